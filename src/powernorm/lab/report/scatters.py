"""γ against the deviation of the batch, a small frame a layer (S20, App. B.1)."""

from collections.abc import Sequence
from math import isfinite
from typing import Final

from markupsafe import Markup
from matplotlib.axes import Axes

from powernorm.lab.report.drawing import (
    figure,
    inline_svg,
    line_style,
    logarithmic_scale,
    plain_axes,
    reference_style,
)
from powernorm.lab.report.figures import DrawnFigure
from powernorm.lab.report.layer_names import short_names
from powernorm.lab.report.numerals import counted, percent, printable
from powernorm.lab.report.records import Comparison, ReportedRun
from powernorm.runs import ScaleRecord, StudyInfo

COLUMNS: Final = 2
MAX_TITLE: Final = 22
MAX_POINTS: Final = 256
"""Features that are drawn of a layer; of more, every second, third … is."""


MAX_FRAMES: Final = 12
"""Layers that are drawn: the first, the last and some between them."""

_CENTERED: Final = frozenset({"bn", "rbn", "brn"})
"""Norms whose deviation is that around the mean, σ_B; that of the others is ψ_B."""

_LEMMA: Final = (
    ", which by Lemma 2 of Shen et al. 2020 makes the loss smoother with PowerNormV than without"
)


def scales(comparison: Comparison, study: StudyInfo) -> list[DrawnFigure]:
    """One figure a variant, of its first seed that has the numbers."""
    del study
    shown: dict[str, ReportedRun] = {}
    for run in comparison.runs:
        if any(map(_pairs, run.scales)):
            shown.setdefault(run.name, run)
    return [
        drawn
        for index, run in enumerate(shown.values())
        for drawn in _of_run(run, f"{comparison.anchor}study-scales-{index}")
    ]


def _of_run(run: ReportedRun, prefix: str) -> list[DrawnFigure]:
    symbol = "σ_B" if run.norm in _CENTERED else "ψ_B"
    name, lemma = printable(run.name), _LEMMA if run.norm == "pnv" else ""
    ending = "" if run.finished else f" The run is marked {run.shown_status}."
    return [
        DrawnFigure(drawn.svg, f"{drawn.caption}{ending}")
        for drawn in draw_scales(
            run.scales,
            lead=f"{name}, seed {run.seed}: a point a feature",
            below=f"|γ| ≤ {symbol}{lemma}",
            owner=name,
            prefix=prefix,
        )
    ]


def draw_scales(
    layers: Sequence[ScaleRecord], *, lead: str, below: str, owner: str, prefix: str
) -> list[DrawnFigure]:
    """One figure of all layers that have numbers; empty where none has.

    Args:
        layers: from the first.
        lead: how the caption begins.
        below: what holds below the line.
        owner: whose layers they are.
        prefix: of the ids in the SVG.
    """
    known = [(layer["layer"], pairs) for layer in layers if (pairs := _pairs(layer))]
    if not known:
        return []
    everything = [pair for _, pairs in known for pair in pairs]
    share = sum(weight <= deviation for deviation, weight in everything) / len(everything)
    notes = [
        f"{lead}, both axes logarithmic. Below the line {below}: {percent(share)} % of the "
        "features."
    ]
    left_out = sum(len(layer["weight"]) for layer in layers) - len(everything)
    if left_out:
        notes.append(f"Left out: {counted(left_out, 'feature')} whose γ or deviation is 0.")
    if len(known) > MAX_FRAMES:
        notes.append(
            f"Of {len(known)} layers {MAX_FRAMES} are drawn, from the first to the last; the share "
            "is of all."
        )
    return [DrawnFigure(_draw(_spaced(known), owner, prefix), " ".join(notes))]


_Pairs = list[tuple[float, float]]


def _pairs(layer: ScaleRecord) -> _Pairs:
    """Deviation and |γ|, where both have a logarithm."""
    return [
        (deviation, abs(weight))
        for deviation, weight in zip(layer["deviation"], layer["weight"], strict=False)
        if isfinite(deviation) and isfinite(weight) and deviation > 0 and weight
    ]


def _draw(layers: Sequence[tuple[str, _Pairs]], owner: str, prefix: str) -> Markup:
    names = short_names([name for name, _ in layers])
    everything = [pair for _, pairs in layers for pair in pairs]
    rows = -(-len(layers) // COLUMNS)
    with figure(0.5 + 1.6 * rows) as drawn:
        grid = drawn.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False)
        frames = list(grid.flat)
        for axes, (_, pairs), name in zip(frames, layers, names, strict=False):
            _draw_layer(axes, pairs, _title(name))
        logarithmic_scale(frames[0].xaxis, [x for x, _ in everything], 1.3)
        logarithmic_scale(frames[0].yaxis, [y for _, y in everything], 1.3)
        for index, axes in enumerate(frames):
            # The last frame of a column shows the numbers, also where another column is longer.
            axes.tick_params(labelsize=8, labelbottom=index + COLUMNS >= len(layers))
        for axes in frames[len(layers) :]:
            axes.remove()
        drawn.supxlabel("deviation of the batch", fontsize=10)
        drawn.supylabel("|γ|", fontsize=10)
        description = f"γ against the deviation of the batch in each layer of {owner}"
        return inline_svg(drawn, prefix, description)


def _spaced(layers: Sequence[tuple[str, _Pairs]]) -> Sequence[tuple[str, _Pairs]]:
    """All, or so many from the first to the last: a model of a hundred layers takes minutes."""
    if len(layers) <= MAX_FRAMES:
        return layers
    return [layers[i * (len(layers) - 1) // (MAX_FRAMES - 1)] for i in range(MAX_FRAMES)]


def _title(name: str) -> str:
    """A layer's name, without its first parts where it is too long for a small frame."""
    while len(name) > MAX_TITLE and "." in name:
        name = name.partition(".")[2]
    return name if len(name) <= MAX_TITLE else "…" + name[1 - MAX_TITLE :]


def _draw_layer(axes: Axes, pairs: _Pairs, name: str) -> None:
    plain_axes(axes, "", "", "")
    axes.set_title(name, loc="left", fontsize=8)
    shown = pairs[:: -(-len(pairs) // MAX_POINTS)]
    color, _ = line_style(0)
    x, y = zip(*shown, strict=True)
    axes.plot(x, y, color=color, marker=".", markersize=4, linestyle="", alpha=0.7)
    ink, dashes = reference_style()
    axes.axline((1, 1), (2, 2), color=ink, linestyle=dashes, linewidth=1)
