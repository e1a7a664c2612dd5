"""Lines over training: one a run, one color a norm."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, nan
from statistics import fmean
from typing import Final, Literal

from markupsafe import Markup

from powernorm.lab.report.lines import Band, Panel, UnfinishedLine, draw_panels
from powernorm.lab.report.magnitudes import mean
from powernorm.lab.report.records import ReportedRun

MAX_POINTS: Final = 300
"""Points of a drawn line; longer logs are averaged in blocks."""
MAX_DRAWN: Final = 30_000
"""Points of a figure, over all its lines: what a page of hundreds of runs can hold."""
FEWEST_POINTS: Final = 40
"""Of a line among however many."""


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


Axis = Literal["tokens", "step", "epoch"]
"""What curves are drawn against."""


def bands_over_seeds(
    runs: Sequence[ReportedRun],
    column: str,
    against: Axis,
    order: Sequence[str],
    most: int = MAX_POINTS,
) -> list[Band]:
    """A column of `metrics.csv`, of each norm the mean of its seeds and their range.

    A run that did not finish is a thin line of its own where it broke down, or where another seed
    of the norm finished.

    Args:
        runs: of the comparison.
        column: of `metrics.csv`, or of its own.
        against: the quantity on the x axis.
        order: names of the norms; the place there is the number of a line's style.
        most: points of a line; longer logs are averaged in blocks.
    """
    runs_of = {name: [run for run in runs if run.name == name] for name in order}
    drawn = sum(map(bool, runs_of.values()))
    most = min(most, max(FEWEST_POINTS, MAX_DRAWN // max(drawn, 1)))
    bands = (
        _band(name, style, _points(runs_of[name], column, against), most)
        for style, name in enumerate(order)
    )
    return [band for band in bands if band.x or band.traces]


def _band(
    name: str, style: int, lines: Sequence[tuple[ReportedRun, Mapping[float, float]]], most: int
) -> Band:
    """The mean over the runs of a norm, and those that are no part of it."""
    sound = [points for run, points in lines if run.finished]
    sound = sound or [points for run, points in lines if not run.broke_down]
    means = list(_means(sound, most))
    low, high = ([end(values) for _, values in means] for end in (min, max))
    others = [
        (run, thinned(name, sorted(points.items()), most))
        for run, points in lines
        if all(points is not one for one in sound)
    ]
    return Band(
        name,
        style,
        [place for place, _ in means],
        [fmean(values) for _, values in means],
        low if len(sound) > 1 else (),
        high if len(sound) > 1 else (),
        traces=[UnfinishedLine(line.x, line.y, lost=run.broke_down) for run, line in others],
    )


def _means(
    lines: Sequence[Mapping[float, float]], most: int
) -> Iterator[tuple[float, Sequence[float]]]:
    """Middle of a block, and each seed's mean there, for the positions that all seeds have."""
    places = sorted(set.intersection(*map(set, lines))) if lines else []
    size = max(1, -(-len(places) // most))
    for start in range(0, len(places), size):
        block = places[start : start + size]
        yield fmean(block), [fmean(line[place] for place in block) for line in lines]


def _points(
    runs: Sequence[ReportedRun], column: str, against: Axis
) -> list[tuple[ReportedRun, Mapping[float, float]]]:
    """The values of runs of one norm by position, NaN where one is not finite; not of no values."""
    length = _steps_per_epoch(runs) if against == "epoch" else 1.0
    if length is None:
        return []
    axis = "step" if against == "epoch" else against
    found = [
        {
            place / length: value if isfinite(value) else nan
            for row in run.curve
            if (place := row.get(axis)) is not None and (value := row.get(column)) is not None
        }
        for run in runs
    ]
    return [(run, points) for run, points in zip(runs, found, strict=True) if points]


def _steps_per_epoch(runs: Iterable[ReportedRun]) -> float | None:
    """The steps in which runs go through their data once; None where all ended before.

    By the steps at which one epoch ends and the next begins, to the steps between two rows of the
    log.
    """
    longest, shortest = inf, 0.0
    for row in (row for run in runs for row in run.curve):
        step, epoch = row.get("step"), row.get("epoch")
        if step is None or epoch is None:
            continue
        # The epoch is that of the step's last micro-batch.
        shortest = max(shortest, step / (epoch + 1))
        if epoch > 0:
            longest = min(longest, (step - 1) / epoch)
    return (shortest + max(shortest, longest)) / 2 if isfinite(longest) else None


def num_epochs(run: ReportedRun) -> float:
    """How often a run has gone through its data; 0 where that is less than once."""
    length = _steps_per_epoch([run])
    steps = [step for row in run.curve if (step := row.get("step")) is not None]
    return max(steps, default=0.0) / length if length else 0.0


def gap_series(runs: Iterable[ReportedRun]) -> list[Series]:
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
    runs: Iterable[ReportedRun], column: str, layers: Literal["first", "average"], scale: float = 1
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


def _line(run: ReportedRun, points: Sequence[tuple[float | None, float | None]]) -> list[Series]:
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
        series: the lines; those that are lost do not set the frame where there are others.
        order: all norms of the comparison, so that each has the same color in every figure.
        title: of the frame.
        y_label: quantity and unit.
        logarithmic: whether the y axis is.
        baselines: horizontal lines by name.
        prefix: of the ids in the SVG.
        description: for readers who cannot see the figure.
        x_label: of the x axis.
        logarithmic_x: whether the x axis is logarithmic, too.
    """
    styles = {name: style for style, name in enumerate(dict.fromkeys(order))}
    bands = [
        Band(
            line.norm, styles[line.norm], (), (), traces=[UnfinishedLine(line.x, line.y, lost=True)]
        )
        if line.lost
        else Band(line.norm, styles[line.norm], line.x, line.y)
        for line in sorted(_thinned_together(series), key=lambda line: styles[line.norm])
    ]
    panel = Panel(title, y_label, bands, baselines, logarithmic=logarithmic)
    return draw_panels(
        [panel],
        x_label=x_label,
        logarithmic_x=logarithmic_x,
        prefix=prefix,
        description=description,
    )
