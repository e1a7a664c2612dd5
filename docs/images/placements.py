"""Draw placements.svg: the position of the norms in a layer with each placement.

Run `python docs/images/placements.py` after a change of `lab/models/placements.py`, from which all
of it is read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch

from powernorm.records import Placement
from powernorm_lab.models.choices import TransformerShape
from powernorm_lab.models.placements import (
    WITHOUT_FINAL_NORM,
    LayerPlaces,
    SubLayerPlaces,
    has_embedding_norm,
    layer_places,
)
from powernorm_lab.report.drawing import SERIES
from powernorm_lab.runs import PLACEMENTS

OUT: Final = Path(__file__).with_suffix(".svg")

NORM: Final = "N"
_ORANGE, _BLUE, _INK, _PALE = SERIES[1], SERIES[0], "#333333", "#e8e8ec"
_COLUMNS: Final = 5
_WIDTH, _HEIGHT = 2.0, 4.85
"""Size of a panel in inches."""
_STREAM, _BRANCH = 0.4, 1.22
"""Positions of the stream and the branches in a panel."""
_STEP: Final = 0.29
"""Distance between the boxes of a branch."""

CAPTIONS: Final[Mapping[Placement, str]] = {
    "pre": "Xiong et al. 2020",
    "post": "Vaswani et al. 2017",
    "sandwich": "Ding et al. 2021",
    "peri": "Kim et al. 2025",
    "out": "OLMo 2, 2024",
    "mix": "Li et al. 2024",
    "deepnorm": "Wang et al. 2022",
    "normformer": "Shleifer et al. 2021",
    "bn-ffn": "Yao et al. 2021",
    "bn-linear": "FusionFormer",
    "lns": "Sun et al. 2025",
    "hybrid": "Zhuo et al. 2025",
}


def attention_boxes(places: LayerPlaces) -> list[str]:
    """Return the boxes of a branch with attention, the lowest first."""
    own = ["q k v", NORM, "attention", "out", NORM] if places.linears else ["attention"]
    if places.scales_heads:
        own = ["h · attention"]
    if places.heads:
        own = ["q k v", NORM, "attention"]
    return _between(own, places.attention)


def feedforward_boxes(places: LayerPlaces) -> list[str]:
    """Return the boxes of a branch with a feed-forward network, the lowest first."""
    if places.hidden is None and not places.linears:
        return _between(["feed-forward"], places.feedforward)
    first = places.linears or places.hidden == "before"
    own = ["fc1", *[NORM] * first, "activation", *[NORM] * (places.hidden == "after"), "fc2"]
    return _between([*own, *[NORM] * places.linears], places.feedforward)


def _between(own: list[str], places: SubLayerPlaces) -> list[str]:
    return [*[NORM] * places.before, *own, *[NORM] * places.after]


def sublayers(placement: Placement) -> Iterator[tuple[str, Sequence[str], SubLayerPlaces]]:
    """Yield label, boxes and places of the two sub-layers of a panel, the lower one first."""
    layers = layer_places(TransformerShape(num_layers=8, placement=placement))
    lowest, highest = layers[0], layers[-1]
    if lowest != highest:  # of layers that differ, one sub-layer each
        for label, layer in (("lowest layers", lowest), ("the others", highest)):
            yield label, _between(["sub-layer"], layer.attention), layer.attention
        return
    yield "", attention_boxes(lowest), lowest.attention
    yield "", feedforward_boxes(lowest), lowest.feedforward


def draw() -> Figure:
    """Return the picture."""
    rows = -(-len(PLACEMENTS) // _COLUMNS)
    figure = Figure(figsize=(_COLUMNS * _WIDTH, rows * _HEIGHT + 0.35))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, _COLUMNS * _WIDTH)
    axes.set_ylim(0, rows * _HEIGHT + 0.35)
    axes.set_axis_off()
    for index, placement in enumerate(PLACEMENTS):
        row, column = divmod(index, _COLUMNS)
        _panel(axes, column * _WIDTH, (rows - 1 - row) * _HEIGHT + 0.35, placement)
    legend = (
        "N norm   dashed: once, after the embeddings or the last layer   α constant, λ and h "
        "learned"
    )
    axes.text(0.2, 0.14, legend, fontsize=9, color=_INK)
    return figure


def _panel(axes: Axes, left: float, bottom: float, placement: Placement) -> None:
    """Draw a layer with one placement, from the embeddings below to the output above."""
    x = left + _STREAM
    axes.text(left + 0.15, bottom + _HEIGHT - 0.3, placement, fontsize=11, fontweight="bold")
    axes.text(
        left + 0.15, bottom + _HEIGHT - 0.5, CAPTIONS[placement], fontsize=8.5, color="#6b6b70"
    )
    shape = TransformerShape(placement=placement)
    y = start = bottom + 0.12
    if has_embedding_norm(shape):
        _box(axes, x, y + 0.17, NORM, dashed=True)
        y += 0.32
    for label, boxes, places in sublayers(placement):
        y = _sublayer(axes, left, y, boxes, places, label)
    if placement not in WITHOUT_FINAL_NORM:
        _box(axes, x, y + 0.2, NORM, dashed=True)
        y += 0.3
    axes.annotate(
        "",
        xy=(x, y + 0.2),
        xytext=(x, start),
        arrowprops={"arrowstyle": "-|>", "color": _INK, "linewidth": 1.2},
        zorder=1,
    )


def _sublayer(
    axes: Axes, left: float, y: float, boxes: Sequence[str], places: SubLayerPlaces, label: str
) -> float:
    """Draw a branch up to the stream; return where the next one begins."""
    x, branch = left + _STREAM, left + _BRANCH
    leaves, top = y + 0.14, y + 0.14 + _STEP * (len(boxes) + 0.5)
    path = ([x, branch, branch, x], [leaves, leaves, top, top])
    axes.plot(*path, color=_INK, linewidth=1.2, zorder=1)
    for number, box in enumerate(boxes):
        _box(axes, branch, leaves + _STEP * (number + 0.65), box)
    axes.add_patch(Circle((x, top), 0.085, facecolor="white", edgecolor=_INK, zorder=3))
    axes.text(x, top - 0.005, "+", fontsize=10, ha="center", va="center", color=_INK, zorder=4)
    if places.residual != 1:
        name = "λ" if places.residual == "learned" else "α"
        middle = (leaves + top) / 2
        axes.add_patch(Circle((x, middle), 0.1, facecolor=_BLUE, edgecolor="none", zorder=3))
        axes.text(x, middle, name, fontsize=9, ha="center", va="center", color="white", zorder=4)
    if label:
        axes.text(branch, leaves - 0.12, label, fontsize=8.5, ha="center", color="#6b6b70")
    if places.at_sum:
        _box(axes, x, top + 0.26, NORM)
        top += 0.26
    return top + 0.22


def _box(axes: Axes, x: float, y: float, text: str, *, dashed: bool = False) -> None:
    """Draw one box, centered."""
    is_norm = text == NORM
    width = 0.34 if is_norm else 1.0
    color = _ORANGE if is_norm else _PALE
    patch = FancyBboxPatch(
        (x - width / 2, y - 0.1),
        width,
        0.2,
        boxstyle="round,pad=0,rounding_size=0.05",
        facecolor="white" if dashed else color,
        edgecolor=color if is_norm else "#b8b8c0",
        linestyle="--" if dashed else "-",
        zorder=3,
    )
    axes.add_patch(patch)
    ink = "white" if is_norm and not dashed else _ORANGE if is_norm else _INK
    weight = "bold" if is_norm else "normal"
    axes.text(
        *(x, y - 0.005, text),
        fontsize=8.5,
        ha="center",
        va="center",
        color=ink,
        fontweight=weight,
        zorder=4,
    )


def main() -> int:
    """Write the picture."""
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": "powernorm"}):
        draw().savefig(OUT, facecolor="white", metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
