"""Legends, ticks and axes for any names and numbers; and figures as files."""

import json
import math
import random
import re
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pandas import Series

from covering import some_default
from powernorm.errors import InputError
from powernorm_lab.report.drawing import (
    add_legend,
    figure,
    legend_label,
    line_style,
    logarithmic_scale,
    saved_figures,
    short_names,
)
from powernorm_lab.report.lines import (
    Band,
    Panel,
    SeedLine,
    bands_over_seeds,
    draw_panel,
    draw_panels,
    grid,
    rows_figure,
)
from powernorm_lab.schema import LARGEST

NAMES = ("ln", "bn-64", "rbn-0.01-0.1", "pn-0.9-0.99", "MWMWMWMWMW", "layers.11.attention")
LINE = Band("ln", 0, [1.0, 2.0, 3.0], [96.0, 98.5, 99.2])


def drawn(*panels: Panel, prefix: str = "p") -> str:
    return draw_panels(panels, x_label="step", prefix=prefix)


def rows_of(label: str, *values: Sequence[float | None]) -> Band:
    """Return a quantity of rows: values, and their lowest and highest ones."""
    return Band(label, 0, range(len(values[0])), *values)


def words_of(svg: str) -> list[str]:
    return [unescape(text) for text in re.findall(r"<text[^>]*>([^<]+)<", svg)]


def frame_of(svg: str) -> dict[str, Any]:
    (frames,) = re.findall(r'data-frames="([^"]+)"', svg)
    return dict(json.loads(unescape(frames))[0])


@pytest.mark.parametrize("count", some_default(range(1, 15), 1, 7, 14))
def test_legends_fit_into_the_figure(count: int) -> None:
    dice = random.Random(count)
    for _ in range(4):
        names = [f"{dice.choice(NAMES)}{index}" for index in range(count)]
        with figure(2) as shown:
            axes = shown.subplots()
            for name in names:
                axes.plot([], [], label=legend_label(name))
            legend = add_legend(shown, [axes])
            assert legend is not None
            shown.draw_without_rendering()
            assert legend.get_window_extent().width <= shown.bbox.width, names
            # The figure has grown, so that the axes keep their height.
            assert axes.get_position().height * shown.get_figheight() > 1.3


def test_long_names_lose_their_middle() -> None:
    label = legend_label("a" * 5000 + "b" * 5000)
    assert re.fullmatch("a{10,}…b{10,}", label)
    assert legend_label("_") == "–"


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (
            [
                "bert.embeddings.LayerNorm",
                "bert.encoder.layer.0.attention.output.LayerNorm",
                "bert.encoder.layer.11.output.LayerNorm",
            ],
            ["embeddings", "…layer.0.attention.output", "encoder.layer.11.output"],
        ),
        (["blocks.0.norm", "blocks.1.norm"], ["blocks.0", "blocks.1"]),
        (["layers.0.norm1", "layers.1.norm2"], ["layers.0.norm1", "layers.1.norm2"]),
        (["a.blocks.0.norm1", "a.blocks.0.norm2"], ["norm1", "norm2"]),
        (["a.attention.norm", "a.final_norm"], ["attention", "final_norm"]),
        (["norm"], ["norm"]),
        (["a.b.norm"], ["norm"]),
        (["a", "a.b"], ["a", "b"]),
        (["x" * 40, "y" * 40], ["…" + "x" * 27, "…" + "y" * 27]),
        (["a" + "x" * 40, "b" + "x" * 40], ["…" + "x" * 27 + " #1", "…" + "x" * 27 + " #2"]),
    ],
)
def test_short_names_say_what_differs(layers: list[str], names: list[str]) -> None:
    assert short_names(layers) == names


def test_thirty_two_lines_look_different() -> None:
    assert len({line_style(index) for index in range(32)}) == 32


@pytest.mark.parametrize("high", [1.2, 2.4, 3.0, 9.0, 50.0, 3e3, 1e9])
def test_logarithmic_axes_have_at_least_two_numbers(high: float) -> None:
    for low in (1.0, 1.1, 3.1, 7.0):
        with figure(2) as shown:
            axes = shown.subplots()
            axes.plot([low, low * high], [low, low * high])
            for axis in (axes.xaxis, axes.yaxis):
                logarithmic_scale(axis)
                ends = axis.get_view_interval()
                places = [one for one in axis.get_ticklocs() if ends[0] <= one <= ends[1]]
                assert len(places) >= 2, (low, high)


@pytest.mark.parametrize("logarithmic", [True, False])
@pytest.mark.parametrize("huge", [1e99, 1e280, 1.7e308])
def test_huge_numbers_are_drawn_or_left_out(huge: float, logarithmic: bool) -> None:
    seeds = [
        SeedLine({1: 1e3, 2: huge, 3: 5e-324}),
        SeedLine({1: huge}, finished=False, lost=True),
    ]
    bands = bands_over_seeds({"a": seeds})
    svg = drawn(Panel("t", "y", bands, {"b": 1.0}, logarithmic=logarithmic))
    assert svg.startswith("<svg")
    assert "inf" not in svg
    assert "nan" not in svg


# matplotlib warns of constants that nearly equal a power of ten.
NUMBERS = st.floats(-LARGEST, LARGEST).map(lambda number: float(f"{number:.6g}"))


@settings(max_examples=8)
@given(values=st.lists(NUMBERS, min_size=1, max_size=4))
def test_panels_take_any_number(values: list[float]) -> None:
    steps = [float(step) for step in range(len(values))]
    trace = SeedLine(Series(values, steps), finished=False, lost=True)
    band = Band("a", 0, steps, values, values, values, traces=[trace])
    with catch_warnings():
        simplefilter("error")
        for logarithmic in (True, False):
            assert drawn(Panel("t", "y", [band], zero=not logarithmic, logarithmic=logarithmic))


@pytest.mark.parametrize("lost", [True, False])
def test_unfinished_runs_do_not_set_the_frame(lost: bool) -> None:
    trace = SeedLine({1.0: 4.0, 2.0: 1e9, 3.0: 4.3e9}, finished=False, lost=lost)
    with figure(2) as shown:
        axes = shown.subplots()
        draw_panel(axes, Panel("t", "y", [LINE, Band("none", 1, [], [], traces=[trace])]))
        assert axes.get_ylim()[1] < 100
        crosses = [line.get_ydata()[0] for line in axes.lines if line.get_marker() == "x"]
        assert crosses == [axes.get_ylim()[1]] * lost


@pytest.mark.parametrize(
    ("value", "logarithmic", "words", "is_drawn"),
    [
        (94.0, False, "unigram 94", True),
        (10.6, False, "unigram 10.6, below", False),
        (300.0, False, "unigram 300, above", False),
        (3000.0, True, "unigram 3e+03", True),
    ],
)
def test_a_reference_leaves_the_lines_room(
    value: float, logarithmic: bool, words: str, is_drawn: bool
) -> None:
    """A reference is a line, unless that would squeeze the others; then it is in the legend."""
    with figure(2) as shown:
        axes = shown.subplots()
        draw_panel(axes, Panel("t", "y", [LINE], {"unigram": value}, logarithmic=logarithmic))
        (line,) = (line for line in axes.lines if str(line.get_label()).startswith("unigram"))
        low, high = axes.get_ylim()
        assert line.get_label() == words
        assert bool(low <= value <= high) is is_drawn
        assert bool(len(line.get_ydata())) is is_drawn


def test_a_mean_is_of_the_positions_that_all_seeds_have() -> None:
    seeds = [SeedLine({2: 1.0, 1: 3.0, 3: 9.0}), SeedLine({1: 5.0, 2: 2.0})]
    seeds.append(SeedLine({1: 7.0, 4: 8.0}, finished=False, lost=True))
    (band,) = bands_over_seeds({"other": (), "a": seeds})
    assert (band.style, band.x, band.mean) == (1, [1, 2], [4, 1.5])
    assert (band.low, band.high) == ([3, 1], [5, 2])
    (trace,) = band.traces
    assert (dict(trace.points), trace.lost) == ({1: 7, 4: 8}, True)
    (band,) = bands_over_seeds({"a": seeds[2:]})
    assert not band.x
    blocks = bands_over_seeds({"a": [SeedLine(dict.fromkeys(range(7), 2.0) | {6: 4.0})]}, most=4)
    assert (blocks[0].x, blocks[0].mean) == ([0.5, 2.5, 4.5, 6], [2, 2, 2, 4])


def test_a_line_and_its_frame_can_be_asked_for_values() -> None:
    svg = drawn(Panel("t", "y", [Band("a<b", 0, LINE.x, LINE.mean)]))
    assert 'data-name="a&lt;b"' in svg
    assert 'data-unit="step"' in svg
    frame = frame_of(svg)
    assert 0 <= frame["left"] < frame["right"] <= 1
    assert 0 <= frame["top"] < frame["bottom"] <= 1
    assert frame["y"][0] < 96.0 < 99.2 < frame["y"][1]
    assert frame["y"][2] is False


@pytest.mark.parametrize(
    ("x", "logarithmic", "ticks"),
    [
        ([64.0, 128.0, 480.0], True, ["64", "128", "480"]),
        ([float(3**power) for power in range(12)], True, ["1", "100", "10k"]),
        ([0.0, 1.0, 2.0], False, ["0", "1", "2"]),
        ([0.0, 1e6, 2e6], False, ["0", "1M", "2M"]),
    ],
)
def test_ticks_say_where_the_points_are(
    x: list[float], logarithmic: bool, ticks: list[str]
) -> None:
    panel = Panel("t", "y", [Band("a", 0, x, [2000.0 + 1000 * one for one in range(len(x))])])
    svg = draw_panels([panel], x_label="step", logarithmic_x=logarithmic, prefix="p")
    assert set(ticks) <= set(words_of(svg))
    assert frame_of(svg)["x"][2] is logarithmic


def test_rows_of_variants() -> None:
    quantities = [
        rows_of("training", [1.0, None, 3.0], [0.5, None, 3.0], [1.5, None, 3.0]),
        rows_of("validation", [2.0, None, math.inf], [2.0, None, 3.0], [2.0, None, 4.0]),
    ]
    names = ["ln", "none", "a long name of a variant"]
    options: dict[str, Any] = {"title": "t", "x_label": "loss", "prefix": "p"}
    notes = ["", "NaN", ""]
    (shown,) = rows_figure(names, quantities, notes=notes, caption="c", logarithmic=True, **options)
    words = words_of(shown.svg)
    assert {"ln", "none", "NaN", "a long nam…f a variant", "training", "validation"} <= set(words)
    assert re.findall(r'data-name="(\w+)"', shown.svg) == ["training", "validation"]
    assert json.loads(unescape(re.findall(r'data-rows="([^"]+)"', shown.svg)[0])) == names
    assert frame_of(shown.svg)["x"][2] is True
    # Nothing below 0 on a logarithmic axis.
    below = [rows_of("gap", [1.0, -1.0, 0.0], [0.9, -2.0, 0.0], [1.1, 0.0, 0.0])]
    (shown,) = rows_figure(names, below, caption="c", logarithmic=True, **options)
    assert frame_of(shown.svg)["x"][2] is False
    assert rows_figure(names, [rows_of("a", [None] * 3)], caption="c", **options) == []


def test_rows_of_layers() -> None:
    layers = [f"model.{number}.norm" for number in range(30)]
    lines = [rows_of("κ", [number or None for number in range(30)])]
    (shown,) = rows_figure(
        layers,
        lines,
        layers=True,
        limits=[5.0, 0.0],
        logarithmic=True,
        title="t",
        x_label="κ",
        caption="c",
        prefix="p",
    )
    assert next(word for word in words_of(shown.svg) if "model" in word) == "model.0"
    (low, high, is_logarithmic) = frame_of(shown.svg)["x"]
    assert 0 < low < 1 < 29 < high
    assert is_logarithmic


def test_a_grid_has_words_in_each_cell() -> None:
    cells = {(0.0, 0.5): (3.0, "3.00"), (1.0, 0.5): (2.0, "2.00*"), (1.0, 2.0): (math.nan, "NaN")}
    names = {"title": "t", "x_label": "λ of x", "y_label": "λ of y"}
    svg = grid(cells, 2.0, prefix="p", description="d", **names)
    assert {"3.00", "2.00*", "NaN", "0.5", "1", "2", *names.values()} <= set(words_of(svg))
    dark, light = (
        re.search(f"fill: #(.{{6}})[^>]*>{words}<", svg) for words in (r"2.00\*", "3.00")
    )
    assert dark is not None
    assert light is not None
    assert (dark[1], light[1]) == ("ffffff", "111111")
    lost = grid(
        {(0.0, 0.0): (math.nan, "diverged")}, math.nan, prefix="p", description="d", **names
    )
    assert "diverged" in words_of(lost)


def test_figures_of_a_page_share_no_id() -> None:
    pages = [drawn(Panel("t", "y", [LINE]), prefix=prefix) for prefix in ("a", "b")]
    first, second = (set(re.findall(r' id="([^"]+)"', page)) for page in pages)
    assert first
    assert not first & second
    for page in pages:
        used = re.findall(r'(?:url\(#|href="#)([^)"]+)', page)
        assert set(used) <= set(re.findall(r' id="([^"]+)"', page))


def test_figures_as_files(tmp_path: Path) -> None:
    """They have their own colors, fonts and size, and are reproducible."""
    written = []
    for folder in ("one", "two"):
        with saved_figures(tmp_path / folder, ("svg", "pdf", "png")) as files:
            drawn(Panel("$t", "y", [LINE]), prefix="curve-0")
        written.append([file.read_bytes() for file in files])
        assert list(files.values()) == ["$t against step for ln"] * 3
    assert written[0] == written[1]
    svg, pdf, png = written[0]
    assert b'width="237.6pt"' in svg
    assert b"<text" not in svg
    assert not [word for word in (b"var(", b"currentColor", b"data-name") if word in svg]
    assert b"/FontFile2" in pdf, "TrueType, which publishers take"
    assert b"/Type3" not in pdf
    assert b"/MediaBox [ 0 0 237.6" in pdf
    assert png.startswith(b"\x89PNG")
    drawn(Panel("t", "y", [LINE]), prefix="later")
    assert len(list((tmp_path / "one").iterdir())) == 3


@pytest.mark.parametrize("formats", [("eps",), (), ("svg", "")])
def test_unknown_formats_are_refused(formats: tuple[str, ...], tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match="expected some of svg, pdf, png"),
        saved_figures(tmp_path, formats),
    ):
        pass


def test_files_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(InputError, match="file cannot be written"),
        saved_figures(tmp_path / "file", ("svg",)),
    ):
        drawn(Panel("t", "y", [LINE]))
    with (
        pytest.raises(InputError, match="the page has no figure"),
        saved_figures(tmp_path / "new", ("svg",)),
    ):
        pass
    assert not (tmp_path / "new").exists()
