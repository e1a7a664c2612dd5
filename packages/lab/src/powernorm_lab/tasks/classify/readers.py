"""Texts with classes in three splits, read lazily: RT, IMDB and the Stanford Sentiment Treebank.

The Stanford Sentiment Treebank has trees with a class from 0 to 4 for every phrase. A line is
`(3 (2 It) (4 (4 (2 's) (4 good)) (2 .)))`: a class, then a word or two trees. The reader returns
the sentence with the class of its root; inner phrases are not used.
"""

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, Literal, NamedTuple

from powernorm.errors import InputError
from powernorm_lab.data.corpus import Split
from powernorm_lab.data.files import USER_LICENSE, read_lines, read_text

RT_VALID: Final = 964 / 10661
RT_TEST: Final = 1089 / 10661
"""Fractions of RT's sentences in the valid and test splits of Xu et al. 2019 (section 2.2)."""
VALID_OF_TRAIN: Final = 0.3
"""Fraction of the training texts for validation if there is no valid split (Wang et al. 2022,
App. A)."""
LEAST: Final = 20
"""Minimal number of texts to split."""
_SEED: Final = 0


class LabeledText(NamedTuple):
    """A text with its class and its place in a file."""

    label: str
    text: str
    path: Path
    line: int
    """Line number, from 1; the last line of a text with several lines."""

    @property
    def place(self) -> str:
        """Return file and line, for messages."""
        return f"{self.path}, line {self.line}"


Read = Callable[[], Iterator[LabeledText]]
"""Returns an iterator over texts, from the beginning at each call."""


@dataclass(frozen=True, slots=True)
class LabeledTexts:
    """A data set that is read lazily.

    Its readers raise an `InputError` for a damaged file during iteration.
    """

    name: str
    source: str
    license: str
    read: Mapping[Split, Read]
    labels: tuple[str, ...] | None = None
    """The classes in order; None for those of the train split in alphabetical order."""


def shuffled_parts(
    texts: Iterable[LabeledText], *, valid: float = RT_VALID, test: float = RT_TEST
) -> dict[Split, Read]:
    """Divide texts at random with a fixed seed.

    Args:
        texts: all texts.
        valid: fraction of the valid split.
        test: fraction of the test split.
    """
    rows = list(texts)
    random.Random(_SEED).shuffle(rows)
    num_valid, num_test = round(len(rows) * valid), round(len(rows) * test)
    num_train = len(rows) - num_valid - num_test
    return {
        "train": reading(rows[:num_train]),
        "valid": reading(rows[num_train : num_train + num_valid]),
        "test": reading(rows[num_train + num_valid :]),
    }


def reading(rows: Sequence[LabeledText]) -> Read:
    """Return a `Read` over texts in memory."""
    return partial(iter, rows)


def with_drawn_valid(train: Read, test: Read) -> dict[Split, Read]:
    """Move a random fraction of about `VALID_OF_TRAIN` of the train split to the valid split.

    Each text is drawn independently with a fixed seed, so that files of any size are streamed.
    """
    return {
        "train": lambda: _drawn(train(), is_valid=False),
        "valid": lambda: _drawn(train(), is_valid=True),
        "test": test,
    }


def _drawn(texts: Iterator[LabeledText], *, is_valid: bool) -> Iterator[LabeledText]:
    draw = random.Random(_SEED)
    for text in texts:
        if (draw.random() < VALID_OF_TRAIN) == is_valid:
            yield text


# Trees.


TREE_FILES: Final[dict[Split, str]] = {"train": "train.txt", "valid": "dev.txt", "test": "test.txt"}
PHRASE_CLASSES: Final = ("0", "1", "2", "3", "4")
"""Classes of phrases: very negative, negative, neutral, positive, very positive."""
_PART: Final = re.compile(r"[()]|[^\s()]+")
_BRACKETS: Final = {"-LRB-": "(", "-RRB-": ")"}
"""Brackets as the Penn Treebank escapes them."""
_ESCAPED: Final = re.compile(r"\\([/*])")


def read_trees(folder: Path) -> LabeledTexts:
    """Read `train.txt`, `dev.txt` and `test.txt` of trees.

    Raises:
        InputError: a file is missing. Damaged lines raise errors when the texts are read.
    """
    splits: dict[Split, Read] = {}
    for split, name in TREE_FILES.items():
        path = folder / name
        if not path.exists():
            raise InputError(f"{folder} has no {name}: expected {', '.join(TREE_FILES.values())}")
        splits[split] = partial(_tree_texts, path)
    return LabeledTexts(folder.resolve().name, str(folder), USER_LICENSE, splits, PHRASE_CLASSES)


def _tree_texts(path: Path) -> Iterator[LabeledText]:
    for number, line in enumerate(read_lines(path), start=1):
        if line.strip():
            label, words = parse_tree(line, f"{path}, line {number}")
            yield LabeledText(label, " ".join(words), path, number)


def parse_tree(line: str, place: str) -> tuple[str, list[str]]:
    """Return the class of a tree's root and the words of its leaves.

    Args:
        line: the tree.
        place: file and line, for messages.

    Raises:
        InputError: the line is not a tree; the message names the column.

    >>> parse_tree("(3 (2 It) (4 (2 's) (4 good)))", "here")
    ('3', ['It', "'s", 'good'])
    """
    words: list[str] = []
    label = ""
    # Number of parts (words or trees) in each open bracket; -1 before its class.
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
    """Count a part of the innermost bracket, which must have a class already."""
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


# Reviews in files or folders named after their class: RT's two files, IMDB's folders.


RT_FILES: Final = {"negative": "rt-polarity.neg", "positive": "rt-polarity.pos"}
IMDB_FOLDERS: Final = {"negative": "neg", "positive": "pos"}
_IMDB_SPLITS: Final = ("train", "test")
LABELS: Final = ("negative", "positive")
_ALL_FOLDERS: Final = "train/pos, train/neg, test/pos and test/neg"
_BREAK: Final = re.compile(r"<br\s*/?>")


def read_rt(folder: Path) -> LabeledTexts:
    """Read Pang and Lee's `rt-polarity.pos` and `rt-polarity.neg`, with a sentence on each line.

    The files are in Windows-1252; UTF-8 is read, too. The sentences are divided at random in the
    proportions of Xu et al. 2019: 8,609, 964 and 1,089 of the 10,662 official ones.

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
        raise InputError(f"{path} is empty: expected a sentence on each line")


def _lines(path: Path) -> list[str]:
    """Return the lines of a file in UTF-8 or else in Windows-1252."""
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
    """Read IMDB's folders `train/pos`, `train/neg`, `test/pos`, `test/neg` with a file per review.

    The valid split is drawn from the train split. `unsup` and other folders are ignored.

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
    """Refuse an incomplete folder of IMDB, and one of its two halves.

    Raises:
        InputError: the folder is only a part of IMDB; the message names the missing parts.
    """
    names = tuple(IMDB_FOLDERS.values())
    if any((folder / split / name).is_dir() for split in _IMDB_SPLITS for name in names):
        _check_folders(folder)
    place = folder.resolve()
    # In a folder with another name, pos and neg may belong to another data set.
    if place.name in _IMDB_SPLITS and all((folder / name).is_dir() for name in names):
        raise InputError(
            f"{folder} is one half of IMDB: give the folder above, {place.parent}; expected "
            f"{_ALL_FOLDERS} in it"
        )


def _reviews(folder: Path, split: Literal["train", "test"]) -> Iterator[LabeledText]:
    """Yield the reviews by class, sorted by name: independent of the file system's order."""
    for label, name in IMDB_FOLDERS.items():
        paths = sorted((folder / split / name).glob("*.txt"))
        if not paths:
            raise InputError(f"{folder / split / name} has no .txt files: expected reviews")
        for path in paths:
            yield LabeledText(label, without_breaks(read_text(path)), path, 1)


def without_breaks(review: str) -> str:
    """Return a review with its HTML line breaks as spaces."""
    return _BREAK.sub(" ", review)
