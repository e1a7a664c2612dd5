"""The kit of all figures: style, axes, legend, and a figure as a part of a page or as files."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from io import BytesIO, StringIO
from math import isfinite, log10, nan
from pathlib import Path
from typing import Any, Final, cast
from warnings import catch_warnings, filterwarnings
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.ticker import Locator, LogLocator, MaxNLocator, NullLocator, StrMethodFormatter
from numpy.typing import NDArray

from powernorm.errors import InputError
from powernorm.files import write
from powernorm_lab.report.numerals import NOTHING, printable
from powernorm_lab.schema import LARGEST

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

_INK: Final = "#1b1f24"
_GRID: Final = "#dfe3e8"
NO_NUMBER: Final = "#9a9a9a"
"""Gray on light and on dark pages."""

_THEME: Final[Mapping[str, str]] = {
    _INK: "currentColor",
    _GRID: "var(--grid)",
    **{color: f"var(--series-{index})" for index, color in enumerate(SERIES)},
    "'DejaVu Sans'": "system-ui",
}
"""What the page puts in place of a figure's font and colors, which are those of its light theme."""

REFERENCE: Final[Mapping[str, Any]] = {
    "color": _INK,
    "linestyle": (0, (1, 3)),
    "linewidth": 1,
}
"""A line that is no run."""

_DASHES: Final = ("-", "--", ":", "-.")
_HOVER: Final = "value of "
_MOST_COLUMNS: Final = 5
_LABEL_LENGTH: Final = 34
_TITLE_LENGTH: Final = 36
_NAME_LENGTH: Final = 28
# Any: recent matplotlib types the keys as a long Literal, older ones as str.
_STYLE: Final[Any] = {
    "svg.fonttype": "none",
    "pdf.fonttype": 42,  # TrueType, which publishers accept.
    # A name from a file may hold a dollar sign.
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.sans-serif": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _GRID,
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "legend.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_PLACES: Final = ("d", "x", "y", "transform")
_LONG_NUMBER: Final = re.compile(r"\d+\.\d{3,}")

WIDTH: Final = 3.3
"""Inches: a column of a paper. On a page a figure is as wide as there is room."""

FORMATS: Final[Mapping[str, Mapping[str, None]]] = {
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
    "png": {},
}
"""Of files, with the metadata that would differ each time."""


@dataclass(frozen=True)
class DrawnFigure:
    """A figure with the words that belong to it."""

    svg: Markup
    caption: str


@contextmanager
def figure(height: float) -> Iterator[Figure]:
    """A figure of a column's width in the page's style; no global state of pyplot is touched.

    Args:
        height: inches, without a legend.
    """
    with mpl.rc_context(_STYLE), catch_warnings():
        # A glyph that the font lacks is drawn as a box; the page's own font may have it.
        filterwarnings("ignore", "Glyph", UserWarning)
        drawn = Figure(figsize=(WIDTH, height), layout="constrained", dpi=200)
        FigureCanvasSVG(drawn)
        yield drawn


def line_style(index: int) -> tuple[str, str]:
    """Color and dashes of the n-th series: told apart without color, too."""
    # One further for every round of colors, so that no two of 32 are alike.
    dashes = index // 2 + index // len(SERIES)
    return SERIES[index % len(SERIES)], _DASHES[dashes % len(_DASHES)]


def shorten(text: str, length: int) -> str:
    """The text as a figure has room for it: without its middle where it is too long.

    >>> shorten("a-very-long-name", 9), shorten("short", 9)
    ('a-ve…name', 'short')
    """
    text = printable(text)
    if len(text) <= length:
        return text
    return f"{text[: (length - 1) // 2]}…{text[len(text) - length // 2 :]}"


def short_names(layers: Sequence[str]) -> list[str]:
    """The layers' names without what says nothing, cut to the room that there is.

    That is what all names share in front and behind, and a last part `norm`. Names that are the
    same when they are cut have the number of the layer behind them.

    >>> short_names(["model.layers.0.attention.norm", "model.layers.1.feedforward.norm"])
    ['layers.0.attention', 'layers.1.feedforward']
    """
    parts = [name.split(".") for name in layers]
    ahead = _num_shared(parts)
    behind = _num_shared([names[::-1] for names in parts]) if len(layers) > 1 else 0
    short = [_short_name(names, ahead, behind) for names in parts]
    return [
        name if short.count(name) == 1 else f"{name} #{number}"
        for number, name in enumerate(short, start=1)
    ]


def _short_name(whole: Sequence[str], ahead: int, behind: int) -> str:
    ahead = min(ahead, len(whole) - 1)
    end = max(len(whole) - behind, ahead + 1)
    if whole[ahead].isdigit():
        # A number says too little without its noun.
        ahead = max(ahead - 1, 0)
    own = list(whole[ahead:end])
    if len(own) > 1 and own[-1] == "norm":
        own.pop()
    name = printable(".".join(own))
    if len(name) <= _NAME_LENGTH:
        return name
    # The end tells layers apart; whole parts are left out where that suffices.
    while len(own) > 1 and len(printable(".".join(own))) >= _NAME_LENGTH:
        own.pop(0)
    return "…" + printable(".".join(own))[1 - _NAME_LENGTH :]


def _num_shared(names: Sequence[Sequence[str]]) -> int:
    """How many parts all names begin with."""
    shared = 0
    for column in zip(*names, strict=False):
        if len(set(column)) > 1:
            break
        shared += 1
    return shared


def plain_axes(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Title, labels and a quiet grid."""
    axes.set_title(shorten(title, _TITLE_LENGTH), loc="left", fontweight="bold")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True)


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


def legend_label(name: str) -> str:
    """The name as a legend has room for it: without its middle where it is too long.

    >>> legend_label("pn-512"), legend_label("_")
    ('pn-512', '–')
    """
    # A label that starts with an underscore would be left out of the legend.
    return shorten(name.lstrip("_") or NOTHING, _LABEL_LENGTH)


def add_legend(drawn: Figure, frames: Iterable[Axes]) -> Legend | None:
    """A legend of the lines below the frames in as many columns as fit; the figure grows.

    Frames have one entry for lines that look the same and have the same name.
    """
    entries: dict[tuple[str, object, object], Line2D] = {}
    for axes in frames:
        lines, labels = axes.get_legend_handles_labels()
        for line, label in zip(cast("list[Line2D]", lines), labels, strict=True):
            entries.setdefault((label, line.get_color(), line.get_linestyle()), line)
    for columns in range(min(_MOST_COLUMNS, len(entries)), 0, -1):
        legend = drawn.legend(
            entries.values(),
            [label for label, *_ in entries],
            loc="outside lower center",
            ncols=columns,
            columnspacing=1.2,
        )
        extent = legend.get_window_extent()
        if extent.width <= drawn.bbox.width or columns == 1:
            drawn.set_figheight(drawn.get_figheight() + extent.height / drawn.dpi)
            return legend
        legend.remove()
    return None


def logarithmic_scale(axis: XAxis | YAxis) -> None:
    """A logarithmic axis with ticks that have room beside each other, as plain numbers.

    Args:
        axis: of a frame in which everything that sets its ends is drawn; it stays linear where
            nothing is above 0.
    """
    if not isfinite(axis.get_minpos()):
        return
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    low, high = axis.get_view_interval()
    is_x = isinstance(axis, XAxis)
    # Labels side by side take twice the room of labels below each other.
    decades = log10(high / low) * (2 if is_x else 1)
    locator: Locator = LogLocator(
        subs=(1.0, 2.0, 5.0) if decades < 2.2 else (1.0, 3.0) if decades < 4 else (1.0,)
    )
    if sum(low <= place <= high for place in locator.tick_values(low, high)) < 2:
        # Round numbers: a single power of ten would not say how the axis runs.
        locator = MaxNLocator(3 if is_x else 5)
    axis.set_major_locator(locator)
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_locator(NullLocator())


def drawable(values: Iterable[float | None], *, positive: bool = False) -> list[float]:
    """The values that an axis can show, also one for positive values alone; NaN for the others."""
    least = 1 / LARGEST if positive else -LARGEST
    return [nan if one is None or not least <= one <= LARGEST else one for one in values]


def hover_name(name: str) -> str:
    """Id of a line that says its values under the pointer, by this name."""
    return _HOVER + printable(name)


def inline_svg(
    drawn: Figure, prefix: str, description: str, unit: str = "", rows: Sequence[str] = ()
) -> Markup:
    """The figure as an `<svg>` element that follows the page's colors; see also `saved_figures`.

    Args:
        drawn: a figure of `figure`, inside its `with` block.
        prefix: its name in the ids, so that figures of one page do not clash, and of its files.
        description: what a reader who cannot see the figure is told.
        unit: of the x axes, for the values under the pointer; empty where there are none.
        rows: names of the rows of figures that have rows in place of a y axis.
    """
    stream = StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    # Ids of clip paths and markers are hashes with the salt.
    with mpl.rc_context({"svg.hashsalt": prefix}):
        drawn.savefig(stream, format="svg", metadata=no_metadata)
    root = ElementTree.fromstring(stream.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if _local(child.tag) in {"metadata", "style"}:
                parent.remove(child)
    for node in root.iter():
        _adapt(node)
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.attrib |= {"role": "img", "aria-label": description}
    if unit:
        root.attrib |= {"data-frames": json.dumps(list(map(_frame, drawn.axes))), "data-unit": unit}
    if rows:
        root.attrib["data-rows"] = json.dumps(list(map(printable, rows)))
    root.attrib["style"] = "stroke-linejoin: round; stroke-linecap: butt"
    if saving := _SAVING.get():
        saving.save(drawn, prefix, description)
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


def _adapt(node: ElementTree.Element) -> None:
    """Names and colors of one element; plain names, for HTML puts SVG in its namespace itself."""
    node.tag = _local(node.tag)
    adapted = {_local(key): value for key, value in node.attrib.items()}
    if node.tag == "g" and "id" in adapted:
        # Nothing refers to a group.
        name = adapted.pop("id")
        if name.startswith(_HOVER):
            adapted["data-name"] = name.removeprefix(_HOVER)
    for key in _PLACES:
        if key in adapted:
            places = " ".join(adapted[key].split())
            adapted[key] = _LONG_NUMBER.sub(lambda number: f"{float(number[0]):.2f}", places)
    for own, theme in _THEME.items():
        if "style" in adapted:
            adapted["style"] = adapted["style"].replace(own, theme)
    node.attrib.clear()
    node.attrib.update(adapted)
    node.tail = None
    if node.tag != "text":
        node.text = None


@dataclass(frozen=True)
class _Files:
    """Where figures go, and what each file shows."""

    folder: Path
    formats: Sequence[str]
    written: dict[Path, str]

    def save(self, drawn: Figure, name: str, description: str) -> None:
        for form in self.formats:
            stream = BytesIO()
            # Letters of an SVG as paths: it looks the same wherever it is shown.
            with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": name}):
                drawn.savefig(stream, format=form, facecolor="white", metadata=FORMATS[form])
            target = self.folder / f"{name}.{form}"
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                write(target, stream.getvalue())
            except OSError as error:
                raise InputError(
                    f"{self.folder} cannot be written ({error.strerror}): give --figures a folder "
                    "of your own"
                ) from error
            self.written[target] = description


_SAVING: Final[ContextVar[_Files | None]] = ContextVar("_SAVING", default=None)


@contextmanager
def saved_figures(folder: Path, formats: Sequence[str]) -> Iterator[Mapping[Path, str]]:
    """Write each figure that is drawn inside as files, a column wide, with their fonts.

    Args:
        folder: where to; files of the same names are replaced.
        formats: of `FORMATS`.

    Yields:
        What each file shows, in the order of the page.

    Raises:
        InputError: there is no such format, a file cannot be written, or nothing was drawn.
    """
    unknown = [form for form in formats if form not in FORMATS]
    if unknown or not formats:
        raise InputError(
            f"--format {','.join(formats)}: expected some of {', '.join(FORMATS)}, "
            "with commas between them"
        )
    files = _Files(folder, formats, {})
    token = _SAVING.set(files)
    try:
        yield files.written
    finally:
        _SAVING.reset(token)
    if not files.written:
        raise InputError("the page has no figure: nothing was logged over the training")
