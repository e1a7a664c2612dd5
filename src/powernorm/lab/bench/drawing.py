"""The results as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from powernorm.lab.bench.rows import Row

_COLORS: Final = {
    "cpu": "#6aaedb",
    "triton": "#6aaedb",
    "step": "#6aaedb",
    "compiled": "#a9cfa4",
    "eager": "#ccd4da",
    "torch": "#e3ab84",
}
_LEGEND: Final = {
    "powernorm's kernels": "cpu",
    "through torch.compile": "compiled",
    "powernorm in eager torch": "eager",
    "torch and others": "torch",
}
_LIMIT: Final = 2.5
"""Longer bars are cut off; their number says how long they are."""
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
    from matplotlib.patches import Patch

    cases = [list(group) for _, group in groupby(rows, key=lambda row: row.case)]
    columns = min(3, len(cases))
    lines = -(-len(cases) // columns)
    bars = max(len(case) for case in cases)
    size = (5.4 * columns, (_PER_BAR * bars + 0.8) * lines + 0.7)
    figure, grid = plt.subplots(lines, columns, figsize=size, squeeze=False)
    for axis, case in zip(grid.flat, cases, strict=False):
        _draw_case(axis, case)
    for axis in list(grid.flat)[len(cases) :]:
        axis.set_visible(False)
    kernels = f"{machine['processor']}, {machine['threads']} threads"
    title = f"time over torch's LayerNorm\n{kernels}, torch {machine['torch']}"
    figure.suptitle(title, y=1.0, fontsize=10)
    present = {_COLORS[row.backend] for row in rows}
    handles = [
        Patch(color=_COLORS[backend], label=label)
        for label, backend in _LEGEND.items()
        if _COLORS[backend] in present
    ]
    figure.legend(
        handles=handles, loc="lower center", ncols=len(handles), fontsize=8, frameon=False
    )
    figure.tight_layout(rect=(0, 0.25 / figure.get_figheight(), 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _case(row: Row, whole_step: bool) -> str:
    padding = f", {row.padding:.0%} padding" if row.padding else ""
    what = "a training step, 6 + 6 layers" if whole_step else row.direction
    return f"{row.tokens}×{row.features} {row.dtype}{padding}\n{what}"


def _draw_case(axis: Any, rows: Sequence[Row]) -> None:
    ordered = sorted(rows, key=lambda row: -row.ratio)
    whole_step = any(row.backend == "step" for row in rows)
    names = [row.norm if whole_step else row.provider for row in ordered]
    colors = [_COLORS[row.backend] for row in ordered]
    axis.barh(names, [min(row.ratio, _LIMIT) for row in ordered], color=colors)
    for index, row in enumerate(ordered):
        axis.text(0.03, index, f"{row.ratio:.2f}", va="center", fontsize=7)
        if row.ratio < _LIMIT:
            quartiles = [
                bound * row.ratio / row.median_us for bound in (row.lower_us, row.upper_us)
            ]
            axis.plot(quartiles, [index, index], color="black", linewidth=0.8)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_xlim(0, _LIMIT)
    axis.margins(y=0.01)
    axis.set_title(_case(ordered[0], whole_step), fontsize=9)
    axis.tick_params(labelsize=7)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
