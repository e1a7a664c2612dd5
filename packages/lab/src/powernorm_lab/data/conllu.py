"""The CoNLL-U format of Universal Dependencies: one word per line, ten tab-separated columns.

CoNLL-X, the format of the 2006 shared task, can be read, too: its columns CPOSTAG and POSTAG are in
place of UPOS and XPOS, and it has neither comments nor contractions.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from powernorm.errors import InputError

COLUMNS: Final = (
    "ID",
    "FORM",
    "LEMMA",
    "UPOS",
    "XPOS",
    "FEATS",
    "HEAD",
    "DEPREL",
    "DEPS",
    "MISC",
)
UNSPECIFIED: Final = "_"
_ID, _FORM, _LEMMA, _UPOS, _XPOS, HEAD, DEPREL = (
    COLUMNS.index(name) for name in ("ID", "FORM", "LEMMA", "UPOS", "XPOS", "HEAD", "DEPREL")
)
_NO_WORD: Final = re.compile(r"\d+[-.]\d+")
"""IDs of lines that are not words: `9-10` is a contraction, `8.1` an empty node."""

_NUMBER: Final = re.compile(r"[0-9]{1,9}")

_Line = tuple[int, str]


class Word(NamedTuple):
    """A syntactic word."""

    form: str
    lemma: str
    tag: str
    """Universal part of speech; `UNSPECIFIED` if the file has none."""
    head: int | None
    """Number of the head, from 1; 0 for the root, None if it is not annotated."""
    relation: str
    """Dependency relation to the head."""
    fine_tag: str = UNSPECIFIED
    """Language-specific part of speech, such as Penn Treebank's."""


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence of a treebank."""

    words: tuple[Word, ...]
    comments: Mapping[str, str]
    """Values of the lines `# key = value` by key, such as `sent_id` and `text`."""
    source: str = field(default="", compare=False)
    """Name of the file."""
    lines: tuple[int, ...] = field(default=(), compare=False)
    """Line numbers of the words in the file, from 1."""


def parse_conllu(text: str, source: str) -> list[Sentence]:
    r"""Read the sentences of a file; contractions and empty nodes are left out.

    Args:
        text: content of the file, with "\n" at the ends of lines.
        source: name of the file, for messages.

    Raises:
        InputError: a line is damaged; the message names file, line, column and the expected value.
    """
    return [_sentence(block, source) for block in _blocks(text)]


def _blocks(text: str) -> Iterator[list[_Line]]:
    """Yield the numbered lines between blank ones, without blocks of comments only."""
    block: list[_Line] = []
    for number, line in enumerate([*text.split("\n"), ""], start=1):
        if line.strip():
            block.append((number, line))
        else:
            if any(not kept.startswith("#") for _, kept in block):
                yield block
            block = []


def _sentence(block: list[_Line], source: str) -> Sentence:
    words: list[Word] = []
    numbers: list[int] = []
    comments: dict[str, str] = {}
    for number, line in block:
        if line.startswith("#"):
            key, equals, value = line[1:].partition("=")
            if equals:
                comments[key.strip()] = value.strip()
            continue
        columns = line.split("\t")
        where = f"{source}, line {number}"
        _check_columns(columns, where)
        if _NO_WORD.fullmatch(columns[_ID]):
            continue
        words.append(_word(columns, len(words) + 1, where))
        numbers.append(number)
    for number, (position, word) in zip(numbers, enumerate(words, start=1), strict=True):
        if word.head is not None and (word.head > len(words) or word.head == position):
            expected = f"0 for the root or another of the sentence's {len(words)} words"
            raise damage(f"{source}, line {number}", HEAD, str(word.head), expected)
    if not words:
        number, _ = block[-1]
        raise InputError(
            f"{source}, line {number}: a sentence without words; expected at least one"
        )
    return Sentence(tuple(words), comments, source, tuple(numbers))


def _check_columns(columns: list[str], where: str) -> None:
    if len(columns) != len(COLUMNS):
        raise InputError(
            f"{where} has {len(columns)} columns: expected the {len(COLUMNS)} of CoNLL-U "
            f"({' '.join(COLUMNS)}) with tabs between them"
        )
    if "" in columns:
        raise damage(where, columns.index(""), "", f"a value, or {UNSPECIFIED} for none")


def _word(columns: list[str], position: int, where: str) -> Word:
    if columns[_ID] != str(position):
        expected = f"{position}, because the words of a sentence are counted from 1"
        raise damage(where, _ID, columns[_ID], expected)
    head = columns[HEAD]
    if head != UNSPECIFIED and not _NUMBER.fullmatch(head):
        raise damage(where, HEAD, head, f"the number of a word, or {UNSPECIFIED}")
    return Word(
        columns[_FORM],
        columns[_LEMMA],
        columns[_UPOS],
        None if head == UNSPECIFIED else int(head),
        columns[DEPREL],
        columns[_XPOS],
    )


def damage(where: str, column: int, value: str, expected: str) -> InputError:
    """Return the error for a value in a column, counted from 0."""
    return InputError(
        f"{where}, column {column + 1} ({COLUMNS[column]}): {value!r}; expected {expected}"
    )
