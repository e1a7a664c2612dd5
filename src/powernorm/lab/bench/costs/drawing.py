"""Costs of norms as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from powernorm.lab.bench.costs.rows import CostRow, best_rows

_MARKS: Final = {
    "LayerNorm": ("D", "#e08b4f"),
    "RMSNorm": ("^", "#a374b5"),
    "DyT": ("s", "#8fbf88"),
    "folded": ("o", "#1f77b4"),
}
_LIMIT: Final = 1.6
"""Ratios beyond stand at the edge with their number."""


def draw_costs(path: Path, machine: dict[str, Any], rows: Sequence[CostRow]) -> None:
    """Write an SVG or PNG: a panel an encoder, a line a case, a mark a rival in its best setting.

    Args:
        path: file to write.
        machine: of `describe_machine`.
        rows: of one run.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = [list(group) for _, group in groupby(best_rows(rows), key=lambda row: row.encoder)]
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    height = max(len({row.case for row in panel}) for panel in panels)
    figure, grid = plt.subplots(
        lines, columns, figsize=(5.6 * columns, (0.22 * height + 0.9) * lines + 1), squeeze=False
    )
    for axis in grid.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(grid.flat, panels, strict=False):
        _draw_panel(axis, panel)
    title = f"time of an encoder over the one with LayerNorm\n{machine['processor']}"
    figure.suptitle(title, fontsize=10)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.3 / figure.get_figheight(), 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _draw_panel(axis: Any, rows: Sequence[CostRow]) -> None:
    ways = list(dict.fromkeys(row.way for row in rows))
    axis.axvline(1, color="#dfe6ec", linewidth=1)
    for rival, (marker, color) in _MARKS.items():
        own = [row for row in rows if row.rival == rival]
        heights = [ways.index(row.way) for row in own]
        shown = [min(row.ratio, _LIMIT) for row in own]
        axis.plot(shown, heights, marker, color=color, label=rival, markersize=5, clip_on=False)
        for row, at in zip(own, heights, strict=True):
            if row.ratio > _LIMIT:
                axis.text(
                    *(_LIMIT - 0.015, at, f"{row.ratio:.1f}"),
                    color=color,
                    fontsize=7,
                    ha="right",
                    va="center",
                )
    axis.set_yticks(range(len(ways)), ways)
    axis.set_ylim(len(ways) - 0.5, -0.5)
    axis.set_xlim(min(0.75, *(row.ratio - 0.02 for row in rows)), _LIMIT)
    axis.grid(axis="y", color="#eeeeee")
    axis.set_axisbelow(True)
    axis.set_title(rows[0].title, fontsize=9)
    axis.tick_params(labelsize=7)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
