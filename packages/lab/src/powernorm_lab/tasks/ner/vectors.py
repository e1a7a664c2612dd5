"""Word vectors in GloVe's text format: a word and its numbers on each line, separated by spaces.

A first line of two integers (word2vec's numbers of words and features) is skipped.
"""

import math
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from powernorm.errors import InputError

_HEADER_COLUMNS: Final = 2
_FORMAT: Final = "a word and its numbers with single spaces between them"


def read_vectors(path: Path, words: Set[str]) -> dict[str, Tensor]:
    """Return the vectors of those words that a file has.

    A word that the file has only in another case (`EU` for `eu`) gets the first such vector. Only
    the numbers of these words are parsed; the number of columns of every line is checked.

    Args:
        path: path of the file, UTF-8.
        words: words to look up, in lower case.

    Returns:
        Vectors by word, float32, (features,), scaled to norm 1 as in Yan et al. 2019; zero vectors
        stay zero.

    Raises:
        InputError: the file cannot be read or is empty, a line is damaged, or it has none of the
            words.
    """
    exact: dict[str, Tensor] = {}
    other_case: dict[str, Tensor] = {}
    num_features = 0
    number = 0
    for number, line in _lines(path):
        if number == 1 and _is_header(line):
            continue
        num_features = num_features or _num_features(line, f"{path}, line {number}")
        word, values = _columns(line, num_features, f"{path}, line {number}")
        kept = exact if word in words else other_case
        key = word.lower()
        if key in words and key not in kept:
            kept[key] = _vector(values, f"{path}, line {number}")
    if not num_features:
        problem = "has no vector after its first line" if number else "is empty"
        raise InputError(f"{path} {problem}: expected {_FORMAT} in each line")
    found = other_case | exact
    if not found:
        raise InputError(
            f"{path} has a vector for none of the {len(words)} words of the data: expected vectors "
            "of its language"
        )
    return found


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open("rb") as file:
            for number, content in enumerate(file, start=1):
                try:
                    line = content.decode("utf-8").rstrip(" \t\r\n")
                except UnicodeDecodeError as error:
                    raise InputError(
                        f"{path}, line {number}: byte 0x{content[error.start]:02x} is not UTF-8 "
                        "text; convert the file to UTF-8"
                    ) from error
                if not line:
                    raise InputError(f"{path}, line {number} is empty: expected a word's vector")
                if "\t" in line:
                    # Otherwise a number could be read as the end of a word, here or in later lines.
                    raise InputError(
                        f"{path}, line {number} has a tab: expected {_FORMAT}; put one space in "
                        "place of each tab"
                    )
                yield number, line
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}): expected word vectors in GloVe's text "
            "format"
        ) from error


def _is_header(line: str) -> bool:
    columns = line.split(" ")
    return len(columns) == _HEADER_COLUMNS and all(
        item.isascii() and item.isdigit() for item in columns
    )


def _num_features(line: str, where: str) -> int:
    """Return the number of numbers at the end of the first line; the word may contain spaces."""
    columns = line.split(" ")
    number = 0
    while number < len(columns) - 1 and _is_number(columns[-1 - number]):
        number += 1
    if not number:
        raise InputError(
            f"{where}, column {len(columns)}: {columns[-1][:40]!r}; expected {_FORMAT}"
        )
    return number


def _columns(line: str, num_features: int, where: str) -> tuple[str, list[str]]:
    columns = line.rsplit(" ", num_features)
    if columns[0].strip(" ") and columns[0].endswith(" "):
        raise InputError(f"{where} has two consecutive spaces: expected {_FORMAT}")
    # Some published words contain spaces, so that more columns are an error only if numeric.
    _, space, last = columns[0].rpartition(" ")
    if len(columns) != num_features + 1 or (space and _is_number(last)):
        raise InputError(
            f"{where} has {line.count(' ') + 1} columns: expected a word and {num_features} "
            "numbers with single spaces between them, as in the first lines"
        )
    return columns[0], columns[1:]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _vector(values: list[str], where: str) -> Tensor:
    numbers: list[float] = []
    for column, value in enumerate(values, start=2):
        number = float(value) if _is_number(value) else math.nan
        if not math.isfinite(number):
            raise InputError(f"{where}, column {column}: {value[:40]!r}; expected a finite number")
        numbers.append(number)
    vector = torch.tensor(numbers, dtype=torch.float64)
    length = float(vector.norm())
    return (vector / length if length else vector).float()
