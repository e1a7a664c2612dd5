"""Entities as spans of words and as one tag for each word, in several schemes.

A tag is `O`, outside of all entities, or a letter, a hyphen and the kind of the entity.

| scheme | first word | words between | last word | only word |
|---|---|---|---|---|
| `bioes` | B | I | E | S |
| `bmes` | B | M | E | S |
| `iob2` | B | I | I | B |
| `iob1` | I; B right after another entity of the same kind | I | I | as the first |
| `iob` | B, or I unless it continues an entity of its kind | I | I | as the first |

In reading, `bioes` and `bmes` are the same scheme, and BILOU (L for E, U for S) is the same with
other letters. `iob` is how the CoNLL evaluation reads tags that do not fit the other schemes; it is
written as `iob2`.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

Scheme = Literal["bioes", "bmes", "iob2", "iob1", "iob"]

OUTSIDE: Final = "O"
TAG: Final = re.compile(r"O|[BIMELSU]-\S+")
"""Pattern of the tags of all schemes."""
BOUNDARY_LETTERS: Final = frozenset("MELSU")
"""Letters of the schemes with ends of entities only."""
LETTERS: Final = ("B", "I", "E", "S")
"""Letters of the scheme of training, in the order of the tags of a kind."""
_READ_AS: Final = {"M": "I", "L": "E", "U": "S"}
_WRITTEN: Final[dict[Scheme, tuple[str, str, str, str]]] = {
    "bioes": ("B", "I", "E", "S"),
    "bmes": ("B", "M", "E", "S"),
    "iob2": ("B", "I", "I", "B"),
    "iob1": ("I", "I", "I", "I"),
    "iob": ("B", "I", "I", "B"),
}


class Span(NamedTuple):
    """An entity: the words from `start` up to and excluding `end`, from 0."""

    kind: str
    start: int
    end: int


class IllegalTagError(ValueError):
    """A tag that is illegal at its position.

    Args:
        position: position of the tag in its sentence, from 0; the sentence's length if its end is
            illegal.
        expected: description of legal tags.
    """

    def __init__(self, position: int, expected: str) -> None:
        super().__init__(expected)
        self.position = position
        self.expected = expected


class Transitions(NamedTuple):
    """Legal transitions between tags, in the order of `tag_names`."""

    starts: tuple[bool, ...]
    """Whether a sentence may begin with each tag."""
    follows: tuple[tuple[bool, ...], ...]
    """Whether the tag of the column may follow that of the row."""
    ends: tuple[bool, ...]
    """Whether a sentence may end with each tag."""


def tag_names(kinds: Iterable[str]) -> list[str]:
    """Return the tags of the scheme of training: `O`, then B, I, E, S of each kind.

    >>> tag_names(["LOC"])
    ['O', 'B-LOC', 'I-LOC', 'E-LOC', 'S-LOC']
    """
    return [OUTSIDE, *(f"{letter}-{kind}" for kind in kinds for letter in LETTERS)]


def legal_transitions(num_tags: int) -> Transitions:
    """Return the legal transitions between the tags of `tag_names`.

    Args:
        num_tags: 1 + 4 · number of kinds.
    """
    is_inner = [_letter(tag) in ("B", "I") for tag in range(num_tags)]
    continues = [_letter(tag) in ("I", "E") for tag in range(num_tags)]
    return Transitions(
        starts=tuple(not inside for inside in continues),
        follows=tuple(
            tuple(
                is_inner[before] == continues[tag]
                and (not continues[tag] or _kind(before) == _kind(tag))
                for tag in range(num_tags)
            )
            for before in range(num_tags)
        ),
        ends=tuple(not inside for inside in is_inner),
    )


def _letter(tag: int) -> str:
    return LETTERS[(tag - 1) % len(LETTERS)] if tag else OUTSIDE


def _kind(tag: int) -> int:
    return (tag - 1) // len(LETTERS) if tag else -1


def tags_of(spans: Iterable[Span], length: int, scheme: Scheme = "bioes") -> list[str]:
    """Convert entities to tags.

    Args:
        spans: entities, which do not overlap.
        length: number of words of the sentence.
        scheme: scheme of the tags.

    >>> tags_of([Span("LOC", 1, 3), Span("PER", 3, 4)], 5)
    ['O', 'B-LOC', 'E-LOC', 'S-PER', 'O']
    """
    first, inner, last, single = _WRITTEN[scheme]
    tags = [OUTSIDE] * length
    before: Span | None = None
    for span in sorted(spans, key=lambda item: item.start):
        kind, start, end = span
        tags[start:end] = [f"{inner}-{kind}"] * (end - start)
        touches = before is not None and (before.kind, before.end) == (kind, start)
        if scheme == "iob1":
            tags[start] = f"{'B' if touches else first}-{kind}"
        elif end - start == 1:
            tags[start] = f"{single}-{kind}"
        else:
            tags[start], tags[end - 1] = f"{first}-{kind}", f"{last}-{kind}"
        before = span
    return tags


def spans_of(tags: Sequence[str], scheme: Scheme = "bioes") -> list[Span]:
    """Convert tags to entities.

    A sentence of the schemes with ends may begin inside an entity, because some files split long
    sentences within entities. The rest at the beginning is then an entity, too.

    `iob` takes tags of all schemes in any order, as conlleval does: a word continues the entity of
    the previous word if that word is the first or an inner word of an entity and this word is an
    inner or the last word of the same kind. Any other tag except `O` begins an entity.

    Args:
        tags: tags of a sentence, which match `TAG`.
        scheme: scheme of the tags.

    Raises:
        IllegalTagError: a tag cannot follow the one before it; never with `iob`.
    """
    spans: list[Span] = []
    open_kind: str | None = None
    for position, (letter, kind) in enumerate(map(_parts, tags)):
        expected = _expected(scheme, letter, kind, open_kind, is_first=position == 0)
        if expected is not None:
            raise IllegalTagError(position, expected)
        if letter in ("I", "E") and open_kind == kind:
            spans[-1] = spans[-1]._replace(end=position + 1)
        elif letter != OUTSIDE:
            spans.append(Span(kind, position, position + 1))
        open_kind = kind if letter in ("B", "I") else None
    expected = _expected(scheme, OUTSIDE, "", open_kind, is_first=not tags)
    if expected is not None:
        raise IllegalTagError(len(tags), expected)
    return spans


def _expected(
    scheme: Scheme, letter: str, kind: str, open_kind: str | None, *, is_first: bool
) -> str | None:
    """Return a description of legal tags if a tag is illegal, else None."""
    continues = letter in ("I", "E") and open_kind == kind
    if scheme == "iob1" and letter == "B" and open_kind != kind:
        return f"I-{kind}, as no entity of that kind ends before it"
    if scheme == "iob2" and letter == "I" and not continues:
        return f"B-{kind}, as no entity of that kind is open"
    if scheme in ("bioes", "bmes") and not continues:
        if open_kind is not None:
            inside = "the middle (I, M) or the end (E, L) of the entity of kind"
            return f"{inside} {open_kind} that is open"
        if letter in ("I", "E") and not is_first:
            return "O, B or S, as no entity is open"
    return None


def _parts(tag: str) -> tuple[str, str]:
    """Return letter and kind of a tag, with the letter of `bioes`."""
    return _READ_AS.get(tag[0], tag[0]), tag[2:]
