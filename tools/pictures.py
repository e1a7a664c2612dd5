"""Draw the pictures of docs/results that no report holds, as .svg or .png.

    python tools/pictures.py curves RUNS... --norms ln,bn --measure valid_loss --out a.svg
    python tools/pictures.py fluctuation ResNet-20=runs/a/bn-pre-seed0 LM=runs/b/bn-pre-seed0

`curves` takes the folder of a comparison, of parts of it, or of runs, and draws losses and scores
over the training: mean and range of the seeds of each norm. `fluctuation` draws how far batch
statistics lie from the running ones in models of unlike tasks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any, Final, get_args

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pandas import Series

from powernorm.errors import InputError
from powernorm_lab.report.drawing import add_legend
from powernorm_lab.report.figures import (
    Axis,
    layer_column,
    metric_bands,
    own_columns,
)
from powernorm_lab.report.lines import Band, Panel, draw_panel, scale_x
from powernorm_lab.report.loading import read_runs, read_selection
from powernorm_lab.report.measures import QUANTITIES, Quantity, own_heading
from powernorm_lab.report.records import Comparison, ReportedRun
from powernorm_lab.report.results_document import joined
from powernorm_lab.runs import is_run_folder

SUFFIXES: Final = (".svg", ".png")

# A name from a file may hold a dollar sign. Any: recent matplotlib types the keys as a Literal.
_STYLE: Final[Any] = {
    "text.parse_math": False,
    "svg.hashsalt": "powernorm",
    "legend.frameon": False,
}

_CURVES: Final = ("train_loss", "valid_loss", "valid_score")
"""Wang et al. 2022, Figure 1, and Xu et al. 2019, Figure 1; the last where runs have it."""

_TITLES: Final = {
    "train_loss": ("Training loss", "nats per target"),
    "valid_loss": ("Validation loss", "nats per target"),
    "valid_perplexity": ("Validation perplexity", "perplexity"),
}
"""Title and unit of the columns of the built-in tasks."""

_WIDE: Final = 20
"""A line whose highest value is so many times its lowest is drawn on a logarithmic axis: at the end
of a long training its differences would be thinner than the line."""

_BLOCKS: Final = 40
"""Points of a drawn line: the training loss of single steps is noise."""


def draw_training_curves(
    folders: Sequence[Path],
    out: Path,
    norms: Sequence[str] = (),
    measures: Sequence[str] = (),
    against: Axis = "step",
) -> Path:
    """Draw logged values of a comparison over its training, mean of the seeds and their range.

    Seeds that did not finish are left out of a norm that has others.

    Args:
        folders: of a comparison with its runs, of its parts, or of its runs.
        out: the picture, `.svg` or `.png`.
        norms: which to draw, in this order; all where none is named.
        measures: columns of metrics.csv, or what its `valid_score` is, such as `valid_bleu`; where
            none is named the losses, and the score where the runs have one. Of an own function the
            first ones.
        against: the x axis.

    Raises:
        InputError: the folders are no comparison, or several; there is no such norm or measure, or
            nothing was logged of it; a run ended before an epoch did; the picture cannot be
            written.
    """
    comparison = _only(folders)
    chosen = _chosen(comparison, norms)
    panels = [
        Panel(title, y_label, bands, logarithmic=_are_wide(bands))
        for column in _columns(comparison, chosen, measures)
        for title, y_label in [_title(comparison, column)]
        if (bands := _bands(comparison, chosen, column, against))
    ]
    if not panels and against == "epoch" and any(len(run.curve) for run in comparison.runs):
        raise InputError(
            f"{comparison.folder} has no run that logged the end of an epoch: draw against step"
        )
    if not panels:
        raise InputError(
            f"{comparison.folder} has no losses over the training: give the folder that "
            "`powernorm compare` wrote, with its runs"
        )
    return _save(_draw(panels, against), out)


def _only(folders: Sequence[Path]) -> Comparison:
    comparisons = joined(read_selection(folders))
    if len(comparisons) > 1:
        raise InputError(
            f"{', '.join(map(str, folders))} are {len(comparisons)} comparisons, which differ in "
            "more than norms and seeds: draw each by itself"
        )
    return comparisons[0]


def _bands(
    comparison: Comparison, norms: Sequence[str], column: str, against: Axis
) -> Sequence[Band]:
    """The mean over the seeds of each norm as a line, their range as a band."""
    found = metric_bands(comparison.runs, column, against, norms, most=_BLOCKS)
    return [replace(band, traces=()) if band.x else band for band in found]


def _columns(
    comparison: Comparison, norms: Sequence[str], measures: Sequence[str]
) -> Sequence[str]:
    """The columns that are drawn, each with a value at least."""
    runs = [run for run in comparison.runs if run.name in norms]
    logged = [
        name
        for name in dict.fromkeys(
            name for run in runs for name in run.curve.dropna(axis=1, how="all")
        )
        if name not in _NOT_DRAWN
    ]
    if not measures and comparison.function is not None:
        return own_columns(comparison)[:2]
    own_name = comparison.score_measure.metric.replace("test_", "valid_", 1)
    named = ["valid_score" if name == own_name else name for name in measures]
    missing = [name for name, column in zip(measures, named, strict=True) if column not in logged]
    if missing and logged:
        known = [own_name if name == "valid_score" else name for name in logged]
        raise InputError(
            f"{comparison.folder} logged no {', '.join(missing)}: it has {', '.join(known)}"
        )
    return named or [name for name in _CURVES if name in logged]


_NOT_DRAWN: Final = frozenset({"step", "epoch", "tokens", "seconds"})


def _title(comparison: Comparison, column: str) -> tuple[str, str]:
    """Title and unit of a frame."""
    if comparison.function is None and column == "valid_score":
        score = comparison.score_measure
        heading = score.heading.removeprefix("test ")
        unit = f"{score.unit}, " if score.unit else ""
        return f"Validation {heading}", f"{heading} ({unit}{score.better_way} is better)"
    if comparison.function is None and column in _TITLES:
        return _TITLES[column]
    return own_heading(column), own_heading(column)


def _chosen(comparison: Comparison, norms: Sequence[str]) -> Sequence[str]:
    unknown = [name for name in norms if name not in comparison.names]
    if unknown:
        raise InputError(
            f"{comparison.folder} has no run of {', '.join(unknown)}: it has "
            f"{', '.join(comparison.names)}"
        )
    return norms or comparison.names


def _are_wide(bands: Sequence[Band]) -> bool:
    means = ([value for value in band.mean if isfinite(value)] for band in bands)
    return any(0 < _WIDE * min(mean) < max(mean) for mean in means if mean)


_FLUCTUATIONS: Final = {
    "mean_distance": "Mean, first norm layer",
    "var_distance": "Variance, first norm layer",
    "mean_tid": "Mean TID, average of layers",
    "var_tid": "Deviation TID, average of layers",
}
"""Shen et al. 2020, Fig. 2, and Wang et al. 2022, Fig. 2: title by the report's column."""


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
    known = {quantity.key: quantity for quantity in QUANTITIES["fluctuations"]}
    panels = [_panel(known[column], title, read) for column, title in _FLUCTUATIONS.items()]
    return _save(_draw(panels, "part of the training, %"), out)


def _recorded(folder: Path) -> ReportedRun:
    if not is_run_folder(folder):
        raise InputError(f"{folder} is no run of `powernorm compare`: give a run's folder")
    (run,) = read_runs(folder.parent, [folder.name]).runs
    if run.samples["var_distance"].isna().all():
        raise InputError(
            f"{folder} has no statistics of batches in its norms.csv: give a run with a norm that "
            "has them, such as bn, and training.monitor_every above 0"
        )
    return run


def _panel(quantity: Quantity, title: str, runs: Mapping[str, ReportedRun]) -> Panel:
    bands = [
        Band(name, style, line.index.tolist(), line.tolist())
        for style, (name, line) in enumerate(
            (name, _points(run, quantity)) for name, run in runs.items()
        )
    ]
    return Panel(title, quantity.unit, bands, logarithmic=True)


def _points(run: ReportedRun, quantity: Quantity) -> Series:
    """Return the points of a column that a logarithmic axis can show, by part of the training."""
    values = run.samples[quantity.key]
    rows = run.samples[np.isfinite(values) & (values > 0)]
    layers = list(rows["layer"].unique())
    chosen = layers[:1] if quantity.layers == "first" else layers
    line = layer_column(quantity, chosen, replace(run, samples=rows))
    line.index = 100 * line.index / max(line.index, default=1)
    return line


def _draw(panels: Sequence[Panel], x_label: str) -> Figure:
    """Draw panels on white, two in a row, or three where that fills it."""
    columns = 3 if len(panels) == 3 else 2
    rows = -(-len(panels) // columns)
    drawn = Figure(figsize=(4.5 * columns, 3.3 * rows), layout="constrained", dpi=150)
    FigureCanvasAgg(drawn)
    frames = iter(drawn.subplots(rows, columns, squeeze=False).flat)
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
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with mpl.rc_context(_STYLE):
            add_legend(drawn, drawn.axes)
            drawn.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    except OSError as error:
        raise InputError(
            f"{out} cannot be written ({error.strerror}): give a file in a folder of your own"
        ) from error
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw what the command line asks for."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    curves = kinds.add_parser("curves", help="losses and scores over the training")
    curves.add_argument("runs", nargs="+", type=Path)
    for option in ("--norms", "--measure"):
        curves.add_argument(option, default="", metavar="NAME,...")
    curves.add_argument("--x", default="step", choices=get_args(Axis))
    fluctuation = kinds.add_parser("fluctuation", help="batch statistics against running ones")
    fluctuation.add_argument("runs", nargs="+", metavar="NAME=RUN")
    for kind in (curves, fluctuation):
        kind.add_argument("--out", type=Path, default=Path("picture.svg"))
    chosen = parser.parse_args(arguments)
    if chosen.out.suffix not in SUFFIXES:
        parser.error(f"--out {chosen.out}: the picture is an .svg or a .png file")
    try:
        if chosen.kind == "curves":
            norms, measures = (
                [name.strip() for name in names.split(",") if name.strip()]
                for names in (chosen.norms, chosen.measure)
            )
            draw_training_curves(chosen.runs, chosen.out, norms, measures, chosen.x)
        else:
            draw_fluctuation(_named(chosen.runs), chosen.out)
    except InputError as error:
        sys.exit(f"error: {error}")
    sys.stdout.write(f"written: {chosen.out}\n")


def _named(texts: Sequence[str]) -> Mapping[str, Path]:
    named: dict[str, Path] = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        if not equals or not name or not folder:
            raise InputError(
                f"{text!r} is not of the form NAME=RUN, e.g. ResNet-20=runs/a/bn-pre-seed0"
            )
        if name in named:
            raise InputError(f"{name} names two runs: give each a name of its own")
        named[name] = Path(folder)
    return named


if __name__ == "__main__":
    main()
