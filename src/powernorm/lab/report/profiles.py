"""Quantities of every layer side by side: layers from top to bottom, numbers to the right."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Final

from markupsafe import Markup
from matplotlib.axes import Axes

from powernorm.lab.report.drawing import (
    figure,
    inline_svg,
    line_style,
    logarithmic_ticks,
    plain_axes,
    reference_style,
)
from powernorm.lab.report.heatmaps import short_name
from powernorm.lab.report.magnitudes import logarithmic_limits
from powernorm.lab.report.numerals import printable

MAX_NAMES: Final = 60
"""Layers that are named on the axis; of more, every second, third … is."""

_MARKERS: Final = ("o", "s", "^", "D")


@dataclass(frozen=True)
class Profile:
    """One quantity, a value a layer; None where it does not exist."""

    label: str
    values: Sequence[float | None]

    @property
    def positive(self) -> list[float]:
        """What a logarithmic axis can show, NaN elsewhere."""
        return [
            value if value is not None and isfinite(value) and value > 0 else nan
            for value in self.values
        ]


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
    values = [value for line in profiles for value in line.positive if isfinite(value)]
    if not values:
        return None
    with figure(1.15 + 0.17 * max(len(layers), 4) + 0.22 * -(-len(profiles) // 2)) as drawn:
        axes = drawn.subplots()
        plain_axes(axes, title, x_label, "")
        for index, line in enumerate(profiles):
            colour, dashes = line_style(index)
            axes.plot(
                line.positive,
                range(len(layers)),
                color=colour,
                linestyle=dashes,
                linewidth=1.0,
                marker=_MARKERS[index % len(_MARKERS)],
                markersize=3.5,
                label=printable(line.label),
            )
        shown = [limit for limit in limits if limit > 0]
        colour, reference = reference_style()
        for limit in shown:
            axes.axvline(limit, color=colour, linestyle=reference, linewidth=1)
        _frame(axes, layers, [*values, *shown])
        if len(profiles) > 1:
            drawn.legend(
                *axes.get_legend_handles_labels(),
                loc="outside lower center",
                ncols=2,
                handlelength=2.2,
                columnspacing=1.2,
            )
        return inline_svg(drawn, prefix, description)


def _frame(axes: Axes, layers: Sequence[str], values: Sequence[float]) -> None:
    every = -(-len(layers) // MAX_NAMES)
    axes.set_ylim(len(layers) - 0.5, -0.5)
    axes.set_yticks(
        range(0, len(layers), every),
        [short_name(layer, layers) for layer in layers[::every]],
        fontsize=7,
    )
    axes.set_xscale("log")
    axes.set_xlim(*logarithmic_limits(values, 1.3))
    logarithmic_ticks(axes.xaxis, *axes.get_xlim())


def draw_scatter(
    x: Sequence[float],
    y: Sequence[float],
    *,
    title: str,
    x_label: str,
    y_label: str,
    prefix: str,
    description: str,
) -> Markup:
    """Points with a logarithmic x axis.

    Args:
        x: positions; those not above 0 are left out.
        y: values.
        title: of the frame.
        x_label: quantity and unit.
        y_label: quantity and unit.
        prefix: of the ids in the SVG.
        description: for readers who cannot see the figure.
    """
    points = [(a, b) for a, b in zip(x, y, strict=True) if a > 0 and isfinite(a) and isfinite(b)]
    with figure(2.9) as drawn:
        axes = drawn.subplots()
        plain_axes(axes, title, x_label, y_label)
        axes.scatter(
            [a for a, _ in points],
            [b for _, b in points],
            s=7,
            linewidths=0,
            alpha=0.6,
            color=line_style(0)[0],
        )
        if points:
            axes.set_xscale("log")
            axes.set_xlim(*logarithmic_limits([a for a, _ in points], 1.1))
            logarithmic_ticks(axes.xaxis, *axes.get_xlim())
        return inline_svg(drawn, prefix, description)
