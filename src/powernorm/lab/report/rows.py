"""Quantities of layers or variants side by side: rows from top to bottom, numbers to the right."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from powernorm.lab.report.drawing import (
    NO_NUMBER,
    REFERENCE,
    DrawnFigure,
    add_legend,
    drawable,
    figure,
    hover_name,
    inline_svg,
    legend_label,
    line_style,
    logarithmic_scale,
    name_rows,
    plain_axes,
    short_names,
    shorten,
)
from powernorm.lab.report.numerals import printable

_MARKERS: Final = ("o", "s", "^", "D")
_NAME_LENGTH: Final = 22


@dataclass(frozen=True)
class RowQuantity:
    """One quantity, a value a row; None or NaN where it does not exist.

    Attributes:
        label: in the legend.
        values: by row.
        low: smallest over seeds, where the values are their mean; else empty.
        high: largest over seeds.
    """

    label: str
    values: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


def rows_figure(
    names: Sequence[str],
    quantities: Sequence[RowQuantity],
    *,
    layers: bool = False,
    notes: Sequence[str] = (),
    limits: Sequence[float] = (),
    title: str,
    x_label: str,
    logarithmic: bool = False,
    caption: str,
    prefix: str,
    description: str,
) -> list[DrawnFigure]:
    """All quantities in one frame: lines through layers, or dots of variants joined in each row.

    Args:
        names: of the rows, from the top.
        quantities: with a legend where there are several.
        layers: whether rows are layers, of which there are many with long names.
        notes: below a name, such as what became of its runs.
        limits: where dotted vertical lines stand.
        title: of the frame.
        x_label: quantity and unit.
        logarithmic: whether the x axis is; of variants where all values are above 0.
        caption: of the figure.
        prefix: of the ids in the SVG.
        description: for readers who cannot see the figure.

    Returns:
        Nothing where there is no value that the axis can show.
    """
    lows = [value for one in quantities for value in (one.low or one.values) if value is not None]
    logarithmic = logarithmic and (layers or min(lows, default=1) > 0)
    table = np.array([drawable(one.values, positive=logarithmic) for one in quantities])
    if not np.isfinite(table).any():
        return []
    height = 0.14 if layers else 0.3 if any(notes) else 0.22
    with figure(0.8 + height * max(len(names), 4 if layers else 3)) as drawn:
        axes = drawn.subplots()
        plain_axes(axes, title, x_label, "")
        for index, one in enumerate(quantities):
            _draw_quantity(axes, index, one, layers=layers, logarithmic=logarithmic)
        for limit in limits:
            if limit > 0:
                axes.axvline(limit, **REFERENCE)
        if layers:
            name_rows(axes, short_names(names), size=6)
        else:
            axes.grid(visible=False, axis="y")
            rows = [row for row in range(len(names)) if np.isfinite(table[:, row]).any()]
            ends = np.nanmin(table[:, rows], axis=0), np.nanmax(table[:, rows], axis=0)
            axes.hlines(rows, *ends, color=NO_NUMBER, linewidth=1.2, zorder=1)
            labels = [shorten(name, _NAME_LENGTH) for name in names]
            for row, note in enumerate(notes):
                if note:
                    labels[row] += f"\n{printable(note)}"
            name_rows(axes, labels, size=7)
        if logarithmic:
            logarithmic_scale(axes.xaxis)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(5))
        if len(quantities) > 1:
            add_legend(drawn, [axes])
        svg = inline_svg(drawn, prefix, description, unit=x_label, rows=names)
        return [DrawnFigure(svg, caption)]


def _draw_quantity(
    axes: Axes, index: int, one: RowQuantity, *, layers: bool, logarithmic: bool
) -> None:
    color, dashes = line_style(index)
    rows = range(len(one.values))
    low, high = (drawable(end, positive=logarithmic) for end in (one.low, one.high))
    if layers and low:
        axes.fill_betweenx(rows, low, high, color=color, alpha=0.18, linewidth=0)
    elif low:
        axes.hlines(rows, low, high, color=color, linewidth=2.4, alpha=0.35)
    axes.plot(
        drawable(one.values, positive=logarithmic),
        rows,
        color=color,
        linestyle=dashes,
        # Not a line of no kind: that would have no point under the pointer.
        linewidth=0.8 if layers else 0,
        marker=_MARKERS[index % len(_MARKERS)],
        markersize=2.8 if layers else 4.8,
        label=legend_label(one.label),
        gid=hover_name(one.label),
    )
