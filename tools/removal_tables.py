"""Write the tables of docs/removal.md from the results of `removal_methods.py`.

python tools/removal_tables.py
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from cost_tables import RESULTS, Table, write

from powernorm_lab.report import numerals
from powernorm_lab.report.statistics import gap_of

FOLDER = Path(__file__).parents[1] / "docs" / "removal"
CONTROL = "control"
Row = Mapping[str, Any]


def tables(results: Path = RESULTS) -> dict[str, Table]:
    """Return all tables by name."""
    found, larger = (stored(results, size) for size in ("1m", "5m"))
    controls = [row for row in found.get("final", []) if row["arm"] == CONTROL]
    later = found.get("later", [])
    return {
        "pilot": pilot([*found.get("pilot", []), *found.get("pilot, anchored", [])]),
        "final": final(found.get("final", []), found.get("originals", [])),
        "later": final([*controls, *later] if later else []),
        "larger": final(larger.get("later", []), larger.get("originals", [])),
    }


def stored(results: Path, size: str) -> Mapping[str, Any]:
    """Return the measurements of models of a size; empty if there are none."""
    path = results / f"removal-methods-{size}.json"
    found: Mapping[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found


def pilot(rows: Sequence[Row]) -> Table:
    """Return the table of mean validation losses over the control at its best rate."""
    rates = sorted({row["rate"] for row in rows})
    losses = {
        (arm, rate): mean(row["valid_loss"] for row in those)
        for arm in names(rows)
        for rate in rates
        if (those := [row for row in rows if (row["arm"], row["rate"]) == (arm, rate)])
    }
    goal = min((loss for (arm, _), loss in losses.items() if arm == CONTROL), default=0.0)
    lines = [
        (
            arm if arm == CONTROL else f"`{arm}`",
            *(f"{losses[arm, r] - goal:+.3f}" if (arm, r) in losses else "" for r in rates),
        )
        for arm in names(rows)
    ]
    lines.sort(key=lambda line: min(float(cell) for cell in line[1:] if cell))
    return [("", *(f"rate {rate:g}" for rate in rates)), *lines]


def final(rows: Sequence[Row], originals: Sequence[float] = ()) -> Table:
    """Return the mean test losses over the control, and next to the first arm, the best published.

    Args:
        rows: rows of arms and control.
        originals: losses of the original models by seed; none leaves the control's row out.
    """
    arms = [arm for arm in names(rows) if arm != CONTROL]
    shares = sorted({row["share"] for row in rows if row["arm"] != CONTROL})
    lines: Table = [("", *(f"{share:.0%}" for share in shares))]
    if arms and originals:
        before = dict(enumerate(originals))
        gaps = [differences(by_seed(rows, CONTROL, share), before) for share in shares]
        lines.append(("control, beside the original", *map(interval, gaps)))
    for arm in arms:
        others = (CONTROL,) if arm == arms[0] else (CONTROL, arms[0])
        for other in others:
            gaps = [differences(by_seed(rows, arm, s), by_seed(rows, other, s)) for s in shares]
            label = f"`{arm}`" if other == CONTROL else f"… beside `{other}`"
            lines.append((label, *map(interval, gaps)))
    return lines


def by_seed(rows: Iterable[Row], arm: str, share: float) -> dict[int, float]:
    """Return the test losses of an arm at a length, by seed."""
    return {
        row["seed"]: row["test_loss"] for row in rows if (row["arm"], row["share"]) == (arm, share)
    }


def differences(one: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    """Return the differences for the seeds that both have."""
    return [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]


def interval(values: Sequence[float]) -> str:
    """Return mean and 95 % interval of Student's t; only the mean of fewer than three seeds."""
    return numerals.interval(gap_of(values), 3)


def names(rows: Iterable[Row]) -> list[str]:
    """Return the arms in the order of their first rows."""
    return list(dict.fromkeys(row["arm"] for row in rows))


def main() -> None:
    """Write the tables."""
    write(FOLDER, tables())


if __name__ == "__main__":
    main()
