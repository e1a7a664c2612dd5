"""The trials of a tuning, from its `trials.csv`."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from powernorm.files import read_text
from powernorm.runs import TRIALS_COLUMNS


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
