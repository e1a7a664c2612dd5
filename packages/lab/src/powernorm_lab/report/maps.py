"""Heat maps: TID of each layer over training, and a study's metric over its grid."""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, log10, nan
from typing import Final

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter
from numpy.typing import NDArray
from pandas import DataFrame

from powernorm_lab.report.drawing import (
    DrawnFigure,
    figure,
    inline_svg,
    name_rows,
    paint,
    plain_axes,
    short_names,
)
from powernorm_lab.report.numerals import printable
from powernorm_lab.report.records import ReportedRun

MAX_COLUMNS: Final = 120
"""Largest number of columns of a heat map; longer logs are averaged in blocks of steps."""

_KINDS: Final = {"mean_tid": "mean", "var_tid": "variance"}


def kinds_of(run: ReportedRun) -> list[str]:
    """Return the TID columns of the run's norm; a norm that does not center has no mean."""
    return [kind for kind in _KINDS if run.samples[kind].notna().any()]


def color_scale(runs: Iterable[ReportedRun]) -> LogNorm | None:
    """Return a logarithmic scale in percent for all runs, from 2nd to 98th percentile."""
    parts = [100 * run.samples[list(_KINDS)].to_numpy(dtype=float).ravel() for run in runs]
    values = np.concatenate([*parts, []])
    values = values[np.isfinite(values) & (values > 0)]
    if not values.size:
        return None
    low, high = np.quantile(values, [0.02, 0.98])
    if log10(high) - log10(low) < 0.5:
        low, high = low / 2, high * 2
    return LogNorm(low, high, clip=True)


def heat_map(run: ReportedRun, scale: LogNorm, *, prefix: str) -> DrawnFigure:
    """Draw TID by layer, from top to bottom, and step, with gray for missing numbers.

    Args:
        run: run with TIDs, see `kinds_of`.
        scale: color scale of all runs.
        prefix: prefix of the ids in the SVG.
    """
    titles = {kind: _KINDS[kind] for kind in kinds_of(run)}
    if len(titles) == 1:
        titles = dict.fromkeys(titles, "quadratic mean")
    # Norms without batch statistics have rows for their gradients.
    samples = run.samples.dropna(subset=list(titles), how="all")
    layers = list(samples["layer"].unique())
    name = f"{printable(run.name)}, seed {run.seed}"
    with figure(len(titles) * (0.35 + 0.14 * max(len(layers), 3)) + 0.7) as drawn:
        frames = list(drawn.subplots(len(titles), 1, sharex=True, squeeze=False)[:, 0])
        for axes, (kind, title) in zip(frames, titles.items(), strict=True):
            _paint_kind(axes, samples, layers, kind, scale)
            axes.set_title(title, loc="left", fontweight="bold")
        frames[-1].set_xlabel("step")
        bar = drawn.colorbar(frames[0].images[0], ax=frames, location="bottom", shrink=0.8)
        bar.set_label("TID, %")
        bar.ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        bar.ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        bar.ax.xaxis.set_minor_locator(NullLocator())
        svg = inline_svg(drawn, prefix, f"TID by layer and step of {name}")
    what = " and ".join(titles.values())
    ending = "" if run.finished else f" The run is marked {run.shown_status}."
    caption = f"{name}: online TID of the {what} by layer (top: first) and step.{ending}"
    return DrawnFigure(svg, caption)


def _paint_kind(
    axes: Axes, samples: DataFrame, layers: Sequence[str], kind: str, scale: LogNorm
) -> None:
    """Draw percentages by layer and block of steps."""
    steps = sorted(samples["step"].astype(int).unique())
    block = np.searchsorted(steps, samples["step"]) // -(-len(steps) // MAX_COLUMNS)
    table = samples.assign(block=block)
    means = 100 * table.pivot_table(kind, "layer", "block", dropna=False).reindex(layers)
    extent = (steps[0], max(steps[-1], steps[0] + 1), len(layers) - 0.5, -0.5)
    paint(axes, means.to_numpy(), scale, extent)
    name_rows(axes, short_names(layers), size=6)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))


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
