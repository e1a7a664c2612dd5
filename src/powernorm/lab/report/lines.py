"""The one way to draw lines: with bands over seeds, in frames that share the x axis."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite, log, nan
from typing import Final

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from powernorm.lab.report.drawing import (
    draw_legend,
    figure,
    hover_name,
    inline_svg,
    legend_entries,
    legend_height,
    legend_label,
    line_style,
    logarithmic_scale,
    logarithmic_ticks,
    plain_axes,
    reference_style,
)
from powernorm.lab.report.magnitudes import linear_limits
from powernorm.lab.report.numerals import printable
from powernorm.lab.schema import bounded

MAX_TICKS: Final = 8
"""Of more positions on the x axis, not each has its tick."""
SQUEEZED: Final = 0.2
"""Part of a frame's height that the lines must have for a reference to be drawn with them."""
_MARKED: Final = 12
"""Points of a line up to which each has a dot."""
_DIGIT: Final = 0.024
_BETWEEN: Final = 0.015
"""Width of a digit of a tick, and what keeps two ticks apart, as parts of the frame's width."""
_ROOM: Final = 0.07
"""Part of a frame's height that the words on a reference need."""


@dataclass(frozen=True)
class UnfinishedLine:
    """A run beside the mean, for it has not come to its end.

    Attributes:
        x: positions, rising; at least one.
        y: values.
        lost: whether it broke down, so that its end deserves a mark.
    """

    x: Sequence[float]
    y: Sequence[float]
    lost: bool


@dataclass(frozen=True)
class Band:
    """A line, with the extremes over seeds where it is their mean.

    Attributes:
        label: in the legend; several lines may have one.
        style: number of its color and dashes.
        x: positions, rising.
        mean: values; NaN where there is none.
        low: smallest over seeds; empty or as `mean` for a single seed.
        high: largest over seeds.
        lost: positions at which runs have no number.
        traces: runs that are no part of the mean; they do not set the frame where bands do.
    """

    label: str
    style: int
    x: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    lost: Sequence[float] = ()
    traces: Sequence[UnfinishedLine] = ()


@dataclass(frozen=True)
class Panel:
    """One frame.

    Attributes:
        title: above it.
        y_label: quantity and unit.
        bands: its lines.
        references: horizontal lines by name.
        zero: whether to draw a line at 0, which is always in the frame.
        logarithmic: whether the y axis is.
    """

    title: str
    y_label: str
    bands: Sequence[Band]
    references: Mapping[str, float] = field(default_factory=dict)
    zero: bool = False
    logarithmic: bool = False


def draw_panels(
    panels: Sequence[Panel],
    *,
    x_label: str,
    logarithmic_x: bool = False,
    prefix: str,
    description: str,
) -> Markup:
    """Panels below each other, with one legend.

    Args:
        panels: from top to bottom.
        x_label: of the x axis.
        logarithmic_x: whether it is logarithmic.
        prefix: of the ids in the SVG.
        description: for readers who cannot see the figure.
    """
    labels = list(dict.fromkeys(band.label for panel in panels for band in panel.bands))
    # The titles of several frames with one line each say what that is.
    is_named = len(panels) == 1 or any(len(panel.bands) > 1 for panel in panels)
    legend = legend_height(labels) if is_named else 0
    panel_height = 2.7 if len(panels) == 1 else 1.9
    with figure(0.4 + panel_height * len(panels) + legend) as drawn:
        frames = list(drawn.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0])
        for axes, panel in zip(frames, panels, strict=True):
            draw_panel(axes, panel)
        frames[-1].set_xlabel(x_label)
        scale_x(frames[-1], panels, logarithmic=logarithmic_x)
        if legend:
            draw_legend(drawn, legend_entries(frames))
        return inline_svg(drawn, prefix, description, unit=x_label)


def draw_panel(axes: Axes, panel: Panel) -> None:
    """Draw one frame but for its x axis."""
    plain_axes(axes, panel.title, "", panel.y_label)
    for band in panel.bands:
        _draw_band(axes, band)
    values = _framing_values(panel)
    far = _far(panel, values)
    near = {name: value for name, value in panel.references.items() if name not in far}
    _scale_y(axes, panel, [*values, *near.values()])
    _draw_references(axes, panel, near, far)
    for band in panel.bands:
        _mark_ends(axes, band)


def _draw_band(axes: Axes, band: Band) -> None:
    color, dashes = line_style(band.style)
    label = legend_label(band.label)
    if any(low < high for low, high in zip(band.low, band.high, strict=True)):
        axes.fill_between(band.x, band.low, band.high, color=color, alpha=0.18, linewidth=0)
    axes.plot(
        band.x,
        _drawable(band.mean),
        color=color,
        linestyle=dashes,
        linewidth=1.5,
        marker="o" if len(band.x) <= _MARKED else "",
        markersize=3.5,
        label=label,
        gid=hover_name(band.label),
    )
    for trace in band.traces:
        axes.plot(
            trace.x,
            _drawable(trace.y),
            color=color,
            linestyle=dashes,
            linewidth=0.8,
            alpha=0.8,
            gid=hover_name(band.label),
        )
    if band.lost:
        # On the upper edge: above everything that has a number.
        axes.plot(
            band.lost,
            [0.97] * len(band.lost),
            transform=axes.get_xaxis_transform(),
            color=color,
            linestyle="",
            marker="x",
            markersize=8,
            markeredgewidth=2,
        )


def _drawable(values: Iterable[float]) -> list[float]:
    return [value if isfinite(bounded(value)) else nan for value in values]


def _framing_values(panel: Panel) -> list[float]:
    """The values that must be seen: those of sound runs, or all where there is none."""
    values = [y for band in panel.bands for y in (*band.mean, *band.low, *band.high)]
    values = [y for y in values if isfinite(bounded(y))] or [
        y for band in panel.bands for trace in band.traces for y in trace.y if isfinite(bounded(y))
    ]
    return [*values, 0.0] if panel.zero and values else values


def _far(panel: Panel, values: Sequence[float]) -> dict[str, bool]:
    """The references beside which the lines would be squeezed flat, and whether they are above."""
    if panel.logarithmic or not values or min(values) == max(values):
        return {}
    low, high = min(values), max(values)
    return {
        name: value > high
        for name, value in panel.references.items()
        if high - low < SQUEEZED * (max(high, value) - min(low, value))
    }


def _scale_y(axes: Axes, panel: Panel, values: Sequence[float]) -> None:
    positive = [value for value in values if value > 0]
    if panel.logarithmic and positive:
        logarithmic_scale(axes.yaxis, positive, 1.15)
    elif values:
        axes.set_ylim(*linear_limits(values, 0.07, 0.1 * abs(values[0]) or 0.1))


def _draw_references(
    axes: Axes, panel: Panel, near: Mapping[str, float], far: Mapping[str, bool]
) -> None:
    """A line for each that is near, and for the others a word at the edge beyond which they are."""
    color, dashes = reference_style()
    for value in near.values():
        axes.axhline(value, color=color, linestyle=dashes, linewidth=1.2)
    for names, value in _without_collisions(axes, near):
        _annotate(axes, ", ".join(names), value, ("axes fraction", "data"), 3)
    for is_above in (True, False):
        words = [
            f"{printable(name)} {panel.references[name]:.3g}"
            for name, above in far.items()
            if above == is_above
        ]
        if words:
            text = f"{', '.join(words)}: {'above' if is_above else 'below'}"
            _annotate(axes, text, float(is_above), "axes fraction", -13 if is_above else 3)
    if panel.zero:
        axes.axhline(0, color=color, linewidth=0.8)


def _without_collisions(
    axes: Axes, references: Mapping[str, float]
) -> list[tuple[list[str], float]]:
    """Names, and the height of their words: those of neighbors stand in one line."""
    low, high = axes.get_ylim()
    is_logarithmic = axes.get_yscale() == "log"

    def place(value: float) -> float:
        if is_logarithmic:
            return log(max(value, low) / low) / log(high / low)
        return (value - low) / (high - low)

    groups: list[tuple[list[str], float]] = []
    for name, value in sorted(references.items(), key=lambda pair: pair[1]):
        if groups and place(value) - place(groups[-1][1]) < _ROOM:
            groups[-1] = ([*groups[-1][0], printable(name)], value)
        else:
            groups.append(([printable(name)], value))
    return groups


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
        verticalalignment="bottom",
        fontsize=9,
        annotation_clip=True,
    )


def _mark_ends(axes: Axes, band: Band) -> None:
    """A cross where a run broke down: on the edge of the frame where the run has left it."""
    low, high = axes.get_ylim()
    color, _ = line_style(band.style)
    for trace in band.traces:
        points = zip(trace.x, _drawable(trace.y), strict=True)
        known = [(x, y) for x, y in points if isfinite(y)]
        if trace.lost and known:
            x, y = known[-1]
            axes.plot(
                x,
                min(max(y, low), high),
                color=color,
                marker="x",
                markersize=7,
                markeredgewidth=2,
                clip_on=False,
            )


def scale_x(axes: Axes, panels: Sequence[Panel], *, logarithmic: bool = False) -> None:
    """A tick at each position where these are few and have room, as with batch sizes."""
    bands = [band for panel in panels for band in panel.bands]
    positions = sorted(
        {x for band in bands for x in (*band.x, *band.lost)}
        | {x for band in bands for trace in band.traces for x in trace.x}
    )
    is_logarithmic = logarithmic and bool(positions) and positions[0] > 0
    if is_logarithmic:
        axes.set_xscale("log")
    are_round = all(abs(x) >= 1e5 or float(f"{x:.5g}") == x for x in positions)
    have_room = _have_room(positions, logarithmic=is_logarithmic)
    if len(positions) <= MAX_TICKS and are_round and have_room:
        axes.xaxis.set_major_locator(FixedLocator(positions))
        axes.xaxis.set_major_formatter(FuncFormatter(_round))
    elif is_logarithmic:
        logarithmic_ticks(axes.xaxis, *axes.get_xlim())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5))
        is_large = bool(positions) and positions[-1] >= 1000
        axes.xaxis.set_major_formatter(EngFormatter(sep="") if is_large else FuncFormatter(_round))
    axes.xaxis.set_minor_locator(NullLocator())


def _round(value: float, _: int | None) -> str:
    # Many tokens are counted exactly, and read in thousands or millions.
    return f"{value:.5g}" if abs(value) < 1e5 else EngFormatter(sep="")(float(f"{value:.3g}"))


def _have_room(positions: Sequence[float], *, logarithmic: bool) -> bool:
    """Whether the numbers that are written at these positions do not touch."""
    places = list(map(log, positions)) if logarithmic else positions
    widths = [_DIGIT * len(_round(position, None)) for position in positions]
    return all(
        after - before >= ((left + right) / 2 + _BETWEEN) * (places[-1] - places[0])
        for (before, after), (left, right) in zip(pairwise(places), pairwise(widths), strict=True)
    )
