"""Figures of a comparison: curves, quantities of norms over training, and heat maps of layers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from math import isfinite, log10, nan
from typing import Final, Literal

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter
from pandas import DataFrame, Series, concat

from powernorm.records import NORMS_COLUMNS
from powernorm_lab.report.document import words
from powernorm_lab.report.drawing import (
    DrawnFigure,
    figure,
    inline_svg,
    name_rows,
    paint,
    short_names,
)
from powernorm_lab.report.lines import (
    MAX_POINTS,
    Band,
    Panel,
    SeedLine,
    bands_over_seeds,
    panels_figure,
)
from powernorm_lab.report.measures import QUANTITIES, Quantity, own_heading
from powernorm_lab.report.numerals import printable
from powernorm_lab.report.records import Comparison, ReportedRun
from powernorm_lab.runs import METRICS_COLUMNS

Axis = Literal["tokens", "step", "epoch"]
"""Horizontal axes of curves."""


def learning_curves(comparison: Comparison) -> list[DrawnFigure]:
    """Draw losses and scores over the training; empty where nothing was logged."""
    columns: Sequence[str] = SCORED if _has_scores(comparison) else LIKELY
    if comparison.function is not None:
        columns = own_columns(comparison)[:MAX_CURVES]
    return [
        drawn
        for number, column in enumerate(columns)
        for drawn in _curve(comparison, column, f"{comparison.anchor}curve-{number}")
    ]


def own_columns(comparison: Comparison) -> list[str]:
    """Return the columns of `metrics.csv` in which a user's function logged numbers.

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


def hidden_columns(comparison: Comparison) -> list[str]:
    """Return the headings of columns of a user's function that have no figure."""
    names = [] if comparison.function is None else own_columns(comparison)[MAX_CURVES:]
    return list(map(own_heading, names))


LIKELY: Final = ("train_loss", "valid_perplexity")
SCORED: Final = ("train_loss", "valid_loss", "valid_score")
"""Curves of tasks whose checkpoints are chosen by a score: where the loss rises while the training
loss falls, the model overfits (Xu et al. 2019, Figures 1 and 3)."""
OWN_FIRST: Final = ("train_loss", "valid_loss", "valid_perplexity", "valid_score")
"""Columns that every metrics.csv has and that a user's function may have filled."""
MAX_MAPS: Final = 20
"""Largest number of heat maps of a page: each takes a quarter of a second and tens of kilobytes."""
MAX_CURVES: Final = 8
"""Largest number of curves of a user's function, which may log anything."""
_DECADES: Final = 1000
"""A curve whose highest value is so many times its lowest is drawn on a logarithmic axis."""


_TITLES: Final = {
    "train_loss": "Training loss",
    "valid_loss": "Validation loss",
    "valid_perplexity": "Validation perplexity",
}


def _curve(comparison: Comparison, column: str, prefix: str) -> list[DrawnFigure]:
    """Draw a column of `metrics.csv`, with the metric of the baselines if they have it."""
    is_own, is_perplexity = comparison.function is not None, column == "valid_perplexity"
    heading, metric, y_label = own_heading(column), column, ""
    title = heading
    against: Axis = "step"
    if not is_own:
        against = "epoch" if _is_by_epoch(comparison) else "tokens"
        y_label = perplexity_label(comparison) if is_perplexity else "nats per target"
        title = _TITLES.get(column, "")
    if not is_own and column == "valid_score":
        score = comparison.score_measure
        heading = score.heading.removeprefix("test ")
        metric = score.metric.replace("test_", "valid_")
        y_label = ", ".join(filter(None, (heading, score.unit)))
        title = f"Validation {heading}"
    bands = metric_bands(comparison.runs, column, against, comparison.names)
    baselines = {
        baseline["name"]: value
        for baseline in comparison.baselines
        if (value := baseline["metrics"].get(metric)) is not None
        and (is_own or column.startswith("valid"))
    }
    values = _values(bands)
    is_wide = bool(values) and 0 < _DECADES * min(values) < max(values)
    logarithmic = is_wide if is_own else is_perplexity
    # What the x axis counts, in the words of the task's data.
    units = {"image": "images", "parse": "transitions", "lm-char": "bytes", "sequences": "frames"}
    return panels_figure(
        [Panel(title, y_label, bands, baselines, logarithmic=logarithmic)],
        caption=words("curve", comparison, column, heading, has_baselines=bool(baselines)),
        x_label=units.get(comparison.task, "tokens") if against == "tokens" else against,
        prefix=prefix,
    )


def _values(bands: Iterable[Band]) -> list[float]:
    """Return the finite values of lines, and of runs that are not part of them."""
    lines = [line for b in bands for line in (b.mean, *(Series(t.points) for t in b.traces))]
    return [value for line in lines for value in line if value is not None and isfinite(value)]


def perplexity_label(comparison: Comparison) -> str:
    """Return the label of a perplexity's axis, with its unit."""
    units = {"mlm": "masked token", "tag": "tag", "translation": "subword", "lm-char": "byte"}
    return f"perplexity per {units.get(comparison.task, 'word')}"


def _is_by_epoch(comparison: Comparison) -> bool:
    """Return whether runs with scores all went through their data several times."""
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
    """Return a band for each norm from a column of `metrics.csv`.

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
    """Return a band for each name from a quantity over training; see `bands_over_seeds`."""
    return bands_over_seeds(
        {
            name: [SeedLine(measure(run), run.finished, run.broke_down) for run in runs]
            for name, runs in groups.items()
        },
        most,
    )


def runs_by_name(runs: Iterable[ReportedRun]) -> dict[str, list[ReportedRun]]:
    """Return the runs of each norm, in their order."""
    groups: dict[str, list[ReportedRun]] = {}
    for run in runs:
        groups.setdefault(run.name, []).append(run)
    return groups


def run_column(
    run: ReportedRun, column: str, axis: str = "step", length: float | None = 1.0
) -> Series:
    """Return a run's column by position divided by `length`; empty without a length."""
    if length is None or column not in run.curve:
        return Series(dtype=float)
    return _known(run.curve[axis] / length, run.curve[column])


def _known(x: Series, values: Series) -> Series:
    """Return the known values by increasing position; the last one of a repeated position."""
    # Not by dropna and sort_index, which take ten times as long: a page may have 500 runs.
    positions, numbers = x.to_numpy(), values.to_numpy()
    known = ~(np.isnan(positions) | np.isnan(numbers))
    positions, numbers = positions[known], numbers[known]
    if (np.diff(positions) <= 0).any():
        positions, last = np.unique(positions[::-1], return_index=True)
        numbers = numbers[::-1][last]
    return Series(numbers, positions)


def _steps_per_epoch(runs: Iterable[ReportedRun]) -> float | None:
    """Return the number of steps of an epoch; None if all runs ended before its end.

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
    """Return how often a run has gone through its data; 0 for less than once."""
    length = _steps_per_epoch([run])
    return float(run.curve["step"].max()) / length if length else 0.0


def tid_over_time(comparison: Comparison) -> list[DrawnFigure]:
    """Draw online TID averaged over layers, and the fluctuation of statistics, against steps."""
    prefix = f"{comparison.anchor}over-time-"
    groups = runs_by_name(comparison.runs)
    caption = (
        "Loss of a few validation batches when the norms use their running statistics, minus the "
        "loss when they use each batch's own. Above 0: evaluation costs something."
    )
    unit = "nats per token" if comparison.function is None else "loss"
    panel = Panel("Running against batch statistics", unit, bands_of(groups, _gap), zero=True)
    return [
        *monitored(groups, QUANTITIES["fluctuations"], prefix),
        *panels_figure([panel], caption=caption, x_label="step", prefix=f"{prefix}gap"),
    ]


def _gap(run: ReportedRun) -> Series:
    """Return the loss by running statistics minus that by each batch's own, by step."""
    return _known(run.curve["step"], run.curve["gap_running_loss"] - run.curve["gap_batch_loss"])


def gradients_over_time(comparison: Comparison) -> list[DrawnFigure]:
    """Draw parts of the norms' input gradients against steps; empty where none were recorded."""
    return monitored(
        runs_by_name(comparison.runs), QUANTITIES["gradients"], f"{comparison.anchor}over-time-"
    )


def monitored(
    runs: Mapping[str, Sequence[ReportedRun]], quantities: Sequence[Quantity], prefix: str
) -> list[DrawnFigure]:
    """Draw columns of `norms.csv` over the training; empty if none was recorded."""
    drawn: list[DrawnFigure] = []
    # The seeds of a norm have the same layers.
    seen = [run for group in runs.values() for run in [r for r in group if len(r.samples)][:1]]
    rows = concat([run.samples for run in seen]) if seen else DataFrame(columns=NORMS_COLUMNS)
    everywhere = list(rows["layer"].unique())
    compared = shared_layers(
        everywhere,
        (set(run.samples.loc[run.samples["norm"] == run.norm, "layer"]) for run in seen),
    )
    for quantity in quantities:
        having = set(rows.loc[rows[quantity.key].notna(), "layer"])
        layers = [layer for layer in compared if layer in having]
        note = f"Over {len(layers)} of {len(everywhere)} norm layers, those that are compared."
        if quantity.layers != "average":
            layers = layers[:1] if quantity.layers == "first" else layers[-1:]
            note = f"The layer: {''.join(map(printable, layers))}."
        elif set(everywhere) <= set(compared):
            note = ""
        bands = bands_of(runs, partial(layer_column, quantity, layers))
        if any(value > 0 for value in _values(bands)):
            drawn += panels_figure(
                [Panel(quantity.title, quantity.unit, bands, logarithmic=True)],
                caption=f"{quantity.caption} {note}".rstrip(),
                x_label="step",
                prefix=f"{prefix}{quantity.key.replace('_', '-')}",
            )
    return drawn


def shared_layers(layers: Sequence[str], compared: Iterable[AbstractSet[str]]) -> list[str]:
    """Return the layers in which every run has the norm that it is a run of.

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


def layer_column(quantity: Quantity, layers: Sequence[str], run: ReportedRun) -> Series:
    """Return the mean of a column of `norms.csv` over layers by step."""
    # Not by groupby: a page of 500 runs has thousands of these.
    values = run.samples[quantity.key].to_numpy()
    known = run.samples["layer"].isin(layers).to_numpy() & ~np.isnan(values)
    steps, place = np.unique(run.samples["step"].to_numpy()[known], return_inverse=True)
    means = np.bincount(place, values[known]) / np.bincount(place)
    return Series(quantity.scale * means, steps)


@dataclass(frozen=True)
class HeatMaps:
    """Heat maps of the runs of a comparison.

    Attributes:
        first: maps of the first seed of each norm that has one.
        others: maps of other seeds.
        left_out: number of further runs.
    """

    first: Sequence[DrawnFigure]
    others: Sequence[DrawnFigure]
    left_out: int


def tid_heat_maps(comparison: Comparison) -> HeatMaps:
    """Draw a heat map of layer and step for each run with batch statistics, in one scale."""
    observed = mapped_runs(comparison)
    scale = _color_scale(observed)
    if scale is None:
        return HeatMaps((), (), 0)
    shown = observed[:MAX_MAPS]
    first = {run.name: run.seed for run in reversed(shown)}
    drawn: tuple[list[DrawnFigure], list[DrawnFigure]] = ([], [])
    for index, run in enumerate(shown):
        one = _heat_map(run, scale, prefix=f"{comparison.anchor}heat-{index}")
        drawn[run.seed != first[run.name]].append(one)
    return HeatMaps(*drawn, left_out=len(observed) - len(shown))


def mapped_runs(comparison: Comparison) -> list[ReportedRun]:
    """Return the runs that have batch statistics over time, the first seed of each norm first."""
    numbers: dict[str, int] = {}
    places: list[tuple[int, ReportedRun]] = []
    for run in comparison.runs:
        if _kinds_of(run):
            numbers[run.name] = numbers.get(run.name, -1) + 1
            places.append((numbers[run.name], run))
    return [run for _, run in sorted(places, key=lambda place: place[0])]


MAX_COLUMNS: Final = 120
"""Largest number of columns of a heat map; longer logs are averaged in blocks of steps."""

_KINDS: Final = {"mean_tid": "mean", "var_tid": "variance"}


def _kinds_of(run: ReportedRun) -> list[str]:
    """Return the TID columns of the run's norm; a norm that does not center has no mean."""
    return [kind for kind in _KINDS if run.samples[kind].notna().any()]


def _color_scale(runs: Iterable[ReportedRun]) -> LogNorm | None:
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


def _heat_map(run: ReportedRun, scale: LogNorm, *, prefix: str) -> DrawnFigure:
    """Draw TID by layer, from top to bottom, and step, with gray for missing numbers.

    Args:
        run: run with TIDs, see `_kinds_of`.
        scale: color scale of all runs.
        prefix: prefix of the ids in the SVG.
    """
    titles = {kind: _KINDS[kind] for kind in _kinds_of(run)}
    if len(titles) == 1:
        titles = dict.fromkeys(titles, "quadratic mean")
    # Norms without batch statistics have rows for their gradients.
    samples = run.samples.dropna(subset=list(titles), how="all")
    layers = list(samples["layer"].unique())
    steps = sorted(samples["step"].astype(int).unique())
    block = np.searchsorted(steps, samples["step"]) // -(-len(steps) // MAX_COLUMNS)
    blocks = samples.assign(block=block)
    extent = (steps[0], max(steps[-1], steps[0] + 1), len(layers) - 0.5, -0.5)
    name = f"{printable(run.name)}, seed {run.seed}"
    with figure(len(titles) * (0.35 + 0.14 * max(len(layers), 3)) + 0.7) as drawn:
        frames = list(drawn.subplots(len(titles), 1, sharex=True, squeeze=False)[:, 0])
        for axes, (kind, title) in zip(frames, titles.items(), strict=True):
            means = 100 * blocks.pivot_table(kind, "layer", "block", dropna=False).reindex(layers)
            paint(axes, means.to_numpy(), scale, extent)
            name_rows(axes, short_names(layers), size=6)
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
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
