"""The figures of a comparison: what is drawn from which rows, and what the caption says."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from math import isfinite, nan
from typing import Final, Literal

import numpy as np
from pandas import DataFrame, Series, concat

from powernorm.records import NORMS_COLUMNS
from powernorm_lab.report import maps
from powernorm_lab.report.drawing import DrawnFigure
from powernorm_lab.report.lines import (
    MAX_POINTS,
    Band,
    Panel,
    SeedLine,
    bands_over_seeds,
    panels_figure,
)
from powernorm_lab.report.measures import better_way, own_heading
from powernorm_lab.report.numerals import printable
from powernorm_lab.report.records import Comparison, ReportedRun
from powernorm_lab.runs import METRICS_COLUMNS

Axis = Literal["tokens", "step", "epoch"]
"""Horizontal axes of curves."""


def learning_curves(comparison: Comparison) -> list[DrawnFigure]:
    """Losses and scores over the training; empty where nothing was logged."""
    columns: Sequence[str] = SCORED if _has_scores(comparison) else LIKELY
    if comparison.function is not None:
        columns = own_columns(comparison)[:MAX_CURVES]
    return [
        drawn
        for number, column in enumerate(columns)
        for drawn in _curve(comparison, column, f"{comparison.anchor}curve-{number}")
    ]


def own_columns(comparison: Comparison) -> list[str]:
    """The columns of `metrics.csv` in which an own function logged numbers.

    Losses first, then the goal's, then the others in their order.
    """
    found = [
        name
        for name in dict.fromkeys(name for run in comparison.runs for name in run.curve)
        if (name in OWN_FIRST or name not in METRICS_COLUMNS)
        and any(np.isfinite(run.curve.get(name, nan)).any() for run in comparison.runs)
    ]
    goal = comparison.metric
    first = (*OWN_FIRST, goal, goal.replace("test_", "valid_", 1))
    return [name for name in dict.fromkeys([*first, *found]) if name in found]


LIKELY: Final = ("train_loss", "valid_perplexity")
SCORED: Final = ("train_loss", "valid_loss", "valid_score")
"""Curves of tasks whose checkpoints are chosen by a score: where the loss rises while the training
loss falls, the model overfits (Xu et al. 2019, Figures 1 and 3)."""
OWN_FIRST: Final = ("train_loss", "valid_loss", "valid_perplexity", "valid_score")
"""Columns that every metrics.csv has and that an own function may have filled."""
MAX_MAPS: Final = 20
"""Heat maps of a page: each takes a quarter of a second and tens of kilobytes."""
MAX_CURVES: Final = 8
"""Most curves of a training function, which may log anything."""
_DECADES: Final = 1000
"""A curve whose highest value is so many times its lowest is drawn on a logarithmic axis."""


_CAPTIONS: Final = {
    "train_loss": ("Training loss", "Training loss, nats per target, each point a mean of steps."),
    "valid_loss": (
        "Validation loss",
        "Loss on the validation data, nats per target. Where it rises while the training loss "
        "falls, the model overfits.",
    ),
    "valid_score": ("Validation", ""),
    "valid_perplexity": (
        "Validation perplexity",
        "Perplexity on the validation text, logarithmic.",
    ),
}


def _curve(comparison: Comparison, column: str, prefix: str) -> list[DrawnFigure]:
    """A column of `metrics.csv`, with the metric of the baselines where they have it."""
    is_own = comparison.function is not None
    heading, metric, y_label = own_heading(column), column, ""
    title, caption = heading, f"The {heading} as the function logged it."
    against: Axis = "step"
    if not is_own:
        against = "epoch" if _is_by_epoch(comparison) else "tokens"
        y_label = "nats per target"
        title, caption = _CAPTIONS[column]
    if not is_own and column == "valid_perplexity":
        y_label = perplexity_label(comparison)
    elif not is_own and column == "valid_score":
        score = comparison.score_measure
        heading = score.heading.removeprefix("test ")
        metric = score.metric.replace("test_", "valid_")
        y_label = ", ".join(filter(None, (heading, score.unit)))
        title = f"{title} {heading}"
        caption = (
            f"{heading[:1].upper()}{heading[1:]} on the validation data{_sample(comparison)}; "
            f"{better_way(score)} is better."
        )
    bands = metric_bands(comparison.runs, column, against, comparison.names)
    values = [y for band in bands for y in (*band.mean, *(y for t in band.traces for y in t.y))]
    baselines = {
        baseline["name"]: value
        for baseline in comparison.baselines
        if (value := baseline["metrics"].get(metric)) is not None
        and (is_own or column.startswith("valid"))
    }
    if baselines:
        caption += f" Dotted: {'baselines' if is_own else 'models without a network'}."
    logarithmic = _is_wide(values) if is_own else column == "valid_perplexity"
    # What the x axis counts, in the words of the task's data.
    units = {"image": "images", "parse": "transitions", "lm-char": "bytes", "sequences": "frames"}
    return panels_figure(
        [Panel(title, y_label, bands, baselines, logarithmic=logarithmic)],
        caption=caption,
        x_label=units.get(comparison.task, "tokens") if against == "tokens" else against,
        prefix=prefix,
    )


def _sample(comparison: Comparison) -> str:
    """Describe which pairs a validation translates, and how; empty for other tasks."""
    is_translated = comparison.task == "translation"
    return ", at most 500 evenly spaced pairs of it, translated greedily" if is_translated else ""


def perplexity_label(comparison: Comparison) -> str:
    """Return the label of a perplexity's axis, with its unit."""
    units = {"mlm": "masked token", "tag": "tag", "translation": "subword", "lm-char": "byte"}
    return f"perplexity per {units.get(comparison.task, 'word')}"


def _is_by_epoch(comparison: Comparison) -> bool:
    """Whether runs with scores all went through their data several times."""
    runs = [run for run in comparison.runs if len(run.curve)]
    return _has_scores(comparison) and all(_num_epochs(run) >= FEWEST_EPOCHS for run in runs)


def _has_scores(comparison: Comparison) -> bool:
    return any(run.curve["valid_score"].notna().any() for run in comparison.runs)


FEWEST_EPOCHS: Final = 2
"""Shortest training whose curves are drawn against epochs, as in Wang et al. 2022, Figure 1."""


def metric_bands(
    runs: Sequence[ReportedRun],
    column: str,
    against: Axis,
    names: Sequence[str],
    most: int = MAX_POINTS,
) -> list[Band]:
    """A column of `metrics.csv`, of each norm the mean of its seeds and their range.

    Args:
        runs: of the comparison.
        column: of `metrics.csv`, or of its own.
        against: the quantity on the x axis.
        names: of the norms, whose place is the number of their style.
        most: points of a line.
    """
    groups = {name: [run for run in runs if run.name == name] for name in names}
    lengths = {name: _steps_per_epoch(seeds) for name, seeds in groups.items()}
    if against == "epoch":
        return bands_of(groups, lambda run: run_column(run, column, length=lengths[run.name]), most)
    return bands_of(groups, lambda run: run_column(run, column, against), most)


def bands_of(
    groups: Mapping[str, Sequence[ReportedRun]],
    measure: Callable[[ReportedRun], Series | Mapping[float, float]],
    most: int = MAX_POINTS,
) -> list[Band]:
    """A quantity of runs over their training, one band a name; see `bands_over_seeds`."""
    return bands_over_seeds(
        {
            name: [SeedLine(measure(run), run.finished, run.broke_down) for run in runs]
            for name, runs in groups.items()
        },
        most,
    )


def runs_by_name(runs: Iterable[ReportedRun]) -> dict[str, list[ReportedRun]]:
    """The seeds of each norm, in the order of the runs."""
    groups: dict[str, list[ReportedRun]] = {}
    for run in runs:
        groups.setdefault(run.name, []).append(run)
    return groups


def run_column(
    run: ReportedRun, column: str, axis: str = "step", length: float | None = 1.0
) -> Series:
    """The values of a run's column by position, in units of so much; empty without a unit."""
    if length is None or column not in run.curve:
        return Series(dtype=float)
    rows = run.curve[[axis, column]].dropna()
    found = Series(rows[column].to_numpy(), rows[axis].to_numpy() / length).sort_index()
    return found[~found.index.duplicated(keep="last")]


def _steps_per_epoch(runs: Iterable[ReportedRun]) -> float | None:
    """The steps in which runs go through their data once; None where all ended before.

    By the steps at which one epoch ends and the next begins, to the steps between two rows of the
    log.
    """
    rows = concat([*(run.curve[["step", "epoch"]] for run in runs), DataFrame()]).dropna()
    later = rows[rows["epoch"] > 0]
    if later.empty:
        return None
    # The epoch is that of the step's last micro-batch.
    shortest = float((rows["step"] / (rows["epoch"] + 1)).max())
    longest = float(((later["step"] - 1) / later["epoch"]).min())
    return (shortest + max(shortest, longest)) / 2


def _num_epochs(run: ReportedRun) -> float:
    """How often a run has gone through its data; 0 where that is less than once."""
    length = _steps_per_epoch([run])
    return float(run.curve["step"].max()) / length if length else 0.0


def _is_wide(values: Sequence[float]) -> bool:
    finite = [value for value in values if isfinite(value)]
    return bool(finite) and 0 < _DECADES * min(finite) < max(finite)


@dataclass(frozen=True)
class MonitoredPanel:
    """A figure of one column of `norms.csv` over training."""

    column: str
    layers: Literal["first", "last", "average"]
    title: str
    y_label: str
    caption: str
    scale: float = 1


FLUCTUATIONS: Final = (
    MonitoredPanel(
        "var_tid",
        "average",
        "TID over training: deviation",
        "TID, %",
        "Online TID of the deviation (quadratic mean where the norm does not center) in percent, "
        "averaged over the norm layers, logarithmic (Wang et al. 2022, Fig. 4).",
        scale=100,
    ),
    MonitoredPanel(
        "mean_tid",
        "average",
        "TID over training: mean",
        "TID, %",
        "Online TID of the mean in percent, averaged over the norm layers, logarithmic.",
        scale=100,
    ),
    MonitoredPanel(
        "var_distance",
        "first",
        "Fluctuation of the variance",
        "‖batch - running‖ / d",
        "Distance of the batch's variance (or quadratic mean) to the running one in the first norm "
        "layer, logarithmic (Shen et al. 2020, Fig. 2 right, Fig. 4 left).",
    ),
    MonitoredPanel(
        "mean_distance",
        "first",
        "Fluctuation of the mean",
        "‖batch - running‖ / d",
        "The same of the mean (Fig. 2 left).",
    ),
)

GRADIENTS: Final = (
    MonitoredPanel(
        "var_gradient_norm",
        "first",
        "Gradient through the variance",
        "norm of the part",
        "Norm of the part of the first norm layer's input gradient that goes through the variance "
        "or quadratic mean (g_σ², g_ψ²), logarithmic (Shen et al. 2020, Fig. 3 right, Fig. 4 "
        "right).",
    ),
    MonitoredPanel(
        "mean_gradient_norm",
        "first",
        "Gradient through the mean",
        "norm of the part",
        "The same for the part through the mean (g_μ; Fig. 3 left).",
    ),
    MonitoredPanel(
        "gradient_norm",
        "first",
        "Input gradient, first layer",
        "norm",
        "Norm of the whole gradient of the first norm layer's input, logarithmic.",
    ),
    MonitoredPanel(
        "token_gradient_var",
        "average",
        "Gradient variance per token",
        "variance over features",
        "Variance over features of the input gradient, mean over tokens and norm layers, "
        "logarithmic: what normalization reduces according to Xu et al. 2019, Theorem 1.",
    ),
    MonitoredPanel(
        "outlier_share",
        "average",
        "Share of |y| above 1/k",
        "%",
        "Of AdaNorm's and SimpleLayerNorm's outputs, mean over norm layers: where AdaNorm's "
        "factor would change its sign (Xu et al. 2019, eq. 7).",
        scale=100,
    ),
    MonitoredPanel(
        "saturated_share",
        "average",
        "Share of saturated values",
        "%",
        "Of DyT, Derf and DyISRU, mean over norm layers: values beyond the linear range.",
        scale=100,
    ),
    MonitoredPanel(
        "slope",
        "average",
        "Slope of the argument",
        "α, or 1/√B",
        "Of DyT, Derf and DyISRU, mean over norm layers.",
    ),
    MonitoredPanel(
        "input_scale",
        "last",
        "Scale of the last norm's input",
        "root mean square",
        "Root mean square of the last norm layer's input over valid tokens, of norms without batch "
        "statistics, logarithmic: in a model without norms what enters the head.",
    ),
)


def tid_over_time(comparison: Comparison) -> list[DrawnFigure]:
    """Online TID averaged over layers, and the fluctuation of the statistics, against steps."""
    prefix = f"{comparison.anchor}over-time-"
    groups = runs_by_name(comparison.runs)
    caption = (
        "Loss of a few validation batches when the norms use their running statistics, minus the "
        "loss when they use each batch's own. Above 0: evaluation costs something."
    )
    unit = "nats per token" if comparison.function is None else "loss"
    panel = Panel("Running against batch statistics", unit, bands_of(groups, _gap), zero=True)
    return [
        *monitored(groups, FLUCTUATIONS, prefix),
        *panels_figure([panel], caption=caption, x_label="step", prefix=f"{prefix}gap"),
    ]


def _gap(run: ReportedRun) -> Series:
    """Loss by running statistics minus loss by each batch's own, by step."""
    return difference(run_column(run, "gap_running_loss"), run_column(run, "gap_batch_loss"))


def difference(ours: Series, theirs: Series) -> Series:
    """One quantity minus another at the positions that both have."""
    common = ours.index.intersection(theirs.index)
    return ours[common] - theirs[common]


def gradients_over_time(comparison: Comparison) -> list[DrawnFigure]:
    """Parts of the norms' input gradients against steps; empty where none were recorded."""
    return monitored(runs_by_name(comparison.runs), GRADIENTS, f"{comparison.anchor}over-time-")


def monitored(
    runs: Mapping[str, Sequence[ReportedRun]], panels: Sequence[MonitoredPanel], prefix: str
) -> list[DrawnFigure]:
    """Columns of `norms.csv` over the training, a line a norm; empty where none was recorded."""
    drawn: list[DrawnFigure] = []
    # The seeds of a norm have the same layers.
    seen = [run for group in runs.values() for run in [r for r in group if len(r.samples)][:1]]
    rows = concat([run.samples for run in seen]) if seen else DataFrame(columns=NORMS_COLUMNS)
    everywhere = list(rows["layer"].unique())
    compared = shared_layers(
        everywhere,
        (set(run.samples.loc[run.samples["norm"] == run.norm, "layer"]) for run in seen),
    )
    for panel in panels:
        having = set(rows.loc[rows[panel.column].notna(), "layer"])
        layers = [layer for layer in compared if layer in having]
        note = f"Over {len(layers)} of {len(everywhere)} norm layers, those that are compared."
        if panel.layers != "average":
            layers = layers[:1] if panel.layers == "first" else layers[-1:]
            note = f"The layer: {''.join(map(printable, layers))}."
        elif set(everywhere) <= set(compared):
            note = ""
        bands = bands_of(runs, partial(layer_column, panel, layers))
        lines = [line for band in bands for line in (band.mean, *(t.y for t in band.traces))]
        if any(value > 0 for line in lines for value in line):
            frame = Panel(panel.title, panel.y_label, bands, logarithmic=True)
            name = panel.column.replace("_", "-")
            caption = f"{panel.caption} {note}".rstrip()
            drawn += panels_figure(
                [frame], caption=caption, x_label="step", prefix=f"{prefix}{name}"
            )
    return drawn


def shared_layers(layers: Sequence[str], compared: Iterable[AbstractSet[str]]) -> list[str]:
    """The layers where every run has the norm that it is a run of.

    A model of translation keeps LayerNorm in its decoder, which says nothing of the norms that are
    compared. Where the runs have no such layer in common it is all layers.

    Args:
        layers: of all runs.
        compared: of each run those that have its norm; it says nothing where it has none.
    """
    shared = set(layers)
    for own in compared:
        shared &= own or shared
    return [layer for layer in layers if layer in shared] or list(layers)


def layer_column(panel: MonitoredPanel, layers: Sequence[str], run: ReportedRun) -> Series:
    """The mean of a column of `norms.csv` over layers by step."""
    # Not by groupby: a page of 500 runs has thousands of these.
    values = run.samples[panel.column].to_numpy()
    known = run.samples["layer"].isin(layers).to_numpy() & ~np.isnan(values)
    steps, place = np.unique(run.samples["step"].to_numpy()[known], return_inverse=True)
    means = np.bincount(place, values[known]) / np.bincount(place)
    return Series(panel.scale * means, steps)


def tid_heat_maps(comparison: Comparison) -> list[tuple[ReportedRun, DrawnFigure]]:
    """One heat map of layer against step a run that has batch statistics; one color scale."""
    observed = mapped_runs(comparison)
    scale = maps.color_scale(observed)
    if scale is None:
        return []
    return [
        (run, maps.heat_map(run, scale, prefix=f"{comparison.anchor}heat-{index}"))
        for index, run in enumerate(observed[:MAX_MAPS])
    ]


def mapped_runs(comparison: Comparison) -> list[ReportedRun]:
    """The runs that have batch statistics over time, the first seed of each norm first."""
    numbers: dict[str, int] = {}
    places: list[tuple[int, ReportedRun]] = []
    for run in comparison.runs:
        if maps.kinds_of(run):
            numbers[run.name] = numbers.get(run.name, -1) + 1
            places.append((numbers[run.name], run))
    return [run for _, run in sorted(places, key=lambda place: place[0])]
