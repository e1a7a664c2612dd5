"""Section of a study with figures along an axis, on a grid, of variants, and of γ."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isnan, nan
from typing import Any, Final

from pandas import DataFrame, Series

from powernorm_lab.report.diagnoses import draw_scales, scale_pairs
from powernorm_lab.report.document import words
from powernorm_lab.report.drawing import DrawnFigure
from powernorm_lab.report.figures import (
    bands_of,
    perplexity_label,
    run_column,
    runs_by_name,
)
from powernorm_lab.report.lines import Band, Panel, grid, panels_figure, rows_figure
from powernorm_lab.report.measures import PERPLEXITY
from powernorm_lab.report.numerals import number, printable
from powernorm_lab.report.records import Comparison, ReportedRun
from powernorm_lab.report.statistics import REFERENCE, finite, mean
from powernorm_lab.runs import StudyInfo

TAIL: Final = 0.1
"""Final fraction of the run over which the training loss is averaged, as batches are noisy."""

LOGARITHMIC_FROM: Final = 4
"""Smallest ratio of the largest to the smallest value for a logarithmic axis."""

_WITHOUT_REFERENCE: Final = f"no {REFERENCE}"

# Values of the variants -----------------------------------------------------------------------

Measure = Callable[[ReportedRun], float | None]
"""Function from a run to a quantity, or None."""


_NUMBERS: Final = ("x", "y", "mean", "low", "high")


def points_of(comparison: Comparison, measure: Measure, missing: str = "") -> DataFrame:
    """Return a row for each variant, by label and in the order of the runs.

    Args:
        comparison: comparison with the runs.
        measure: the quantity.
        missing: note on a finished run without the quantity; empty to ignore it.

    Returns:
        `norm`; `x` and `y` on the study's axes; `mean`, `low` and `high` over finished runs, NaN
        without any that have the quantity; `lost`, the statuses of the other runs.
    """
    rows = {}
    for name, runs in runs_by_name(comparison.runs).items():
        lost = [run.status_words for run in runs if not run.finished]
        found = [measure(run) for run in runs if run.finished]
        lost += [missing] if missing and None in found else []
        known = finite(found)
        # A run without a result has no position, but other seeds may have one.
        placed = next((run for run in runs if run.x is not None), runs[0])
        ends = (mean(known), min(known), max(known)) if known else (nan, nan, nan)
        rows[name] = [placed.norm, "/".join(dict.fromkeys(lost)), placed.x, placed.y, *ends]
    table = DataFrame.from_dict(rows, orient="index", columns=["norm", "lost", *_NUMBERS])
    return table.astype(dict.fromkeys(_NUMBERS, float))


@dataclass(frozen=True)
class StudyQuantity:
    """A quantity of variants in a figure.

    Attributes:
        key: name in the ids of an SVG.
        title: description for titles.
        unit: unit of an axis.
        measure: function from a run to the quantity.
        higher_is_better: whether it is a score, not a loss.
        decimals: decimals of a number in a cell; None depends on the magnitude.
    """

    key: str
    title: str
    unit: str
    measure: Measure
    higher_is_better: bool = False
    decimals: int | None = None

    @property
    def direction(self) -> str:
        """Better direction in words."""
        return f"{'higher' if self.higher_is_better else 'lower'} is better"


def main_score(comparison: Comparison) -> StudyQuantity:
    """Return the main measure of a comparison, such as perplexity, BLEU or accuracy."""
    measure = comparison.measure
    name = measure.heading.removeprefix("test ")
    return StudyQuantity(
        "test",
        f"Test {name}",
        _unit(comparison, name),
        metric(measure.metric),
        measure.higher_is_better,
        measure.decimals if measure.decimals > 2 else None,
    )


def validation_score(comparison: Comparison) -> StudyQuantity:
    """Return the main measure on the validation data, else the validation loss."""
    name = comparison.metric.replace("test_", "valid_", 1)
    if not any(name in run.metrics for run in comparison.runs):
        return VALID_LOSS
    test = main_score(comparison)
    title = test.title.replace("Test", "Validation", 1)
    return replace(test, key="valid", title=title, measure=metric(name))


def _unit(comparison: Comparison, name: str) -> str:
    if comparison.metric == PERPLEXITY:
        return perplexity_label(comparison)
    return ", ".join(filter(None, (name, comparison.measure.unit)))


def metric(name: str) -> Measure:
    """Return the measure of a metric of the result."""
    return lambda run: run.metrics.get(name)


def tid_percent(key: str) -> Measure:
    """Return the measure of a TID in percent, by a key of `powernorm.records.TID`."""
    return lambda run: None if (value := run.tid_of(key)) is None else 100 * value


NATS: Final = "nats per target"
VALID_LOSS: Final = StudyQuantity(
    "valid", "Validation loss", NATS, metric("valid_loss"), decimals=3
)


_AVERAGE_TID: Final = StudyQuantity(
    "tid", "Variance TID, average over layers", "variance TID, %", tid_percent("var_avg")
)
_TIDS: Final = (
    StudyQuantity("var-tid", "Variance TID, average", "%", tid_percent("var_avg"), decimals=2),
    StudyQuantity("mean-tid", "Mean TID, average", "%", tid_percent("mean_avg"), decimals=2),
)


def _study(comparison: Comparison) -> StudyInfo:
    assert comparison.study is not None
    return comparison.study


# Along an axis -----------------------------------------------------------------------------------


def micro_batches(comparison: Comparison) -> list[DrawnFigure]:
    """Draw scores and TID of each norm against the study's axis (S20, Fig. 5)."""
    quantities = (main_score(comparison), validation_score(comparison), _AVERAGE_TID)
    return [drawn for quantity in quantities for drawn in _along_axis(comparison, quantity)]


def _along_axis(comparison: Comparison, quantity: StudyQuantity) -> list[DrawnFigure]:
    study = _study(comparison)
    points = points_of(comparison, quantity.measure)
    norms = list(points["norm"].unique())
    bands = [
        band
        for style, norm in enumerate(norms)
        for band in _band(norm, style, points[points["norm"] == norm])
    ]
    if not any(band.x for band in bands):
        return []
    references = points.loc[points["x"].isna(), "mean"].dropna().to_dict()
    # Scores near 0 do not suit a logarithmic axis.
    logarithmic = not quantity.higher_is_better and _spans_decades(bands, references)
    return panels_figure(
        [Panel(quantity.title, quantity.unit, bands, references, logarithmic=logarithmic)],
        caption=words("along_axis", quantity, study["x_label"], logarithmic, references),
        x_label=study["x_label"],
        logarithmic_x=study["logarithmic"],
        prefix=f"{comparison.anchor}study-{quantity.key}",
    )


def _spans_decades(bands: Sequence[Band], references: Mapping[str, float]) -> bool:
    """Return whether the worst variant would squeeze the others to the bottom of a linear axis."""
    values = finite([*references.values(), *(value for band in bands for value in band.mean)])
    return bool(values) and max(values) > LOGARITHMIC_FROM * min(values) > 0


def _band(label: str, style: int, points: DataFrame) -> list[Band]:
    """Return the line through points with a position; empty without any."""
    placed = points.dropna(subset="x").sort_values("x", kind="stable")
    known = placed.dropna(subset="mean")
    lost = placed.loc[placed["lost"] != "", "x"].tolist()
    if known.empty and not lost:
        return []
    x, mean, low, high = (known[name].tolist() for name in ("x", "mean", "low", "high"))
    return [Band(label, style, x, mean, low, high, lost)]


def lowest_layers(comparison: Comparison) -> list[DrawnFigure]:
    """Draw score gap and TID against the number of layers, and over training (W22, Fig. 3)."""
    score = main_score(comparison)
    gaps = points_of(comparison, _gap_to_reference(comparison, score.measure), _WITHOUT_REFERENCE)
    tids = points_of(comparison, tid_percent("var_last"))
    is_unknown = gaps["lost"].str.contains(_WITHOUT_REFERENCE, regex=False)
    title = f"{score.title}, gap to {REFERENCE}"
    drawn = panels_figure(
        [
            Panel(title, score.unit, _band("bn", 0, gaps), zero=True),
            Panel("Variance TID, last BN layer", "%", _band("bn", 1, tids)),
        ],
        caption=words("lowest_layers", score.higher_is_better, is_unknown.any()),
        x_label=_study(comparison)["x_label"],
        prefix=f"{comparison.anchor}study-lowest",
    )
    return drawn + _gap_over_time(comparison)


def _gap_to_reference(comparison: Comparison, measure: Measure) -> Measure:
    """Return the difference of a quantity to LayerNorm's with the same seed and remark."""

    def gap(run: ReportedRun) -> float | None:
        theirs = next(
            (
                one
                for one in comparison.runs
                if one.finished
                and (one.seed, one.remark) == (run.seed, run.remark)
                and (one.norm if run.remark else one.name) == REFERENCE
            ),
            None,
        )
        value, reference = measure(run), None if theirs is None else measure(theirs)
        return None if value is None or reference is None else value - reference

    return gap


def _gap_over_time(comparison: Comparison) -> list[DrawnFigure]:
    """Draw gap and TID over training for the variant with the most BN layers, paired by seed."""
    placed = [run for run in comparison.runs if run.x is not None and run.name != REFERENCE]
    if not placed:
        return []
    most = max(run.x for run in placed if run.x is not None)
    runs = [run for run in placed if run.x == most]
    gaps = bands_of({"gap": runs}, partial(_loss_gap, comparison))
    tids = bands_of({"gap": (), "TID": runs}, _last_tid)
    panels = [
        Panel("Validation loss, bn minus ln", NATS, gaps, zero=True),
        Panel("Variance TID, last BN layer", "%", tids, logarithmic=True),
    ]
    if not all(panel.bands for panel in panels):
        return []
    unfinished = [run for run in runs if not run.finished]
    return panels_figure(
        panels,
        caption=words("most_layers", most, unfinished),
        x_label="step",
        prefix=f"{comparison.anchor}study-time",
    )


def _loss_gap(comparison: Comparison, run: ReportedRun) -> Series:
    theirs = next((r for r in comparison.runs if (r.name, r.seed) == (REFERENCE, run.seed)), None)
    if theirs is None:
        return Series(dtype=float)
    return (run_column(run, "valid_loss") - run_column(theirs, "valid_loss")).dropna()


def _last_tid(run: ReportedRun) -> Series:
    known = run.samples.dropna(subset="var_tid")
    last = known[known["layer"].isin(known["layer"].unique()[-1:])]
    return 100 * last.groupby("step")["var_tid"].last()


# On a grid ---------------------------------------------------------------------------------------


def penalties(comparison: Comparison) -> list[DrawnFigure]:
    """Draw score, validation loss and TID by penalty (W22, Fig. 5)."""
    return _grids(comparison, (main_score(comparison), VALID_LOSS, *_TIDS))


def alphas(comparison: Comparison) -> list[DrawnFigure]:
    """Draw scores by forward and backward α; the paper chooses on valid data (S20, App. A)."""
    return _grids(comparison, (validation_score(comparison), main_score(comparison)))


def _grids(comparison: Comparison, quantities: Sequence[StudyQuantity]) -> list[DrawnFigure]:
    """Draw a map of each quantity that a variant of the grid has."""
    study, drawn = _study(comparison), []
    for quantity in quantities:
        points = points_of(comparison, quantity.measure)
        placed = points.dropna(subset=["x", "y"])
        values = placed["mean"].dropna()
        is_score = quantity.key in ("valid", "test")
        if len(values) or (is_score and (placed["lost"] != "").any()):
            is_percent = quantity.unit.endswith("%")
            svg = grid(
                {(row.x, row.y): _cell(row, quantity) for row in placed.itertuples()},
                float(values.max() if quantity.higher_is_better else values.min()),
                # Other titles include their unit.
                title=f"{quantity.title}, %" if is_percent else quantity.title,
                x_label=study["x_label"],
                y_label=study.get("y_label", ""),
                prefix=f"{comparison.anchor}study-{quantity.key}",
                description=f"{quantity.title} by {study['x_label']} and "
                f"{study.get('y_label', '')}",
            )
            drawn.append(DrawnFigure(svg, _grid_caption(quantity, points)))
    return drawn


def _cell(point: Any, quantity: StudyQuantity) -> tuple[float, str]:
    """Return the number with its text, or NaN with the statuses of the runs."""
    if isnan(point.mean):
        return nan, point.lost or "–"
    text = number(point.mean, quantity.decimals)
    return point.mean, f"{text}*" if point.lost else text


def _grid_caption(quantity: StudyQuantity, points: DataFrame) -> str:
    is_placed = points[["x", "y"]].notna().all(axis=1)
    others = [
        (name, number(value, quantity.decimals))
        for name, value in points.loc[~is_placed, "mean"].dropna().items()
    ]
    return words("grid", quantity, NATS, others, (points.loc[is_placed, "lost"] != "").any())


# Variants ----------------------------------------------------------------------------------------


def layernorm_parts(comparison: Comparison) -> list[DrawnFigure]:
    """Draw final scores, final losses, and learning curves of each part (X19, Fig. 1, 2)."""
    return [
        *scores_of_variants(comparison),
        *_fit_and_overfit(comparison),
        *_losses_over_time(comparison),
    ]


def scores_of_variants(comparison: Comparison) -> list[DrawnFigure]:
    """Draw a dot for the score of each variant."""
    score = main_score(comparison)
    points = points_of(comparison, score.measure)
    return _dots(
        list(points.index),
        {score.title: points},
        notes=list(map(_note, points.itertuples())),
        title=score.title,
        x_label=score.unit,
        caption=f"Mean over seeds, and a bar from the lowest to the highest; {score.direction}.",
        prefix=f"{comparison.anchor}study-dots",
    )


def _dots(names: Sequence[str], points: Mapping[str, DataFrame], **texts: Any) -> list[DrawnFigure]:
    """Draw a dot for each quantity and variant; other arguments are those of `rows_figure`."""
    rows = range(len(names))
    bands = [
        Band(label, style, rows, *(found[end].tolist() for end in ("mean", "low", "high")))
        for style, (label, table) in enumerate(points.items())
        for found in [table.reindex(names)]
    ]
    return rows_figure(names, bands, **texts)


def _note(point: Any) -> str:
    return f"{point.lost}{' (some seeds)' * bool(point.lost and not isnan(point.mean))}"


def future(comparison: Comparison) -> list[DrawnFigure]:
    """Draw scores and gaps to LayerNorm of each norm, with and without the causal mask.

    The reference is the LayerNorm of the same form, so that a gap in one form only comes from the
    leak.
    """
    score = main_score(comparison)
    gap = _gap_to_reference(comparison, metric("test_loss"))
    title = f"Test loss, gap to {REFERENCE} of its form"
    return [
        *_both_forms(comparison, score, logarithmic=True),
        *_both_forms(comparison, StudyQuantity("gap", title, NATS, gap)),
    ]


def _both_forms(
    comparison: Comparison, quantity: StudyQuantity, *, logarithmic: bool = False
) -> list[DrawnFigure]:
    norms = list(dict.fromkeys(run.norm for run in comparison.runs))
    points = {}
    for remark in dict.fromkeys(run.remark for run in comparison.runs):
        runs = [run for run in comparison.runs if run.remark == remark]
        found = points_of(replace(comparison, runs=runs), quantity.measure).set_index("norm")
        points[remark or "causal"] = found[~found.index.duplicated(keep="last")]
    return _dots(
        norms,
        points,
        title=quantity.title,
        x_label=quantity.unit,
        logarithmic=logarithmic,
        caption=words("both_forms", quantity, logarithmic),
        prefix=f"{comparison.anchor}study-{quantity.key}",
    )


def _fit_and_overfit(comparison: Comparison) -> list[DrawnFigure]:
    points = points_of(comparison, _train_loss)
    return _dots(
        list(points.index),
        {"training loss": points, "validation loss": points_of(comparison, _last_valid_loss)},
        notes=list(map(_note, points.itertuples())),
        title="Do γ and β overfit?",
        x_label="nats per target, at the end",
        caption=words("overfit", TAIL),
        prefix=f"{comparison.anchor}study-overfit",
    )


def _train_loss(run: ReportedRun) -> float | None:
    losses = run_column(run, "train_loss")
    return float(losses[(1 - TAIL) * losses.index.max() :].mean()) if len(losses) else None


def _last_valid_loss(run: ReportedRun) -> float | None:
    losses = run_column(run, "valid_loss")
    return float(losses.iloc[-1]) if len(losses) else None


def _losses_over_time(comparison: Comparison) -> list[DrawnFigure]:
    columns = {"train_loss": "Training loss", "valid_loss": "Validation loss"}
    groups = runs_by_name(comparison.runs)
    return panels_figure(
        [
            Panel(title, NATS, bands_of(groups, partial(run_column, column=column)))
            for column, title in columns.items()
        ],
        caption="Losses over training.",
        x_label="step",
        prefix=f"{comparison.anchor}study-losses",
    )


# γ -----------------------------------------------------------------------------------------------

_CENTERED: Final = frozenset({"bn", "rbn", "brn"})
"""Norms with the deviation around the mean, σ_B; the others have ψ_B."""


def scales(comparison: Comparison) -> list[DrawnFigure]:
    """Draw γ against the batch's deviation for each variant's first seed with scales."""
    shown: dict[str, ReportedRun] = {}
    for run in comparison.runs:
        if any(map(scale_pairs, run.scales)):
            shown.setdefault(run.name, run)
    return [
        drawn
        for index, run in enumerate(shown.values())
        for drawn in draw_scales(
            run.scales,
            lead=f"{printable(run.name)}, seed {run.seed}: one point per feature",
            below=words("scale_bound", run.norm in _CENTERED, run.norm == "pnv"),
            ending="" if run.finished else f" The run is marked {run.shown_status}.",
            owner=printable(run.name),
            prefix=f"{comparison.anchor}study-scales-{index}",
        )
    ]


# By study ----------------------------------------------------------------------------------------

FIGURES: Final[Mapping[str, Callable[[Comparison], Sequence[DrawnFigure]]]] = {
    "micro-batches": micro_batches,
    "lowest-layers": lowest_layers,
    "penalties": penalties,
    "alphas": alphas,
    "scales": scales,
    "layernorm-parts": layernorm_parts,
    "future": future,
}
"""Drawing functions by the study's name; other studies are drawn by the axes of their variants."""


def study_figures(comparison: Comparison) -> Sequence[DrawnFigure]:
    """Draw the figures of a study."""
    draw = FIGURES.get(_study(comparison)["name"])
    if draw is None and any(run.y is not None for run in comparison.runs):
        draw = alphas
    elif draw is None and any(run.x is not None for run in comparison.runs):
        draw = micro_batches
    return (draw or scores_of_variants)(comparison)
