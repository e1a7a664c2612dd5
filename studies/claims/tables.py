"""Tables of docs/claims.md from claims.json."""

import csv
from pathlib import Path
from typing import Any

from arms import GROUPS, Sweep
from rules import CLAIMS, Results


def write(folder: Path, measured: dict[str, Any]) -> None:
    """Write each table into a CSV file.

    Args:
        folder: the folder of the files.
        measured: contents of claims.json.
    """
    tables = {
        "claims": [("claim", "", "here", "found"), *_claims(losses_of(measured))],
        "rules": [("claim", "rule"), *((claim.claim, claim.rule) for claim in CLAIMS)],
        "tuned": [("norm", "group", "test loss", "lost", "best settings of its trials")],
        "sweeps": [("placement", "group", "rate", "test loss", "lost")],
    }
    for group in GROUPS:
        for arm, found in measured["groups"].get(group.name, {}).items():
            kept = [value for value in found["losses"] if value is not None]
            losses = (_spread(kept), len(found["losses"]) - len(kept))
            if isinstance(group, Sweep):
                placement, _, rate = arm.partition("@")
                tables["sweeps"].append((f"`{placement}`", group.name, rate, *losses))
            else:
                settings = (f"{key} {value:.3g}" for key, value in found["settings"].items())
                tables["tuned"].append((f"`{arm}`", group.name, *losses, ", ".join(settings)))
    for name, rows in tables.items():
        with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


def losses_of(measured: dict[str, Any]) -> Results:
    """Return test losses by group, arm and seed, with None for lost runs."""
    return {
        name: {arm: found["losses"] for arm, found in group.items()}
        for name, group in measured["groups"].items()
    }


def _claims(results: Results) -> list[tuple[str, ...]]:
    rows = []
    for claim in CLAIMS:
        if any(name not in results for name in claim.groups):
            rows.append((claim.claim, claim.source, "not trained yet", ""))
        else:
            verdict = claim.judge(results)
            rows.append((claim.claim, claim.source, f"**{verdict.word}**", verdict.found))
    return rows


def _spread(values: list[float]) -> str:
    if not values:
        return "–"
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.4f}"
    deviation = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
    return f"{mean:.4f} ± {deviation:.4f}"
