"""Quantities of layers or variants side by side: rows from top to bottom, numbers to the right."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Final

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from powernorm.lab.report.drawing import (
    NO_NUMBER,
    REFERENCE,
    add_legend,
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
from powernorm.lab.schema import LARGEST

_MARKERS: Final = ("o", "s", "^", "D")
_NAME_LENGTH: Final = 22


@dataclass(frozen=True)
class RowQuantity:
    """One quantity, a value a row; None where it does not exist.

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


def draw_profiles(
    layers: Sequence[str],
    quantities: Sequence[RowQuantity],
    *,
    title: str,
    x_label: str,
    limits: Sequence[float],
    prefix: str,
    description: str,
) -> Markup | None:
    """Lines through the layers, with a logarithmic axis; None where no value is positive.

    Args:
        layers: names, from the first.
        quantities: in one frame.
        title: of the frame.
        x_label: quantity and unit.
        limits: where dotted vertical lines stand.
        prefix: of the ids in the SVG.
        description: for readers who cannot see the figure.
    """
    ends = [_known(end) for one in quantities for end in (one.values, one.low, one.high)]
    if not any(value > 0 for end in ends for value in end):
        return None
    with figure(0.8 + 0.14 * max(len(layers), 4)) as drawn:
        axes = drawn.subplots()
        plain_axes(axes, title, x_label, "")
        for index, one in enumerate(quantities):
            _draw_line(axes, index, one)
        for limit in limits:
            if limit > 0:
                axes.axvline(limit, **REFERENCE)
        name_rows(axes, short_names(layers), size=6)
        logarithmic_scale(axes.xaxis)
        if len(quantities) > 1:
            add_legend(drawn, [axes])
        return inline_svg(drawn, prefix, description, unit=x_label, rows=layers)


def _known(values: Sequence[float | None], *, positive: bool = False) -> list[float]:
    """The values that an axis can show, and NaN for the others."""
    least = 1 / LARGEST if positive else -LARGEST
    return [nan if one is None or not least <= one <= LARGEST else one for one in values]


def _draw_line(axes: Axes, index: int, one: RowQuantity) -> None:
    color, dashes = line_style(index)
    if one.low:
        low, high = (_known(end, positive=True) for end in (one.low, one.high))
        axes.fill_betweenx(range(len(low)), low, high, color=color, alpha=0.18, linewidth=0)
    axes.plot(
        _known(one.values, positive=True),
        range(len(one.values)),
        color=color,
        linestyle=dashes,
        linewidth=0.8,
        marker=_MARKERS[index % len(_MARKERS)],
        markersize=2.8,
        label=legend_label(one.label),
        gid=hover_name(one.label),
    )


def draw_dots(
    names: Sequence[str],
    quantities: Sequence[RowQuantity],
    *,
    notes: Sequence[str] = (),
    title: str,
    x_label: str,
    prefix: str,
    description: str,
    logarithmic: bool = False,
) -> Markup | None:
    """A dot a variant with the range of its seeds; a line joins the quantities of a row.

    Args:
        names: the variants.
        quantities: with a legend where there are several.
        notes: below a name, such as what became of its runs.
        title: of the frame.
        x_label: quantity and unit.
        prefix: of the ids in the SVG.
        description: for readers who cannot see the figure.
        logarithmic: whether the x axis is, where all values are above 0.

    Returns:
        None where there is no value.
    """
    table = np.array([_known(one.values) for one in quantities])
    if not np.isfinite(table).any():
        return None
    labels = [shorten(name, _NAME_LENGTH) for name in names]
    if any(notes):
        labels = [
            f"{label}\n{printable(note)}" if note else label
            for label, note in zip(labels, notes, strict=True)
        ]
    row_height = 0.3 if any(notes) else 0.22
    with figure(0.8 + row_height * max(len(names), 3)) as drawn:
        axes = drawn.subplots()
        plain_axes(axes, title, x_label, "")
        axes.grid(visible=False, axis="y")
        if len(quantities) > 1:
            places = [row for row in range(len(names)) if np.isfinite(table[:, row]).any()]
            ends = np.nanmin(table[:, places], axis=0), np.nanmax(table[:, places], axis=0)
            axes.hlines(places, *ends, color=NO_NUMBER, linewidth=1.2, zorder=1)
        for index, one in enumerate(quantities):
            _draw_dots(axes, index, one)
        name_rows(axes, labels, size=7)
        lows = [value for one in quantities for value in _known(one.low) if isfinite(value)]
        if logarithmic and min(lows) > 0:
            logarithmic_scale(axes.xaxis)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(5))
        if len(quantities) > 1:
            add_legend(drawn, [axes])
        return inline_svg(drawn, prefix, description, unit=x_label, rows=names)


def _draw_dots(axes: Axes, index: int, one: RowQuantity) -> None:
    color, _ = line_style(index)
    rows = range(len(one.values))
    axes.hlines(rows, _known(one.low), _known(one.high), color=color, linewidth=2.4, alpha=0.35)
    axes.plot(
        _known(one.values),
        rows,
        color=color,
        marker=_MARKERS[index % len(_MARKERS)],
        markersize=4.8,
        # Not a line of no kind: that would have no point under the pointer.
        linewidth=0,
        label=one.label,
        gid=hover_name(one.label),
    )
