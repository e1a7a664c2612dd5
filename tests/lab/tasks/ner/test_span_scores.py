import pytest
from hypothesis import given
from hypothesis import strategies as st

from powernorm.lab.tasks.ner.scores import span_scores
from powernorm.lab.tasks.ner.tag_schemes import Span, tags_of


@st.composite
def spans(draw: st.DrawFn, length: int) -> list[Span]:
    found, position = [], 0
    while position < length:
        width = draw(st.integers(0, min(3, length - position)))
        if width:
            found.append(Span(draw(st.sampled_from("AB")), position, position + width))
        position += width or 1
    return found


@st.composite
def annotations(draw: st.DrawFn) -> list[tuple[int, list[Span], list[Span]]]:
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    return [(length, draw(spans(length)), draw(spans(length))) for length in lengths]


@given(annotations())
def test_scores_are_those_of_counted_spans(cases: list[tuple[int, list[Span], list[Span]]]) -> None:
    right = sum(len(set(gold) & set(found)) for _, gold, found in cases)
    num_gold = sum(len(gold) for _, gold, _ in cases)
    num_found = sum(len(found) for _, _, found in cases)
    precision = right / num_found if num_found else 0.0
    recall = right / num_gold if num_gold else 0.0
    f1 = 2 * right / (num_gold + num_found) if num_gold + num_found else 0.0
    scores = span_scores(
        [tags_of(gold, length) for length, gold, _ in cases],
        [tags_of(found, length) for length, _, found in cases],
    )
    assert scores == {
        "f1": pytest.approx(100 * f1),
        "precision": pytest.approx(100 * precision),
        "recall": pytest.approx(100 * recall),
    }


def test_a_rest_of_an_entity_is_not_the_entity() -> None:
    gold = [["B-A", "I-A", "E-A", "O"]]
    assert span_scores(gold, gold)["f1"] == 100
    assert span_scores(gold, [["B-A", "E-A", "S-A", "O"]])["f1"] == 0
    assert span_scores(gold, [["B-B", "I-B", "E-B", "O"]])["f1"] == 0
