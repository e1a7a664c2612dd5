"""Training loss beside validation loss, each norm the mean of its seeds: where a norm overfits."""

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Final

from powernorm.errors import InputError
from powernorm.lab.report.figures import own_columns
from powernorm.lab.report.lines import Band, Panel
from powernorm.lab.report.loading import read_comparison
from powernorm.lab.report.measures import own_heading
from powernorm.lab.report.pictures import draw_pictures, save
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
    panels = [
        Panel(title, y_label, bands, logarithmic=_are_wide(bands))
        for column, title, y_label in _panes(comparison)
        if (bands := list(_bands(comparison, chosen, column)))
    ]
    if not panels:
        raise InputError(
            f"{folder} has no losses over the training: give the folder that "
            "`powernorm compare` wrote, with its runs."
        )
    return save(draw_pictures(panels, "step"), out)


def _bands(comparison: Comparison, norms: Sequence[str], column: str) -> Iterator[Band]:
    """The mean over the seeds of each norm as a line, their range as a band."""
    for style, name in enumerate(norms):
        lines = [line for run in _runs_of(comparison, name) if (line := _line(run, column))]
        points = list(_blocks(lines)) if lines else []
        if points:
            steps, values = zip(*points, strict=True)
            low, high = (list(map(end, values)) for end in (min, max))
            yield Band(name, style, steps, list(map(fmean, values)), low, high)


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


def _are_wide(bands: Sequence[Band]) -> bool:
    return any(0 < WIDE * min(band.mean) < max(band.mean) for band in bands)


def _blocks(
    lines: Sequence[Mapping[float, float]],
) -> Iterator[tuple[float, Sequence[float]]]:
    """Middle step of a block, and each seed's mean there, for the steps that all seeds have."""
    steps = sorted(set.intersection(*(set(line) for line in lines)))
    size = max(1, -(-len(steps) // _BLOCKS))
    for start in range(0, len(steps), size):
        block = steps[start : start + size]
        yield fmean(block), [fmean(line[step] for step in block) for line in lines]
