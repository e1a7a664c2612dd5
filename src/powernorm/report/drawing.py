"""matplotlib figures as SVG that can stand many times in one page and follows its colours."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from math import log10
from typing import Any, Final
from xml.etree import ElementTree

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from powernorm.report.markup import Markup
from powernorm.report.style import SERIES

# Placeholders that no figure uses for data; the page replaces them by its own colours.
_INK: Final = "#010203"
_GRID: Final = "#010204"
_COLOURS: Final[Mapping[str, str]] = {
    _INK: "currentColor",
    _GRID: "var(--grid)",
    **{colour: f"var(--series-{index})" for index, colour in enumerate(SERIES)},
}
_DASHES: Final = ("-", "--", ":", "-.")
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
    "legend.fontsize": 9,
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
_SVG: Final = "{http://www.w3.org/2000/svg}"
_HREF: Final = "{http://www.w3.org/1999/xlink}href"
_REFERENCE: Final = re.compile(r"url\(#([^)]+)\)")

WIDTH: Final = 4.1
"""Inches; small enough that text stays readable on a phone, where a figure fills the width."""

LEGEND_CHARACTERS: Final = 48
"""Of a legend's size that fit into `WIDTH`."""


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
    """Colour and dashes of the n-th series: told apart without colour, too."""
    # One further for every round of colours, so that no two of 32 are alike.
    dashes = index // 2 + index // len(SERIES)
    return SERIES[index % len(SERIES)], _DASHES[dashes % len(_DASHES)]


def reference_style() -> tuple[str, tuple[int, tuple[int, int]]]:
    """Colour and dashes of a line that is no run."""
    return _INK, (0, (1, 3))


def plain_axes(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Title, labels and a quiet grid."""
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True, linewidth=0.6)
    axes.set_axisbelow(True)


def legend_columns(labels: Sequence[str]) -> int:
    """As many as fit side by side in a figure's width, five at most.

    >>> legend_columns(["ln", "bn", "rbn", "pn", "adanorm"])
    5
    >>> legend_columns([f"layers.{layer}.attention" for layer in range(9)])
    2
    """
    for columns in range(min(5, len(labels)), 1, -1):
        rows = -(-len(labels) // columns)
        # Filled column by column, each as wide as its longest label and the line before it.
        widths = (max(map(len, labels[i : i + rows])) for i in range(0, len(labels), rows))
        if sum(width + 5 for width in widths) <= LEGEND_CHARACTERS:
            return columns
    return 1


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
    axis.set_major_locator(LogLocator(base=10, subs=parts))
    axis.set_major_formatter(FuncFormatter(_plain_number))
    axis.set_minor_formatter(NullFormatter())


def _plain_number(value: float, position: int | None) -> str:
    del position
    if 1e-4 < value < 1e5:
        return f"{value:g}"
    digits, _, exponent = f"{value:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}e{int(exponent)}"


def inline_svg(drawn: Figure, prefix: str, description: str) -> Markup:
    """The figure as an `<svg>` element.

    Args:
        drawn: a figure of `figure`, inside its `with` block.
        prefix: put in front of every id, so that figures of one page do not clash.
        description: what a reader who cannot see the figure is told.
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
    root.attrib["style"] = f"stroke-linejoin: round; stroke-linecap: butt; font-family: {_FONTS}"
    return Markup(ElementTree.tostring(root, encoding="unicode", short_empty_elements=True))


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]


def _adapt(node: ElementTree.Element, prefix: str) -> None:
    """Ids and colours of one element; plain names, for HTML puts SVG in its namespace itself."""
    node.tag = _local(node.tag)
    adapted: dict[str, str] = {}
    for key, value in node.attrib.items():
        if key == "id":
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
    for placeholder, colour in _COLOURS.items():
        style = style.replace(placeholder, colour)
    return style
