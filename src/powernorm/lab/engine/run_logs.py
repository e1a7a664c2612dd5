"""metrics.csv and norms.csv of a run."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from powernorm.errors import InputError
from powernorm.lab.engine.logs import CsvLog, MergedLog, Writing
from powernorm.lab.engine.processes import is_main
from powernorm.runs import METRICS_COLUMNS, METRICS_FILE, NORMS_COLUMNS, NORMS_FILE


class RunLogs:
    """The two logs, opened at their first row; the first of several processes writes them.

    Args:
        folder: of the run.
        last_step: returns the step up to which the rows of an earlier sitting hold, None for none;
            every process calls it.
        writing: context of every change of a file.
    """

    def __init__(self, folder: Path, last_step: Callable[[], int | None], writing: Writing) -> None:
        self._folder = folder
        self._last_step = last_step
        self._writing = writing
        self._csvs: dict[str, CsvLog] = {}
        self._metrics: MergedLog | None = None

    def add(self, step: int, cells: Mapping[str, Any]) -> None:
        """Add cells to the row of a step in metrics.csv."""
        csv = self._opened(METRICS_FILE, METRICS_COLUMNS)
        if csv is not None:
            self._metrics = self._metrics or MergedLog(csv)
            self._metrics.add(step, cells)

    def add_norm(self, row: Mapping[str, Any]) -> None:
        """Append a row to norms.csv."""
        csv = self._opened(NORMS_FILE, NORMS_COLUMNS)
        if csv is not None:
            csv.write(row)

    def flush(self) -> None:
        """Write the row that is being gathered."""
        if self._metrics is not None:
            self._metrics.flush()

    def close(self) -> None:
        """Finish the files."""
        with ExitStack() as closing:  # also where the last row cannot be written
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
        InputError: it is none, or its name cannot be a column.
    """
    if name == "step" or any(letter in name for letter in ',"\n\r'):
        raise InputError(f"run.log cannot have a column {name!r}: give it another name")
    try:
        return plain_number(value)
    except (TypeError, ValueError):
        raise InputError(
            f"run.log got {name}={value!r:.80}, expected a number or a tensor with one element"
        ) from None


def plain_number(value: Any) -> float | None:
    """Return a number, or a tensor with one element, as a float; None as it is.

    Raises:
        TypeError, ValueError: it is something else.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"a tensor of shape {tuple(value.shape)}")
        return float(value.detach())
    return None if value is None else float(value)
