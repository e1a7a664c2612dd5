"""Draw the pictures of the start page from stored results: `python docs/pictures.py`.

Each is drawn twice, for light and for dark pages.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from powernorm_lab.report.loading import read_comparison
from powernorm_lab.report.results_document import claims, joined
from powernorm_lab.report.statistics import summarize

ROOT = Path(__file__).parents[1]
STORED = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
INK = {"light": "#1f2328", "dark": "#e6e6e6"}
PAPER = {"light": "#ffffff", "dark": "#131416"}
COLORS = {"light": ("#2563a8", "#c2571a", "#8a8f98"), "dark": ("#6cb0f5", "#f0954f", "#7d838c")}
"""Colors of ours, theirs or the paper's, and the line between."""


@contextmanager
def styled(theme: str) -> Iterator[None]:
    """Apply matplotlib's settings for one theme."""
    ink = INK[theme]
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    settings: dict[str, Any] = dict.fromkeys(names, ink)
    settings |= {
        "figure.facecolor": PAPER[theme],
        "axes.facecolor": PAPER[theme],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 11,
        "svg.hashsalt": "powernorm",
    }
    with mpl.rc_context(settings):
        yield


def draw(name: str, drawing: Callable[[str], Figure]) -> None:
    """Write a picture in both themes."""
    for theme in INK:
        with styled(theme):
            figure = drawing(theme)
            figure.savefig(IMAGES / f"{name}-{theme}.svg", metadata={"Date": None})


SPEED = {
    "RMSNorm": ("rms (cpu)", "torch RMSNorm", "rms (compiled)"),
    "BatchNorm": ("bn (cpu)", "torch BatchNorm1d", "bn (compiled)"),
    "Regularized BatchNorm": ("rbn (cpu)", None, "rbn (compiled)"),
    "PowerNorm": ("pn (cpu)", None, "pn (compiled)"),
    "AdaNorm": ("adanorm (cpu)", None, "adanorm (compiled)"),
}
"""Providers of `bench.py` by norm: this library's kernels, torch's layer, our formulas in torch
through its compiler."""


def speed(theme: str) -> Figure:
    """Draw the time of a training step's norm over LayerNorm's, by provider."""
    lines = (STORED / "rivals.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    rows = [json.loads(line) for line in lines]
    ratios = {
        row["provider"]: row["ratio"]
        for row in rows
        if (row["tokens"], row["features"], row["padding"]) == (4096, 512, 0)
    }
    figure = Figure(figsize=(8, 3.9), layout="constrained")
    axes = figure.subplots()
    labels = ("powernorm's kernel", "torch's own layer", "the formula through torch.compile")
    for place, label in enumerate(labels):
        bars = [
            (row - 0.28 + 0.28 * place, ratios[providers[place]])
            for row, providers in enumerate(SPEED.values())
            if providers[place] is not None
        ]
        drawn = axes.barh(
            [y for y, _ in bars],
            [x for _, x in bars],
            height=0.25,
            color=COLORS[theme][place],
            label=label,
        )
        axes.bar_label(drawn, fmt="%.2f", padding=3, fontsize=9)
    axes.axvline(1, color=INK[theme], linewidth=1, linestyle=":")
    axes.set_yticks(range(len(SPEED)), list(SPEED))
    axes.invert_yaxis()
    axes.set_xlabel("time of forward and backward, torch's LayerNorm = 1")
    axes.legend(frameon=False, loc="lower right")
    return figure


SHOWN = (-2.2, 1.4)
"""Range of the drawn gaps; values outside are written at the edge."""


def gaps(theme: str) -> Figure:
    """Draw the score of each norm minus LayerNorm's on the translations, with the papers'."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True)
    for axes, placement in zip(panels, ("pre", "post"), strict=True):
        _draw_gaps(axes, placement, theme)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _draw_gaps(axes: Axes, placement: str, theme: str) -> None:
    folders = sorted((STORED / "papers").glob(f"translation-verses-mini-{placement}-seed*"))
    (comparison,) = joined(map(read_comparison, folders))
    ours, papers, _ = COLORS[theme]
    names = []
    for row in summarize(comparison):
        gap = row.gap
        if gap is None or row.is_baseline:
            continue
        names.append(row.label)
        errors = [[gap.difference - gap.low], [gap.high - gap.difference]]
        label = "here: mean of 5 seeds, 95 % interval" if len(names) == 1 else None
        axes.errorbar(
            gap.difference, len(names) - 1, xerr=errors, fmt="o", color=ours, capsize=3, label=label
        )
    printed = [one for one in claims(comparison) if one.against == "ln" and one.norm in names]
    axes.scatter(
        [one.printed for one in printed],
        [names.index(one.norm) for one in printed],
        marker="D",
        facecolors="none",
        edgecolors=papers,
        zorder=3,
        label="the papers, on IWSLT14",
    )
    axes.set_xlim(*SHOWN)
    for one in printed:
        if one.printed < SHOWN[0]:
            place = (SHOWN[0], names.index(one.norm))
            axes.text(*place, f" ← {one.printed:.1f}", color=papers, va="center")
    axes.axvline(0, color=INK[theme], linewidth=1, linestyle=":")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_title(f"{placement}-norm", fontsize=11)
    axes.set_xlabel("BLEU minus LayerNorm's")


if __name__ == "__main__":
    draw("speed", speed)
    draw("gaps", gaps)
