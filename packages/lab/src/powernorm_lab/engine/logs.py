"""Logs of a run's folder: appended while training, truncated to the checkpoint on resume."""

import csv
import io
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from powernorm.files import read_text, remove, write

STEP = "step"
CHECK_SECONDS: Final = 1.0
"""Seconds between two checks that this process still holds the run's lease."""


Writing = Callable[[], AbstractContextManager[Any]]
"""Context in which a file may be written; see `Lease.writing`."""


class CsvLog:
    """A CSV file with a header and a `step` column.

    Args:
        path: the file; its folder exists.
        columns: the header, including `step`. Further columns of a row or of the file are appended.
        last_step: keep the rows of an existing file up to this step; None replaces the file.
        writing: context in which the file is written; rows within `CHECK_SECONDS` skip it.
    """

    def __init__(
        self,
        path: Path,
        columns: Sequence[str],
        last_step: int | None = None,
        writing: Writing = nullcontext,
    ) -> None:
        self._path = path
        self._writing = writing
        kept = [] if last_step is None else _rows_until(path, last_step)
        self._columns = list(dict.fromkeys([*columns, *(name for row in kept for name in row)]))
        self._begin(kept)

    def _begin(self, kept: Sequence[Mapping[str, Any]]) -> None:
        """Write header and rows, and open the file to append to them."""
        # Renamed into place: an interruption must not cost the rows that are kept.
        content = io.StringIO(newline="")
        writer = csv.DictWriter(content, self._columns)
        writer.writeheader()
        for row in kept:
            writer.writerow({name: row.get(name) for name in self._columns})
        with self._writing():
            write(self._path, content.getvalue())
        self._checked_at = time.monotonic()
        self._file = self._path.open("a", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, self._columns)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row; missing columns and None become empty cells."""
        new = [name for name in row if name not in self._columns]
        if new:
            self._file.close()
            self._columns += new
            self._begin(_rows_until(self._path, math.inf))
        # A late row harms no other process: a new owner replaces the file by its own.
        is_due = time.monotonic() - self._checked_at > CHECK_SECONDS
        with self._writing() if is_due else nullcontext():
            self._writer.writerow(row)
            self._file.flush()
        if is_due:
            self._checked_at = time.monotonic()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class JsonLinesLog:
    """A file with a JSON object with a `step` in each line.

    Args:
        path: the file; its folder exists. The file is created with the first row.
        last_step: keep the rows of an existing file up to this step; None removes the file.
    """

    def __init__(self, path: Path, last_step: int | None = None) -> None:
        self._path = path
        kept = [] if last_step is None else _lines_until(path, last_step)
        if kept:
            write(path, *kept)
        else:
            remove(path)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row."""
        line = json.dumps(row, ensure_ascii=False, allow_nan=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


class MergedLog:
    """Merges all cells of a step into one row of a CsvLog.

    Args:
        log: receives a row when cells of a later step arrive, or at `flush`.
    """

    def __init__(self, log: CsvLog) -> None:
        self._log = log
        self._row: dict[str, Any] = {}

    def add(self, step: int, cells: Mapping[str, Any]) -> None:
        """Add cells to the row of `step`."""
        if self._row and self._row[STEP] != step:
            self.flush()
        self._row |= {STEP: step, **cells}

    def flush(self) -> None:
        """Write the pending row, if there is one."""
        if self._row:
            self._log.write(self._row)
            self._row = {}


def _rows_until(path: Path, last_step: float) -> list[dict[str, str]]:
    if not path.exists():
        return []
    rows = list(csv.DictReader(io.StringIO(read_text(path), newline="")))
    # An interrupted write may have truncated a row within its step.
    whole = [row for row in rows if None not in row and None not in row.values()]
    return [row for row in whole if row[STEP].isdigit() and int(row[STEP]) <= last_step]


def _lines_until(path: Path, last_step: int) -> list[str]:
    if not path.exists():
        return []
    lines = io.StringIO(read_text(path), newline="")
    return [line for line in lines if 0 <= _step_of(line) <= last_step]


def _step_of(line: str) -> int:
    """Return the step of a row; -1 for a truncated one."""
    try:
        return int(json.loads(line)[STEP]) if line.endswith("\n") else -1
    except (ValueError, KeyError, TypeError):
        return -1
