"""Dots with whiskers, one row a variant."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from powernorm.lab.report.drawing import (
    NO_NUMBER,
    draw_legend,
    figure,
    fitting,
    hover_name,
    inline_svg,
    legend_entries,
    legend_height,
    line_style,
    logarithmic_scale,
    name_rows,
    plain_axes,
)
from powernorm.lab.report.numerals import printable
from powernorm.lab.report.study_values import SeedRange

NAME_ROOM: Final = 110
"""Points at the left of the frame that a name may take."""
_MARKERS: Final = ("o", "D")


@dataclass(frozen=True)
class DotRow:
    """One variant.

    Attributes:
        name: at the left.
        values: one a quantity, in the order of the legend; None where there is no number.
        note: what stands in the row in place of a number.
    """

    name: str
    values: Sequence[SeedRange | None]
    note: str = ""


def draw_dots(
    rows: Sequence[DotRow],
    quantities: Sequence[str],
    *,
    title: str,
    x_label: str,
    prefix: str,
    description: str,
    logarithmic: bool = False,
) -> Markup:
    """Rows from top to bottom; two quantities of a row are joined by a line.

    Args:
        rows: the variants.
        quantities: names of the values of each row, for a legend where there are several.
        title: of the frame.
        x_label: quantity and unit.
        prefix: of the ids in the SVG.
        description: for readers who cannot see the figure.
        logarithmic: whether the x axis is, where all values are above 0.
    """
    known = [
        edge for row in rows for value in row.values if value for edge in (value.low, value.high)
    ]
    legend = legend_height(quantities) if len(quantities) > 1 else 0
    with figure(1.0 + 0.27 * max(len(rows), 3) + legend) as drawn:
        axes = drawn.subplots()
        plain_axes(axes, title, x_label, "")
        axes.grid(visible=False, axis="y")
        for place, row in enumerate(rows):
            _draw_row(axes, place, row, quantities)
        names = [fitting(printable(row.name), NAME_ROOM, 9) for row in rows]
        name_rows(axes, names, size=9)
        if logarithmic and min(known, default=0) > 0:
            logarithmic_scale(axes.xaxis, known, 1.15)
        else:
            axes.margins(x=0.08)
            axes.xaxis.set_major_locator(MaxNLocator(5))
        for place, row in enumerate(rows):
            _write_note(axes, place, row)
        if legend:
            draw_legend(drawn, legend_entries([axes]))
        return inline_svg(drawn, prefix, description, unit=x_label, rows=names)


def _draw_row(axes: Axes, place: int, row: DotRow, quantities: Sequence[str]) -> None:
    known = [value.mean for value in row.values if value is not None]
    if len(known) > 1:
        axes.plot([min(known), max(known)], [place] * 2, color=NO_NUMBER, linewidth=1.5, zorder=1)
    for index, (value, quantity) in enumerate(zip(row.values, quantities, strict=True)):
        if value is None:
            continue
        color, _ = line_style(index)
        axes.plot([value.low, value.high], [place] * 2, color=color, linewidth=3, alpha=0.35)
        axes.plot(
            value.mean,
            place,
            color=color,
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=6,
            # Not a line of no kind: that would have no point under the pointer.
            linewidth=0,
            label=quantity,
            gid=hover_name(quantity),
        )


def _write_note(axes: Axes, place: int, row: DotRow) -> None:
    """In the half of the row that has no dot, and above the middle: a long one passes the dot."""
    if row.note:
        known = [value.mean for value in row.values if value is not None]
        is_right = bool(known) and sum(known) / len(known) > sum(axes.get_xlim()) / 2
        axes.annotate(
            printable(row.note),
            (0.01 if is_right else 0.99, place),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3 if known else 0),
            textcoords="offset points",
            horizontalalignment="left" if is_right else "right",
            verticalalignment="baseline" if known else "center",
            fontsize=8,
            fontweight="bold",
        )
