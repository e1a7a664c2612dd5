"""Curves for testing the race rules: 32 settings, four norms, five seeds.

The settings are those of the study of the verdict, with a validation after every tenth of the
training instead of every quarter.
"""

import csv
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "verdict"))

from settings import settings
from training import train

NORMS = ("ln", "bn", "rbn", "pn")
SEEDS = (0, 1, 2, 3, 4)
ROUNDS = ((0, 1, 2), SEEDS)
"""Groups of seeds; the first is trained for all settings before the second for any."""
NUM_VALIDATIONS = 10

Setting = dict[str, Any]


def train_all(out: Path, names: list[str], say: Callable[[str], None]) -> None:
    """Train missing runs in this process."""
    for seeds in ROUNDS:
        for index, name in enumerate(names, start=1):
            say(f"[{index}/{len(names)}] {name}, seeds {', '.join(map(str, seeds))}")
            setting = settings()[name]
            results = train(
                setting, out / name, NORMS, seeds, validations=NUM_VALIDATIONS, early=False
            )
            for run in results.runs:
                if run.status == "failed":
                    raise SystemExit(f"{out / name / run.folder} failed; see result.json there")


def collect(out: Path) -> list[Setting]:
    """Return the results of a folder for settings in which all norms have a seed."""
    known = {name: dict(_runs_of(out / name)) for name in settings() if (out / name).exists()}
    return [_setting(name, runs) for name, runs in known.items() if runs]


def _runs_of(folder: Path) -> Iterator[tuple[tuple[str, int], dict[str, Any]]]:
    for path in sorted(folder.glob("*/result.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result["status"] in ("finished", "diverged", "nonfinite"):
            rows = csv.DictReader((path.parent / "metrics.csv").open(encoding="utf-8"))
            curve = [_rounded(row["valid_loss"]) for row in rows if row["valid_loss"]]
            yield (
                (result["norm"], result["seed"]),
                {
                    "status": result["status"],
                    "curve": curve,
                    "valid": _rounded(result["metrics"].get("valid_loss")),
                    "test": _rounded(result["metrics"].get("test_loss")),
                    "seconds": round(result["seconds"], 1),
                },
            )


def _rounded(value: Any) -> float | None:
    """Round to five decimals; relevant gaps are hundredths."""
    return None if value in (None, "", "nan", "inf") else round(float(value), 5)


def _setting(name: str, runs: dict[tuple[str, int], dict[str, Any]]) -> Setting:
    setting = settings()[name]
    whole = [seed for seed in SEEDS if all((norm, seed) in runs for norm in NORMS)]
    return {
        "name": name,
        "text": setting.group,
        "max_steps": setting.max_steps,
        "seeds": whole,
        "runs": {norm: [runs[norm, seed] for seed in whole] for norm in NORMS},
    }
