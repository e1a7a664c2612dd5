r"""Readers of labeled texts: CSV files, files named by their class, sentiment trees.

Zhang et al. 2015 (Yelp, DBPedia, Sogou News) publish `train.csv` and `test.csv`.

A row is a class, counted from 1, and one or more texts (title and content) in quotation marks,
where `""` stands for one of them and `\n` for the end of a line; a row may also go over several
lines. `classes.txt`, a class a line, names the classes. Files of any size are gone through row by
row.

A first row with `label` and `sentence` (or `text`), or with the names in `columns.Columns`, is a
header: then classes are what their column says, and the other columns are passed over.

The Stanford Sentiment Treebank has trees whose every phrase has a class from 0 to 4. A line is `(3
(2 It) (4 (4 (2 's) (4 good)) (2 .)))`: a class, then a word or two trees. What is read is the
sentence with the class of its root; phrases inside are not used.
"""

import csv
import re
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, Literal

from powernorm.errors import InputError
from powernorm.lab.data.corpus import Split
from powernorm.lab.data.lines import read_lines
from powernorm.lab.data.readers import USER_LICENSE, read_text
from powernorm.lab.tasks.classify.columns import ColumnPlaces, Columns
from powernorm.lab.tasks.classify.labeled_texts import (
    LabeledText,
    LabeledTexts,
    Read,
    shuffled_parts,
    with_drawn_valid,
)
from powernorm.lab.tasks.classify.tables import divided_texts

TREE_FILES: Final[dict[Split, str]] = {"train": "train.txt", "valid": "dev.txt", "test": "test.txt"}
PHRASE_CLASSES: Final = ("0", "1", "2", "3", "4")
"""Very negative, negative, neutral, positive, very positive."""
_PART: Final = re.compile(r"[()]|[^\s()]+")
_BRACKETS: Final = {"-LRB-": "(", "-RRB-": ")"}
"""How the Penn Treebank writes what has a meaning of its own there."""
_ESCAPED: Final = re.compile(r"\\([/*])")


def read_trees(folder: Path) -> LabeledTexts:
    """Read `train.txt`, `dev.txt` and `test.txt` of trees.

    Raises:
        InputError: a file is missing. Damaged lines are found when the texts are gone through.
    """
    splits: dict[Split, Read] = {}
    for split, name in TREE_FILES.items():
        path = folder / name
        if not path.exists():
            raise InputError(f"{folder} has no {name}: expected {', '.join(TREE_FILES.values())}")
        splits[split] = partial(_texts, path)
    return LabeledTexts(folder.resolve().name, str(folder), USER_LICENSE, splits, PHRASE_CLASSES)


def _texts(path: Path) -> Iterator[LabeledText]:
    for number, line in enumerate(read_lines(path), start=1):
        if line.strip():
            label, words = parse_tree(line, f"{path}, line {number}")
            yield LabeledText(label, " ".join(words), path, number)


def parse_tree(line: str, place: str) -> tuple[str, list[str]]:
    """Return the class of a tree's root and the words of its leaves.

    Args:
        line: the tree.
        place: where it stands, for messages.

    Raises:
        InputError: it is no such tree; names the column.

    >>> parse_tree("(3 (2 It) (4 (2 's) (4 good)))", "here")
    ('3', ['It', "'s", 'good'])
    """
    words: list[str] = []
    label = ""
    # Number of parts (words or trees) in each bracket that is open; -1 while its class is missing.
    open_brackets: list[int] = []
    for match in _PART.finditer(line):
        part, column = match[0], match.start() + 1
        if not open_brackets and (part != "(" or label):
            raise _broken(place, column, part, "a tree in brackets and nothing after it")
        if part == "(":
            _count_part(open_brackets, place, column, part)
            open_brackets.append(-1)
        elif part == ")":
            if open_brackets.pop() < 1:
                raise _broken(place, column, part, "a class, then a word or two trees")
        elif open_brackets[-1] < 0:
            if part not in PHRASE_CLASSES:
                raise _broken(place, column, part, "a class from 0 to 4 after a bracket")
            label = label or part
            open_brackets[-1] = 0
        else:
            _count_part(open_brackets, place, column, part)
            words.append(_BRACKETS.get(part) or _ESCAPED.sub(r"\1", part))
    if open_brackets or not words:
        raise _broken(place, len(line) + 1, "the end of the line", "a closing bracket")
    return label, words


def _count_part(open_brackets: list[int], place: str, column: int, part: str) -> None:
    """Count a part of the innermost bracket, which has to have its class by then."""
    if not open_brackets:
        return
    if open_brackets[-1] < 0:
        raise _broken(place, column, part, "a class from 0 to 4 after a bracket")
    open_brackets[-1] += 1


def _broken(place: str, column: int, found: str, expected: str) -> InputError:
    shown = found if len(found) <= 40 else f"{found[:40]}…"
    return InputError(
        f"{place}, column {column}: {shown!r}; expected {expected}, as in (3 (2 It) (4 works))"
    )


# Reviews in files that are named by their class: RT's two files of sentences, IMDB's folders.


RT_FILES: Final = {"negative": "rt-polarity.neg", "positive": "rt-polarity.pos"}
IMDB_FOLDERS: Final = {"negative": "neg", "positive": "pos"}
_IMDB_SPLITS: Final = ("train", "test")
LABELS: Final = ("negative", "positive")
_ALL_FOLDERS: Final = "train/pos, train/neg, test/pos and test/neg"
_BREAK: Final = re.compile(r"<br\s*/?>")


def read_rt(folder: Path) -> LabeledTexts:
    """Read Pang and Lee's `rt-polarity.pos` and `rt-polarity.neg`, a sentence a line.

    The files are in Windows-1252; UTF-8 is read, too. The sentences are divided at random in the
    proportions of Xu et al. 2019, which on the 10,662 official ones is 8,609, 964 and 1,089.

    Raises:
        InputError: a file is missing, empty or in neither encoding.
    """
    for name in RT_FILES.values():
        if not (folder / name).exists():
            both = " and ".join(RT_FILES.values())
            raise InputError(f"{folder} has no {name}: expected {both}")
    texts = chain.from_iterable(
        _sentences(folder / name, label) for label, name in RT_FILES.items()
    )
    parts = shuffled_parts(texts)
    return LabeledTexts(folder.resolve().name, str(folder), USER_LICENSE, parts, LABELS)


def _sentences(path: Path, label: str) -> Iterator[LabeledText]:
    number = 0
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            yield LabeledText(label, line, path, number)
    if not number:
        raise InputError(f"{path} is empty: expected a sentence a line")


def _lines(path: Path) -> list[str]:
    """Return the lines of a file in UTF-8 or, as a whole, in Windows-1252."""
    try:
        lines = path.read_bytes().replace(b"\r\n", b"\n").split(b"\n")
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}): expected a text file"
        ) from error
    lines = lines if lines[-1] else lines[:-1]
    try:
        return [line.decode() for line in lines]
    except UnicodeDecodeError:
        return [_in_windows_1252(line, path, number) for number, line in enumerate(lines, start=1)]


def _in_windows_1252(line: bytes, path: Path, number: int) -> str:
    try:
        return line.decode("cp1252")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}, line {number}: byte 0x{line[error.start]:02x} is neither UTF-8 nor "
            "Windows-1252 text; convert the file to UTF-8"
        ) from error


def read_imdb(folder: Path) -> LabeledTexts:
    """Read the folders of IMDB: `train/pos`, `train/neg`, `test/pos`, `test/neg`, a file a review.

    The valid split is drawn out of the train split. `unsup` and other folders are not looked at.

    Raises:
        InputError: a folder is missing or has no reviews.
    """
    _check_folders(folder)
    splits = with_drawn_valid(
        lambda: _reviews(folder, "train"),
        lambda: _reviews(folder, "test"),
    )
    return LabeledTexts(folder.resolve().name, str(folder), USER_LICENSE, splits, LABELS)


def _check_folders(folder: Path) -> None:
    for split in _IMDB_SPLITS:
        for name in IMDB_FOLDERS.values():
            if not (folder / split / name).is_dir():
                raise InputError(
                    f"{folder} has no folder {split}/{name}: expected {_ALL_FOLDERS} with a .txt "
                    "file for each review"
                )


def refuse_parts_of_imdb(folder: Path) -> None:
    """Say what is missing where a folder has some of IMDB's, or is one of its two halves.

    Raises:
        InputError: it is a part of IMDB.
    """
    names = tuple(IMDB_FOLDERS.values())
    if any((folder / split / name).is_dir() for split in _IMDB_SPLITS for name in names):
        _check_folders(folder)
    place = folder.resolve()
    # Folders pos and neg alone, of whatever name, may be another data set's.
    if place.name in _IMDB_SPLITS and all((folder / name).is_dir() for name in names):
        raise InputError(
            f"{folder} is one half of IMDB: give the folder above, {place.parent}; expected "
            f"{_ALL_FOLDERS} in it"
        )


def _reviews(folder: Path, split: Literal["train", "test"]) -> Iterator[LabeledText]:
    """Go through the reviews, classes in turn: they shall not depend on how a disk lists them."""
    for label, name in IMDB_FOLDERS.items():
        paths = sorted((folder / split / name).glob("*.txt"))
        if not paths:
            raise InputError(f"{folder / split / name} has no .txt files: expected reviews")
        for path in paths:
            yield LabeledText(label, without_breaks(read_text(path)), path, 1)


def without_breaks(review: str) -> str:
    """Return a review with its HTML line breaks as spaces."""
    return _BREAK.sub(" ", review)


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
