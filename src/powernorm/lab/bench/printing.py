"""Results in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from powernorm.lab.bench.rows import Row
from powernorm.lab.bench.targets import Outcome, mask_costs

_MEMORY: Final = ("peak MB", "/ LN", "kept MB")
"""Headings of a step's memory: most at any time, that over LayerNorm's, between the two passes."""


def number_table(first: str, numbers: Sequence[str]) -> Table:
    """Return an empty table: a column of words, then columns of numbers."""
    table = Table(box=None, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _memory_cells(row: Row) -> tuple[str, str, str]:
    return (
        "" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.2f}",
        "" if row.peak_ratio is None else f"{row.peak_ratio:.3f}",
        "" if row.kept_bytes is None else f"{row.kept_bytes / 1e6:.2f}",
    )


def print_case(console: Console, rows: Sequence[Row]) -> None:
    """One case: every provider, fastest first."""
    first = rows[0]
    padding = f", {first.padding:.0%} padding" if first.padding else ""
    title = f"{first.tokens}×{first.features} {first.dtype}{padding}, {first.direction}"
    table = Table(title=title, box=None, pad_edge=False, title_justify="left")
    table.add_column("provider", no_wrap=True)
    with_memory = any(row.peak_bytes is not None for row in rows)
    headings = ("µs", "quartiles", "/ LayerNorm", "GB/s", "of copy")
    for heading in (*headings, *(_MEMORY if with_memory else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in sorted(rows, key=lambda r: r.median_us):
        table.add_row(
            row.provider,
            f"{row.median_us:.0f}",
            f"{row.lower_us:.0f}-{row.upper_us:.0f}",
            f"{row.ratio:.2f}",
            f"{row.gigabytes_per_second:.1f}",
            f"{row.share_of_copy:.0%}",
            *(_memory_cells(row) if with_memory else ()),
        )
    console.print(table)
    console.print()


def print_steps(console: Console, rows: Sequence[Row]) -> None:
    """Whole training steps: every norm, fastest first."""
    title = f"a training step, 6 + 6 layers of {rows[0].features}, {rows[0].tokens} tokens a side"
    table = Table(title=title, box=None, pad_edge=False, title_justify="left")
    table.add_column("norm in the encoder", no_wrap=True)
    with_memory = any(row.peak_bytes is not None for row in rows)
    for heading in ("ms", "quartiles", "/ LayerNorm", *(_MEMORY if with_memory else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in sorted(rows, key=lambda r: r.median_us):
        quartiles = f"{row.lower_us / 1e3:.0f}-{row.upper_us / 1e3:.0f}"
        times = (f"{row.median_us / 1e3:.0f}", quartiles, f"{row.ratio:.3f}")
        table.add_row(row.norm, *times, *(_memory_cells(row) if with_memory else ()))
    console.print(table)
    console.print()


_LABELS: Final = {"forward+backward": "fwd+bwd", "evaluation": "eval", "forward": "fwd"}


def print_targets(console: Console, found: Sequence[Outcome], rows: Sequence[Row]) -> None:
    """Which of the project's targets were met."""
    if not found:
        return
    table = Table(title="targets", box=None, pad_edge=False, title_justify="left")
    table.add_column("norm", no_wrap=True)
    table.add_column("case", no_wrap=True)
    table.add_column("against", no_wrap=True)
    for heading in ("limit", "found", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for outcome in found:
        row = outcome.row
        mask = f" {row.padding:.0%} pad" if row.padding else ""
        dtype = {"float32": "f32", "bfloat16": "bf16"}.get(row.dtype, row.dtype)
        case = f"{row.tokens}×{row.features} {dtype}{mask} {_LABELS[row.direction]}"
        verdict = "met" if outcome.met else "missed"
        numbers = (f"{outcome.target.limit:.2f}", f"{outcome.ratio:.2f}")
        table.add_row(row.norm, case, outcome.target.rival, *numbers, verdict)
    console.print(table)
    missed = [outcome for outcome in found if not outcome.met]
    console.print(f"{len(found) - len(missed)} of {len(found)} met")
    costs = [cost for row, cost in mask_costs(rows) if row.backend == "cpu"]
    if costs:
        console.print(
            f"a padding mask: {min(costs) - 1:+.0%} to {max(costs) - 1:+.0%} of the time without"
        )
