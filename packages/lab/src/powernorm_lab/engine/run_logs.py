"""Logs of a run: metrics.csv, norms.csv, diagnoses.jsonl and experiment trackers."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from powernorm.diagnosis import NormRow
from powernorm.errors import InputError
from powernorm.integrations.trainers import log_entries
from powernorm.records import NORMS_COLUMNS, DiagnosisRecord
from powernorm_lab.engine.logs import CsvLog, JsonLinesLog, MergedLog, Writing
from powernorm_lab.engine.processes import is_main
from powernorm_lab.engine.trackers import Trackers
from powernorm_lab.runs import DIAGNOSES_FILE, METRICS_COLUMNS, METRICS_FILE, NORMS_FILE


class RunLogs:
    """Logs of a run, opened with their first row and written by the first process.

    Args:
        folder: folder of the run.
        last_step: returns the step up to which rows of an existing log are kept, None to replace
            it; every process calls it.
        writing: context in which files are written.
        trackers: names of the trackers that receive all numbers.
    """

    def __init__(
        self,
        folder: Path,
        last_step: Callable[[], int | None],
        writing: Writing,
        trackers: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._last_step = last_step
        self._writing = writing
        self._csvs: dict[str, CsvLog] = {}
        self._metrics: MergedLog | None = None
        self._diagnoses: JsonLinesLog | None = None
        self._trackers = Trackers(trackers, folder)

    def add(self, step: int, cells: Mapping[str, Any]) -> None:
        """Add cells to the row of a step in metrics.csv."""
        csv = self._opened(METRICS_FILE, METRICS_COLUMNS)
        if csv is not None:
            self._metrics = self._metrics or MergedLog(csv)
            self._metrics.add(step, cells)
            self._show(step, cells)

    def add_norm(self, row: NormRow) -> None:
        """Append a row to norms.csv."""
        csv = self._opened(NORMS_FILE, NORMS_COLUMNS)
        if csv is not None:
            csv.write(row)
            self._show(int(row["step"] or 0), log_entries([row]))

    def add_diagnosis(self, record: DiagnosisRecord) -> None:
        """Append a diagnosis to diagnoses.jsonl."""
        last = self._last_step()
        if not is_main():
            return
        with self._writing():
            if self._diagnoses is None:
                self._diagnoses = JsonLinesLog(self._folder / DIAGNOSES_FILE, last)
            self._diagnoses.write(record)

    def _show(self, step: int, cells: Mapping[str, Any]) -> None:
        finite = {k: v for k, v in cells.items() if v is not None and math.isfinite(v)}
        self._trackers.log(finite, step=step, last_step=self._last_step())

    def flush(self) -> None:
        """Write the pending row."""
        if self._metrics is not None:
            self._metrics.flush()

    def close(self) -> None:
        """Close the files and trackers."""
        with ExitStack() as closing:  # closes all, even if the last row cannot be written
            closing.callback(self._trackers.close)
            for csv in self._csvs.values():
                closing.callback(csv.close)
            self._csvs = {}
            metrics, self._metrics = self._metrics, None
            if metrics is not None:
                metrics.flush()

    def _opened(self, name: str, columns: tuple[str, ...]) -> CsvLog | None:
        last = self._last_step()
        if not is_main():
            return None
        if name not in self._csvs:
            self._csvs[name] = CsvLog(self._folder / name, columns, last, self._writing)
        return self._csvs[name]


def number_of(name: str, value: Any) -> float | None:
    """Return a logged value as a number.

    Raises:
        InputError: the value is not a number, or its name cannot be a column.
    """
    if name == "step" or any(letter in name for letter in ',"\n\r'):
        raise InputError(f"run.log cannot have a column {name!r}: give it another name")
    try:
        return value if type(value) is int else plain_number(value)
    except (TypeError, ValueError):
        raise InputError(
            f"run.log got {name}={value!r:.80}, expected a number or a tensor with one element"
        ) from None


def plain_number(value: Any) -> float | None:
    """Return a number, or a tensor with one element, as a float; None as it is.

    Raises:
        TypeError, ValueError: the value is of another type, or a tensor of several elements.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"a tensor of shape {tuple(value.shape)}")
        return float(value.detach())
    return None if value is None else float(value)
