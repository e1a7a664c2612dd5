"""Reader of files with a word on each line, its tag last, and empty lines between sentences.

These are CoNLL-2003 (word, part of speech, chunk and tag; lines `-DOCSTART-` between documents),
and files with two columns such as those of Resume, MSRA and Weibo (a character and its tag).
Columns are separated by tabs or, in a file without tabs, by spaces. The scheme of the tags is
detected (`tag_schemes`): one with ends of entities if M, E, L, S or U occurs, else IOB2 if all tags
fit it, else IOB1, the scheme of the original release of CoNLL-2003, in which an entity begins with
I. Tags that fit no scheme are an error.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from powernorm.errors import InputError
from powernorm_lab.tasks.ner.tag_schemes import (
    BOUNDARY_LETTERS,
    TAG,
    IllegalTagError,
    Scheme,
    Span,
    spans_of,
)

DOCUMENT_START: Final = "-DOCSTART-"
_BLANKS: Final = " \t"
"""White space of the format; not `str.isspace`, because a Chinese text may hold ideographic spaces
as characters."""


@dataclass(frozen=True, slots=True)
class TaggedSentence:
    """A sentence and its entities."""

    words: tuple[str, ...]
    spans: tuple[Span, ...]


class _Line(NamedTuple):
    number: int
    word: str
    tag: str


_Block = list[_Line]


def parse_columns(text: str, source: str, scheme: Scheme | None = None) -> list[TaggedSentence]:
    r"""Read the sentences of a file.

    Args:
        text: content of the file, with "\n" at the ends of lines.
        source: name of the file, for messages.
        scheme: scheme of the tags; None detects it.

    Raises:
        InputError: a line is damaged; the message names file, line, column and the expected value.
    """
    blocks = _blocks(text, source)
    reason = f"the file is read as {scheme}"
    if scheme is None:
        scheme, reason = _scheme(blocks, source)
    return [
        TaggedSentence(
            tuple(line.word for line in block), tuple(_spans(block, scheme, reason, source))
        )
        for block in blocks
    ]


def _blocks(text: str, source: str) -> list[_Block]:
    blocks: list[_Block] = [[]]
    split: Callable[[str], list[str]] = _at_tabs if "\t" in text else _at_spaces
    num_columns: int | None = None
    known: set[str] = set()
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip(_BLANKS):
            blocks.append([])
            continue
        columns = split(line)
        if columns[0] == DOCUMENT_START:
            blocks.append([])
            continue
        num_columns = num_columns or max(len(columns), 2)
        if len(columns) != num_columns or columns[-1] not in known:
            _check_columns(columns, num_columns, f"{source}, line {number}")
            known.add(columns[-1])
        if not columns[0].strip(_BLANKS):
            expected = f"column 1 (word): {columns[0]!r}; expected a word"
            raise InputError(f"{source}, line {number}, {expected}")
        blocks[-1].append(_Line(number, columns[0], columns[-1]))
    return [block for block in blocks if block]


def _at_tabs(line: str) -> list[str]:
    return line.split("\t")


def _at_spaces(line: str) -> list[str]:
    columns = line.split(" ")
    return [column for column in columns if column] if "" in columns else columns


def _check_columns(columns: list[str], expected: int, where: str) -> None:
    if len(columns) != expected:
        raise InputError(
            f"{where} has {len(columns)} columns: expected {expected}, a word first and its tag "
            "last, separated by tabs or spaces"
        )
    if not TAG.fullmatch(columns[-1]):
        raise InputError(
            f"{where}, column {expected} (tag): {columns[-1]!r}; expected O, or one of B, I, M, E, "
            "L, S and U with a hyphen and the kind of the entity, such as B-PER"
        )


def _scheme(blocks: list[_Block], source: str) -> tuple[Scheme, str]:
    """Return the scheme of a file, and the reason for choosing it."""
    for block in blocks:
        for line in block:
            if line.tag[0] in BOUNDARY_LETTERS:
                reason = (
                    f"the file is read as BIOES (BMES), because line {line.number} has {line.tag}"
                )
                return "bioes", reason
    damage = _first_damage(blocks, "iob2", source)
    if damage is None or _first_damage(blocks, "iob1", source) is not None:
        return "iob2", "the file is read as IOB2, because not all of its tags fit IOB1"
    return "iob1", "the file is read as IOB1"


def _first_damage(blocks: list[_Block], scheme: Scheme, source: str) -> InputError | None:
    for block in blocks:
        try:
            _spans(block, scheme, "", source)
        except InputError as error:
            return error
    return None


def _spans(block: _Block, scheme: Scheme, reason: str, source: str) -> list[Span]:
    try:
        return spans_of([line.tag for line in block], scheme)
    except IllegalTagError as error:
        if error.position < len(block):
            line = block[error.position]
            found = f"the tag {line.tag}"
        else:
            line = block[-1]
            found = f"the sentence ends after {line.tag}"
        raise InputError(
            f"{source}, line {line.number}: {found}; expected {error.expected} ({reason})"
        ) from error
