"""Draw norms.svg: the values that every norm of the registry averages over, and static norms.

Run `python docs/images/norms.py` after a change of the registry; a test compares the two.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from powernorm.norms import NORMS, NormInfo

OUT: Final = Path(__file__).with_suffix(".svg")

Kind = Literal["token", "groups", "batch", "last", "all"]
_BLUE, _ORANGE, _INK, _PALE = "#0072b2", "#c44e00", "#333333", "#e8e8ec"
_BATCHES, _TOKENS, _FEATURES = 4, 4, 6

PATTERNS: Final[Mapping[str, Sequence[Kind]]] = {
    "nothing": (),
    "features of a token": ("token",),
    "groups of features of a token": ("groups",),
    "features of a token, at the end nothing": ("token",),
    "features of a token, at the end valid tokens of the batch": ("token", "batch"),
    "features of a token, then valid tokens of all batches so far": ("token", "all"),
    "valid tokens of the batch": ("batch",),
    "valid tokens of the batch, corrected to the running ones": ("batch", "all"),
    "valid tokens of the last batches": ("last",),
    "valid tokens of all batches so far": ("all",),
}
"""Shaded cells, for every set that a norm averages over in the registry."""

_ROW: Final = 0.62
"""Height of a row, in inches."""


def rows() -> list[tuple[str, list[NormInfo]]]:
    """Return the norms by what they average over, in the order of `PATTERNS`."""
    return [
        (over, [info for info in NORMS.values() if info.averages_over == over]) for over in PATTERNS
    ]


def label(info: NormInfo) -> str:
    """Return a norm's name in the picture, with its mark."""
    return f"{'●' if info.static else '○'} {info.name}"


def draw() -> Figure:
    """Return the picture."""
    groups = rows()
    height = _ROW * (len(groups) + 1.6)
    figure = Figure(figsize=(10, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 10)
    axes.set_ylim(0, height)
    axes.set_axis_off()
    top = height - 0.45
    for x, title in ((0.2, "batches, the last one now"), (3.7, "averages over"), (7.1, "norms")):
        axes.text(x, top, title, fontsize=10, fontweight="bold", color=_INK)
    for index, (over, infos) in enumerate(groups):
        middle = top - _ROW * (index + 0.75)
        axes.plot([0.2, 9.8], [middle + _ROW / 2] * 2, color=_PALE, linewidth=1)
        for batch in range(_BATCHES):
            _matrix(axes, 0.2 + 0.82 * batch, middle, PATTERNS[over], batch)
        axes.text(3.7, middle, _wrapped(over), fontsize=9.5, va="center", color=_INK)
        _names(axes, 7.1, middle, infos)
    axes.text(
        *(
            0.2,
            0.18,
            "a matrix is a batch: tokens down, features across, the last token is padding (white)",
        ),
        fontsize=9,
        color=_INK,
    )
    axes.text(6.2, 0.18, "● static at inference   ○ not", fontsize=9, color=_INK)
    return figure


def _matrix(axes: Axes, left: float, middle: float, kinds: Sequence[Kind], batch: int) -> None:
    """Draw a batch, and shade the values that normalize one value of the last batch."""
    width, height = 0.7 / _FEATURES, 0.44 / _TOKENS
    bottom = middle - 0.22
    size = width * _FEATURES, height * (_TOKENS - 1)
    axes.add_patch(Rectangle((left, bottom + height), *size, facecolor=_PALE, linewidth=0))
    for kind in reversed(kinds):
        for token, feature, tokens, features in _shaded(kind, batch):
            place = left + width * feature, bottom + height * (_TOKENS - token - tokens)
            color = _ORANGE if kind in ("token", "groups") else _BLUE
            area = width * features, height * tokens
            axes.add_patch(Rectangle(place, *area, facecolor=color, linewidth=0))
    across = [bottom + height * token for token in range(_TOKENS + 1)]
    down = [left + width * feature for feature in range(_FEATURES + 1)]
    lines = [[(left, y), (left + size[0], y)] for y in across]
    lines += [[(x, bottom), (x, across[-1])] for x in down]
    axes.add_collection(LineCollection(lines, colors="#b5b5bd", linewidths=0.5))


def _shaded(kind: Kind, batch: int) -> list[tuple[int, int, int, int]]:
    """Return the shaded parts of a batch: first token and feature, numbers of both."""
    now = batch == _BATCHES - 1
    if kind in ("token", "groups"):
        return [(1, 0, 1, _FEATURES if kind == "token" else _FEATURES // 2)] if now else []
    is_read = {"batch": now, "last": batch >= _BATCHES - 2, "all": True}[kind]
    return [(0, 1, _TOKENS - 1, 1)] if is_read else []


def _wrapped(over: str) -> str:
    first, comma, rest = over.partition(", ")
    return f"{first},\n{rest}" if comma else first


def _names(axes: Axes, left: float, middle: float, infos: Sequence[NormInfo]) -> None:
    """Write the names, three in a line."""
    lines = [infos[start : start + 3] for start in range(0, len(infos), 3)]
    for index, line in enumerate(lines):
        y = middle + 0.17 * ((len(lines) - 1) / 2 - index)
        for column, info in enumerate(line):
            x = left + 0.98 * column
            color = _BLUE if info.static else _INK
            axes.text(x, y, label(info), fontsize=9, va="center", color=color)


def main(out: Path = OUT) -> None:
    """Write the picture."""
    style = {"svg.fonttype": "none", "svg.hashsalt": "powernorm", "font.family": "sans-serif"}
    with mpl.rc_context(style):
        draw().savefig(out, format="svg", facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else OUT)
