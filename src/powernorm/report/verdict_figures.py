"""Early discrepancy against final gap, a point a setting."""

from collections.abc import Sequence
from math import isfinite
from typing import Final

from matplotlib.axes import Axes

from powernorm.report.drawing import (
    figure,
    inline_svg,
    line_style,
    logarithmic_ticks,
    plain_axes,
    reference_style,
)
from powernorm.report.figures import DrawnFigure
from powernorm.report.verdict_records import WORDS, mean_gap
from powernorm.verdict_runs import VerdictResults, VerdictSetting

_MARKERS: Final = {"pre": "o", "post": "s"}

DRAWN: Final = (
    ("bn", "ln_total_tid_last", "the ln model's last TID"),
    ("bn", "ln_total_tid_avg", "the ln model's average TID"),
    ("bn", "bn_var_tid_last", "its own last var TID"),
    ("rbn", "ln_total_tid_last", "the ln model's last TID"),
    ("pn", "ln_pn_tid_last", "the ln model's last TID"),
)
"""Norm, quantity, and the quantity as a title has room for it."""


def scatters(results: VerdictResults) -> list[DrawnFigure]:
    """One figure a norm and quantity of which something is known."""
    return [
        drawn
        for norm, quantity, title in DRAWN
        if (drawn := _scatter(results, norm, quantity, title)) is not None
    ]


def _scatter(results: VerdictResults, norm: str, quantity: str, title: str) -> DrawnFigure | None:
    points = [
        (setting, 100 * value, gap)
        for setting in results["settings"]
        if (value := setting["early"].get(quantity)) is not None
        and (gap := mean_gap(setting, norm)) is not None
        and isfinite(gap)
    ]
    if not points:
        return None
    threshold = next(
        (
            score["threshold"]
            for score in results["scores"]
            if (score["norm"], score["predictor"]) == (norm, quantity)
        ),
        None,
    )
    with figure(3.2) as drawn:
        axes = drawn.subplots()
        plain_axes(axes, f"{norm} by {title}", "early TID, %, logarithmic", "final gap to ln, nats")
        _draw_points(axes, results, points)
        low, high = min(x for _, x, _ in points) / 1.2, max(x for _, x, _ in points) * 1.2
        axes.set(xscale="log", xlim=(low, high))
        logarithmic_ticks(axes.xaxis, low, high)
        ink, dashes = reference_style()
        axes.axhline(0, color=ink, linestyle=dashes, linewidth=1)
        if threshold:
            axes.axvline(100 * threshold, color=ink, linewidth=1)
        drawn.legend(loc="outside lower center", ncols=4, handlelength=1, columnspacing=1)
        description = f"Early TID against the final loss gap of {norm} to ln in each setting"
        svg = inline_svg(drawn, f"verdict-{norm}-{quantity}", description)
    return DrawnFigure(svg, _scatter_caption(quantity, threshold))


def _scatter_caption(quantity: str, threshold: float | None) -> str:
    text = (
        f"{WORDS[quantity]}, at a tenth of the training, against the loss minus LayerNorm's at its "
        "end, mean over the seeds. "
        "A point a setting: squares post-norm, circles pre-norm; filled: the threshold was chosen "
        "on them, hollow: it was scored on them."
    )
    return text + (" The upright line is the threshold." if threshold else "")


def _draw_points(
    axes: Axes,
    results: VerdictResults,
    points: Sequence[tuple[VerdictSetting, float, float]],
) -> None:
    groups = list(dict.fromkeys(setting["group"] for setting, _, _ in points))
    for setting, x, y in points:
        colour, _ = line_style(groups.index(setting["group"]))
        chosen = setting["name"] in results["choosing"]
        axes.plot(
            [x],
            [y],
            marker=_MARKERS.get(setting["placement"], "o"),
            color=colour,
            markerfacecolor=colour if chosen else "none",
            linestyle="",
            markersize=5,
        )
    for group in groups:
        colour, _ = line_style(groups.index(group))
        axes.plot([], [], marker="o", color=colour, linestyle="", markersize=5, label=group)
