"""Results of encoders as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from powernorm.lab.bench.inference.rows import TARGETS, InferenceRow

_MARKS: Final = {
    "identity": ("no norms (identity)", "|", "#30363c"),
    "BatchNorm": ("BatchNorm, not folded", "s", "#8fbf88"),
    "LayerNorm": ("LayerNorm", "D", "#e08b4f"),
    "RMSNorm": ("RMSNorm", "^", "#a374b5"),
    "folded": ("folded", "o", "#1f77b4"),
}
"""By provider: label, marker, color; drawn in this order."""
_LIMIT: Final = 1.6
"""Ratios beyond stand at the edge with their number."""


def draw_inference(path: Path, machine: dict[str, Any], rows: Sequence[InferenceRow]) -> None:
    """Writes an SVG or PNG: a panel an encoder, a line a case, a mark a provider.

    Args:
        path: file to write.
        machine: of `describe_machine`.
        rows: of one run.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = [list(group) for _, group in groupby(rows, key=lambda row: row.encoder)]
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    height = max(len({row.case for row in panel}) for panel in panels)
    figure, grid = plt.subplots(
        lines, columns, figsize=(5.6 * columns, (0.3 * height + 0.9) * lines + 1.1), squeeze=False
    )
    for axis, panel in zip(grid.flat, panels, strict=False):
        _draw_panel(axis, panel)
    for axis in list(grid.flat)[len(panels) :]:
        axis.set_visible(False)
    processor = f"{machine['processor']}, {machine['threads']} threads, torch {machine['torch']}"
    figure.suptitle(f"time of an encoder over the same one without norms\n{processor}", fontsize=10)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.3 / figure.get_figheight(), 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _draw_panel(axis: Any, rows: Sequence[InferenceRow]) -> None:
    cases = list(dict.fromkeys(row.case for row in rows))
    names = {row.case: row.way for row in rows}
    floor = next(target for target in TARGETS if target.rival == "identity")
    axis.axvspan(floor.least, floor.most, color="#dfe6ec", linewidth=0)
    for provider, (label, marker, color) in _MARKS.items():
        own = [row for row in rows if row.provider == provider]
        heights = [cases.index(row.case) for row in own]
        shown = [min(row.ratio_to_identity, _LIMIT) for row in own]
        axis.plot(
            shown, heights, marker, color=color, label=label, markersize=6, clip_on=False, zorder=3
        )
        for row, height in zip(own, heights, strict=True):
            _draw_spread(axis, row, height, color)
    axis.set_yticks(range(len(cases)), [names[case] for case in cases])
    axis.set_ylim(len(cases) - 0.5, -0.5)
    axis.set_xlim(min(0.95, *(row.ratio_to_identity - 0.02 for row in rows)), _LIMIT)
    axis.grid(axis="y", color="#eeeeee")
    axis.set_axisbelow(True)
    axis.set_title(rows[0].title, fontsize=9)
    axis.tick_params(labelsize=7)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _draw_spread(axis: Any, row: InferenceRow, height: int, color: str) -> None:
    """The quartiles, or the number of what lies beyond the edge."""
    if row.ratio_to_identity > _LIMIT:
        text = f"{row.ratio_to_identity:.1f}"
        axis.text(_LIMIT - 0.015, height, text, color=color, fontsize=7, ha="right", va="center")
        return
    bounds = [b * row.ratio_to_identity / row.median_us for b in (row.lower_us, row.upper_us)]
    axis.plot([min(bound, _LIMIT) for bound in bounds], [height, height], color=color, linewidth=1)
