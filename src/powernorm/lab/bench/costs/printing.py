"""Costs of norms in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console

from powernorm.lab.bench.costs.cases import RIVALS
from powernorm.lab.bench.costs.rows import CostRow, best_rows
from powernorm.lab.bench.printing import number_table


def print_costs(console: Console, rows: Sequence[CostRow]) -> None:
    """Print one case: every rival and setting, fastest first."""
    console.print(f"{rows[0].title}, {rows[0].way}", style="italic", highlight=False)
    table = number_table("", ["ms", "quartiles", "/ LayerNorm", "error", "peak MB"])
    for row in sorted(rows, key=lambda row: row.median_us):
        table.add_row(
            f"{row.rival} {row.setting}",
            f"{row.median_us / 1e3:.2f}",
            f"{row.lower_us / 1e3:.2f}-{row.upper_us / 1e3:.2f}",
            f"{row.ratio:.3f}",
            f"{row.error:.1e}",
            "" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.1f}",
        )
    console.print(table)
    console.print()


def print_best_costs(console: Console, rows: Sequence[CostRow]) -> None:
    """Print of all cases every rival in its best setting, over LayerNorm in its best one."""
    for _, encoder in groupby(best_rows(rows), key=lambda row: row.encoder):
        found = list(encoder)
        title = f"{found[0].title}: each in its best setting, over LayerNorm in its own"
        console.print(title, style="italic", highlight=False)
        table = number_table("", RIVALS[1:])
        for _, case in groupby(found, key=lambda row: row.case):
            cells = list(case)
            ratios = {row.rival: f"{row.ratio:.3f}" for row in cells}
            table.add_row(cells[0].way, *(ratios.get(rival, "") for rival in RIVALS[1:]))
        console.print(table)
        console.print()
