"""Rows of plans and reports, one per norm, and how they are printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

Action = Literal["swap", "insert", "modularize", "fold", "calibrate", "match", "remove", "keep"]

_FIRST: Final = ("name", "kind", "action", "into", "mask")
"""Columns before the measures; the reason comes after them."""

PERCENT: Final = {"percent": True}
"""Metadata of a field that is a fraction and is printed in percent."""

_SHOWN: Final = 2
"""Number of names in a printed cell; `to_dict` returns all."""


@dataclass(frozen=True, kw_only=True)
class NormRow:
    """What is, or was, done with one norm of a model; measures are fields of subclasses.

    Attributes:
        name: first dotted name of the norm in the model.
        kind: what the norm computes: `layer`, `rms`, `batch`, `channel`, `conditional` (γ and β are
            computed from a second input) or `unknown` for norms of other libraries, else its short
            name.
        action: what is done with the norm.
        into: what replaces or absorbs the norm: the short name of a new norm, `multiply-add` if
            one per feature is left, the parameters that it is folded into.
        mask: the argument, of the model or a module in it, that gives the norm's padding mask.
        reason: why the request could not be met, or not fully.
    """

    name: str
    kind: str
    action: Action
    into: tuple[str, ...] = ()
    mask: str | None = None
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields' values by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


class NormTable:
    """What plans and reports have in common: one row a norm."""

    rows: Sequence[NormRow]

    def to_rows(self) -> list[dict[str, Any]]:
        """Return the table as dictionaries, one a norm."""
        return [row.to_dict() for row in self.rows]

    def __str__(self) -> str:
        """Return the table as text."""
        return format_rows(self.rows)


def format_rows(rows: Sequence[NormRow], columns: Sequence[str] | None = None) -> str:
    """Return a plain text table with one line per norm.

    Args:
        rows: rows of one class.
        columns: which fields, in this order; None means all. Columns that are empty in every row
            are left out.

    >>> print(format_rows([NormRow(name="norm", kind="bn", action="fold", into=("head.weight",))]))
    name  kind  action  into
    norm  bn    fold    head.weight
    """
    if not rows:
        return "(no rows)"
    known = {item.name: item for item in fields(rows[0])}
    if columns is None:
        measures = [name for name in known if name not in (*_FIRST, "reason")]
        columns = [*_FIRST, *measures, "reason"]
    percents = {name for name in columns if known[name].metadata.get("percent")}
    headings = {name: f"{name} %" if name in percents else name for name in columns}
    return _table(
        [
            {headings[name]: _cell(getattr(row, name), name in percents) for name in columns}
            for row in rows
        ]
    )


def _cell(value: object, percent: bool) -> str:
    if value is None:
        return ""
    if percent and isinstance(value, float):
        return f"{100 * value:.2f}"
    if isinstance(value, tuple):
        more = len(value) - _SHOWN
        return ", ".join(value[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    lines = [columns, *([row[name] for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
