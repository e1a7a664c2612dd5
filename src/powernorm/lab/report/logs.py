"""Reading the CSV logs of a run; a line that cannot be read is named."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Final

from powernorm.errors import InputError
from powernorm.files import read_text
from powernorm.lab.report.records import MetricRow, NormSample
from powernorm.lab.schema import bounded
from powernorm.runs import METRICS_COLUMNS, NORMS_COLUMNS

_FIRST_METRICS_COLUMNS: Final = METRICS_COLUMNS[: METRICS_COLUMNS.index("valid_perplexity") + 1]
_FIRST_NORMS_COLUMNS: Final = NORMS_COLUMNS[: NORMS_COLUMNS.index("num_nonfinite_batches") + 1]
"""Those that the first version wrote; a file without the later ones has empty cells there."""

_TEXT_COLUMNS: Final = frozenset({"layer", "norm"})
"""Of `norms.csv`."""


def read_metrics(path: Path) -> list[MetricRow]:
    """The rows of a `metrics.csv`; an empty list where the file does not exist.

    Raises:
        InputError: a line is damaged; the message names file and line.
    """
    rows: list[MetricRow] = []
    for line, cells in _rows(path, _FIRST_METRICS_COLUMNS):
        values = {column: _number(path, line, column, cell) for column, cell in cells.items()}
        for column in ("step", "tokens"):
            value = values.get(column)
            if value is not None and not isfinite(value):
                raise InputError(
                    f"{path}, line {line}: {column} is {cells[column]!r}, expected a finite "
                    "number; mend or remove the line"
                )
        rows.append(values)
    return rows


def read_norms(path: Path) -> list[NormSample]:
    """The rows of a `norms.csv`; an empty list where the file does not exist.

    Raises:
        InputError: a line is damaged; the message names file and line.
    """
    samples = []
    for line, cells in _rows(path, _FIRST_NORMS_COLUMNS):
        values = {
            column: _number(path, line, column, cell)
            for column, cell in cells.items()
            if column not in _TEXT_COLUMNS
        }
        step = values.get("step")
        if step is None or step != step // 1:
            raise InputError(f"{path}, line {line}: step is {cells['step']!r}, not a whole number")
        batches = values.get("num_nonfinite_batches")
        if batches is not None and batches != batches // 1:
            raise InputError(
                f"{path}, line {line}: num_nonfinite_batches is "
                f"{cells['num_nonfinite_batches']!r}, not a whole number; mend or remove the line"
            )
        samples.append(NormSample(int(step), cells["layer"], cells["norm"], values))
    return samples


def _rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Line number and cells by column name."""
    if not path.exists():
        return
    text = read_text(path)
    # A last line without its line end is still being written, or its writer was killed.
    complete = text[: text.rfind("\n") + 1]
    reader = csv.reader(complete.splitlines(keepends=True), strict=True)
    header: list[str] | None = None
    try:
        for cells in reader:
            if header is None:
                header = _checked_header(path, cells, columns)
            elif len(cells) != len(header):
                raise InputError(
                    f"{path}, line {reader.line_num}: {len(cells)} cells, expected {len(header)}; "
                    "mend or remove the line"
                )
            else:
                yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: not CSV ({error})") from error


def _checked_header(path: Path, cells: list[str], columns: Sequence[str]) -> list[str]:
    missing = [column for column in columns if column not in cells]
    if missing:
        raise InputError(
            f"{path}, line 1: the header lacks {', '.join(missing)}; expected {','.join(columns)}"
        )
    return cells


def _number(path: Path, line: int, column: str, cell: str) -> float | None:
    if not cell:
        return None
    try:
        return bounded(float(cell))
    except ValueError:
        raise InputError(
            f"{path}, line {line}: {column} is {cell!r}, expected a number or nothing; "
            "mend or remove the line"
        ) from None
