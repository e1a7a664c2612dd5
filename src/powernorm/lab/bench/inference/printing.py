"""Results of encoders in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console

from powernorm.lab.bench.inference.rows import (
    TARGETS,
    InferenceOutcome,
    InferenceRow,
    inference_outcomes,
)
from powernorm.lab.bench.printing import number_table


def print_encoders(console: Console, rows: Sequence[InferenceRow]) -> None:
    """One case: every provider, fastest first."""
    console.print(f"{rows[0].title}, {rows[0].way}", style="italic", highlight=False)
    table = number_table("norms", ["ms", "quartiles", "/ identity", "/ LayerNorm"])
    for row in sorted(rows, key=lambda r: r.median_us):
        table.add_row(
            row.provider,
            f"{row.median_us / 1e3:.2f}",
            f"{row.lower_us / 1e3:.2f}-{row.upper_us / 1e3:.2f}",
            f"{row.ratio_to_identity:.3f}",
            f"{row.ratio:.3f}",
        )
    console.print(table)
    console.print()


def print_inference_targets(console: Console, rows: Sequence[InferenceRow]) -> None:
    """The folded encoder against its rivals on all cases, with what was promised."""
    outcomes = inference_outcomes(rows)
    if not outcomes:
        return
    for _, group in groupby(outcomes, key=lambda outcome: outcome.row.encoder):
        found = list(group)
        title = f"the folded encoder of {found[0].row.title}, over that with"
        console.print(title, style="italic", highlight=False)
        table = number_table("", [target.rival for target in TARGETS])
        for _, case in groupby(found, key=lambda outcome: outcome.row.case):
            cells = list(case)
            table.add_row(cells[0].row.way, *map(_cell, cells))
        console.print(table)
        console.print()
    for target in TARGETS:
        judged = [o for o in outcomes if o.target == target and o.is_promised]
        met = sum(outcome.met for outcome in judged)
        console.print(
            f"folded / {target.rival}, target {target.label}: {met} of {len(judged)} met",
            highlight=False,
        )


def _cell(outcome: InferenceOutcome) -> str:
    verdict = "" if not outcome.is_promised else "met" if outcome.met else "missed"
    return f"{outcome.ratio:.3f} {verdict:<6}"
