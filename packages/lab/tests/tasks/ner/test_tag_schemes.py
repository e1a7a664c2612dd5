import itertools
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powernorm_lab.tasks.ner.tag_schemes import (
    IllegalTagError,
    Scheme,
    Span,
    legal_transitions,
    spans_of,
    tag_names,
    tags_of,
)

SCHEMES: tuple[Scheme, ...] = get_args(Scheme)


@st.composite
def annotated(draw: st.DrawFn) -> tuple[list[Span], int]:
    """Draw sorted entities that do not overlap, and the length of their sentence."""
    spans, position = [], 0
    for _ in range(draw(st.integers(0, 5))):
        start = position + draw(st.integers(0, 2))
        position = start + draw(st.integers(1, 3))
        spans.append(Span(draw(st.sampled_from(["PER", "LOC", "B-X"])), start, position))
    return spans, position + draw(st.integers(0, 2))


@pytest.mark.parametrize("scheme", SCHEMES)
@given(annotated())
def test_what_is_written_is_read(scheme: Scheme, sentence: tuple[list[Span], int]) -> None:
    spans, length = sentence
    tags = tags_of(spans[::-1], length, scheme)
    assert len(tags) == length
    assert spans_of(tags, scheme) == spans


def test_schemes_have_their_letters() -> None:
    spans = [Span("P", 0, 1), Span("P", 1, 4), Span("L", 5, 6)]
    written = {scheme: " ".join(tags_of(spans, 7, scheme)) for scheme in SCHEMES}
    assert written == {
        "bioes": "S-P B-P I-P E-P O S-L O",
        "bmes": "S-P B-P M-P E-P O S-L O",
        "iob2": "B-P B-P I-P I-P O B-L O",
        "iob1": "I-P B-P I-P I-P O I-L O",
        "iob": "B-P B-P I-P I-P O B-L O",
    }
    # BILOU has other letters for the last and the only word.
    assert spans_of(["U-P", "B-P", "I-P", "L-P", "O", "U-L", "O"]) == spans


@pytest.mark.parametrize(
    ("scheme", "tags", "position", "expected"),
    [
        ("iob2", "O I-P", 1, "B-P, as no entity"),
        ("iob2", "B-P I-L", 1, "B-L, as no entity"),
        ("iob1", "O B-P", 1, "I-P, as no entity"),
        ("iob1", "I-L B-P", 1, "I-P, as no entity"),
        ("bioes", "O E-P", 1, "O, B or S"),
        ("bioes", "B-P O", 1, "the end"),
        ("bmes", "B-P M-P B-P", 2, "of kind P that is open"),
        ("bmes", "B-P E-L", 1, "of kind P that is open"),
        ("bioes", "O B-P", 2, "the end"),
        ("bioes", "S-P I-P", 1, "O, B or S"),
    ],
)
def test_illegal_tags_are_found(scheme: Scheme, tags: str, position: int, expected: str) -> None:
    with pytest.raises(IllegalTagError, match=expected) as caught:
        spans_of(tags.split(), scheme)
    assert caught.value.position == position


def test_a_piece_may_begin_inside_an_entity() -> None:
    assert spans_of(["E-P", "O"], "bmes") == [Span("P", 0, 1)]
    assert spans_of(["M-P", "M-P", "E-P", "S-P"], "bmes") == [Span("P", 0, 3), Span("P", 3, 4)]


def test_the_lenient_scheme_opens_entities_by_either_letter() -> None:
    assert spans_of(["I-P", "B-P", "I-L", "O", "I-L", "I-L"], "iob") == [
        Span("P", 0, 1),
        Span("P", 1, 2),
        Span("L", 2, 3),
        Span("L", 4, 6),
    ]


def test_transitions_are_those_that_the_reader_takes() -> None:
    names = tag_names(["L", "P"])
    starts, follows, ends = legal_transitions(len(names))

    def is_legal(tags: tuple[int, ...]) -> bool:
        pairs = itertools.pairwise(tags)
        return starts[tags[0]] and ends[tags[-1]] and all(follows[a][b] for a, b in pairs)

    legal = 0
    for length in (1, 2, 3):
        for tags in itertools.product(range(len(names)), repeat=length):
            written = [names[tag] for tag in tags]
            try:
                # Only the reader allows a sentence to begin inside an entity.
                is_read = tags_of(spans_of(written), length) == written
            except IllegalTagError:
                is_read = False
            assert is_legal(tags) == is_read, written
            legal += is_read
    # One word: O and two S. Two: 9 pairs of those, and BE of each kind.
    assert legal == 3 + 11 + (27 + 2 * 2 * 3 + 2)
