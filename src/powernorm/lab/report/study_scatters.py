"""γ against the deviation of the batch, a small frame a layer (S20, App. B.1)."""

from collections.abc import Sequence
from math import isfinite
from typing import Final

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from powernorm.lab.report.drawing import (
    figure,
    inline_svg,
    line_style,
    logarithmic_ticks,
    plain_axes,
    reference_style,
)
from powernorm.lab.report.figures import DrawnFigure
from powernorm.lab.report.heatmaps import short_name
from powernorm.lab.report.magnitudes import logarithmic_limits
from powernorm.lab.report.numerals import percent, printable
from powernorm.lab.report.records import Comparison, Run
from powernorm.runs import ScaleRecord, StudyInfo

COLUMNS: Final = 2
MAX_TITLE: Final = 22
MAX_POINTS: Final = 256
"""Features that are drawn of a layer; of more, every second, third … is."""


MAX_FRAMES: Final = 12
"""Layers that are drawn: the first, the last and some between them."""

_CENTRED: Final = frozenset({"bn", "rbn", "brn"})
"""Norms whose deviation is that around the mean, σ_B; that of the others is ψ_B."""

_LEMMA: Final = (
    ", which by Lemma 2 of Shen et al. 2020 makes the loss smoother with PowerNormV than without"
)


def scales(comparison: Comparison, study: StudyInfo) -> list[DrawnFigure]:
    """One figure a variant, of its first seed that has the numbers."""
    del study
    shown: dict[str, Run] = {}
    for run in comparison.runs:
        if any(_pairs(layer) for layer in run.scales):
            shown.setdefault(run.name, run)
    return [
        DrawnFigure(
            _draw(run, f"{comparison.anchor}study-scales-{index}"),
            _caption(run),
        )
        for index, run in enumerate(shown.values())
    ]


def _pairs(layer: ScaleRecord) -> list[tuple[float, float]]:
    """Deviation and |γ|, where both have a logarithm."""
    return [
        (deviation, abs(weight))
        for deviation, weight in zip(layer["deviation"], layer["weight"], strict=False)
        if isfinite(deviation) and isfinite(weight) and deviation > 0 and weight
    ]


def _caption(run: Run) -> str:
    pairs = [pair for layer in run.scales for pair in _pairs(layer)]
    below = sum(weight <= deviation for deviation, weight in pairs)
    left_out = sum(len(layer["weight"]) for layer in run.scales) - len(pairs)
    symbol = "σ" if run.norm in _CENTRED else "ψ"
    lemma = _LEMMA if run.norm == "pnv" else ""
    notes = [
        f"{printable(run.name)}, seed {run.seed}: a point a feature, both axes logarithmic. Below "
        f"the line |γ| ≤ {symbol}_B{lemma}: {percent(below / len(pairs))} % of the features."
    ]
    if left_out:
        notes.append(f"{left_out} features whose γ or deviation is 0 are left out.")
    num_layers = sum(bool(_pairs(layer)) for layer in run.scales)
    if num_layers > MAX_FRAMES:
        notes.append(
            f"Of {num_layers} layers {MAX_FRAMES} are drawn, from the first to the last; the share "
            "is of all."
        )
    if not run.finished:
        notes.append(f"The run is marked {run.shown_status}.")
    return " ".join(notes)


def _draw(run: Run, prefix: str) -> Markup:
    layers = _spaced([layer for layer in run.scales if _pairs(layer)])
    names = [layer["layer"] for layer in layers]
    everything = [pair for layer in layers for pair in _pairs(layer)]
    x_limits = logarithmic_limits([x for x, _ in everything], 1.3)
    y_limits = logarithmic_limits([y for _, y in everything], 1.3)
    rows = -(-len(layers) // COLUMNS)
    with figure(0.5 + 1.6 * rows) as drawn:
        grid = drawn.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False)
        for index, axes in enumerate(grid.flat):
            if index >= len(layers):
                axes.remove()
                continue
            _draw_layer(axes, layers[index], _title(names[index], names))
            axes.set(xscale="log", yscale="log", xlim=x_limits, ylim=y_limits)
            _tick(axes.xaxis, x_limits)
            _tick(axes.yaxis, y_limits)
            # The last frame of a column shows the numbers, also where another column is longer.
            axes.tick_params(labelsize=8, labelbottom=index + COLUMNS >= len(layers))
        drawn.supxlabel("deviation of the batch", fontsize=10)
        drawn.supylabel("|γ|", fontsize=10)
        description = f"γ against the deviation of the batch in each layer of {printable(run.name)}"
        return inline_svg(drawn, prefix, description)


def _spaced(layers: Sequence[ScaleRecord]) -> Sequence[ScaleRecord]:
    """All, or so many from the first to the last: a model of a hundred layers takes minutes."""
    if len(layers) <= MAX_FRAMES:
        return layers
    return [layers[i * (len(layers) - 1) // (MAX_FRAMES - 1)] for i in range(MAX_FRAMES)]


def _tick(axis: XAxis | YAxis, limits: tuple[float, float]) -> None:
    """Powers of ten and their parts, or round numbers where the axis spans too little for them."""
    if limits[1] > 4 * limits[0]:
        logarithmic_ticks(axis, *limits)
    else:
        axis.set_major_locator(MaxNLocator(3))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _title(layer: str, layers: Sequence[str]) -> str:
    """The layer's name, without its first parts where it is too long for a small frame."""
    name = short_name(layer, layers)
    while len(name) > MAX_TITLE and "." in name:
        name = name.partition(".")[2]
    return name if len(name) <= MAX_TITLE else "…" + name[1 - MAX_TITLE :]


def _draw_layer(axes: Axes, layer: ScaleRecord, name: str) -> None:
    plain_axes(axes, "", "", "")
    axes.set_title(name, loc="left", fontsize=8)
    pairs = _pairs(layer)
    pairs = pairs[:: -(-len(pairs) // MAX_POINTS)]
    colour, _ = line_style(0)
    axes.plot(
        [x for x, _ in pairs],
        [y for _, y in pairs],
        color=colour,
        marker=".",
        markersize=4,
        linestyle="",
        alpha=0.7,
    )
    ink, dashes = reference_style()
    axes.axline((1, 1), (2, 2), color=ink, linestyle=dashes, linewidth=1)
