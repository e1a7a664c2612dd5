"""The figures of studies on a grid: a map with a number in every cell."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Final

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.patches import Rectangle

from powernorm.lab.report.drawing import figure, inline_svg, paint, plain_axes
from powernorm.lab.report.figures import DrawnFigure
from powernorm.lab.report.numerals import number, printable
from powernorm.lab.report.records import Comparison
from powernorm.lab.report.study_values import Measure, Point, metric, points_of, tid_percent
from powernorm.runs import StudyInfo


@dataclass(frozen=True)
class Quantity:
    """What a map shows."""

    key: str
    title: str
    measure: Measure
    decimals: int


LOSSES: Final = (
    Quantity("valid", "Validation loss", metric("valid_loss"), 3),
    Quantity("test", "Test loss", metric("test_loss"), 3),
)
_TIDS: Final = (
    Quantity("var-tid", "Variance TID, average, %", tid_percent("var_avg"), 2),
    Quantity("mean-tid", "Mean TID, average, %", tid_percent("mean_avg"), 2),
)


def penalties(comparison: Comparison, study: StudyInfo) -> list[DrawnFigure]:
    """Validation loss and TID by penalty (W22, Fig. 5)."""
    return grids(comparison, study, (LOSSES[0], *_TIDS))


def alphas(comparison: Comparison, study: StudyInfo) -> list[DrawnFigure]:
    """Losses by forward and backward α (S20, App. A)."""
    return grids(comparison, study, LOSSES)


def grids(
    comparison: Comparison, study: StudyInfo, quantities: Sequence[Quantity]
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


def _caption(quantity: Quantity, placed: Sequence[Point], others: Sequence[Point]) -> str:
    unit = ", nats per token" if "loss" in quantity.title else ""
    notes = [f"{quantity.title}{unit}, mean over seeds. Framed: the lowest."]
    for point in others:
        if point.value is not None:
            value = number(point.value.mean, quantity.decimals)
            notes.append(f"{printable(point.name)} beside it: {value}.")
    if any(point.lost for point in placed):
        notes.append("Grey: no run finished. An asterisk: not all seeds did.")
    return " ".join(notes)


def _draw(points: Sequence[Point], study: StudyInfo, quantity: Quantity, prefix: str) -> Markup:
    columns = sorted({point.x for point in points if point.x is not None})
    rows = sorted({point.y for point in points if point.y is not None})
    values = [point.value.mean for point in points if point.value is not None]
    scale = Normalize(min(values), max(values)) if values else Normalize(0, 1)
    with figure(1.1 + 0.42 * max(len(rows), 3)) as drawn:
        axes = drawn.subplots()
        plain_axes(axes, quantity.title, study["x_label"], study.get("y_label", ""))
        axes.grid(visible=False)
        _paint(axes, points, columns, rows, scale)
        lowest = min(values, default=nan)
        for point in points:
            place = columns.index(point.x or 0.0), rows.index(point.y or 0.0)
            _write(axes, point, place, quantity, scale)
            if point.value is not None and point.value.mean == lowest:
                _frame(axes, place)
        axes.set_xticks(range(len(columns)), [f"{x:g}" for x in columns])
        axes.set_yticks(range(len(rows)), [f"{y:g}" for y in rows])
        axes.tick_params(length=0)
        axes.set_frame_on(False)
        description = f"{quantity.title} by {study['x_label']} and {study.get('y_label', '')}"
        return inline_svg(drawn, prefix, description)


def _paint(
    axes: Axes,
    points: Sequence[Point],
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
    axes: Axes, point: Point, place: tuple[int, int], quantity: Quantity, scale: Normalize
) -> None:
    """The number, or what became of the runs, in black or white as the cell needs it."""
    if point.value is None:
        text, ink = "/".join(point.lost) or "–", "#111111"
    else:
        text = number(point.value.mean, quantity.decimals) + ("*" if point.lost else "")
        ink = "#111111" if float(scale(point.value.mean)) > 0.5 else "#ffffff"
    axes.text(*place, text, ha="center", va="center", fontsize=9, color=ink)


def _frame(axes: Axes, place: tuple[int, int]) -> None:
    corner = place[0] - 0.47, place[1] - 0.46
    axes.add_patch(
        Rectangle(corner, 0.94, 0.92, fill=False, edgecolor="#ffffff", linewidth=2.5, zorder=3)
    )
