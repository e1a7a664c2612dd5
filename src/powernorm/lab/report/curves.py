"""Lines over training: one a run, one colour a norm."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan
from statistics import fmean
from typing import Final, Literal

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import (
    EngFormatter,
    FixedLocator,
    FuncFormatter,
    NullLocator,
)

from powernorm.lab.report.drawing import (
    draw_legend,
    figure,
    inline_svg,
    legend_columns,
    legend_label,
    line_style,
    logarithmic_ticks,
    plain_axes,
    reference_style,
)
from powernorm.lab.report.magnitudes import bounded, linear_limits, logarithmic_limits, mean
from powernorm.lab.report.numerals import printable
from powernorm.lab.report.records import Run

MAX_POINTS: Final = 300
"""Points of a drawn line; longer logs are averaged in blocks."""
MAX_DRAWN: Final = 30_000
"""Points of a figure, over all its lines: what a page of hundreds of runs can hold."""
FEWEST_POINTS: Final = 40
"""Of a line among however many."""
SQUEEZED: Final = 0.2
"""Part of a frame's height that the lines must have for a baseline to be drawn with them."""


@dataclass(frozen=True)
class Series:
    """A line: NaN where a value is missing or not finite.

    Attributes:
        norm: what the line is of, in the legend.
        x: positions.
        y: values.
        lost: whether the run broke down, so that its end deserves a mark.
    """

    norm: str
    x: Sequence[float]
    y: Sequence[float]
    lost: bool = False


def series_of(
    runs: Iterable[Run], column: str, against: Literal["tokens", "step"] = "tokens"
) -> list[Series]:
    """A column of `metrics.csv` against tokens or steps, one line a run that has it."""
    lines = []
    for run in runs:
        points = [
            (row[against], row[column])
            for row in run.curve
            if row.get(against) is not None and row.get(column) is not None
        ]
        lines += _line(run, points)
    return lines


def gap_series(runs: Iterable[Run]) -> list[Series]:
    """Loss by running statistics minus loss by each batch's own, against steps."""
    lines = []
    for run in runs:
        points = [
            (row.get("step"), running - batch)
            for row in run.curve
            if (running := row.get("gap_running_loss")) is not None
            and (batch := row.get("gap_batch_loss")) is not None
        ]
        lines += _line(run, points)
    return lines


def layer_series(
    runs: Iterable[Run], column: str, layers: Literal["first", "average"], scale: float = 1
) -> list[Series]:
    """A column of `norms.csv` against steps, one line a run that has it.

    Args:
        runs: of the comparison.
        column: of NORMS_COLUMNS.
        layers: the first layer that has the quantity, or the average over all that do.
        scale: what the values are multiplied with.
    """
    lines = []
    for run in runs:
        steps: dict[int, list[float]] = {}
        first = ""
        for sample in run.samples:
            value = sample.values.get(column)
            if value is None:
                continue
            first = first or sample.layer
            if layers == "average" or sample.layer == first:
                steps.setdefault(sample.step, []).append(scale * value)
        lines += _line(run, [(step, mean(values)) for step, values in sorted(steps.items())])
    return lines


def _line(run: Run, points: Sequence[tuple[float | None, float | None]]) -> list[Series]:
    known = [(x, y if isfinite(y) else nan) for x, y in points if x is not None and y is not None]
    if not known:
        return []
    return [replace(thinned(run.name, known), lost=run.broke_down)]


def thinned(name: str, points: Sequence[tuple[float, float]], most: int = MAX_POINTS) -> Series:
    """A line of at most so many points."""
    blocks = _blocks(points, most)
    return Series(name, [x for x, _ in blocks], [y for _, y in blocks])


def _thinned_together(series: Sequence[Series]) -> list[Series]:
    """Lines with so few points each that all together are at most about `MAX_DRAWN`."""
    most = max(FEWEST_POINTS, MAX_DRAWN // max(len(series), 1))
    return [
        line
        if len(line.x) <= most
        else replace(
            thinned(line.norm, list(zip(line.x, line.y, strict=True)), most), lost=line.lost
        )
        for line in series
    ]


def _blocks(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most so many points, each the mean of a block; NaN stays NaN."""
    size = -(-len(points) // most)
    chunks = [points[start : start + size] for start in range(0, len(points), size)]
    return [(fmean(x for x, _ in chunk), fmean(y for _, y in chunk)) for chunk in chunks]


def draw_curves(
    series: Sequence[Series],
    *,
    order: Sequence[str],
    title: str,
    y_label: str,
    logarithmic: bool,
    baselines: Mapping[str, float],
    prefix: str,
    description: str,
    x_label: str = "tokens",
    logarithmic_x: bool = False,
) -> Markup:
    """All lines in one frame, with a legend of the norms below it.

    Args:
        series: the lines.
        order: all norms of the comparison, so that each has the same colour in every figure.
        title: of the frame.
        y_label: quantity and unit.
        logarithmic: whether the y axis is.
        baselines: horizontal lines by name.
        prefix: of the ids in the SVG.
        description: for readers who cannot see the figure.
        x_label: of the x axis.
        logarithmic_x: whether the x axis is logarithmic, too.
    """
    series = _thinned_together(series)
    drawn_norms = {line.norm for line in series}
    norms = [norm for norm in order if norm in drawn_norms]
    columns = legend_columns(norms)
    with figure(3.1 + 0.22 * -(-len(norms) // columns)) as drawn:
        axes = drawn.subplots()
        plain_axes(axes, title, x_label, y_label)
        for line in series:
            _draw_line(axes, line, order.index(line.norm), labelled=_is_first(line, series))
        far = {} if logarithmic else _far(series, baselines)
        near = {name: value for name, value in baselines.items() if name not in far}
        _draw_baselines(axes, near, far)
        _scale(axes, series, list(near.values()), logarithmic)
        if logarithmic_x:
            _scale_x(axes, series)
        handles, labels = axes.get_legend_handles_labels()
        draw_legend(drawn, dict(zip(labels, handles, strict=True)), columns)
        return inline_svg(drawn, prefix, description)


def _is_first(line: Series, series: Sequence[Series]) -> bool:
    return next(other for other in series if other.norm == line.norm) is line


def _draw_line(axes: Axes, line: Series, index: int, *, labelled: bool) -> None:
    colour, dashes = line_style(index)
    label = legend_label(line.norm)
    values = [y if isfinite(bounded(y)) else nan for y in line.y]
    axes.plot(
        line.x,
        values,
        color=colour,
        linestyle=dashes,
        linewidth=1.5,
        marker="." if len(line.x) < 13 else "",
        label=label if labelled else "_",
    )
    known = [(x, y) for x, y in zip(line.x, values, strict=True) if isfinite(y)]
    if line.lost and known:
        axes.plot(*known[-1], color=colour, marker="x", markersize=8, markeredgewidth=2, label="_")


def _far(series: Sequence[Series], baselines: Mapping[str, float]) -> dict[str, tuple[float, bool]]:
    """The baselines beside which the lines would be squeezed flat, and whether they are above."""
    values = _framing_values(series)
    if not values or min(values) == max(values):
        return {}
    low, high = min(values), max(values)
    return {
        name: (value, value > high)
        for name, value in baselines.items()
        if high - low < SQUEEZED * (max(high, value) - min(low, value))
    }


def _draw_baselines(
    axes: Axes, near: Mapping[str, float], far: Mapping[str, tuple[float, bool]]
) -> None:
    """A line for each that is near, and for the others a word at the edge beyond which they are."""
    colour, dashes = reference_style()
    for name, value in near.items():
        axes.axhline(value, color=colour, linestyle=dashes, linewidth=1)
        _annotate(axes, printable(name), value, ("axes fraction", "data"), 2)
    for is_above in (True, False):
        words = [f"{printable(n)} {v:.3g}" for n, (v, above) in far.items() if above == is_above]
        if words:
            text = f"{', '.join(words)}: {'above' if is_above else 'below'}"
            _annotate(axes, text, float(is_above), "axes fraction", -10 if is_above else 2)


def _annotate(
    axes: Axes, text: str, height: float, coordinates: str | tuple[str, str], offset: int
) -> None:
    axes.annotate(
        text,
        (1, height),
        xycoords=coordinates,
        xytext=(0, offset),
        textcoords="offset points",
        horizontalalignment="right",
        fontsize=9,
        annotation_clip=True,
    )


def _scale(
    axes: Axes, series: Sequence[Series], baselines: Sequence[float], logarithmic: bool
) -> None:
    values = _framing_values(series) + list(baselines)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(axes.xaxis.get_major_locator())
    axes.locator_params(axis="x", nbins=5)
    positive = [value for value in values if value > 0]
    if logarithmic and positive:
        axes.set_yscale("log")
        axes.set_ylim(*logarithmic_limits(positive, 1.15))
        logarithmic_ticks(axes.yaxis, *axes.get_ylim())
    elif values:
        axes.set_ylim(*linear_limits(values, 0.05, 0.5))


def _scale_x(axes: Axes, series: Sequence[Series]) -> None:
    """A tick at each position where there are few, as with batch sizes."""
    axes.set_xscale("log")
    positions = sorted({x for line in series for x in line.x})
    if len(positions) <= 8:
        axes.xaxis.set_major_locator(FixedLocator(positions))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.5g}"))
    elif positions[0] > 0:
        logarithmic_ticks(axes.xaxis, *axes.get_xlim())
    axes.xaxis.set_minor_locator(NullLocator())


def _framing_values(series: Sequence[Series]) -> list[float]:
    """The values that must be seen: those of sound runs, or all where there is none."""
    sound = [line for line in series if not line.lost] or series
    return [value for line in sound for value in line.y if isfinite(bounded(value))]
