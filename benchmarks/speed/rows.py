"""Results as data: one JSON object a line, the machine's description first."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from powernorm import InputError
from powernorm.json_reading import parse_json

Row = dict[str, Any]
"""One provider on one case."""

Known = Collection[tuple[object, ...]]
"""Cases that are measured already, as `case_of`."""
Note = Callable[[str], None]
"""Is told how far a run is."""

_FIX: Final = "give a file that `benchmarks/bench.py --out` wrote"


def figures(samples: Sequence[float], *, digits: int) -> Row:
    """Return the fields that every row has, from seconds a call.

    Args:
        samples: of one provider.
        digits: of the microseconds.
    """
    lower, _, upper = statistics.quantiles(samples, n=4)
    numbers = {"median_us": statistics.median(samples), "lower_us": lower, "upper_us": upper}
    found = {name: round(seconds * 1e6, digits) for name, seconds in numbers.items()}
    return {**found, "num_samples": len(samples)}


def by_case(rows: Iterable[Row], fields: Sequence[str]) -> Iterator[list[Row]]:
    """Return the rows in blocks of one case each."""
    for _, case in groupby(rows, key=lambda row: case_of(row, fields)):
        yield list(case)


def case_of(row: Row, fields: Sequence[str]) -> tuple[object, ...]:
    """Return what tells the row's case from others."""
    return tuple(row[name] for name in fields)


def write_rows(path: Path, machine: dict[str, Any], rows: Iterable[Row]) -> None:
    """Write the results of a run, in place of what the file held."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"machine": machine}, *rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def read_rows(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Return machine and rows of a file.

    Raises:
        InputError: not a file of results.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise InputError(f"{path} holds no results of a benchmark ({error}); {_FIX}") from None
    head, *rows = (
        parse_json(line, str(path), _FIX, line=number)
        for number, line in enumerate(lines or [""], 1)
    )
    records = [head.get("machine") if isinstance(head, dict) else None, *rows]
    if not all(isinstance(one, dict) for one in records) or any("median_us" not in r for r in rows):
        raise InputError(f"{path} holds no results of a benchmark; {_FIX}")
    return records[0], rows
