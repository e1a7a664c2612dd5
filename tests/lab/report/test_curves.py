"""Models without a network beside learning curves."""

import pytest

from powernorm.lab.report.curves import Series, draw_curves

LINE = Series("ln", [1, 2, 3], [96.0, 98.5, 99.2])


def _drawn(baselines: dict[str, float], line: Series = LINE, *, logarithmic: bool = False) -> str:
    return str(
        draw_curves(
            [line],
            order=["ln"],
            title="score",
            y_label="accuracy, %",
            logarithmic=logarithmic,
            baselines=baselines,
            prefix="a",
            description="curves",
        )
    )


def test_a_baseline_that_is_near_is_a_line_in_the_frame() -> None:
    drawn = _drawn({"unigram": 94.0})
    assert ">unigram<" in drawn
    assert "below" not in drawn


@pytest.mark.parametrize(
    ("value", "words"), [(10.6, "unigram 10.6: below"), (300.0, "unigram 300: above")]
)
def test_one_that_would_squeeze_the_lines_flat_is_named_at_the_edge(
    value: float, words: str
) -> None:
    drawn = _drawn({"unigram": value, "bigram": 97.0})
    assert f">{words}<" in drawn
    assert ">bigram<" in drawn
    assert ">unigram<" not in drawn


def test_logarithmic_frames_have_room_for_all() -> None:
    assert ">unigram<" in _drawn({"unigram": 3000.0}, logarithmic=True)


def test_a_line_of_one_height_is_never_squeezed() -> None:
    assert ">unigram<" in _drawn({"unigram": 10.0}, Series("ln", [1, 2], [99.0, 99.0]))
