"""Lines over the training, with models without a network beside them."""

import json
import re
from collections.abc import Sequence
from html import unescape

import pytest

from powernorm.lab.report.curves import Series, draw_curves

LINE = Series("ln", [1, 2, 3], [96.0, 98.5, 99.2])


def _drawn(
    baselines: dict[str, float],
    line: Series = LINE,
    *,
    logarithmic: bool = False,
    order: Sequence[str] = ("ln",),
) -> str:
    return str(
        draw_curves(
            [line],
            order=order,
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


def test_words_on_neighbors_do_not_collide() -> None:
    drawn = _drawn({"unigram": 97.0, "bigram": 97.02, "copy": 98.5})
    assert ">unigram, bigram<" in drawn
    assert ">copy<" in drawn


def test_ticks_stand_where_they_have_room() -> None:
    """Three positions beside each other and one far off would be one blot of numbers."""
    near = _drawn({}, Series("ln", [1, 1.1, 1.2, 100], [1.0, 2.0, 3.0, 4.0]))
    assert ">1.1<" not in near
    spread = _drawn({}, Series("ln", [1, 30, 60, 100], [1.0, 2.0, 3.0, 4.0]))
    assert ">30<" in spread
    # Tokens are counted exactly, and read in thousands.
    steps = [81_920.0 * number for number in range(1, 17)]
    long = _drawn({}, Series("ln", steps, [17.0 - number for number in range(16)]))
    assert ">246k<" not in long
    assert ">246k<" in _drawn({}, Series("ln", steps[:5:2], [3.0, 2.0, 1.0]))


def test_a_line_and_its_frame_can_be_asked_for_values() -> None:
    drawn = _drawn({}, Series("a<b", [1, 2, 3], [96.0, 98.5, 99.2]), order=("a<b",))
    assert 'data-name="a&lt;b"' in drawn
    assert 'data-unit="tokens"' in drawn
    (frames,) = re.findall(r'data-frames="([^"]+)"', drawn)
    (frame,) = json.loads(unescape(frames))
    assert 0 <= frame["left"] < frame["right"] <= 1
    assert 0 <= frame["top"] < frame["bottom"] <= 1
    assert frame["y"][0] < 96.0 < 99.2 < frame["y"][1]
    assert frame["y"][2] is False
