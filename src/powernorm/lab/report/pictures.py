"""Pictures in files of their own, for papers and pages other than the report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from powernorm.errors import InputError
from powernorm.lab.report.drawing import legend_entries
from powernorm.lab.report.figures import own_columns
from powernorm.lab.report.lines import Band, Panel, draw_panel, scale_x
from powernorm.lab.report.loading import is_run_folder, read_comparison, read_runs
from powernorm.lab.report.measures import own_heading
from powernorm.lab.report.records import Comparison, NormSample, Run

SUFFIXES: Final = (".svg", ".png")

# A name from a file may hold a dollar sign. Any: recent matplotlib types the keys as a Literal.
_STYLE: Final[Any] = {"text.parse_math": False, "svg.hashsalt": "powernorm"}

_LOSSES: Final = (
    ("train_loss", "Training loss"),
    ("valid_loss", "Validation loss"),
)
"""Xu et al. 2019, Figure 1."""

_WIDE: Final = 20
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
    return _save(_draw(panels, "step"), out)


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
        return [(column, title, "nats per target") for column, title in _LOSSES]
    headings = {name: own_heading(name) for name in own_columns(comparison)[: len(_LOSSES)]}
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
    return any(0 < _WIDE * min(band.mean) < max(band.mean) for band in bands)


def _blocks(
    lines: Sequence[Mapping[float, float]],
) -> Iterator[tuple[float, Sequence[float]]]:
    """Middle step of a block, and each seed's mean there, for the steps that all seeds have."""
    steps = sorted(set.intersection(*(set(line) for line in lines)))
    size = max(1, -(-len(steps) // _BLOCKS))
    for start in range(0, len(steps), size):
        block = steps[start : start + size]
        yield fmean(block), [fmean(line[step] for step in block) for line in lines]


@dataclass(frozen=True, slots=True)
class _Panel:
    column: str
    layers: Literal["first", "average"]
    title: str
    y_label: str
    scale: float = 1


_FLUCTUATIONS: Final = (
    _Panel("mean_distance", "first", "Mean, first norm layer", "‖batch - running‖ / d"),
    _Panel("var_distance", "first", "Variance, first norm layer", "‖batch - running‖ / d"),
    _Panel("mean_tid", "average", "Mean TID, average of layers", "TID, %", 100),
    _Panel("var_tid", "average", "Deviation TID, average of layers", "TID, %", 100),
)
"""Shen et al. 2020, Fig. 2, and Wang et al. 2022, Fig. 2."""


def draw_fluctuation(runs: Mapping[str, Path], out: Path) -> Path:
    """Draw the fluctuation of the statistics of several runs against the part of their training.

    The distances are those of the batch's mean and variance to the running ones in the first norm
    layer, (1/d)‖batch - running‖ (Shen et al. 2020, Fig. 2); below them the online TID, averaged
    over the norm layers (Wang et al. 2022, Fig. 2).

    Args:
        runs: folders of runs by the name of each line.
        out: the picture, `.svg` or `.png`.

    Raises:
        InputError: a folder is no run, nothing was recorded of its norms, or the picture cannot be
            written.
    """
    read = {name: _recorded(folder) for name, folder in runs.items()}
    panels = [_panel(panel, read) for panel in _FLUCTUATIONS]
    return _save(_draw(panels, "part of the training, %"), out)


def _recorded(folder: Path) -> Run:
    if not is_run_folder(folder):
        raise InputError(f"{folder} is no run of `powernorm compare`: give a run's folder.")
    (run,) = read_runs(folder.parent, [folder.name]).runs
    if not any(sample.values.get("var_distance") is not None for sample in run.samples):
        raise InputError(
            f"{folder} has no statistics of batches in its norms.csv: give a run with a norm that "
            "has them, such as bn, and training.monitor_every above 0."
        )
    return run


def _panel(panel: _Panel, runs: Mapping[str, Run]) -> Panel:
    points = {name: _points(run, panel) for name, run in runs.items()}
    bands = [
        Band(name, style, [x for x, _ in line], [y for _, y in line])
        for style, (name, line) in enumerate(points.items())
    ]
    return Panel(panel.title, panel.y_label, bands, logarithmic=True)


def _value(sample: NormSample, panel: _Panel) -> float | None:
    """What a logarithmic axis can show of a sample."""
    value = sample.values.get(panel.column)
    return value if value is not None and isfinite(value) and value > 0 else None


def _points(run: Run, panel: _Panel) -> Sequence[tuple[float, float]]:
    steps: dict[int, list[float]] = {}
    first = next((sample.layer for sample in run.samples if _value(sample, panel)), "")
    for sample in run.samples:
        value = _value(sample, panel)
        if value is not None and (panel.layers == "average" or sample.layer == first):
            steps.setdefault(sample.step, []).append(panel.scale * value)
    last = max(steps, default=1)
    return [(100 * step / last, sum(values) / len(values)) for step, values in steps.items()]


def _draw(panels: Sequence[Panel], x_label: str) -> Figure:
    """Draw panels on white, two in a row."""
    rows = -(-len(panels) // 2)
    drawn = Figure(figsize=(9, 3.3 * rows), layout="constrained", dpi=150)
    FigureCanvasAgg(drawn)
    frames = iter(drawn.subplots(rows, 2, squeeze=False).flat)
    for panel, axes in zip(panels, frames, strict=False):
        draw_panel(axes, panel)
        scale_x(axes, [panel])
        axes.set_xlabel(x_label)
    for axes in frames:
        # The last row may not be full.
        drawn.delaxes(axes)
    return drawn


def _save(drawn: Figure, out: Path) -> Path:
    """Write a figure with the legend of its frames below it.

    Raises:
        InputError: the file cannot be written.
    """
    named = legend_entries(drawn.axes)
    drawn.legend(
        handles=list(named.values()),
        labels=list(named),
        loc="outside lower center",
        ncols=min(5, len(named) or 1),
        frameon=False,
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with mpl.rc_context(_STYLE):
            drawn.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    except OSError as error:
        raise InputError(
            f"{out} cannot be written ({error.strerror}): give a file in a folder of your own."
        ) from error
    return out
