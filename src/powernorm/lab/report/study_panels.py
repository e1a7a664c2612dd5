"""Lines with bands over seeds, in panels below each other that share the x axis."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator

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
from powernorm.lab.report.magnitudes import linear_limits, logarithmic_limits
from powernorm.lab.report.numerals import printable

MAX_TICKS: Final = 8
"""Of more positions on the x axis, not each has its tick."""


@dataclass(frozen=True)
class Trace:
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
    """A line with the extremes over seeds.

    Attributes:
        label: in the legend.
        style: number of its colour and dashes.
        x: positions, rising.
        mean: values.
        low: smallest over seeds; as `mean` for a single seed.
        high: largest over seeds.
        lost: positions at which runs have no number.
        traces: runs that are no part of the mean; they do not set the frame where bands do.
    """

    label: str
    style: int
    x: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    lost: Sequence[float] = ()
    traces: Sequence[Trace] = ()


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
    """Panels below each other, with one legend where a panel has several lines."""
    labels = dict.fromkeys(band.label for panel in panels for band in panel.bands)
    columns = legend_columns(list(labels))
    is_mixed = any(len(panel.bands) > 1 for panel in panels)
    rows = -(-len(labels) // columns) if is_mixed else 0
    panel_height = 2.8 if len(panels) == 1 else 1.9
    with figure(0.4 + panel_height * len(panels) + 0.22 * rows) as drawn:
        frames = list(drawn.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0])
        for axes, panel in zip(frames, panels, strict=True):
            _draw_panel(axes, panel)
        frames[-1].set_xlabel(x_label)
        _scale_x(frames[-1], panels, logarithmic_x)
        if rows:
            _legend(drawn, frames, columns)
        return inline_svg(drawn, prefix, description)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    plain_axes(axes, panel.title, "", panel.y_label)
    for band in panel.bands:
        colour, dashes = line_style(band.style)
        if any(low < high for low, high in zip(band.low, band.high, strict=True)):
            axes.fill_between(band.x, band.low, band.high, color=colour, alpha=0.18, linewidth=0)
        axes.plot(
            band.x,
            band.mean,
            color=colour,
            linestyle=dashes,
            linewidth=1.5,
            marker="o" if len(band.x) <= 12 else "",
            markersize=4,
            label=legend_label(band.label),
        )
        for trace in band.traces:
            axes.plot(trace.x, trace.y, color=colour, linestyle=dashes, linewidth=0.8, alpha=0.8)
        # On the upper edge: above everything that has a number.
        axes.plot(
            band.lost,
            [0.97] * len(band.lost),
            transform=axes.get_xaxis_transform(),
            color=colour,
            linestyle="",
            marker="x",
            markersize=8,
            markeredgewidth=2,
        )
    _draw_references(axes, panel)
    values = _framing_values(panel)
    if panel.logarithmic and values and min(values) > 0:
        axes.set_yscale("log")
        axes.set_ylim(*logarithmic_limits(values, 1.1))
        logarithmic_ticks(axes.yaxis, *axes.get_ylim())
    elif values:
        axes.set_ylim(*linear_limits(values, 0.1, 0.1 * abs(values[0]) or 0.1))
    for band in panel.bands:
        _mark_ends(axes, band)


def _framing_values(panel: Panel) -> list[float]:
    """The values that must be seen: those of finished runs, or all where there is none."""
    values = [value for band in panel.bands for value in (*band.low, *band.high)]
    values += panel.references.values()
    values = values or [y for band in panel.bands for trace in band.traces for y in trace.y]
    return [*values, 0.0] if panel.zero and values else values


def _mark_ends(axes: Axes, band: Band) -> None:
    """A cross where a run broke down: on the edge of the frame where the run has left it."""
    low, high = axes.get_ylim()
    colour, _ = line_style(band.style)
    for trace in band.traces:
        if trace.lost:
            axes.plot(
                trace.x[-1],
                min(max(trace.y[-1], low), high),
                color=colour,
                marker="x",
                markersize=7,
                markeredgewidth=2,
                clip_on=False,
            )


def _draw_references(axes: Axes, panel: Panel) -> None:
    colour, dashes = reference_style()
    for name, value in panel.references.items():
        axes.axhline(value, color=colour, linestyle=dashes, linewidth=1.2)
        axes.annotate(
            printable(name),
            (1, value),
            xycoords=("axes fraction", "data"),
            xytext=(0, 2),
            textcoords="offset points",
            horizontalalignment="right",
            fontsize=9,
        )
    if panel.zero:
        axes.axhline(0, color=colour, linewidth=0.8)


def _scale_x(axes: Axes, panels: Sequence[Panel], logarithmic: bool) -> None:
    bands = [band for panel in panels for band in panel.bands]
    positions = sorted(
        {x for band in bands for x in (*band.x, *band.lost)}
        | {x for band in bands for trace in band.traces for x in trace.x}
    )
    if logarithmic and positions and positions[0] > 0:
        axes.set_xscale("log", base=2)
    if len(positions) <= MAX_TICKS:
        axes.xaxis.set_major_locator(FixedLocator(positions))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.5g}"))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_locator(NullLocator())


def _legend(drawn: Figure, frames: Sequence[Axes], columns: int) -> None:
    entries = {
        label: handle
        for axes in frames
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    draw_legend(drawn, entries, columns)
