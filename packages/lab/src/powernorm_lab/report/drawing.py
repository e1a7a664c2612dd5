"""Shared parts of all figures: style, axes, legends, and output as SVG or files."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from io import BytesIO, StringIO
from itertools import takewhile
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
from matplotlib.image import AxesImage
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.ticker import Locator, LogLocator, MaxNLocator, NullLocator, StrMethodFormatter
from numpy.typing import NDArray

from powernorm.errors import InputError
from powernorm.files import write
from powernorm_lab.report.numerals import NOTHING, printable, shorten
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
"""Line colors: Okabe and Ito's palette, darkened for contrast on white; the page has others for its
dark theme (templates/page.css)."""

_INK: Final = "#1b1f24"
_GRID: Final = "#dfe3e8"
NO_NUMBER: Final = "#9a9a9a"
"""Color of missing numbers: gray on light and dark pages."""

_THEME: Final[Mapping[str, str]] = {
    _INK: "currentColor",
    _GRID: "var(--grid)",
    **{color: f"var(--series-{index})" for index, color in enumerate(SERIES)},
    "'DejaVu Sans'": "system-ui",
}
"""Replacements on the page for a figure's font and colors, which are those of the light theme."""

REFERENCE: Final[Mapping[str, Any]] = {
    "color": _INK,
    "linestyle": (0, (1, 3)),
    "linewidth": 1,
}
"""Style of a line that is not a run."""

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
    # A name from a file may contain a dollar sign.
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
_PLACES: Final = ("d", "x", "y")
_DECIMAL: Final = re.compile(r"\d+\.\d+")
_GAPS: Final = re.compile(r"\s*([A-Zaz])\s*")
_INHERITED: Final = (
    "fill: currentColor",
    "font-family: system-ui, sans-serif",
    "stroke-linecap: butt",
    "stroke-linejoin: round",
    "text-anchor: start",
)
"""Style of a whole figure, which its elements need not repeat."""

WIDTH: Final = 3.3
"""Width of a paper's column in inches. On a page, figures are as wide as the available space."""

FORMATS: Final[Mapping[str, Mapping[str, None]]] = {
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
    "png": {},
}
"""File formats, with the metadata to remove because they would differ each time."""


@dataclass(frozen=True)
class DrawnFigure:
    """A figure with its caption."""

    svg: Markup
    caption: str


@contextmanager
def figure(height: float) -> Iterator[Figure]:
    """Create a figure of a column's width in the page's style, without pyplot's global state.

    Args:
        height: height in inches, without a legend.
    """
    with mpl.rc_context(_STYLE), catch_warnings():
        # The page's font may have a glyph that this font lacks.
        filterwarnings("ignore", "Glyph", UserWarning)
        drawn = Figure(figsize=(WIDTH, height), layout="constrained", dpi=200)
        FigureCanvasSVG(drawn)
        yield drawn


def line_style(index: int) -> tuple[str, str]:
    """Return color and dashes of the n-th series, which can be distinguished without color."""
    # Dashes advance with every round of colors, so that 32 series are distinct.
    dashes = index // 2 + index // len(SERIES)
    return SERIES[index % len(SERIES)], _DASHES[dashes % len(_DASHES)]


def short_names(layers: Sequence[str]) -> list[str]:
    """Shorten the names of layers.

    This removes prefixes and suffixes that all names share and a final `norm`, and cuts long names.
    Equal results are numbered.

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
        # A number needs the name before it.
        ahead = max(ahead - 1, 0)
    own = list(whole[ahead:end])
    if len(own) > 1 and own[-1] == "norm":
        own.pop()
    name = printable(".".join(own))
    if len(name) <= _NAME_LENGTH:
        return name
    # The end distinguishes layers, so that parts are removed from the front first.
    while len(own) > 1 and len(printable(".".join(own))) >= _NAME_LENGTH:
        own.pop(0)
    return "…" + printable(".".join(own))[1 - _NAME_LENGTH :]


def _num_shared(names: Sequence[Sequence[str]]) -> int:
    """Return the number of leading parts that all names share."""
    columns = zip(*names, strict=False)
    return len(list(takewhile(lambda column: len(set(column)) == 1, columns)))


def plain_axes(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Set title, labels and a light grid."""
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
    """Draw a heat map with gray for missing numbers.

    Args:
        axes: axes to draw on.
        table: numbers by row and column; the first row is at the bottom, with an extent at the top.
        scale: function from numbers to colors.
        extent: left, right, bottom and top; None for one unit per cell, centered on whole numbers.
    """
    axes.imshow(
        np.ma.masked_invalid(table),
        norm=scale,
        cmap=colormaps["cividis"].with_extremes(bad=NO_NUMBER),
        aspect="auto",
        # A page gets the numbers' own pixels, which the browser enlarges.
        interpolation="none",
        origin="lower" if extent is None else "upper",
        extent=extent,
    )


def name_rows(axes: Axes, names: Sequence[str], size: float) -> None:
    """Label the rows from top to bottom at the left."""
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names, fontsize=size)


def legend_label(name: str) -> str:
    """Shorten a name for a legend.

    >>> legend_label("pn-512"), legend_label("_")
    ('pn-512', '–')
    """
    # matplotlib omits labels with a leading underscore from legends.
    return shorten(name.lstrip("_") or NOTHING, _LABEL_LENGTH)


def add_legend(drawn: Figure, frames: Iterable[Axes]) -> Legend | None:
    """Add a legend below the axes in as many columns as fit, and increase the figure's height.

    Lines with the same look and name have one entry.
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
    """Make an axis logarithmic, with plain numbers as ticks that do not overlap.

    Args:
        axis: axis with its final limits; it stays linear if no value is above 0.
    """
    if not isfinite(axis.get_minpos()):
        return
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    low, high = axis.get_view_interval()
    is_x = isinstance(axis, XAxis)
    # Labels next to each other take twice the space of labels below each other.
    decades = log10(high / low) * (2 if is_x else 1)
    locator: Locator = LogLocator(
        subs=(1.0, 2.0, 5.0) if decades < 2.2 else (1.0, 3.0) if decades < 4 else (1.0,)
    )
    if sum(low <= place <= high for place in locator.tick_values(low, high)) < 2:
        # Round numbers, because a single power of ten would not show the scale.
        locator = MaxNLocator(3 if is_x else 5)
    axis.set_major_locator(locator)
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_locator(NullLocator())


def drawable(values: Iterable[float | None], *, positive: bool = False) -> list[float]:
    """Replace values that an axis cannot show by NaN; `positive` is for logarithmic axes."""
    least = 1 / LARGEST if positive else -LARGEST
    return [nan if one is None or not least <= one <= LARGEST else one for one in values]


def hover_name(name: str) -> str:
    """Return the id of a line that shows its values with this name under the pointer."""
    return _HOVER + printable(name)


def inline_svg(
    drawn: Figure, prefix: str, description: str, unit: str = "", rows: Sequence[str] = ()
) -> Markup:
    """Return a figure as an `<svg>` element in the page's colors; see also `saved_figures`.

    Args:
        drawn: figure of `figure`, inside its `with` block.
        prefix: unique prefix of the figure's ids on a page, and name of its files.
        description: text for readers who cannot see the figure.
        unit: unit of the x axes for the values under the pointer; empty to show none.
        rows: names of the rows for figures with rows instead of a y axis.
    """
    stream = StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    # Ids of clip paths and markers are hashes with the salt.
    with mpl.rc_context({"svg.hashsalt": prefix}):
        drawn.savefig(stream, format="svg", metadata=no_metadata)
    root = ElementTree.fromstring(stream.getvalue())
    for node in root.iter():
        _adapt(node)
    root[:] = _visible(root)
    _share_styles(root)
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.attrib |= {"role": "img", "aria-label": description}
    if unit:
        root.attrib |= {"data-frames": json.dumps(list(map(_frame, drawn.axes))), "data-unit": unit}
    if rows:
        root.attrib["data-rows"] = json.dumps(list(map(printable, rows)))
    root.attrib["style"] = "; ".join(_INHERITED)
    if saving := _SAVING.get():
        saving.save(drawn, prefix, description)
    return Markup(ElementTree.tostring(root, encoding="unicode", short_empty_elements=True))


def _frame(axes: Axes) -> dict[str, object]:
    """Return the position of axes in their figure, from the left and the top, and their limits."""
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
    """Adapt names and colors of an element; inline SVG in HTML needs no namespaces."""
    node.tag = _local(node.tag)
    adapted = {_local(key): value for key, value in node.attrib.items()}
    if adapted.get("transform", "").startswith("rotate(-0 "):
        del adapted["transform"]
    if node.tag in ("g", "image") and "id" in adapted:
        # Only ids of paths and clip paths are referenced.
        name = adapted.pop("id")
        if name.startswith(_HOVER):
            adapted["data-name"] = name.removeprefix(_HOVER)
    for key in _PLACES:
        if key in adapted:
            short = _DECIMAL.sub(lambda number: f"{round(float(number[0]), 2):g}", adapted[key])
            adapted[key] = _GAPS.sub(r"\1", short.strip())
    for own, theme in _THEME.items():
        if "style" in adapted:
            adapted["style"] = adapted["style"].replace(own, theme)
    node.attrib.clear()
    node.attrib.update(adapted)
    node.tail = None
    if node.tag != "text":
        node.text = None


def _visible(parent: ElementTree.Element) -> list[ElementTree.Element]:
    """Return the children without groups that have no effect and shapes that cannot be seen."""
    found = []
    for node in parent:
        node[:] = children = _visible(node)
        if node.tag == "g" and not node.attrib:
            found += children
        elif not (
            node.tag in ("metadata", "style")
            or (node.tag in ("g", "defs") and not children)
            or node.get("style") == "fill: none"
        ):
            found.append(node)
    return found


def _share_styles(root: ElementTree.Element) -> None:
    """Remove the parts of styles that the figure or the used path already has."""
    own = {f"#{node.get('id')}": node.get("style", "").split("; ") for node in root.iter("path")}
    for node in root.iter():
        shared = {*_INHERITED, *own.get(node.get("href", ""), ())}
        kept = [part for part in node.attrib.pop("style", "").split("; ") if part not in shared]
        if any(kept):
            node.attrib["style"] = "; ".join(kept)


@dataclass(frozen=True)
class _Files:
    """Folder and formats of figures, and descriptions of the written files."""

    folder: Path
    formats: Sequence[str]
    written: dict[Path, str]

    def save(self, drawn: Figure, name: str, description: str) -> None:
        for image in cast("list[AxesImage]", drawn.findobj(AxesImage)):
            # Viewers of files may blur the pixels of a small image.
            image.set_interpolation("nearest")
        for form in self.formats:
            stream = BytesIO()
            # With letters as paths, an SVG looks the same without the font.
            with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": name}):
                drawn.savefig(stream, format=form, facecolor="white", metadata=FORMATS[form])
            target = self.folder / f"{name}.{form}"
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                write(target, stream.getvalue())
            except OSError as error:
                raise InputError(
                    f"{self.folder} cannot be written ({error.strerror}): give --figures a folder "
                    "that you can write to"
                ) from error
            self.written[target] = description


_SAVING: Final[ContextVar[_Files | None]] = ContextVar("_SAVING", default=None)


@contextmanager
def saved_figures(folder: Path, formats: Sequence[str]) -> Iterator[Mapping[Path, str]]:
    """Write each figure drawn in the block to files, one column wide, with fonts.

    Args:
        folder: folder of the files; existing files of the same names are replaced.
        formats: formats of `FORMATS`.

    Yields:
        Descriptions by file, in the order of the page.

    Raises:
        InputError: a format is unknown, a file cannot be written, or no figure was drawn.
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
