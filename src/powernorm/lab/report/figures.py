"""The figures of a comparison: what is drawn from which rows, and what the caption says."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Final, Literal

from markupsafe import Markup

from powernorm.lab.report import curves, heatmaps
from powernorm.lab.report.lines import Band, Panel, draw_panels
from powernorm.lab.report.measures import better_way, own_heading
from powernorm.lab.report.numerals import printable
from powernorm.lab.report.records import Comparison, ReportedRun
from powernorm.runs import METRICS_COLUMNS


@dataclass(frozen=True)
class DrawnFigure:
    """A figure with the words that belong to it."""

    svg: Markup
    caption: str


def learning_curves(comparison: Comparison) -> list[DrawnFigure]:
    """Losses and scores over the training; empty where nothing was logged."""
    if comparison.function is not None:
        curves_of_task = list(map(_own_curve, own_columns(comparison)[:MAX_CURVES]))
    else:
        columns = SCORED if _has_scores(comparison) else LIKELY
        curves_of_task = [_known_curve(comparison, name) for name in columns]
    drawn = (
        _draw_curve(comparison, curve, f"{comparison.anchor}curve-{number}")
        for number, curve in enumerate(curves_of_task)
    )
    return [one for one in drawn if one is not None]


def own_columns(comparison: Comparison) -> list[str]:
    """The columns of `metrics.csv` in which an own function logged numbers.

    Losses first, then the goal's, then the others in their order.
    """
    found = dict.fromkeys(
        name
        for run in comparison.runs
        for row in run.curve
        for name, value in row.items()
        if value is not None
        and isfinite(value)
        and (name in OWN_FIRST or name not in METRICS_COLUMNS)
    )
    goal = comparison.metric
    first = (*OWN_FIRST, goal, goal.replace("test_", "valid_", 1))
    return [name for name in dict.fromkeys([*first, *found]) if name in found]


_Column = Literal["train_loss", "valid_loss", "valid_perplexity", "valid_score"]
LIKELY: Final[tuple[_Column, ...]] = ("train_loss", "valid_perplexity")
SCORED: Final[tuple[_Column, ...]] = ("train_loss", "valid_loss", "valid_score")
"""Curves of tasks whose checkpoints are chosen by a score: where the loss rises while the training
loss falls, the model overfits (Xu et al. 2019, Figures 1 and 3)."""
OWN_FIRST: Final = ("train_loss", "valid_loss", "valid_perplexity", "valid_score")
"""Columns that every metrics.csv has and that an own function may have filled."""
MAX_MAPS: Final = 40
"""Heat maps of a page: each takes a quarter of a second and tens of kilobytes."""
MAX_CURVES: Final = 8
"""Of an own function, which may log anything."""
_DECADES: Final = 1000
"""A curve whose highest value is so many times its lowest is drawn on a logarithmic axis."""


@dataclass(frozen=True)
class _Curve:
    """A figure of one column of `metrics.csv`.

    Attributes:
        column: its name.
        title: of the frame.
        caption: what is drawn.
        y_label: quantity and unit; empty where the title says all that is known.
        logarithmic: whether the y axis is; None where the values decide.
        metric: of the baselines, which are drawn with it; empty where they have none.
        against: the quantity on the x axis.
    """

    column: str
    title: str
    caption: str
    y_label: str
    logarithmic: bool | None
    metric: str
    against: curves.Axis


def _own_curve(column: str) -> _Curve:
    heading = own_heading(column)
    return _Curve(
        column=column,
        title=heading,
        caption=f"The {heading} as the function logged it.",
        y_label="",
        logarithmic=None,
        metric=column,
        against="step",
    )


_CAPTIONS: Final[dict[_Column, tuple[str, str]]] = {
    "train_loss": ("Training loss", "Training loss, nats per target, each point a mean of steps."),
    "valid_loss": (
        "Validation loss",
        "Loss on the validation data, nats per target. Where it rises while the training loss "
        "falls, the model overfits.",
    ),
    "valid_score": ("Validation {heading}", "{heading} on the validation data{sample}; {better}."),
    "valid_perplexity": (
        "Validation perplexity",
        "Perplexity on the validation text, logarithmic.",
    ),
}


def _known_curve(comparison: Comparison, column: _Column) -> _Curve:
    title, caption = _CAPTIONS[column]
    score = comparison.score_measure
    heading = score.heading.removeprefix("test ")
    metric = score.metric.replace("test_", "valid_") if column == "valid_score" else column
    return _Curve(
        column=column,
        title=title.format(heading=heading),
        caption=caption.format(
            heading=heading[:1].upper() + heading[1:],
            sample=_sample(comparison),
            better=f"{better_way(score)} is better",
        ),
        y_label={
            "valid_perplexity": perplexity_label(comparison),
            "valid_score": ", ".join(filter(None, (heading, score.unit))),
        }.get(column, "nats per target"),
        logarithmic=column == "valid_perplexity",
        metric=metric if column.startswith("valid") else "",
        against="epoch" if _is_by_epoch(comparison) else "tokens",
    )


def _sample(comparison: Comparison) -> str:
    """What is translated at a validation, and how; empty for other tasks."""
    is_translated = comparison.task == "translation"
    return ", at most 500 evenly spaced pairs of it, translated greedily" if is_translated else ""


def perplexity_label(comparison: Comparison) -> str:
    """What a perplexity is of, for an axis."""
    units = {"mlm": "masked token", "tag": "tag", "translation": "subword", "lm-char": "byte"}
    return f"perplexity per {units.get(comparison.task, 'word')}"


def _is_by_epoch(comparison: Comparison) -> bool:
    """Whether runs with scores all went through their data several times."""
    runs = [run for run in comparison.runs if run.curve]
    return _has_scores(comparison) and all(curves.num_epochs(run) >= FEWEST_EPOCHS for run in runs)


def _has_scores(comparison: Comparison) -> bool:
    return any(row.get("valid_score") is not None for run in comparison.runs for row in run.curve)


FEWEST_EPOCHS: Final = 2
"""Of a training whose curves are drawn against them, as Wang et al. 2022 draw theirs (Figure 1)."""


def _x_label(comparison: Comparison, axis: curves.Axis) -> str:
    """What the x axis counts, in the words of the task's data."""
    units = {"image": "images", "parse": "transitions", "lm-char": "bytes"}
    return units.get(comparison.task, "tokens") if axis == "tokens" else axis


def _draw_curve(comparison: Comparison, curve: _Curve, prefix: str) -> DrawnFigure | None:
    bands = curves.bands_over_seeds(comparison.runs, curve.column, curve.against, comparison.names)
    if not bands:
        return None
    values = [y for band in bands for y in (*band.mean, *(y for t in band.traces for y in t.y))]
    baselines = {
        baseline["name"]: value
        for baseline in comparison.baselines
        if (value := baseline["metrics"].get(curve.metric)) is not None
    }
    norms = ", ".join(dict.fromkeys(printable(band.label) for band in bands))
    notes = [curve.caption, _seeds_note(bands)]
    if baselines:
        is_own = comparison.function is not None
        notes.append(f"Dotted: {'baselines' if is_own else 'models without a network'}.")
    if any(trace.lost for band in bands for trace in band.traces):
        notes.append(_LOST if comparison.baselines else _FAILED)
    x_label = _x_label(comparison, curve.against)
    logarithmic = _is_wide(values) if curve.logarithmic is None else curve.logarithmic
    panel = Panel(curve.title, curve.y_label, bands, baselines, logarithmic=logarithmic)
    described = f"{curve.title} against training {x_label} for {norms}"
    svg = draw_panels([panel], x_label=x_label, prefix=prefix, description=described)
    return DrawnFigure(svg, " ".join(filter(None, notes)))


def _seeds_note(bands: Sequence[Band]) -> str:
    """What a line is of the seeds; empty where each norm has but one."""
    is_mean = any(band.low for band in bands)
    return "Lines are means over the seeds that finished, shades their range." if is_mean else ""


_ENDED: Final = "Thin, with a cross at its end or on the edge where it leaves the frame: a run that"
_LOST: Final = f"{_ENDED} diverged or became NaN."
_FAILED: Final = f"{_ENDED} failed or became NaN."


def _is_wide(values: Sequence[float]) -> bool:
    finite = [value for value in values if isfinite(value)]
    return bool(finite) and 0 < _DECADES * min(finite) < max(finite)


@dataclass(frozen=True)
class MonitoredPanel:
    """A figure of one column of `norms.csv` over training."""

    column: str
    layers: Literal["first", "average"]
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
)


def tid_over_time(comparison: Comparison) -> list[DrawnFigure]:
    """Online TID averaged over layers, and the fluctuation of the statistics, against steps."""
    return _panels(comparison, FLUCTUATIONS) + _evaluation_gap(comparison)


def _evaluation_gap(comparison: Comparison) -> list[DrawnFigure]:
    series = curves.gap_series(comparison.runs)
    if not series:
        return []
    svg = curves.draw_curves(
        series,
        order=comparison.names,
        title="Running against batch statistics",
        x_label="step",
        y_label="nats per token" if comparison.function is None else "loss",
        logarithmic=False,
        baselines={"no gap": 0.0},
        prefix=f"{comparison.anchor}over-time-gap",
        description="Loss by running statistics minus loss by batch statistics, against steps",
    )
    caption = (
        "Loss of a few validation batches when the norms use their running statistics, minus the "
        "loss when they use each batch's own. Above 0: evaluation costs something."
    )
    return [DrawnFigure(svg, caption)]


def gradients_over_time(comparison: Comparison) -> list[DrawnFigure]:
    """Parts of the norms' input gradients against steps; empty where none were recorded."""
    return _panels(comparison, GRADIENTS)


def _panels(comparison: Comparison, panels: Sequence[MonitoredPanel]) -> list[DrawnFigure]:
    drawn = []
    for panel in panels:
        series = curves.layer_series(comparison.runs, panel.column, panel.layers, panel.scale)
        if not any(isfinite(value) and value > 0 for line in series for value in line.y):
            continue
        svg = curves.draw_curves(
            series,
            order=comparison.names,
            title=panel.title,
            x_label="step",
            y_label=panel.y_label,
            logarithmic=True,
            baselines={},
            prefix=f"{comparison.anchor}over-time-{panel.column.replace('_', '-')}",
            description=f"{panel.title} against steps",
        )
        drawn.append(DrawnFigure(svg, panel.caption))
    return drawn


def tid_heat_maps(comparison: Comparison) -> list[tuple[ReportedRun, DrawnFigure]]:
    """One heat map of layer against step a run that has batch statistics; one color scale."""
    observed = mapped_runs(comparison)
    scale = heatmaps.color_scale(observed)
    if scale is None:
        return []
    return [
        (run, DrawnFigure(svg, _heat_map_caption(run)))
        for index, run in enumerate(observed[:MAX_MAPS])
        if (svg := heatmaps.draw_heat_map(run, scale, prefix=f"{comparison.anchor}heat-{index}"))
        is not None
    ]


def mapped_runs(comparison: Comparison) -> list[ReportedRun]:
    """The runs that have batch statistics over time, the first seed of each norm first."""
    numbers: dict[str, int] = {}
    places: list[tuple[int, ReportedRun]] = []
    for run in comparison.runs:
        if heatmaps.kinds_of(run):
            numbers[run.name] = numbers.get(run.name, -1) + 1
            places.append((numbers[run.name], run))
    return [run for _, run in sorted(places, key=lambda place: place[0])]


def _heat_map_caption(run: ReportedRun) -> str:
    kinds: Sequence[str] = heatmaps.kinds_of(run)
    what = "mean and variance" if len(kinds) > 1 else "quadratic mean"
    ending = "" if run.finished else f" The run is marked {run.shown_status}."
    return (
        f"{printable(run.name)}, seed {run.seed}: online TID of the {what} by layer (top: first) "
        f"and step.{ending}"
    )
