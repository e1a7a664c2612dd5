"""Figures of lines over an x axis, lines and dots through named rows, and grids of numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from typing import Any, Final

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.patches import Rectangle
from matplotlib.ticker import (
    EngFormatter,
    FixedLocator,
    MaxNLocator,
    NullLocator,
    StrMethodFormatter,
)
from numpy.typing import NDArray
from pandas import Series, concat

from powernorm_lab.report.document import words
from powernorm_lab.report.drawing import (
    NO_NUMBER,
    REFERENCE,
    DrawnFigure,
    add_legend,
    drawable,
    figure,
    hover_name,
    inline_svg,
    legend_label,
    line_style,
    logarithmic_scale,
    name_rows,
    paint,
    plain_axes,
    short_names,
)
from powernorm_lab.report.numerals import printable, shorten
from powernorm_lab.schema import LARGEST

MAX_POINTS: Final = 300
"""Largest number of points of a line; longer logs are averaged in blocks."""
MAX_DRAWN: Final = 30_000
"""Largest number of points of a figure, so that a page with hundreds of runs stays small."""
FEWEST_POINTS: Final = 40
"""Smallest limit of a line's points, for any number of lines."""
MAX_TICKS: Final = 8
"""Largest number of positions that all have ticks on a logarithmic x axis."""
SQUEEZED: Final = 0.2
"""Smallest fraction of the height for the lines if a reference is drawn with them."""
_MARKED: Final = 12
"""Largest number of points of a line that are marked with dots."""


@dataclass(frozen=True)
class SeedLine:
    """A quantity of one run.

    Attributes:
        points: values by position, a Series or a mapping.
        finished: whether the run finished and is part of the mean over seeds.
        lost: whether it broke down, so that its end is marked.
    """

    points: Series | Mapping[float, float]
    finished: bool = True
    lost: bool = False


@dataclass(frozen=True)
class Band:
    """A line, with extremes over seeds if it is their mean.

    Attributes:
        label: name in the legend, which several lines may share.
        style: number of its color and dashes.
        x: increasing positions, or the numbers of rows.
        mean: values; NaN or None for missing ones.
        low: smallest values over seeds; empty or equal to `mean` for a single seed.
        high: largest values over seeds.
        lost: positions at which runs have no number.
        traces: runs that are not part of the mean, with increasing positions; they do not affect
            the limits set by bands.
    """

    label: str
    style: int
    x: Sequence[float]
    mean: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    lost: Sequence[float] = ()
    traces: Sequence[SeedLine] = ()


def bands_over_seeds(lines: Mapping[str, Sequence[SeedLine]], most: int = MAX_POINTS) -> list[Band]:
    """Return a band for each label: mean and range over its seeds at their shared positions.

    A run that did not finish is a separate thin line if it broke down or if another seed finished,
    because a mean over the remaining runs would jump where a run ends.

    Args:
        lines: runs by label. The index of a label is its style, so that a norm looks the same in
            all figures of a comparison; norms without a run therefore belong here, too.
        most: largest number of points of a line; longer ones are averaged in blocks.
    """
    drawn = sum(len(seed.points) > 0 for seeds in lines.values() for seed in seeds)
    most = min(most, max(FEWEST_POINTS, MAX_DRAWN // max(drawn, 1)))
    bands = (_over_seeds(label, place, lines[label], most) for place, label in enumerate(lines))
    return [band for band in bands if band.x or band.traces]


def _over_seeds(label: str, style: int, seeds: Sequence[SeedLine], most: int) -> Band:
    seeds = [seed for seed in seeds if len(seed.points)]
    sound = [seed for seed in seeds if seed.finished] or [seed for seed in seeds if not seed.lost]
    x, values = _in_blocks(sound, most)
    several = len(sound) > 1
    return Band(
        label,
        style,
        x.tolist(),
        values.mean(axis=1).tolist(),
        values.min(axis=1).tolist() if several else (),
        values.max(axis=1).tolist() if several else (),
        traces=[
            SeedLine(Series(values[:, 0], x), seed.finished, seed.lost)
            for seed in seeds
            if all(seed is not one for one in sound)
            for x, values in [_in_blocks([seed], most)]
        ],
    )


def _in_blocks(
    seeds: Sequence[SeedLine], most: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return means over blocks of shared positions, and of the values there, (position, seed).

    A block with a NaN is NaN.
    """
    columns = [Series(seed.points, dtype=float) for seed in seeds] or [Series(dtype=float)]
    table = concat(columns, axis=1, join="inner").sort_index()
    if table.empty:
        return np.empty(0), np.empty((0, 1))
    values = table.where(table.abs() <= LARGEST).to_numpy()
    size = -(-len(table) // most)
    starts = np.arange(0, len(table), size)
    lengths = np.diff([*starts, len(table)])
    x = np.add.reduceat(table.index.to_numpy(dtype=float), starts) / lengths
    return x, np.add.reduceat(values, starts) / lengths[:, None]


@dataclass(frozen=True)
class Panel:
    """One set of axes.

    Attributes:
        title: title above the axes.
        y_label: quantity and unit.
        bands: lines to draw.
        references: horizontal lines by name.
        zero: whether to draw a line at 0, which is then always visible.
        logarithmic: whether the y axis is logarithmic.
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
) -> Markup:
    """Draw panels below each other with one legend.

    Args:
        panels: panels from top to bottom.
        x_label: label of the x axis.
        logarithmic_x: whether the x axis is logarithmic.
        prefix: prefix of the ids in the SVG.
    """
    height = 2.2 if len(panels) == 1 else 1.5
    titles = ", ".join(panel.title for panel in panels)
    labels = ", ".join(dict.fromkeys(band.label for panel in panels for band in panel.bands))
    with figure(0.3 + height * len(panels)) as drawn:
        frames = list(drawn.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0])
        for axes, panel in zip(frames, panels, strict=True):
            draw_panel(axes, panel)
        frames[-1].set_xlabel(x_label)
        scale_x(frames[-1], panels, logarithmic=logarithmic_x)
        # Several panels with one line each are explained by their titles.
        if len(panels) == 1 or any(len(panel.bands) > 1 for panel in panels):
            add_legend(drawn, frames)
        description = printable(f"{titles} against {x_label} for {labels}")
        return inline_svg(drawn, prefix, description, unit=x_label)


def panels_figure(
    panels: Sequence[Panel], *, caption: str, x_label: str, **options: Any
) -> list[DrawnFigure]:
    """Draw panels with a caption that explains the lines; return an empty list without lines."""
    panels = [panel for panel in panels if panel.bands]
    if not panels:
        return []
    bands = [band for panel in panels for band in panel.bands]
    notes = words(
        "line_notes",
        has_ranges=any(list(band.low) != list(band.high) for band in bands),
        has_lost=any(band.lost for band in bands),
        has_traces=any(band.traces for band in bands),
    )
    svg = draw_panels(panels, x_label=x_label, **options)
    return [DrawnFigure(svg, f"{caption}{notes}")]


def draw_panel(axes: Axes, panel: Panel) -> None:
    """Draw one panel except for its x axis."""
    plain_axes(axes, panel.title, "", panel.y_label)
    for band in panel.bands:
        _draw_band(axes, band, panel)
    if any(isfinite(value) for band in panel.bands for value in drawable(band.mean)):
        # Otherwise runs that broke down would squeeze the others to the bottom.
        _frame_lines(axes, panel)
        axes.set_ylim(axes.get_ylim())
        _draw_traces(axes, panel)
    else:
        _draw_traces(axes, panel)
        _frame_lines(axes, panel)
    for band in panel.bands:
        _mark_lost(axes, band)


def _draw_band(axes: Axes, band: Band, panel: Panel) -> None:
    color, dashes = line_style(band.style)
    low, high = (drawable(end, positive=panel.logarithmic) for end in (band.low, band.high))
    if any(one < other for one, other in zip(low, high, strict=True)):
        axes.fill_between(band.x, low, high, color=color, alpha=0.18, linewidth=0)
    axes.plot(
        band.x,
        drawable(band.mean, positive=panel.logarithmic),
        color=color,
        linestyle=dashes,
        linewidth=1.2,
        marker="o" if len(band.x) <= _MARKED else "",
        markersize=2.8,
        label=legend_label(band.label),
        gid=hover_name(band.label),
    )


def _draw_traces(axes: Axes, panel: Panel) -> None:
    for band in panel.bands:
        color, dashes = line_style(band.style)
        for trace in band.traces:
            points = Series(trace.points)
            axes.plot(
                points.index,
                drawable(points, positive=panel.logarithmic),
                color=color,
                linestyle=dashes,
                linewidth=0.7,
                alpha=0.8,
                gid=hover_name(band.label),
            )


def _frame_lines(axes: Axes, panel: Panel) -> None:
    """Scale the y axis, and draw the references that do not squeeze the lines."""
    if panel.zero:
        axes.axhline(0, color=REFERENCE["color"], linewidth=0.7)
    low, high = axes.get_ylim()
    for number, (name, value) in enumerate(panel.references.items()):
        extent = max(high, value) - min(low, value)
        is_near = value > 0 if panel.logarithmic else high - low >= SQUEEZED * extent
        beyond = "" if is_near else ", above" if value > high else ", below"
        style = {
            **REFERENCE,
            "linestyle": (0, (1, 2 + 3 * number)),
            "label": f"{printable(name)} {value:.3g}{beyond}",
        }
        if is_near:
            axes.axhline(value, **style)
        else:
            axes.plot([], [], **style)
    if panel.logarithmic:
        logarithmic_scale(axes.yaxis)


def _mark_lost(axes: Axes, band: Band) -> None:
    """Mark the places where runs broke down, on the edge for values outside the axes."""
    color, _ = line_style(band.style)
    cross: dict[str, Any] = {"color": color, "marker": "x", "markeredgewidth": 1.6, "linestyle": ""}
    if band.lost:
        # On the upper edge, above all numbers.
        heights = [0.97] * len(band.lost)
        axes.plot(band.lost, heights, transform=axes.get_xaxis_transform(), markersize=6.4, **cross)
    low, high = axes.get_ylim()
    for trace in band.traces:
        points = Series(trace.points)
        known = Series(drawable(points), points.index).dropna()
        if trace.lost and len(known):
            height = min(max(known.iloc[-1], low), high)
            axes.plot(known.index[-1], height, markersize=5.6, clip_on=False, **cross)


def scale_x(axes: Axes, panels: Sequence[Panel], *, logarithmic: bool = False) -> None:
    """Set ticks of the x axis; a logarithmic axis with few positions has ticks at each."""
    bands = [band for panel in panels for band in panel.bands]
    positions = sorted({x for band in bands for x in (*band.x, *band.lost)})
    if logarithmic and positions and positions[0] > 0:
        logarithmic_scale(axes.xaxis)
        if len(positions) <= MAX_TICKS:
            axes.xaxis.set_major_locator(FixedLocator(positions))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    is_large = max(map(abs, axes.get_xlim())) >= 1e4
    axes.xaxis.set_major_formatter(
        EngFormatter(sep="") if is_large else StrMethodFormatter("{x:g}")
    )
    axes.xaxis.set_minor_locator(NullLocator())


# Rows -------------------------------------------------------------------------------------------

_MARKERS: Final = ("o", "s", "^", "D")
_ROW_NAME: Final = 22


def rows_figure(
    names: Sequence[str],
    bands: Sequence[Band],
    *,
    layers: bool = False,
    notes: Sequence[str] = (),
    limits: Sequence[float] = (),
    title: str,
    x_label: str,
    logarithmic: bool = False,
    caption: str,
    prefix: str,
) -> list[DrawnFigure]:
    """Draw quantities in one set of axes: lines through layers, or joined dots of variants.

    Args:
        names: names of the rows, from the top.
        bands: quantities with a value for each row; several have a legend.
        layers: whether rows are layers, which are many and have long names.
        notes: notes below the names, such as the statuses of runs.
        limits: positions of dotted vertical lines.
        title: title of the figure.
        x_label: quantity and unit.
        logarithmic: whether the x axis is logarithmic; for variants only if all values are above 0.
        caption: caption of the figure.
        prefix: prefix of the ids in the SVG.

    Returns:
        The figure; an empty list if there is no value that the axis can show.
    """
    lows = [value for band in bands for value in drawable(band.low or band.mean)]
    logarithmic = logarithmic and (layers or not any(value <= 0 for value in lows))
    table = np.array([drawable(band.mean, positive=logarithmic) for band in bands])
    if not np.isfinite(table).any():
        return []
    height = 0.14 if layers else 0.3 if any(notes) else 0.22
    with figure(0.8 + height * max(len(names), 4 if layers else 3)) as drawn:
        axes = drawn.subplots()
        plain_axes(axes, title, x_label, "")
        for index, band in enumerate(bands):
            _draw_row_band(axes, index, band, layers=layers, logarithmic=logarithmic)
        for limit in limits:
            if limit > 0:
                axes.axvline(limit, **REFERENCE)
        if layers:
            name_rows(axes, short_names(names), size=6)
        else:
            axes.grid(visible=False, axis="y")
            rows = [row for row in range(len(names)) if np.isfinite(table[:, row]).any()]
            ends = np.nanmin(table[:, rows], axis=0), np.nanmax(table[:, rows], axis=0)
            axes.hlines(rows, *ends, color=NO_NUMBER, linewidth=1.2, zorder=1)
            labels = [shorten(name, _ROW_NAME) for name in names]
            for row, note in enumerate(notes):
                if note:
                    labels[row] += f"\n{printable(note)}"
            name_rows(axes, labels, size=7)
        if logarithmic:
            logarithmic_scale(axes.xaxis)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(5))
        if len(bands) > 1:
            add_legend(drawn, [axes])
        shown = ", ".join(band.label for band in bands)
        svg = inline_svg(drawn, prefix, printable(f"{title}: {shown}"), unit=x_label, rows=names)
        return [DrawnFigure(svg, caption)]


def _draw_row_band(axes: Axes, index: int, band: Band, *, layers: bool, logarithmic: bool) -> None:
    color, dashes = line_style(index)
    rows = range(len(band.mean))
    low, high = (drawable(end, positive=logarithmic) for end in (band.low, band.high))
    if layers and low:
        axes.fill_betweenx(rows, low, high, color=color, alpha=0.18, linewidth=0)
    elif low:
        axes.hlines(rows, low, high, color=color, linewidth=2.4, alpha=0.35)
    axes.plot(
        drawable(band.mean, positive=logarithmic),
        rows,
        color=color,
        linestyle=dashes,
        # Not linestyle "": such a line would have no points under the pointer.
        linewidth=0.8 if layers else 0,
        marker=_MARKERS[index % len(_MARKERS)],
        markersize=2.8 if layers else 4.8,
        label=legend_label(band.label),
        gid=hover_name(band.label),
    )


# A grid of variants.


def grid(
    cells: Mapping[tuple[float, float], tuple[float, str]],
    best: float,
    *,
    title: str,
    x_label: str,
    y_label: str,
    prefix: str,
    description: str,
) -> Markup:
    """Draw a heat map with text in every cell.

    Args:
        cells: number, NaN for a missing one, and text by x and y.
        best: number whose cells are framed.
        title: title of the map.
        x_label: label of the x axis.
        y_label: label of the y axis.
        prefix: prefix of the ids in the SVG.
        description: text for readers who cannot see the figure.
    """
    columns, rows = (sorted({place[axis] for place in cells}) for axis in (0, 1))
    table: NDArray[np.float64] = np.full((len(rows), len(columns)), nan)
    for (x, y), (value, _) in cells.items():
        table[rows.index(y), columns.index(x)] = value
    known = table[np.isfinite(table)]
    scale = Normalize(known.min(), known.max()) if known.size else Normalize(0, 1)
    with figure(0.8 + 0.34 * max(len(rows), 3)) as drawn:
        axes = drawn.subplots()
        plain_axes(axes, title, x_label, y_label)
        axes.grid(visible=False)
        paint(axes, table, scale)
        for (x, y), (value, words) in cells.items():
            place = columns.index(x), rows.index(y)
            # Black on a light cell, white on a dark one.
            ink = "#ffffff" if isfinite(value) and scale(value) <= 0.5 else "#111111"
            axes.text(*place, words, ha="center", va="center", fontsize=7, color=ink)
            if value == best:
                corner = place[0] - 0.47, place[1] - 0.46
                axes.add_patch(
                    Rectangle(corner, 0.94, 0.92, fill=False, edgecolor=ink, linewidth=2, zorder=3)
                )
        axes.set_xticks(range(len(columns)), [f"{x:g}" for x in columns])
        axes.set_yticks(range(len(rows)), [f"{y:g}" for y in rows])
        axes.tick_params(length=0)
        axes.set_frame_on(False)
        return inline_svg(drawn, prefix, description)
