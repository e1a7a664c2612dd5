"""How far batch statistics lie from the running ones, in models of unlike tasks side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Final, Literal

from powernorm.errors import InputError
from powernorm.lab.report.lines import Band, Panel
from powernorm.lab.report.loading import is_run_folder, read_runs
from powernorm.lab.report.pictures import draw_pictures, save
from powernorm.lab.report.records import NormSample, Run


@dataclass(frozen=True, slots=True)
class _Panel:
    column: str
    layers: Literal["first", "average"]
    title: str
    y_label: str
    scale: float = 1


PANELS: Final = (
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
    panels = [_panel(panel, read) for panel in PANELS]
    return save(draw_pictures(panels, "part of the training, %"), out)


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
