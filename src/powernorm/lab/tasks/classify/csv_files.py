r"""The files of Zhang et al. 2015 (Yelp, DBPedia, Sogou News): `train.csv` and `test.csv`.

A row is a class, counted from 1, and one or more texts (title and content) in quotation marks,
where `""` stands for one of them and `\n` for the end of a line; a row may also go over several
lines. `classes.txt`, a class a line, names the classes. Files of any size are gone through row by
row.

A first row with `label` and `sentence` (or `text`), or with the names in `columns.Columns`, is a
header: then classes are what their column says, and the other columns are passed over.
"""

import csv
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from powernorm.errors import InputError
from powernorm.lab.data.corpus import Split
from powernorm.lab.data.lines import read_lines
from powernorm.lab.data.readers import USER_LICENSE
from powernorm.lab.tasks.classify.columns import ColumnPlaces, Columns
from powernorm.lab.tasks.classify.labeled_texts import (
    LabeledText,
    LabeledTexts,
    Read,
    with_drawn_valid,
)
from powernorm.lab.tasks.classify.tables import divided_texts

CSV_FILES: Final[dict[Split, str]] = {
    "train": "train.csv",
    "valid": "valid.csv",
    "test": "test.csv",
}
CLASSES: Final = "classes.txt"
LONGEST_CELL: Final = 1 << 20
"""Characters; more is a quotation mark that is never closed. The longest news have over 131,072,
which is what Python takes by itself."""
_WHOLE_CELL: Final = re.compile(r'(?:"[^"]*(?:""[^"]*)*"|(?!")[^,\r\n]*),')
"""As Python's strict reader takes one, with the comma that ends it."""


def read_csv(folder: Path, columns: Columns) -> LabeledTexts:
    """Read `train.csv` and `test.csv`; without a `valid.csv` that split is drawn out of train.

    Raises:
        InputError: a file is missing. Damaged rows are found when the texts are gone through.
    """
    for split in ("train", "test"):
        if not (folder / CSV_FILES[split]).exists():
            raise InputError(f"{folder} has no {CSV_FILES[split]}: expected train.csv and test.csv")
    names = _class_names(folder / CLASSES)
    read = partial(_rows, names=names, columns=columns)
    train, test = (partial(read, folder / CSV_FILES[split]) for split in ("train", "test"))
    splits: dict[Split, Read] = with_drawn_valid(train, test)
    valid = folder / CSV_FILES["valid"]
    if valid.exists():
        splits = {"train": train, "valid": partial(read, valid), "test": test}
    return LabeledTexts(folder.resolve().name, str(folder), USER_LICENSE, splits, names)


def _class_names(path: Path) -> tuple[str, ...] | None:
    if not path.exists():
        return None
    names = tuple(line.strip() for line in read_lines(path) if line.strip())
    if len(set(names)) < len(names) or len(names) < 2:
        raise InputError(f"{path} has {len(names)} classes: expected two or more, each once")
    return names


def csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Go through the rows of a CSV file, each with the number of its last line.

    Raises:
        InputError: the file cannot be read, or a row is damaged or has not as many columns as the
            first.
    """
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_CELL))
    lines: list[str] = []
    reader = csv.reader(_remembered(read_lines(path), lines), strict=True)
    num_columns = 0
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
                    "a quotation mark is never closed, or stands alone inside (line "
                    f"{reader.line_num}: {error})"
                )
            raise InputError(
                f"{path}, line {line}, column {column}: {problem}; expected rows as "
                '"1","a text", with "" for a quotation mark inside'
            ) from error
        if not row:
            continue
        num_columns = num_columns or len(row)
        if len(row) != num_columns or num_columns < 2:
            raise InputError(
                f"{path}, line {reader.line_num}: {len(row)} columns; expected "
                f"{max(num_columns, 2)}, a class and its texts"
            )
        yield reader.line_num, row


def _remembered(source: Iterator[str], lines: list[str]) -> Iterator[str]:
    """Pass lines on; they are kept until the list is cleared, which is after every row."""
    for line in source:
        lines.append(f"{line}\n")
        yield lines[-1]


def _damaged_cell(row: str, first: int) -> tuple[int, int, bool]:
    """Return where the first cell that does not end as it should begins, and whether it is quoted.

    Python's reader only says where it noticed, which is lines below a mark that was never closed.

    Args:
        row: all its lines, as far as they were read.
        first: number of the first of them.
    """
    place, column = 0, 1
    while cell := _WHOLE_CELL.match(row, place):
        place, column = cell.end(), column + 1
    return first + row.count("\n", 0, place), column, row.startswith('"', place)


def read_csv_file(path: Path, columns: Columns) -> LabeledTexts:
    """Read one file and divide it at random in the proportions of RT.

    Raises:
        InputError: it is damaged, or has too few rows.
    """
    return divided_texts(path, _rows(path, None, columns))


def _rows(path: Path, names: tuple[str, ...] | None, columns: Columns) -> Iterator[LabeledText]:
    places: ColumnPlaces | None = None
    for number, (line, row) in enumerate(csv_rows(path)):
        if number == 0 and (places := columns.found_in(row, path)) is not None:
            continue
        if places is None:
            label = _label(row[0], names, f"{path}, line {line}, column 1")
            text = " ".join(row[1:])
        else:
            label, text = row[places.label].strip(), places.text(row)
        if not label:
            column = 1 if places is None else places.label + 1
            raise InputError(f"{path}, line {line}, column {column}: no class; expected its name")
        text = text.replace("\\n", " ").replace("\n", " ")
        yield LabeledText(label, text, path, line)


def _label(cell: str, names: tuple[str, ...] | None, place: str) -> str:
    """Return the name of the class that a cell numbers."""
    digits = cell.strip()
    number = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else 0
    highest = "" if names is None else f" to {len(names)}, the lines of {CLASSES}"
    if number < 1 or (names is not None and number > len(names)):
        shown = cell if len(cell) <= 40 else f"{cell[:40]}…"
        raise InputError(f"{place}: {shown!r}; expected the number of a class, from 1{highest}")
    return str(number) if names is None else names[number - 1]
