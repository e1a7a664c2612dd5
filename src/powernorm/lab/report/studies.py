"""The section of a study: its figure first, and what became of the runs that have no number."""

from collections.abc import Callable, Mapping, Sequence
from math import nan
from types import MappingProxyType
from typing import Final

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.patches import Rectangle

from powernorm.lab.report import scatters, study_figures
from powernorm.lab.report.document import part
from powernorm.lab.report.drawing import figure, inline_svg, paint, plain_axes
from powernorm.lab.report.figures import DrawnFigure
from powernorm.lab.report.numerals import STATUS_WORDS, number, printable
from powernorm.lab.report.records import Comparison
from powernorm.lab.report.study_values import (
    NATS,
    VALID_LOSS,
    StudyPoint,
    StudyQuantity,
    main_score,
    points_of,
    tid_percent,
    validation_score,
)
from powernorm.runs import StudyInfo

# The figures of studies on a grid: a map with a number in every cell.


_TIDS: Final = (
    StudyQuantity("var-tid", "Variance TID, average", "%", tid_percent("var_avg"), decimals=2),
    StudyQuantity("mean-tid", "Mean TID, average", "%", tid_percent("mean_avg"), decimals=2),
)


def penalties(comparison: Comparison, study: StudyInfo) -> list[DrawnFigure]:
    """Score, validation loss and TID by penalty (W22, Fig. 5)."""
    return grids(comparison, study, (main_score(comparison), VALID_LOSS, *_TIDS))


def alphas(comparison: Comparison, study: StudyInfo) -> list[DrawnFigure]:
    """Score by forward and backward α; the paper chooses on the validation data (S20, App. A)."""
    return grids(comparison, study, (validation_score(comparison), main_score(comparison)))


def grids(
    comparison: Comparison, study: StudyInfo, quantities: Sequence[StudyQuantity]
) -> list[DrawnFigure]:
    """One map a quantity that some variant of the grid has."""
    drawn = []
    for quantity in quantities:
        points = points_of(comparison, quantity.measure)
        placed = [point for point in points if point.x is not None and point.y is not None]
        others = [point for point in points if point not in placed and point.value is not None]
        if any(point.value is not None or point.lost for point in placed) and (
            quantity.key in {"valid", "test"} or any(point.value for point in placed)
        ):
            svg = _draw(placed, study, quantity, f"{comparison.anchor}study-{quantity.key}")
            drawn.append(DrawnFigure(svg, _caption(quantity, placed, others)))
    return drawn


def _caption(
    quantity: StudyQuantity, placed: Sequence[StudyPoint], others: Sequence[StudyPoint]
) -> str:
    best = "highest" if quantity.higher_is_better else "lowest"
    percent = " in percent" if quantity.unit.endswith("%") else ""
    unit = f", {NATS}" if quantity.unit == NATS else percent
    notes = [f"{quantity.title}{unit}, mean over seeds. Framed: the {best}."]
    for point in others:
        if point.value is not None:
            value = number(point.value.mean, quantity.decimals)
            notes.append(f"{printable(point.name)} beside it: {value}.")
    if any(point.lost for point in placed):
        notes.append("Grey: no run finished. An asterisk: not all seeds did.")
    return " ".join(notes)


def _named(quantity: StudyQuantity) -> str:
    """Title, with the unit where that is percent; the words of a perplexity or BLEU say theirs."""
    return f"{quantity.title}, %" if quantity.unit.endswith("%") else quantity.title


def _draw(
    points: Sequence[StudyPoint], study: StudyInfo, quantity: StudyQuantity, prefix: str
) -> Markup:
    columns = sorted({point.x for point in points if point.x is not None})
    rows = sorted({point.y for point in points if point.y is not None})
    values = [point.value.mean for point in points if point.value is not None]
    scale = Normalize(min(values), max(values)) if values else Normalize(0, 1)
    with figure(1.1 + 0.42 * max(len(rows), 3)) as drawn:
        axes = drawn.subplots()
        plain_axes(axes, _named(quantity), study["x_label"], study.get("y_label", ""))
        axes.grid(visible=False)
        _paint(axes, points, columns, rows, scale)
        best = (max if quantity.higher_is_better else min)(values, default=nan)
        for point in points:
            place = columns.index(point.x or 0.0), rows.index(point.y or 0.0)
            _write(axes, point, place, quantity, scale)
            if point.value is not None and point.value.mean == best:
                _frame(axes, place, _ink(best, scale))
        axes.set_xticks(range(len(columns)), [f"{x:g}" for x in columns])
        axes.set_yticks(range(len(rows)), [f"{y:g}" for y in rows])
        axes.tick_params(length=0)
        axes.set_frame_on(False)
        description = f"{quantity.title} by {study['x_label']} and {study.get('y_label', '')}"
        return inline_svg(drawn, prefix, description)


def _paint(
    axes: Axes,
    points: Sequence[StudyPoint],
    columns: Sequence[float],
    rows: Sequence[float],
    scale: Normalize,
) -> None:
    table = np.full((len(rows), len(columns)), nan)
    for point in points:
        if point.value is not None:
            table[rows.index(point.y or 0.0), columns.index(point.x or 0.0)] = point.value.mean
    paint(axes, table, scale)


def _write(
    axes: Axes, point: StudyPoint, place: tuple[int, int], quantity: StudyQuantity, scale: Normalize
) -> None:
    """The number, or what became of the runs, in black or white as the cell needs it."""
    if point.value is None:
        text, ink = "/".join(point.lost) or "–", "#111111"
    else:
        text = number(point.value.mean, quantity.decimals) + ("*" if point.lost else "")
        ink = _ink(point.value.mean, scale)
    axes.text(*place, text, ha="center", va="center", fontsize=9, color=ink)


def _ink(value: float, scale: Normalize) -> str:
    """Black on a light cell, white on a dark one."""
    return "#111111" if float(scale(value)) > 0.5 else "#ffffff"


def _frame(axes: Axes, place: tuple[int, int], ink: str) -> None:
    corner = place[0] - 0.47, place[1] - 0.46
    axes.add_patch(
        Rectangle(corner, 0.94, 0.92, fill=False, edgecolor=ink, linewidth=2.5, zorder=3)
    )


StudyFigures = Callable[[Comparison, StudyInfo], Sequence[DrawnFigure]]

FIGURES: Final[Mapping[str, StudyFigures]] = MappingProxyType(
    {
        "micro-batches": study_figures.micro_batches,
        "lowest-layers": study_figures.lowest_layers,
        "penalties": penalties,
        "alphas": alphas,
        "scales": scatters.scales,
        "layernorm-parts": study_figures.layernorm_parts,
        "future": study_figures.future,
    }
)
"""By the name of the study; one that is not here is drawn by the shape of its variants."""


def study_contents(comparison: Comparison) -> list[Markup]:
    """Source, figures and lost runs of a study; empty for a comparison of norms as such."""
    study = comparison.study
    if study is None:
        return []
    drawn = FIGURES.get(study["name"], _by_shape)(comparison, study)
    contents = [
        part(
            "paragraph",
            f"After {study['source']}, with the model and data of this comparison.",
            kind="soft",
        )
    ]
    if drawn:
        contents.append(part("gallery", drawn))
    else:
        contents.append(part("paragraph", "No run has a number to draw."))
    return contents + _lost_runs(comparison)


def _by_shape(comparison: Comparison, study: StudyInfo) -> Sequence[DrawnFigure]:
    if any(run.y is not None for run in comparison.runs):
        return alphas(comparison, study)
    if any(run.x is not None for run in comparison.runs):
        return study_figures.micro_batches(comparison, study)
    return study_figures.scores_of_variants(comparison)


def _lost_runs(comparison: Comparison) -> list[Markup]:
    lost = [
        f"{run.name}, seed {run.seed}: {STATUS_WORDS[run.shown_status]}"
        for run in comparison.runs
        if not run.finished
    ]
    if not lost:
        return []
    words = f"Without a number in the figures: {'; '.join(lost)}."
    return [part("paragraph", words, kind="alarm")]
