"""matplotlib figures as SVG that can stand many times in one page and follows its colors."""

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from io import StringIO
from math import ceil, floor, isfinite, log10
from typing import Any, Final
from warnings import catch_warnings, simplefilter
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.legend import Legend
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from powernorm.lab.report.magnitudes import logarithmic_limits
from powernorm.lab.report.numerals import NOTHING, printable

SERIES: Final = (
    "#0072b2",
    "#c44e00",
    "#00805d",
    "#a8327d",
    "#8a6a00",
    "#2b8cbe",
    "#6b4fbb",
    "#6b7280",
)
"""Line colors: Okabe and Ito's palette, darkened where it has too little contrast on white; the
page has its own for dark rooms (templates/page.css)."""

# Placeholders that no figure uses for data; the page replaces them by its own colors.
_INK: Final = "#010203"
_GRID: Final = "#010204"
_COLOURS: Final[Mapping[str, str]] = {
    _INK: "currentColor",
    _GRID: "var(--grid)",
    **{color: f"var(--series-{index})" for index, color in enumerate(SERIES)},
}
_DASHES: Final = ("-", "--", ":", "-.")
_LEGEND_SIZE: Final = 9
_HOVER: Final = "value of "
_MOST_LETTERS: Final = 400
"""More fit into no figure, whatever they are: laying out a longer text takes long."""
# Any: recent matplotlib types the keys as a long Literal, older ones as str.
_STYLE: Final[Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "powernorm",
    # A name from a file may hold a dollar sign.
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": _LEGEND_SIZE,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _GRID,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "legend.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_FONTS: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif"
_HREF: Final = "{http://www.w3.org/1999/xlink}href"
_REFERENCE: Final = re.compile(r"url\(#([^)]+)\)")

NO_NUMBER: Final = "#9a9a9a"
"""Gray on light and on dark pages."""

WIDTH: Final = 4.1
"""Inches; small enough that text stays readable on a phone, where a figure fills the width."""

LEGEND_WIDTH: Final = 72 * WIDTH - 4
"""Points that a legend may take."""

_TITLE_ROOM: Final = 72 * WIDTH - 55
"""Points above a frame, which has numbers at its left."""

_LEGEND_STYLE: Final[Mapping[str, float]] = {
    "handlelength": 1.8,
    "handletextpad": 0.8,
    "columnspacing": 1.2,
    "borderpad": 0.4,
}
"""In units of the letters' size."""


@contextmanager
def figure(height: float) -> Iterator[Figure]:
    """A figure of the page's width in the page's style; no global state of pyplot is touched.

    Args:
        height: inches.
    """
    with mpl.rc_context(_STYLE):
        drawn = Figure(figsize=(WIDTH, height), layout="constrained", dpi=150)
        FigureCanvasSVG(drawn)
        yield drawn


def line_style(index: int) -> tuple[str, str]:
    """Color and dashes of the n-th series: told apart without color, too."""
    # One further for every round of colors, so that no two of 32 are alike.
    dashes = index // 2 + index // len(SERIES)
    return SERIES[index % len(SERIES)], _DASHES[dashes % len(_DASHES)]


def reference_style() -> tuple[str, tuple[int, tuple[int, int]]]:
    """Color and dashes of a line that is no run."""
    return _INK, (0, (1, 3))


def plain_axes(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Title, labels and a quiet grid."""
    axes.set_title(fitting(title, _TITLE_ROOM, 11, "bold"), loc="left", fontweight="bold")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True, linewidth=0.6)
    axes.set_axisbelow(True)


def paint(
    axes: Axes,
    table: NDArray[np.float64],
    scale: Normalize,
    extent: tuple[float, float, float, float] | None = None,
) -> None:
    """A map of numbers, gray where there is none.

    Args:
        axes: the frame.
        table: by row, from the top where the extent says so and else from the bottom, and column.
        scale: from number to color.
        extent: left, right, bottom and top; None for one unit a cell, centered on whole numbers.
    """
    axes.imshow(
        np.ma.masked_invalid(table),
        norm=scale,
        cmap=colormaps["cividis"].with_extremes(bad=NO_NUMBER),
        aspect="auto",
        interpolation="nearest",
        origin="lower" if extent is None else "upper",
        extent=extent,
    )


def name_rows(axes: Axes, names: Sequence[str], size: float) -> None:
    """Rows from top to bottom, each with its name at the left."""
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names, fontsize=size)


def legend_columns(labels: Sequence[str]) -> int:
    """As many as fit side by side in a figure's width, five at most.

    >>> legend_columns(["ln", "bn", "rbn", "pn", "adanorm"])
    5
    >>> legend_columns([f"layers.{layer}.attention" for layer in range(9)])
    2
    """
    widths = [_text_width(legend_label(label)) for label in labels]
    for columns in range(min(5, len(labels)), 1, -1):
        # matplotlib's own split: the first columns have one entry more where it does not go up.
        parts = np.array_split(widths, columns)
        text = sum(float(part.max()) for part in parts)
        if text + _legend_frame(columns) <= LEGEND_WIDTH:
            return columns
    return 1


def legend_label(name: str) -> str:
    """The name as a legend has room for it: without its middle where it is too long.

    >>> legend_label("pn-512"), legend_label("_")
    ('pn-512', '–')
    """
    # A label that starts with an underscore would be left out of the legend.
    label = printable(name).lstrip("_") or NOTHING
    return fitting(label, LEGEND_WIDTH - _legend_frame(1), _LEGEND_SIZE)


@lru_cache(maxsize=4096)
def fitting(text: str, room: float, size: float, weight: str = "normal") -> str:
    """The text without its middle where it is wider than so many points."""
    if len(text) <= _MOST_LETTERS and _text_width(text, size, weight) <= room:
        return text
    # The width grows with the number of letters: halving finds the longest that fits.
    most = min(len(text), _MOST_LETTERS) - 1
    kept = bisect_right(
        range(1, most + 1), room, key=lambda kept: _text_width(_cut(text, kept), size, weight)
    )
    return _cut(text, max(kept, 1))


def _cut(text: str, kept: int) -> str:
    """The first and last letters, so many together."""
    return f"{text[: kept // 2]}…{text[len(text) - (kept + 1) // 2 :]}"


def _legend_frame(columns: int) -> float:
    """What a legend takes beside its texts, in points."""
    entry = _LEGEND_STYLE["handlelength"] + _LEGEND_STYLE["handletextpad"]
    between = _LEGEND_STYLE["columnspacing"] * (columns - 1)
    return _LEGEND_SIZE * (columns * entry + between + 2 * _LEGEND_STYLE["borderpad"])


@lru_cache(maxsize=4096)
def _text_width(text: str, size: float = _LEGEND_SIZE, weight: str = "normal") -> float:
    with catch_warnings():
        # A glyph that the font lacks is drawn as a box; the page's own font may have it.
        simplefilter("ignore", UserWarning)
        font = FontProperties(family="sans-serif", size=size, weight=weight)
        width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return float(width)


def legend_height(labels: Sequence[str]) -> float:
    """The inches that a legend of these names takes."""
    return 0.22 * -(-len(labels) // legend_columns(labels))


def legend_entries(frames: Iterable[Axes]) -> dict[str, Artist]:
    """One line a label, over several frames."""
    entries: dict[str, Artist] = {}
    for axes in frames:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    return entries


def draw_legend(drawn: Figure, entries: Mapping[str, Artist]) -> Legend:
    """A legend below the frames, of lines by `legend_label`."""
    return drawn.legend(
        entries.values(),
        entries.keys(),
        loc="outside lower center",
        ncols=legend_columns(list(entries)),
        **_LEGEND_STYLE,
    )


def logarithmic_scale(axis: XAxis | YAxis, values: Sequence[float], room: float) -> None:
    """A logarithmic axis that begins and ends so many times beyond the values, all above 0."""
    limits = logarithmic_limits(values, room)
    # The limits first: matplotlib's own would be made before, and warn of values near the largest.
    axis.axes.set(**{f"{axis.axis_name}lim": limits, f"{axis.axis_name}scale": "log"})
    logarithmic_ticks(axis, *limits)


def logarithmic_ticks(axis: XAxis | YAxis, low: float, high: float) -> None:
    """Ticks of a logarithmic axis that have room beside each other, as plain numbers.

    Args:
        axis: with its scale set.
        low: where it begins.
        high: where it ends.
    """
    # Labels side by side take twice the room of labels below each other.
    decades = log10(high / low) * (2 if isinstance(axis, XAxis) else 1)
    parts = (1.0, 2.0, 5.0) if decades < 2.2 else (1.0, 3.0) if decades < 4 else (1.0,)
    exponents = range(floor(log10(low)), ceil(log10(high)) + 1)
    ticks = [part * 10.0**exponent for exponent in exponents for part in parts]
    if sum(low <= tick <= high for tick in ticks) > 1:
        axis.set_major_locator(LogLocator(base=10, subs=parts))
    else:
        # Round numbers: a single power of ten would not say how the axis runs.
        axis.set_major_locator(MaxNLocator(3 if isinstance(axis, XAxis) else 5))
    axis.set_major_formatter(FuncFormatter(_plain_number))
    axis.set_minor_formatter(NullFormatter())


def _plain_number(value: float, position: int | None) -> str:
    del position
    if not isfinite(value):
        return ""
    if 1e-4 < value < 1e5:
        return f"{value:g}"
    digits, _, exponent = f"{value:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}e{int(exponent)}"


def hover_name(name: str) -> str:
    """Id of a line that says its values under the pointer, by this name."""
    return _HOVER + printable(name)


def inline_svg(
    drawn: Figure, prefix: str, description: str, unit: str = "", rows: Sequence[str] = ()
) -> Markup:
    """The figure as an `<svg>` element.

    Args:
        drawn: a figure of `figure`, inside its `with` block.
        prefix: put in front of every id, so that figures of one page do not clash.
        description: what a reader who cannot see the figure is told.
        unit: of the x axes, for the values under the pointer; empty where there are none.
        rows: names of the rows of figures that have rows in place of a y axis.
    """
    stream = StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    drawn.savefig(stream, format="svg", metadata=no_metadata)
    root = ElementTree.fromstring(stream.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if _local(child.tag) in {"metadata", "style"}:
                parent.remove(child)
    for node in root.iter():
        _adapt(node, prefix)
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.attrib["role"] = "img"
    root.attrib["aria-label"] = description
    if unit:
        root.attrib |= {"data-frames": json.dumps(list(map(_frame, drawn.axes))), "data-unit": unit}
    if rows:
        root.attrib["data-rows"] = json.dumps(list(map(printable, rows)))
    root.attrib["style"] = f"stroke-linejoin: round; stroke-linecap: butt; font-family: {_FONTS}"
    return Markup(ElementTree.tostring(root, encoding="unicode", short_empty_elements=True))


def _frame(axes: Axes) -> dict[str, object]:
    """Where a frame lies in its figure, from the left and from the top, and what its axes span."""
    box = axes.get_position()
    sides = {"left": box.x0, "right": box.x1, "top": 1 - box.y1, "bottom": 1 - box.y0}
    x, y = axes.get_xlim(), axes.get_ylim()
    return {
        **{name: round(float(place), 4) for name, place in sides.items()},
        "x": [*map(float, x), axes.get_xscale() == "log"],
        "y": [*map(float, y), axes.get_yscale() == "log"],
    }


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]


def _adapt(node: ElementTree.Element, prefix: str) -> None:
    """Ids and colors of one element; plain names, for HTML puts SVG in its namespace itself."""
    node.tag = _local(node.tag)
    adapted: dict[str, str] = {}
    for key, value in node.attrib.items():
        if key == "id" and value.startswith(_HOVER):
            adapted["data-name"] = value.removeprefix(_HOVER)
        elif key == "id":
            adapted["id"] = f"{prefix}-{value}"
        elif key == _HREF:
            adapted["href"] = f"#{prefix}-{value[1:]}" if value.startswith("#") else value
        elif key == "style":
            adapted["style"] = _themed(value)
        else:
            adapted[key] = _REFERENCE.sub(rf"url(#{prefix}-\1)", value)
    if node.tag == "text":
        # Matplotlib leaves black text without a fill; its font list is replaced by the page's.
        style = re.sub(r"font-family:[^;]*;?|font:[^;]*;?", _font_size, adapted.get("style", ""))
        adapted["style"] = style if "fill" in style else f"fill: currentColor; {style}"
    node.attrib.clear()
    node.attrib.update(adapted)


def _font_size(match: re.Match[str]) -> str:
    """Of a CSS font only weight and size stay."""
    found = re.search(r"(bold |[0-9]00 )?([0-9.]+px)", match[0])
    if found is None:
        return ""
    weight = f"font-weight: {found[1].strip()}; " if found[1] else ""
    return f"{weight}font-size: {found[2]};"


def _themed(style: str) -> str:
    for placeholder, color in _COLOURS.items():
        style = style.replace(placeholder, color)
    return style
