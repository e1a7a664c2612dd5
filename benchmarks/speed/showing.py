"""Rows in the terminal and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from speed.rows import Row, by_case

_LIMIT: Final = {"bar": 2.5, "dot": 1.6}
"""Larger ratios are drawn at the edge with their number."""


class Mark(NamedTuple):
    """How a picture shows a kind of rows."""

    label: str
    color: str
    marker: str = ""
    """Marker of matplotlib; empty is a bar."""


class View(NamedTuple):
    """How the rows of a benchmark are shown."""

    case: tuple[str, ...]
    """Fields that tell cases apart."""
    title: Callable[[Row], str]
    """Title of a case."""
    name: Callable[[Row], str]
    """Label of a row among those of its case."""
    columns: Mapping[str, Callable[[Row], str]]
    """Texts of a row by their headings; a column without any text is left out."""
    heading: str
    """Title of a picture."""
    marks: Mapping[str, Mark]
    """By the value of the field `series`, in the order in which they are drawn."""
    series: str
    ratio: str = "ratio"
    """Field that is drawn."""
    panel: tuple[str, ...] = ()
    """Fields of a panel of several cases, a line each; else a panel a case, a line a row."""
    line: Callable[[Row], str] = str
    """Title of a case in such a panel."""
    panel_title: Callable[[Row], str] = str


def milliseconds(digits: int) -> dict[str, Callable[[Row], str]]:
    """Return the columns of median and quartiles."""

    def shown(row: Row, *bounds: str) -> str:
        return "-".join(f"{row[f'{bound}_us'] / 1e3:.{digits}f}" for bound in bounds)

    return {
        "ms": lambda row: shown(row, "median"),
        "quartiles": lambda row: shown(row, "lower", "upper"),
    }


def text(row: Row, field: str, form: str, scale: float = 1) -> str:
    """Return a number as a text; none where the row has none."""
    value = row.get(field)
    return "" if value is None else format(value * scale, form)


MEMORY: Final[dict[str, Callable[[Row], str]]] = {
    "peak MB": lambda row: text(row, "peak_bytes", ".2f", 1e-6),
    "/ LN": lambda row: text(row, "peak_ratio", ".3f"),
    "kept MB": lambda row: text(row, "kept_bytes", ".2f", 1e-6),
}
"""Memory of a step: the maximum, its ratio to LayerNorm's, and the memory kept for backward."""


def print_case(view: View, rows: Sequence[Row]) -> None:
    """Print one case: every provider, fastest first."""
    ordered = sorted(rows, key=lambda row: float(row["median_us"]))
    columns = {
        heading: cells
        for heading, column in view.columns.items()
        if any(cells := [column(row) for row in ordered])
    }
    lines = zip(map(view.name, ordered), *columns.values(), strict=True)
    print_table(view.title(rows[0]), ("", *columns), list(lines))


def print_table(title: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a column of words and columns of numbers."""
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    print(title)
    for first, *others in (head, *lines):
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        print("  ".join((first.ljust(widths[0]), *cells)).rstrip())
    print()


def draw(path: Path, view: View, machine: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write an SVG or PNG of ratios.

    Args:
        path: file to write.
        view: of the rows.
        machine: of `describe_machine`.
        rows: of one run.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = list(by_case(rows, view.panel or view.case))
    columns = min(2 if view.panel else 3, len(panels))
    height = -(-len(panels) // columns)
    size = (5.6 * columns, (0.25 * max(len(_lines(view, p)) for p in panels) + 0.9) * height + 1)
    figure, grid = plt.subplots(height, columns, figsize=size, squeeze=False)
    for axis in grid.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(grid.flat, panels, strict=False):
        _draw_panel(axis, view, panel)
    threads = "" if "threads" in view.case else f"{machine['threads']} threads, "
    known = f"{machine['processor']}, {threads}torch {machine['torch']}"
    figure.suptitle(f"{view.heading}\n{known}", fontsize=10)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    legend: dict[str, Any] = {"loc": "lower center", "fontsize": 8, "frameon": False}
    figure.legend(handles, labels, ncols=len(labels), **legend)
    figure.tight_layout(rect=(0, 0.3 / figure.get_figheight(), 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _lines(view: View, rows: Sequence[Row]) -> list[str]:
    if view.panel:
        return list(dict.fromkeys(map(view.line, rows)))
    return [view.name(row) for row in sorted(rows, key=lambda row: float(row[view.ratio]))]


def _draw_panel(axis: Any, view: View, rows: Sequence[Row]) -> None:
    lines, name = _lines(view, rows), view.line if view.panel else view.name
    limit = _LIMIT["dot" if view.panel else "bar"]
    axis.axvline(1, color="#b8c2cb", linewidth=1)
    for kind, (label, color, marker) in view.marks.items():
        own = [row for row in rows if row[view.series] == kind]
        heights = [lines.index(name(row)) for row in own]
        shown = [min(row[view.ratio], limit) for row in own]
        if marker:
            style: dict[str, Any] = {"markersize": 5, "clip_on": False, "zorder": 3}
            axis.plot(shown, heights, marker, color=color, label=label, **style)
        elif own:
            axis.barh(heights, shown, color=color, label=label)
        for row, height in zip(own, heights, strict=True):
            _draw_spread(axis, row, row[view.ratio], height, limit)
    axis.set_yticks(range(len(lines)), lines)
    axis.set_ylim(len(lines) - 0.5, -0.5)
    axis.set_xlim(min(0.75, *(row[view.ratio] - 0.02 for row in rows)) if view.panel else 0, limit)
    axis.set_title((view.panel_title if view.panel else view.title)(rows[0]), fontsize=9)
    axis.tick_params(labelsize=7)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _draw_spread(axis: Any, row: Row, ratio: float, height: int, limit: float) -> None:
    """Draw the quartiles, or the number of what lies beyond the edge."""
    if ratio > limit:
        at = (limit - 0.015, height, f"{ratio:.1f}")
        axis.text(*at, fontsize=7, ha="right", va="center", zorder=4)
        return
    bounds = [min(row[f"{b}_us"] * ratio / row["median_us"], limit) for b in ("lower", "upper")]
    axis.plot(bounds, [height, height], color="black", linewidth=0.7)
