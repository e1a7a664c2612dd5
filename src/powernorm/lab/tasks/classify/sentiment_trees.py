"""The Stanford Sentiment Treebank: trees whose every phrase has a class from 0 to 4.

A line is `(3 (2 It) (4 (4 (2 's) (4 good)) (2 .)))`: a class, then a word or two trees. What is
read is the sentence with the class of its root; phrases inside are not used.
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from powernorm.errors import InputError
from powernorm.lab.data.corpus import Split
from powernorm.lab.data.lines import read_lines
from powernorm.lab.data.readers import USER_LICENSE
from powernorm.lab.tasks.classify.labeled_texts import LabeledText, LabeledTexts, Read

TREE_FILES: Final[dict[Split, str]] = {"train": "train.txt", "valid": "dev.txt", "test": "test.txt"}
LABELS: Final = ("0", "1", "2", "3", "4")
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
    return LabeledTexts(folder.resolve().name, str(folder), USER_LICENSE, splits, LABELS)


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
            if part not in LABELS:
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
