"""The figures of studies along an axis, and of those without one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from statistics import fmean
from typing import Final

from powernorm.lab.report.figures import DrawnFigure
from powernorm.lab.report.lines import Band, Panel, UnfinishedLine, draw_panels
from powernorm.lab.report.records import Comparison, ReportedRun
from powernorm.lab.report.statistics import REFERENCE
from powernorm.lab.report.study_dots import DotRow, draw_dots
from powernorm.lab.report.study_values import (
    NATS,
    Measure,
    SeedRange,
    StudyPoint,
    StudyQuantity,
    main_score,
    metric,
    over_time,
    points_of,
    tid_percent,
    validation_score,
)
from powernorm.runs import StudyInfo

TAIL: Final = 0.1
"""Part of the run over whose end the training loss is averaged: single batches are noisy."""

LOGARITHMIC_FROM: Final = 4
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""

_AVERAGE_TID: Final = StudyQuantity(
    "tid", "Variance TID, average over layers", "variance TID, %", tid_percent("var_avg")
)
_SEEDS: Final = "With several seeds: their mean, and a band from the lowest to the highest."
_LOST: Final = "A cross on the upper edge: a run without a number."
_WITHOUT_REFERENCE: Final = f"no {REFERENCE}"
_THIN: Final = (
    "Thin: runs that did not finish, which are no part of a mean. A cross ends one that broke "
    "down, on the edge where it has left the frame."
)


def micro_batches(comparison: Comparison, study: StudyInfo) -> list[DrawnFigure]:
    """Scores and TID of each norm against the study's axis (S20, Fig. 5)."""
    quantities = (main_score(comparison), validation_score(comparison), _AVERAGE_TID)
    return [drawn for quantity in quantities for drawn in _along_axis(comparison, study, quantity)]


def _along_axis(
    comparison: Comparison, study: StudyInfo, quantity: StudyQuantity
) -> list[DrawnFigure]:
    title = quantity.title
    points = points_of(comparison, quantity.measure)
    norms = list(dict.fromkeys(point.norm for point in points))
    bands = [
        band
        for norm in norms
        if (band := _band(norm, norms.index(norm), [p for p in points if p.norm == norm]))
    ]
    if not any(band.x for band in bands):
        return []
    references = {
        point.name: point.value.mean for point in points if point.x is None and point.value
    }
    # A score of almost nothing is no scale.
    logarithmic = not quantity.higher_is_better and _spans_decades(bands, references)
    svg = draw_panels(
        [Panel(title, quantity.unit, bands, references, logarithmic=logarithmic)],
        x_label=study["x_label"],
        logarithmic_x=study["logarithmic"],
        prefix=f"{comparison.anchor}study-{quantity.key}",
        description=f"{title} against {study['x_label']} for {', '.join(norms)}",
    )
    scale = ", logarithmic" if logarithmic else ""
    notes = [f"{title} against {study['x_label']}{scale}; {quantity.direction}."]
    if references:
        notes.append(f"Dotted: {', '.join(references)}, which does not depend on them.")
    return [DrawnFigure(svg, " ".join([*notes, *_notes(bands)]))]


def _spans_decades(bands: Sequence[Band], references: Mapping[str, float]) -> bool:
    """Whether one variant is so much worse that the others would be a line at the bottom."""
    values = [*references.values(), *(value for band in bands for value in band.mean)]
    return bool(values) and max(values) > LOGARITHMIC_FROM * min(values) > 0


def _notes(bands: Sequence[Band]) -> list[str]:
    notes = [_SEEDS] if any(list(band.low) != list(band.high) for band in bands) else []
    if any(band.lost for band in bands):
        notes.append(_LOST)
    if any(band.traces for band in bands):
        notes.append(_THIN)
    return notes


def _band(label: str, style: int, points: Sequence[StudyPoint]) -> Band | None:
    """The line through points that have a place; None where none has."""
    placed = sorted(
        ((point.x, point) for point in points if point.x is not None), key=lambda pair: pair[0]
    )
    known = [(x, point.value) for x, point in placed if point.value is not None]
    lost = [x for x, point in placed if point.lost]
    if not known and not lost:
        return None
    return Band(
        label,
        style,
        [x for x, _ in known],
        [value.mean for _, value in known],
        [value.low for _, value in known],
        [value.high for _, value in known],
        lost,
    )


def lowest_layers(comparison: Comparison, study: StudyInfo) -> list[DrawnFigure]:
    """Score gap and TID against the number of layers, and over training (W22, Fig. 3)."""
    score = main_score(comparison)
    gaps = points_of(comparison, _gap_to_reference(comparison, score.measure), _WITHOUT_REFERENCE)
    tids = points_of(comparison, tid_percent("var_last"))
    panels = [
        Panel(title, unit, [band], zero=zero)
        for title, unit, points, zero in (
            (f"{score.title}, gap to {REFERENCE}", score.unit, gaps, True),
            ("Variance TID, last BN layer", "%", tids, False),
        )
        if (band := _band("bn", int(not zero), points)) is not None
    ]
    drawn = []
    if panels:
        svg = draw_panels(
            panels,
            x_label=study["x_label"],
            prefix=f"{comparison.anchor}study-lowest",
            description=f"{score.title}, gap to LayerNorm, and variance TID of the last "
            "BatchNorm layer, against the number of layers with BatchNorm",
        )
        notes = _notes([band for panel in panels for band in panel.bands])
        worse = "below" if score.higher_is_better else "above"
        caption = f"LayerNorm stands in the layers above; {worse} 0 is worse than LayerNorm."
        if any(_WITHOUT_REFERENCE in point.lost for point in gaps):
            notes.append("So does a run whose gap is unknown, for ln did not finish with its seed.")
        drawn.append(DrawnFigure(svg, " ".join([caption, *notes])))
    return drawn + _gap_over_time(comparison)


def _gap_to_reference(comparison: Comparison, measure: Measure) -> Measure:
    """A quantity minus LayerNorm's, with the same seed and, where a run has one, remark."""

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
    """Of the run with the most BN layers, seed by seed."""
    placed = [run for run in comparison.runs if run.x is not None and run.name != REFERENCE]
    if not placed:
        return []
    most = max(run.x for run in placed if run.x is not None)
    runs = [run for run in placed if run.x == most]
    gap = _over_training("gap", 0, [(run, _loss_gap(comparison, run)) for run in runs])
    tid = _over_training("TID", 1, [(run, _last_tid(run)) for run in runs])
    if gap is None or tid is None:
        return []
    svg = draw_panels(
        [
            Panel("Validation loss, bn minus ln", NATS, [gap], zero=True),
            Panel("Variance TID, last BN layer", "%", [tid], logarithmic=True),
        ],
        x_label="step",
        prefix=f"{comparison.anchor}study-time",
        description="Gap of the validation loss between BatchNorm and LayerNorm, and variance TID "
        "of the last BatchNorm layer, against steps",
    )
    caption = f"BatchNorm in the {most:g} lowest layers, online TID (logarithmic) against steps."
    ended = [f"seed {run.seed} {run.shown_status}" for run in runs if not run.finished]
    notes = [f"Of this, {', '.join(ended)}."] if ended else []
    return [DrawnFigure(svg, " ".join([caption, *_notes([gap, tid]), *notes]))]


def _over_training(
    label: str, style: int, tables: Sequence[tuple[ReportedRun, Mapping[float, float]]]
) -> Band | None:
    """Mean and extremes over the finished runs at the steps that all of them have.

    A mean over the runs that are left would jump where one ends, so the others are lines of their
    own. None where no run has a number.
    """
    finished = [table for run, table in tables if run.finished and table]
    shared = set[float]().union(*finished[:1]).intersection(*finished)
    ranges = [
        (step, found)
        for step in sorted(shared)
        if (found := SeedRange.of(table[step] for table in finished))
    ]
    traces = []
    for run, table in tables:
        known = [(step, value) for step, value in sorted(table.items()) if isfinite(value)]
        if known and not run.finished:
            steps, values = zip(*known, strict=True)
            traces.append(UnfinishedLine(steps, values, run.broke_down))
    if not ranges and not traces:
        return None
    return Band(
        label,
        style,
        [step for step, _ in ranges],
        [found.mean for _, found in ranges],
        [found.low for _, found in ranges],
        [found.high for _, found in ranges],
        traces=traces,
    )


def _loss_gap(comparison: Comparison, run: ReportedRun) -> dict[float, float]:
    references = [one for one in comparison.runs if one.name == REFERENCE and one.seed == run.seed]
    theirs, ours = over_time(references, "valid_loss"), over_time([run], "valid_loss")
    return {step: ours[step] - theirs[step] for step in ours if step in theirs}


def _last_tid(run: ReportedRun) -> dict[float, float]:
    samples = [sample for sample in run.samples if sample.values.get("var_tid") is not None]
    if not samples:
        return {}
    last = list(dict.fromkeys(sample.layer for sample in samples))[-1]
    return {
        float(sample.step): 100 * value
        for sample in samples
        if sample.layer == last and (value := sample.values.get("var_tid")) is not None
    }


def layernorm_parts(comparison: Comparison, study: StudyInfo) -> list[DrawnFigure]:
    """Final score, losses at the end, and learning curves of each part (X19, Fig. 1, 2)."""
    del study
    return [
        *scores_of_variants(comparison),
        *_fit_and_overfit(comparison),
        *_losses_over_time(comparison),
    ]


def scores_of_variants(comparison: Comparison) -> list[DrawnFigure]:
    """One dot a variant."""
    score = main_score(comparison)
    points = points_of(comparison, score.measure)
    rows = [DotRow(point.name, [point.value], _note(point)) for point in points]
    if not any(point.value for point in points):
        return []
    svg = draw_dots(
        rows,
        [score.title],
        title=score.title,
        x_label=score.unit,
        prefix=f"{comparison.anchor}study-dots",
        description=f"{score.title} of each variant",
    )
    caption = f"Mean over seeds, and a bar from the lowest to the highest; {score.direction}."
    return [DrawnFigure(svg, caption)]


def future(comparison: Comparison, study: StudyInfo) -> list[DrawnFigure]:
    """Each norm with the causal mask and without: its score, and its loss against LayerNorm's.

    A gap of one form only is one of the leak: that LayerNorm is of the same form.
    """
    del study
    score = main_score(comparison)
    gap = _gap_to_reference(comparison, metric("test_loss"))
    return [
        *_both_forms(comparison, score, logarithmic=True),
        *_both_forms(
            comparison,
            StudyQuantity("gap", f"Test loss, gap to {REFERENCE} of its form", NATS, gap),
        ),
    ]


def _both_forms(
    comparison: Comparison, quantity: StudyQuantity, *, logarithmic: bool = False
) -> list[DrawnFigure]:
    remarks = list(dict.fromkeys(run.remark for run in comparison.runs))
    columns = [
        {
            point.norm: point
            for point in points_of(
                replace(comparison, runs=[run for run in comparison.runs if run.remark == remark]),
                quantity.measure,
            )
        }
        for remark in remarks
    ]
    norms = dict.fromkeys(run.norm for run in comparison.runs)
    rows = [
        DotRow(norm, [one.value if (one := column.get(norm)) else None for column in columns])
        for norm in norms
    ]
    if not any(value for row in rows for value in row.values):
        return []
    svg = draw_dots(
        rows,
        [remark or "causal" for remark in remarks],
        title=quantity.title,
        x_label=quantity.unit,
        prefix=f"{comparison.anchor}study-{quantity.key}",
        description=f"{quantity.title} of each norm, with the causal mask and without",
        logarithmic=logarithmic,
    )
    scale = ", logarithmic" if logarithmic else ""
    caption = (
        f"{quantity.title}{scale}: mean over seeds, and a bar from the lowest to the highest; "
        f"{quantity.direction}."
    )
    return [DrawnFigure(svg, caption)]


def _note(point: StudyPoint) -> str:
    return "/".join(point.lost) + (" (some seeds)" if point.lost and point.value else "")


def _fit_and_overfit(comparison: Comparison) -> list[DrawnFigure]:
    trained, valid = points_of(comparison, _train_loss), points_of(comparison, _last_valid_loss)
    rows = [
        DotRow(one.name, [one.value, other.value], _note(one))
        for one, other in zip(trained, valid, strict=True)
    ]
    if not any(value for row in rows for value in row.values):
        return []
    svg = draw_dots(
        rows,
        ["training loss", "validation loss"],
        title="Do γ and β overfit?",
        x_label="nats per target, at the end",
        prefix=f"{comparison.anchor}study-overfit",
        description="Training and validation loss of each variant at the end of training",
    )
    caption = (
        "A part that overfits lies further left in training and further right in validation: a "
        f"longer line. Training loss: mean of the last {100 * TAIL:.0f} % of the steps, with "
        "dropout where there is some."
    )
    return [DrawnFigure(svg, caption)]


def _train_loss(run: ReportedRun) -> float | None:
    losses = over_time([run], "train_loss")
    if not losses:
        return None
    start = (1 - TAIL) * max(losses)
    return fmean(loss for step, loss in losses.items() if step >= start)


def _last_valid_loss(run: ReportedRun) -> float | None:
    losses = over_time([run], "valid_loss")
    return losses[max(losses)] if losses else None


def _losses_over_time(comparison: Comparison) -> list[DrawnFigure]:
    panels: list[Panel] = []
    for title, column in (("Training loss", "train_loss"), ("Validation loss", "valid_loss")):
        bands = []
        for style, name in enumerate(comparison.names):
            runs = [run for run in comparison.runs if run.name == name]
            band = _over_training(name, style, [(run, over_time([run], column)) for run in runs])
            if band is not None:
                bands.append(band)
        if bands:
            panels.append(Panel(title, NATS, bands))
    if not panels:
        return []
    svg = draw_panels(
        panels,
        x_label="step",
        prefix=f"{comparison.anchor}study-losses",
        description="Training and validation loss of each variant against steps",
    )
    notes = _notes([band for panel in panels for band in panel.bands])
    return [DrawnFigure(svg, " ".join(["Losses over training.", *notes]))]
