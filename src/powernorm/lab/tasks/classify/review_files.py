"""Reviews in files that are named by their class: RT's two files of sentences, IMDB's folders."""

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Final, Literal

from powernorm.errors import InputError
from powernorm.lab.data.readers import USER_LICENSE, read_text
from powernorm.lab.tasks.classify.labeled_texts import (
    LabeledText,
    LabeledTexts,
    shuffled_parts,
    with_drawn_valid,
)

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
