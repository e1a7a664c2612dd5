r"""Tables of texts with classes: CSV files and tab-separated files.

A first row with `label` (or `class`) and `sentence` (or `text`), or with the names in `Columns`, is
a header: classes are the values of their column, and other columns are ignored. Without a header a
line with tabs is class, tab, text, and a row of CSV is in the format of Yelp, DBPedia and Sogou
News by Zhang et al. 2015: a class, from 1, and one or more texts (title and content) in quotation
marks, with `""` for a quotation mark and `\n` for a line break; a row may span several lines.
`classes.txt` names the classes, one on each line.

Files of any size are streamed row by row.
"""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from powernorm.errors import InputError
from powernorm_lab.data.corpus import Split
from powernorm_lab.data.lines import read_lines
from powernorm_lab.data.readers import USER_LICENSE
from powernorm_lab.data.split_files import SplitFiles
from powernorm_lab.tasks.classify.labeled_texts import (
    LEAST,
    LabeledText,
    LabeledTexts,
    Read,
    shuffled_parts,
    with_drawn_valid,
)

CSV_SUFFIX: Final = ".csv"
CLASSES: Final = "classes.txt"
_CSV_FILES: Final = SplitFiles(
    re.compile(r"(?P<name>)(?P<split>train|valid|test)\.csv"),
    "train.csv and test.csv, optionally valid.csv",
    "tables",
    optional=("valid",),
)
_FILES: Final = SplitFiles(
    re.compile(r"(?P<name>)(?P<split>train|valid|dev|test)\.(?:tsv|txt)"),
    "train.tsv, test.tsv and optionally valid.tsv or dev.tsv, or .txt for .tsv",
    "tables",
    optional=("valid",),
)
LONGEST_CELL: Final = 1 << 20
"""Maximal number of characters of a cell; a longer one has an unclosed quotation mark. The longest
news have more than 131,072, which is Python's default limit."""
_WHOLE_CELL: Final = re.compile(r'(?:"[^"]*(?:""[^"]*)*"|(?!")[^,\r\n]*),')
"""A cell in the format of Python's strict reader, with the comma after it."""
_LABELS: Final = ("label", "class")
_TEXTS: Final = ("sentence", "text")


@dataclass(frozen=True)
class Columns:
    """Names of the columns to read, from `data.label_column` and `data.text_columns`.

    Attributes:
        label: column of the class; None is `label` or `class`.
        texts: columns of the text, which are joined; empty is `sentence` or `text`.
    """

    label: str | None = None
    texts: tuple[str, ...] = ()

    @property
    def are_given(self) -> bool:
        """Whether the user has named a column."""
        return self.label is not None or bool(self.texts)

    def found_in(self, cells: Sequence[str], path: Path) -> "tuple[int, list[int]] | None":
        """Return the numbers, from 0, of the class column and of the text columns.

        Returns None if the first line is not a header.

        Args:
            cells: cells of the first line.
            path: path of the file, for messages.

        Raises:
            InputError: a named column is missing.
        """
        names = [cell.strip().lower() for cell in cells]
        labels = _LABELS if self.label is None else (self.label.lower(),)
        label = next((name for name in labels if name in names), None)
        texts = [text.lower() for text in self.texts]
        if not texts:
            texts += [name for name in _TEXTS if name in names][:1]
        missing = [name for name in texts if name not in names]
        if self.are_given and (label is None or missing or not texts):
            key = "label_column" if label is None else "text_columns"
            wanted = self.label or _LABELS[0] if label is None else ", ".join(missing or _TEXTS)
            raise InputError(
                f"{path}, line 1: no column {wanted!r}; there are {', '.join(cells)[:200]}: name "
                f"one of them with data.{key}"
            )
        if label is None or not texts:
            return None
        return names.index(label), [names.index(text) for text in texts]


def has_csv(folder: Path) -> bool:
    """Return whether a folder has the CSV file of a train split."""
    return (folder / "train.csv").exists()


def has_tables(folder: Path) -> bool:
    """Return whether a folder has a table of a train split."""
    return has_csv(folder) or any(_FILES.train_name(path) is not None for path in folder.iterdir())


def read_tables(folder: Path, columns: Columns) -> LabeledTexts:
    """Read a table for each split; a missing valid split is drawn from the train split.

    Raises:
        InputError: the train or test split has no table or two. Damaged rows raise errors when the
            texts are read.
    """
    names = _class_names(folder / CLASSES) if has_csv(folder) else None
    files = (_CSV_FILES if has_csv(folder) else _FILES).of(folder, "")
    reads: dict[Split, Read] = {
        split: partial(_texts, path, columns, names) for split, path in files.items()
    }
    if "valid" not in reads:
        reads = with_drawn_valid(reads["train"], reads["test"])
    return LabeledTexts(folder.resolve().name, str(folder), USER_LICENSE, reads, names)


def read_table(path: Path, columns: Columns) -> LabeledTexts:
    """Read one table and divide it at random in the proportions of RT.

    Raises:
        InputError: the table is damaged, or has too few rows.
    """
    texts = list(_texts(path, columns, None))
    if len(texts) < LEAST:
        raise InputError(
            f"{path} has {len(texts)} texts: at least {LEAST} are needed to set some aside for "
            "validation and test"
        )
    return LabeledTexts(path.stem, str(path), USER_LICENSE, shuffled_parts(texts))


def _is_csv(path: Path) -> bool:
    return path.suffix.lower() == CSV_SUFFIX


def _class_names(path: Path) -> tuple[str, ...] | None:
    if not path.exists():
        return None
    names = tuple(line.strip() for line in read_lines(path) if line.strip())
    if len(set(names)) < len(names) or len(names) < 2:
        raise InputError(f"{path} has {len(names)} classes: expected at least two different ones")
    return names


def _texts(path: Path, columns: Columns, names: tuple[str, ...] | None) -> Iterator[LabeledText]:
    place_of_label, places_of_text = 0, [1]
    is_numbered = False
    for number, (line, row) in enumerate(table_rows(path)):
        if number == 0:
            header = columns.found_in(row, path)
            if header is not None:
                place_of_label, places_of_text = header
                continue
            is_numbered = _is_csv(path)
            places_of_text = list(range(1, len(row) if is_numbered else 2))
            if len(row) > 2 and not is_numbered:
                raise _columns_error(path, line, len(row), 2)
        place = f"{path}, line {line}, column {place_of_label + 1}"
        cell = row[place_of_label]
        label = _numbered(cell, names, place) if is_numbered else cell.strip()
        if not label:
            raise InputError(f"{place}: no class; expected its name")
        text = " ".join(row[one] for one in places_of_text)
        if _is_csv(path):
            text = text.replace("\\n", " ").replace("\n", " ")
        yield LabeledText(label, text, path, line)


def table_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a table, each with the number of its last line.

    Args:
        path: path of a file; it is CSV by its suffix, otherwise tab-separated.

    Raises:
        InputError: the file cannot be read, or a row is damaged or has another number of columns
            than the first one.
    """
    num_columns = 0
    for line, row in _csv_rows(path) if _is_csv(path) else _tab_rows(path):
        num_columns = num_columns or max(len(row), 2)
        if len(row) != num_columns:
            raise _columns_error(path, line, len(row), num_columns)
        yield line, row


def _columns_error(path: Path, line: int, found: int, expected: int) -> InputError:
    between = "" if _is_csv(path) else " with tabs between them"
    return InputError(
        f"{path}, line {line}: {found} columns; expected {expected}{between}, a class and its texts"
    )


def _tab_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(read_lines(path), start=1):
        if line.strip():
            yield number, line.split("\t")


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_CELL))
    lines: list[str] = []
    reader = csv.reader(_remembered(read_lines(path), lines), strict=True)
    while True:
        lines.clear()
        first = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            line, column, is_quoted = _damaged_cell("".join(lines), first)
            problem = str(error)
            if is_quoted:
                problem = (
                    "a quotation mark is never closed, or not doubled inside a cell (line "
                    f"{reader.line_num}: {error})"
                )
            raise InputError(
                f"{path}, line {line}, column {column}: {problem}; expected rows as "
                '"1","a text", with "" for a quotation mark inside'
            ) from error
        if row:
            yield reader.line_num, row


def _remembered(source: Iterator[str], lines: list[str]) -> Iterator[str]:
    """Yield lines and append them to a list, which the caller clears after every row."""
    for line in source:
        lines.append(f"{line}\n")
        yield lines[-1]


def _damaged_cell(row: str, first: int) -> tuple[int, int, bool]:
    """Return line and column of the first malformed cell, and whether it is quoted.

    Python's reader only reports where it noticed the error, which is lines after an unclosed mark.

    Args:
        row: all lines of the row that were read.
        first: number of its first line.
    """
    place, column = 0, 1
    while cell := _WHOLE_CELL.match(row, place):
        place, column = cell.end(), column + 1
    return first + row.count("\n", 0, place), column, row.startswith('"', place)


def _numbered(cell: str, names: tuple[str, ...] | None, place: str) -> str:
    """Return the name of a class from its number in a cell."""
    digits = cell.strip()
    number = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else 0
    highest = "" if names is None else f" to {len(names)}, the lines of {CLASSES}"
    if number < 1 or (names is not None and number > len(names)):
        shown = cell if len(cell) <= 40 else f"{cell[:40]}…"
        raise InputError(f"{place}: {shown!r}; expected the number of a class, from 1{highest}")
    return str(number) if names is None else names[number - 1]
