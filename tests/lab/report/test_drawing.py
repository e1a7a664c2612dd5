"""Legends, ticks and frames, whatever the names and numbers."""

import math
import random
from warnings import catch_warnings, simplefilter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.lines import Line2D

from powernorm.lab.report import drawing
from powernorm.lab.report.curves import Series, draw_curves
from powernorm.lab.report.drawing import (
    WIDTH,
    draw_legend,
    figure,
    legend_columns,
    legend_label,
    logarithmic_ticks,
)
from powernorm.lab.report.lines import Band, Panel, UnfinishedLine, draw_panels
from powernorm.lab.report.magnitudes import linear_limits, logarithmic_limits
from powernorm.lab.schema import LARGEST

NAMES = ("ln", "bn-64", "rbn-0.01-0.1", "pn-0.9-0.99", "MWMWMWMWMW", "layers.11.attention")


@pytest.mark.parametrize("count", range(1, 15))
def test_legends_fit_into_the_figure(count: int) -> None:
    dice = random.Random(count)
    for _ in range(4):
        names = [f"{dice.choice(NAMES)}{index}" for index in range(count)]
        entries = {legend_label(name): Line2D([], []) for name in names}
        with figure(4) as drawn:
            shown = draw_legend(drawn, entries)
            drawn.draw_without_rendering()
            assert shown.get_window_extent().width <= WIDTH * drawn.dpi, names


def test_legend_of_twelve_short_names_has_several_columns() -> None:
    names = [f"{norm}-{tokens}" for norm in ("bn", "pnv", "pn") for tokens in (64, 128, 256, 512)]
    assert legend_columns(names) >= 3


def test_long_names_lose_their_middle() -> None:
    shown = legend_label("a" * 60 + "b" * 60)
    assert shown.startswith("aaaa")
    assert shown.endswith("bbbb")
    assert "…" in shown
    assert 20 < len(shown) < 100


def test_long_names_are_measured_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of a thousand letters once took three minutes: each shorter one was laid out."""
    measured = []

    class Counting:
        def get_text_width_height_descent(
            self, text: str, *_: object, **__: object
        ) -> tuple[float, float, float]:
            measured.append(len(text))
            return 5.0 * len(text), 0.0, 0.0

    monkeypatch.setattr(drawing, "text_to_path", Counting())
    shown = legend_label("c" * 5000 + "d" * 5000)
    assert "…" in shown
    assert sum(measured) < 5000
    assert legend_label("c" * 5000 + "d" * 5000) == shown


@pytest.mark.parametrize("high", [1.2, 2.4, 3.0, 9.0, 50.0, 3e3, 1e9])
def test_logarithmic_axes_have_at_least_two_numbers(high: float) -> None:
    for low in (1.0, 1.1, 3.1, 7.0):
        with figure(3) as drawn:
            axes = drawn.subplots()
            axes.set(yscale="log", ylim=(low, low * high))
            logarithmic_ticks(axes.yaxis, low, low * high)
            ends = low * 0.999, low * high * 1.001
            texts = [
                text
                for text, place in zip(
                    axes.yaxis.get_major_formatter().format_ticks(axes.get_yticks()),
                    axes.get_yticks(),
                    strict=True,
                )
                if ends[0] <= place <= ends[1] and text
            ]
            assert len(texts) >= 2, (low, high)


@pytest.mark.parametrize("logarithmic", [True, False])
@pytest.mark.parametrize("huge", [1e99, 1e280, 1.7e308])
def test_huge_numbers_are_drawn_or_left_out(huge: float, logarithmic: bool) -> None:
    lines = [Series("a", [1.0, 2.0, 3.0], [1e3, huge, 5e-324]), Series("a", [1.0], [huge], True)]
    svg = draw_curves(
        lines,
        order=["a"],
        title="t",
        y_label="y",
        logarithmic=logarithmic,
        baselines={"b": 1.0},
        prefix="p",
        description="d",
    )
    assert svg.startswith("<svg")
    assert "inf" not in svg
    assert "nan" not in svg


VALUES = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5)


@given(values=VALUES)
def test_limits_are_finite_and_rise(values: list[float]) -> None:
    low, high = linear_limits(values, 0.1, 0.5)
    assert -math.inf < low < high < math.inf
    assert all(low <= value <= high for value in values if abs(value) <= LARGEST)
    positive = [abs(value) or 1.0 for value in values]
    low, high = logarithmic_limits(positive, 1.1)
    assert 0 < low < high < math.inf
    assert all(low <= value <= high for value in positive if 1e-100 <= value <= 1e100)


@settings(max_examples=8)
@given(values=st.lists(st.floats(-LARGEST, LARGEST), min_size=1, max_size=4))
def test_panels_take_any_number(values: list[float]) -> None:
    steps = [float(step) for step in range(len(values))]
    band = Band(
        "a", 0, steps, values, values, values, traces=[UnfinishedLine(steps, values, lost=True)]
    )
    with catch_warnings():
        simplefilter("error")
        for logarithmic in (True, False):
            panel = Panel("t", "y", [band], zero=not logarithmic, logarithmic=logarithmic)
            assert draw_panels([panel], x_label="x", prefix="p", description="d")
