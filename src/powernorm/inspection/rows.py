"""Rows as a plain text table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def format_table(rows: Sequence[Mapping[str, object]]) -> str:
    """A table with one line a row; columns that are empty everywhere are left out.

    >>> print(format_table([{"name": "norm", "action": "fold", "reason": ""}]))
    name  action
    norm  fold
    """
    if not rows:
        return "(no rows)"
    columns = [name for name in rows[0] if any(str(row[name]) for row in rows)]
    lines = [columns, *([str(row[name]) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
