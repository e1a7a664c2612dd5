"""The results as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from powernorm.benchmarking.rows import Row

_OURS: Final = {"cpu": "#1b6ca8", "triton": "#1b6ca8", "eager": "#b9c4cc", "compiled": "#8fb58a"}
_OTHERS: Final = "#d08c60"
_PER_BAR: Final = 0.24
"""Height of a bar in inches."""


def draw_rows(path: Path, machine: dict[str, Any], rows: Sequence[Row]) -> None:
    """Writes an SVG: one panel a case, a bar a provider, as ratios to torch's LayerNorm.

    Args:
        path: file to write.
        machine: of `describe_machine`.
        rows: of one run.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    cases = [list(group) for _, group in groupby(rows, key=lambda row: row.case)]
    columns = min(3, len(cases))
    lines = -(-len(cases) // columns)
    bars = max(len(case) for case in cases)
    size = (5.4 * columns, (_PER_BAR * bars + 0.8) * lines + 0.5)
    figure, grid = plt.subplots(lines, columns, figsize=size, squeeze=False)
    for axis, case in zip(grid.flat, cases, strict=False):
        _draw_case(axis, case)
    for axis in list(grid.flat)[len(cases) :]:
        axis.set_visible(False)
    kernels = machine.get("gpu", f"{machine['processor']}, {machine['threads']} threads")
    figure.suptitle(f"time over torch's LayerNorm ({kernels}, torch {machine['torch']})", y=1.0)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _case(row: Row) -> str:
    padding = f", {row.padding:.0%} padding" if row.padding else ""
    return f"{row.tokens}×{row.features} {row.dtype}{padding}\n{row.direction}"


def _draw_case(axis: Any, rows: Sequence[Row]) -> None:
    ordered = sorted(rows, key=lambda row: -row.ratio)
    limit = 2.5
    lengths = [min(row.ratio, limit) for row in ordered]
    scale = [row.ratio / row.median_us for row in ordered]
    spread = [
        [max(0.0, row.ratio - row.lower_us * s) for row, s in zip(ordered, scale, strict=True)],
        [max(0.0, row.upper_us * s - row.ratio) for row, s in zip(ordered, scale, strict=True)],
    ]
    colors = [_OURS.get(row.backend, _OTHERS) for row in ordered]
    names = [row.provider for row in ordered]
    axis.barh(names, lengths, color=colors, xerr=spread, error_kw={"elinewidth": 0.8})
    for index, row in enumerate(ordered):
        axis.text(0.03, index, f"{row.ratio:.2f}", va="center", fontsize=7, color="black")
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_xlim(0, limit)
    axis.set_title(_case(ordered[0]), fontsize=9)
    axis.tick_params(labelsize=7)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
