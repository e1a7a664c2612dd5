"""TID of each layer over training as a heat map."""

from collections.abc import Iterable, Sequence
from math import isfinite, log10
from statistics import quantiles
from typing import Final

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from numpy.typing import NDArray

from powernorm.lab.report.drawing import figure, inline_svg, name_rows, paint
from powernorm.lab.report.layer_names import short_names
from powernorm.lab.report.numerals import printable
from powernorm.lab.report.records import NormSample, ReportedRun

MAX_COLUMNS: Final = 120
"""Columns of a heat map; longer logs are averaged in blocks of steps."""

_KINDS: Final = {"mean_tid": "mean", "var_tid": "variance"}


def kinds_of(run: ReportedRun) -> list[str]:
    """The TID columns that the run's norm has: without a mean where it does not center."""
    return [
        kind
        for kind in _KINDS
        if any(sample.values.get(kind) is not None for sample in run.samples)
    ]


def color_scale(runs: Iterable[ReportedRun]) -> LogNorm | None:
    """One logarithmic scale in percent for all runs, from their 2nd to their 98th percentile."""
    values = [
        100 * value
        for run in runs
        for sample in run.samples
        for kind in _KINDS
        if (value := sample.values.get(kind)) is not None and isfinite(value) and value > 0
    ]
    if not values:
        return None
    # Inclusive: the other way would extrapolate below 0 from a few values.
    parts = quantiles(values, n=50, method="inclusive") if len(values) > 1 else values * 2
    low, high = parts[0], parts[-1]
    if log10(high) - log10(low) < 0.5:
        low, high = low / 2, high * 2
    return LogNorm(low, high, clip=True)


def draw_heat_map(run: ReportedRun, scale: LogNorm, *, prefix: str) -> Markup | None:
    """Layers from top to bottom, steps from left to right; gray where there is no number."""
    kinds = kinds_of(run)
    if not kinds:
        return None
    # A norm without batch statistics has rows, too, for its gradients.
    layers = list(
        dict.fromkeys(
            sample.layer
            for sample in run.samples
            if any(sample.values.get(kind) is not None for kind in kinds)
        )
    )
    height = len(kinds) * (0.45 + 0.17 * max(len(layers), 3)) + 1.0
    with figure(height) as drawn:
        grid = drawn.subplots(len(kinds), 1, sharex=True, squeeze=False)
        for axes, kind in zip(grid[:, 0], kinds, strict=True):
            _draw_panel(axes, run.samples, layers, kind, scale, alone=len(kinds) == 1)
        grid[-1, 0].set_xlabel("step")
        bar = drawn.colorbar(
            grid[0, 0].images[0], ax=list(grid[:, 0]), location="bottom", shrink=0.8, pad=0.02
        )
        bar.set_label("TID, %")
        bar.ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        bar.ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        bar.ax.xaxis.set_minor_locator(NullLocator())
        bar.ax.xaxis.set_minor_formatter(NullFormatter())
        description = f"TID by layer and step of {printable(run.name)}, seed {run.seed}"
        return inline_svg(drawn, prefix, description)


def _draw_panel(
    axes: Axes,
    samples: Sequence[NormSample],
    layers: Sequence[str],
    kind: str,
    scale: LogNorm,
    *,
    alone: bool,
) -> None:
    table, steps = _table(samples, layers, kind)
    ends = steps[0], max(steps[1], steps[0] + 1)
    paint(axes, table, scale, (*ends, len(layers) - 0.5, -0.5))
    axes.set_title("quadratic mean" if alone else _KINDS[kind], loc="left", fontweight="bold")
    name_rows(axes, short_names(layers), size=7)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def _table(
    samples: Sequence[NormSample], layers: Sequence[str], kind: str
) -> tuple[NDArray[np.float64], tuple[int, int]]:
    """Percent by (layer, block of steps), and the first and last step."""
    samples = [sample for sample in samples if sample.layer in set(layers)]
    steps = sorted({sample.step for sample in samples})
    size = -(-len(steps) // MAX_COLUMNS)
    column = {step: index // size for index, step in enumerate(steps)}
    row = {layer: index for index, layer in enumerate(layers)}
    total = np.zeros((len(layers), column[steps[-1]] + 1))
    entries = np.zeros_like(total)
    for sample in samples:
        value = sample.values.get(kind)
        if value is not None:
            place = row[sample.layer], column[sample.step]
            total[place] += 100 * value
            entries[place] += 1
    with np.errstate(invalid="ignore"):
        mean = np.where(entries > 0, total / np.maximum(entries, 1), np.nan)
    return mean, (steps[0], steps[-1])
