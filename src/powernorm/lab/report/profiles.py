"""Quantities of every layer side by side: layers from top to bottom, numbers to the right."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Final

from markupsafe import Markup
from matplotlib.axes import Axes

from powernorm.lab.report.drawing import (
    draw_legend,
    figure,
    hover_name,
    inline_svg,
    legend_entries,
    legend_height,
    legend_label,
    line_style,
    logarithmic_scale,
    name_rows,
    plain_axes,
    reference_style,
)
from powernorm.lab.report.layer_names import short_names

_MARKERS: Final = ("o", "s", "^", "D")


@dataclass(frozen=True)
class Profile:
    """One quantity, a value a layer; None where it does not exist.

    Attributes:
        label: in the legend.
        values: by layer.
        low: smallest over seeds, where the values are their mean; else empty.
        high: largest over seeds.
    """

    label: str
    values: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()

    @property
    def positive(self) -> list[float]:
        """What a logarithmic axis can show, NaN elsewhere."""
        return list(map(_positive, self.values))


def _positive(value: float | None) -> float:
    return value if value is not None and isfinite(value) and value > 0 else nan


def draw_profiles(
    layers: Sequence[str],
    profiles: Sequence[Profile],
    *,
    title: str,
    x_label: str,
    limits: Sequence[float],
    prefix: str,
    description: str,
) -> Markup | None:
    """All quantities in one frame with a logarithmic axis; None where no value is positive.

    Args:
        layers: names, from the first.
        profiles: the quantities.
        title: of the frame.
        x_label: quantity and unit.
        limits: where dotted vertical lines stand.
        prefix: of the ids in the SVG.
        description: for readers who cannot see the figure.
    """
    values = [
        value
        for line in profiles
        for value in map(_positive, (*line.values, *line.low, *line.high))
        if isfinite(value)
    ]
    if not values:
        return None
    shown = [limit for limit in limits if limit > 0]
    legend = legend_height([line.label for line in profiles]) if len(profiles) > 1 else 0
    with figure(1.15 + 0.17 * max(len(layers), 4) + legend) as drawn:
        axes = drawn.subplots()
        plain_axes(axes, title, x_label, "")
        for index, line in enumerate(profiles):
            _draw_line(axes, index, line)
        color, dashes = reference_style()
        for limit in shown:
            axes.axvline(limit, color=color, linestyle=dashes, linewidth=1)
        name_rows(axes, short_names(layers), size=7)
        logarithmic_scale(axes.xaxis, [*values, *shown], 1.3)
        if legend:
            draw_legend(drawn, legend_entries([axes]))
        return inline_svg(drawn, prefix, description, unit=x_label, rows=layers)


def _draw_line(axes: Axes, index: int, line: Profile) -> None:
    color, dashes = line_style(index)
    if line.low:
        low, high = (list(map(_positive, ends)) for ends in (line.low, line.high))
        axes.fill_betweenx(range(len(low)), low, high, color=color, alpha=0.18, linewidth=0)
    axes.plot(
        line.positive,
        range(len(line.values)),
        color=color,
        linestyle=dashes,
        linewidth=1.0,
        marker=_MARKERS[index % len(_MARKERS)],
        markersize=3.5,
        label=legend_label(line.label),
        gid=hover_name(line.label),
    )
