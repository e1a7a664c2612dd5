import pytest
from hypothesis import given
from hypothesis import strategies as st

from powernorm_lab.tasks.ner.data import span_scores
from powernorm_lab.tasks.ner.tag_schemes import Span, spans_of


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
    scores = span_scores([gold for _, gold, _ in cases], [found for _, _, found in cases])
    assert scores == {
        "f1": pytest.approx(100 * f1),
        "precision": pytest.approx(100 * precision),
        "recall": pytest.approx(100 * recall),
    }


# Tags of all schemes in any order, predictions, and F1, precision and recall of seqeval 1.2.2,
# which counts as conlleval does.
REFERENCE = [
    ("B-A I-A E-A O", "B-A I-A E-A O", 100, 100, 100),
    ("B-A I-A E-A O", "B-A E-A S-A O", 0, 0, 0),
    ("B-A I-A E-A O", "B-B I-B E-B O", 0, 0, 0),
    ("I-A I-A B-A I-B", "I-A I-A I-A I-B", 40, 50, 100 / 3),
    ("I-A I-A O E-A S-B", "B-A I-A O I-A B-B", 100, 100, 100),
    ("S-A I-A O B-A B-A", "S-A E-A O B-A I-A", 200 * 2 / 7, 200 / 3, 50),
    ("O O", "O S-A", 0, 0, 0),
    ("S-A O", "O O", 0, 0, 0),
]


@pytest.mark.parametrize(("gold", "found", "f1", "precision", "recall"), REFERENCE)
def test_entities_are_counted_as_conlleval_counts(
    gold: str, found: str, f1: float, precision: float, recall: float
) -> None:
    scores = span_scores([spans_of(gold.split(), "iob")], [spans_of(found.split(), "iob")])
    wanted = {"f1": f1, "precision": precision, "recall": recall}
    assert scores == pytest.approx(wanted)
