"""How a comparison was tuned, from its `results.json` and its `trials.csv`."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Literal, cast

from powernorm.files import read_text
from powernorm.lab.report.json_files import JsonObject
from powernorm.runs import TRIALS_COLUMNS, ChosenTrial, Goal, NormTuning, TuningRecord


@dataclass(frozen=True)
class TrialRow:
    """One line of `trials.csv`."""

    norm: str
    number: str
    status: str
    value: float | None
    """What it is judged by; None where it did not come to its end."""
    settings: Mapping[str, str]
    """By dotted key, those that were searched."""


def read_tuning(results: JsonObject) -> TuningRecord | None:
    """How the settings were chosen; None where nobody tuned them.

    Args:
        results: what `results.json` holds.

    Raises:
        InputError: a value is missing or of another type.
    """
    if results.values.get("tuning") is None:
        return None
    row = results.child("tuning")
    goal = row.child("select_by")
    norms = row.child("norms")
    return TuningRecord(
        num_trials=row.whole("num_trials"),
        select_by=Goal(
            metric=goal.text("metric"),
            direction=cast(Literal["min", "max"], goal.choice("direction", ("min", "max"))),
        ),
        seed=row.whole("seed"),
        sampler=row.text("sampler"),
        pruner=None if row.values.get("pruner") is None else row.text("pruner"),
        norms={name: _norm(norms.child(name)) for name in norms.values},
    )


def _norm(row: JsonObject) -> NormTuning:
    search, trials, importance = (row.child(key) for key in ("search", "trials", "importance"))
    curve = [
        point.number("value")
        for point in (
            JsonObject(row.path, {"value": value}, row.mend, f"{row.trail}curve[{index}].")
            for index, value in enumerate(row.values.get("curve", []))
        )
    ]
    return NormTuning(
        search={key: search.text(key) for key in search.values},
        trials={status: trials.whole(status) for status in trials.values},
        untuned=row.number("untuned"),
        best=None if row.values.get("best") is None else _best(row.child("best")),
        curve=curve,
        importance={key: importance.sure_number(key) for key in importance.values},
    )


def _best(row: JsonObject) -> ChosenTrial:
    return ChosenTrial(
        trial=row.whole("trial"),
        value=row.sure_number("value"),
        settings=row.mapping("settings"),
    )


def read_trials(path: Path) -> list[TrialRow]:
    """The rows of a `trials.csv`; an empty list where the file does not exist, or is another's.

    Raises:
        InputError: it is not UTF-8 or cannot be read.
    """
    if not path.exists():
        return []
    reader = csv.DictReader(read_text(path).splitlines())
    if not set(TRIALS_COLUMNS) <= set(reader.fieldnames or ()):
        return []
    return [
        TrialRow(
            norm=row["norm"],
            number=row["trial"],
            status=row["status"],
            value=as_number(row["value"]),
            settings={k: v for k, v in row.items() if k not in TRIALS_COLUMNS and v},
        )
        for row in reader
        if None not in row and None not in row.values()
    ]


def as_number(text: str | None) -> float | None:
    """The finite number that a cell holds, or None."""
    try:
        number = float(text or "nan")
    except ValueError:
        return None
    return number if isfinite(number) else None
