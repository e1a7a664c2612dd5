"""Tables of what `removal_methods.py` measured, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from cost_tables import table
from powernorm.lab.report import numerals
from powernorm.lab.report.paired import gap_of

CONTROL = "control"
Row = Mapping[str, Any]


def tables(found: Mapping[str, Any]) -> str:
    """The pilot, and the result as far as it is there."""
    parts = []
    if found.get("pilot"):
        parts += ["## Pilot", pilot([*found["pilot"], *found.get("pilot, anchored", [])])]
    if found.get("final"):
        parts += ["## Loss over the control", final(found["final"], found["published"])]
    if found.get("later"):
        controls = [row for row in found.get("final", []) if row["arm"] == CONTROL]
        rows = [*controls, *found["later"]]
        parts += ["## Later: each at its rate of that length", final(rows, found["published"])]
    return "\n\n".join(parts) + "\n"


def pilot(rows: Sequence[Row]) -> str:
    """Mean valid loss over the control at its better rate, by arm and rate."""
    rates = sorted({row["rate"] for row in rows})
    losses = {
        (arm, rate): mean(row["valid_loss"] for row in those)
        for arm in names(rows)
        for rate in rates
        if (those := [row for row in rows if (row["arm"], row["rate"]) == (arm, rate)])
    }
    goal = min(losses[CONTROL, rate] for rate in rates)
    lines = [
        (
            arm,
            *(f"{losses[arm, r] - goal:+.3f}" if (arm, r) in losses else "" for r in rates),
        )
        for arm in names(rows)
    ]
    lines.sort(key=lambda line: min(float(cell) for cell in line[1:] if cell))
    return table(("arm", *(f"rate {rate:g}" for rate in rates)), lines)


def final(rows: Sequence[Row], published: Iterable[str]) -> str:
    """Mean loss over the control with 95 % intervals, and beside the best published arm."""
    arms = [arm for arm in names(rows) if arm != CONTROL]
    best = next(arm for arm in arms if arm.removesuffix("+anchor") in published)
    lines = []
    for share in sorted({row["share"] for row in rows if row["arm"] != CONTROL}):
        losses = {arm: by_seed(rows, arm, share) for arm in (CONTROL, *arms)}
        for arm in arms:
            over = differences(losses[arm], losses[CONTROL])
            beside = differences(losses[arm], losses[best]) if arm != best else []
            lines.append((f"{share:.0%}", arm, interval(over), interval(beside), str(len(over))))
    head = ("length", "arm", "over the control", f"beside `{best}`", "seeds")
    return table(head, lines, texts=2)


def by_seed(rows: Iterable[Row], arm: str, share: float) -> dict[int, float]:
    """Test losses of an arm at a length."""
    return {
        row["seed"]: row["test_loss"] for row in rows if (row["arm"], row["share"]) == (arm, share)
    }


def differences(one: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    """Of the seeds that both have."""
    return [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]


def interval(values: Sequence[float]) -> str:
    """Mean and 95 % interval of Student's t; the mean alone of fewer than three seeds."""
    return numerals.interval(gap_of(values), 3)


def names(rows: Iterable[Row]) -> list[str]:
    """Arms in the order of their first row."""
    return list(dict.fromkeys(row["arm"] for row in rows))
