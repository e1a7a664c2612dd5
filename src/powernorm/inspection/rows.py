"""Rows of plans and reports, one per norm, and their formatting as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

Action = Literal[
    "swap", "insert", "modularize", "fold", "simplify", "calibrate", "match", "remove", "keep"
]

WIDTH: Final = 80
"""Default number of characters per line."""

_FIRST: Final = ("name", "kind", "action", "into", "mask")
"""Columns that are more important than a reason, which is more important than the measures."""

_BELOW: Final = ("into", "reason")
"""Columns that are wrapped below their row if the line has no room for them."""

_BESIDE_NAME: Final = 26
"""Characters of other columns that a name leaves before it is broken into lines."""

_SHOWN: Final = 2
"""Number of names in a printed cell; `to_dict` returns all."""


@dataclass(frozen=True, kw_only=True)
class NormRow:
    """Planned or past change of one norm of a model; subclasses add fields for measures.

    Attributes:
        name: first dotted name of the norm in the model.
        kind: the norm's computation: `layer`, `rms`, `batch`, `channel`, `conditional` (γ and β are
            computed from a second input) or `unknown` for norms of other libraries, else its short
            name.
        action: action on the norm.
        into: replacement of the norm: the short name of a new norm, `multiply-add` if
            one per feature is left, or the parameters that it is folded into.
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
    """Base class of plans and reports: a table with one row per norm."""

    rows: Sequence[NormRow]

    def to_rows(self) -> list[dict[str, Any]]:
        """Return the table as dictionaries, one per norm."""
        return [row.to_dict() for row in self.rows]

    def to_text(self, width: int | None = WIDTH) -> str:
        """Return the table as text, followed by notes on all rows.

        Args:
            width: characters per line, at least 40. The columns that fit are shown, the most
                important first; long reasons are wrapped below their rows. None shows all columns,
                one line per row.
        """
        notes = [line for note in self._notes() for line in _wrapped(note, width, "", "  ")]
        columns = None if width is None else self._columns()
        return "\n".join([format_rows(self.rows, columns, width), *notes])

    def __str__(self) -> str:
        """Return the table as text, 80 characters wide."""
        return self.to_text()

    def _columns(self) -> Sequence[str] | None:
        """Return the fields to print, as `format_rows` takes them."""
        return None

    def _notes(self) -> list[str]:
        """Return the sentences below the table."""
        return []


def format_rows(
    rows: Sequence[NormRow], columns: Sequence[str] | None = None, width: int | None = None
) -> str:
    """Return a plain text table with one line per norm.

    Args:
        rows: rows of one class.
        columns: names of fields, the most important first; None means all. Columns that are empty
            in every row are left out, and the reason is the last one.
        width: as for `NormTable.to_text`.

    >>> row = NormRow(name="norm", kind="bn", action="fold", into=("head.weight",), reason="tied")
    >>> print(format_rows([row]))
    name  kind  action  into         reason
    norm  bn    fold    head.weight  tied
    >>> print(format_rows([row], width=30))
    name  kind  action  reason
    norm  bn    fold    tied
        into: head.weight
    """
    if not rows:
        return "(no rows)"
    known = {item.name: item for item in fields(rows[0])}
    if columns is None:
        measures = [name for name in known if name not in (*_FIRST, "reason")]
        columns = [*_FIRST, "reason", *measures]
    percents = {name for name in columns if known[name].metadata.get("percent")}
    table = {
        f"{name} %" if name in percents else name: [
            _cell(getattr(row, name), name in percents) for row in rows
        ]
        for name in columns
    }
    return _table({name: cells for name, cells in table.items() if any(cells)}, width)


def _cell(value: object, percent: bool) -> str:
    if value is None:
        return ""
    if percent and isinstance(value, float):
        return f"{100 * value:.2f}"
    if isinstance(value, tuple):
        more = len(value) - _SHOWN
        return ", ".join(value[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(columns: dict[str, list[str]], width: int | None) -> str:
    """Return lines of all columns, or of those that fit."""
    widths: dict[str, int] = {}
    for name, cells in columns.items():
        wider = {**widths, name: max(map(len, (name, *cells)))}
        if width is not None and not widths:
            wider[name] = min(wider[name], max(20, width - _BESIDE_NAME))
        if width is None or sum(wider.values()) + 2 * (len(wider) - 1) <= width:
            widths = wider
    shown = sorted(widths, key="reason".__eq__)
    below = [name for name in _BELOW if name in columns and name not in widths]
    lines = _line(shown, [widths[name] for name in shown])
    for index in range(len(columns[shown[0]])):
        lines += _line([columns[name][index] for name in shown], [widths[name] for name in shown])
        for name in below:
            text = columns[name][index]
            if text:
                said = f"{name}: {text}" if name != "reason" else text
                lines += _wrapped(said, width, "    ", "    ")
    left_out = [name for name in columns if name not in (*shown, *below)]
    if left_out:
        lines += _wrapped(f"not shown, see --wide or to_rows(): {', '.join(left_out)}", width)
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Return a row, in several lines if its name is wider than its column."""
    name, *others = cells
    parts = [name[start : start + widths[0]] for start in range(0, len(name) or 1, widths[0])]
    whole = [cell.ljust(width) for cell, width in zip([parts[0], *others], widths, strict=True)]
    return ["  ".join(whole).rstrip(), *parts[1:]]


def _wrapped(text: str, width: int | None, first: str = "", others: str = "  ") -> list[str]:
    """Break a sentence into lines of at most this width, unless a single word is longer."""
    if width is None:
        return [first + text]
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
