"""Training loss beside validation loss, each norm the mean of its seeds: where a norm overfits."""

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from powernorm.errors import InputError
from powernorm.lab.report.drawing import line_style, logarithmic_ticks
from powernorm.lab.report.figures import own_columns
from powernorm.lab.report.loading import read_comparison
from powernorm.lab.report.measures import own_heading
from powernorm.lab.report.numerals import printable
from powernorm.lab.report.pictures import label_axes, panels, save
from powernorm.lab.report.records import Comparison, Run

COLUMNS: Final = (
    ("train_loss", "Training loss"),
    ("valid_loss", "Validation loss"),
)
"""Xu et al. 2019, Figure 1."""

WIDE: Final = 20
"""A line whose highest value is so many times its lowest is drawn on a logarithmic axis: at the end
of a long training its differences would be thinner than the line."""

_BLOCKS: Final = 40
"""Points of a drawn line: the training loss of single steps is noise."""


def draw_loss_curves(folder: Path, out: Path, norms: Sequence[str] = ()) -> Path:
    """Draw the losses of a comparison against the steps, mean of the seeds and their range.

    Seeds that did not finish are left out of a norm that has others.

    Args:
        folder: of a comparison, with its runs.
        out: the picture, `.svg` or `.png`.
        norms: which to draw, in this order; all where none is named.

    Raises:
        InputError: the folder is no comparison, has no such norm, or nothing was logged of it; the
            picture cannot be written.
    """
    comparison = read_comparison(folder)
    chosen = _chosen(comparison, norms, folder)
    drawn, frames = panels(1)
    panes = _panes(comparison)
    for axes, (column, title, y_label) in zip(frames, panes, strict=False):
        for index, name in enumerate(chosen):
            lines = [_line(run, column) for run in _runs_of(comparison, name)]
            _draw(axes, [line for line in lines if line], name, index)
        if any(_is_wide(line.get_ydata()) for line in axes.lines):
            axes.set_yscale("log")
            logarithmic_ticks(axes.yaxis, *axes.get_ylim())
        label_axes(axes, title, "step", y_label)
    for axes in frames[len(panes) :]:
        drawn.delaxes(axes)
    if not any(axes.lines for axes in frames):
        raise InputError(
            f"{folder} has no losses over the training: give the folder that "
            "`powernorm compare` wrote, with its runs."
        )
    return save(drawn, out)


def _panes(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Column, title and unit of the frames: of an own function what it logged first of all."""
    if comparison.function is None:
        return [(column, title, "nats per target") for column, title in COLUMNS]
    headings = {name: own_heading(name) for name in own_columns(comparison)[: len(COLUMNS)]}
    return [(name, heading, heading) for name, heading in headings.items()]


def _chosen(comparison: Comparison, norms: Sequence[str], folder: Path) -> Sequence[str]:
    unknown = [name for name in norms if name not in comparison.names]
    if unknown:
        raise InputError(
            f"{folder} has no run of {', '.join(unknown)}: it has {', '.join(comparison.names)}."
        )
    return norms or comparison.names


def _runs_of(comparison: Comparison, name: str) -> Sequence[Run]:
    """The finished runs of a norm, as in the table's averages; all where none finished."""
    runs = [run for run in comparison.runs if run.name == name]
    return [run for run in runs if run.finished] or runs


def _line(run: Run, column: str) -> Mapping[float, float]:
    """Losses by step."""
    return {
        step: value
        for row in run.curve
        if (step := row.get("step")) is not None
        and (value := row.get(column)) is not None
        and isfinite(value)
    }


def _draw(axes: Axes, lines: Sequence[Mapping[float, float]], name: str, index: int) -> None:
    """The mean over the seeds as a line, their range as a band."""
    if not lines:
        return
    colour, dashes = line_style(index)
    points = list(_blocks(lines))
    if not points:
        return
    steps = [step for step, _ in points]
    axes.plot(
        steps,
        [fmean(values) for _, values in points],
        color=colour,
        linestyle=dashes,
        linewidth=1.6,
        label=printable(name),
    )
    if len(lines) > 1:
        low, high = [min(values) for _, values in points], [max(values) for _, values in points]
        axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)


def _is_wide(values: ArrayLike) -> bool:
    numbers = np.asarray(values, dtype=float)
    return bool(numbers.min() > 0 and WIDE * numbers.min() < numbers.max())


def _blocks(
    lines: Sequence[Mapping[float, float]],
) -> Iterator[tuple[float, Sequence[float]]]:
    """Middle step of a block, and each seed's mean there, for the steps that all seeds have."""
    steps = sorted(set.intersection(*(set(line) for line in lines)))
    size = max(1, -(-len(steps) // _BLOCKS))
    for start in range(0, len(steps), size):
        block = steps[start : start + size]
        yield fmean(block), [fmean(line[step] for step in block) for line in lines]
