"""Figure of the study: both forms of each norm, and their gaps to LayerNorm.

python studies/causality/figure.py studies/causality/results
"""

import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

import powernorm_lab as lab

Values = dict[tuple[str, int], Any]
"""Values by variant and seed."""
FORMS = (("", "causal", "o"), ("-future", "sees the future", "D"))


def draw(comparison: lab.Comparison, path: Path) -> None:
    """Draw test perplexity and test loss minus that of LayerNorm of the same form and seed."""
    finished = {(run.name, run.seed): run.metrics for run in comparison.runs if run.finished}
    losses: Values = {key: metrics["test_loss"] for key, metrics in finished.items()}
    perplexities: Values = {key: metrics["test_perplexity"] for key, metrics in finished.items()}
    gaps = {
        (name, seed): loss - losses[base, seed]
        for (name, seed), loss in losses.items()
        if (base := "ln-future" if name.endswith("-future") else "ln") != name
        and (base, seed) in losses
    }
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_panel(left, perplexities)
    left.set(xscale="log", xlabel="perplexity per word, logarithmic", title="Test perplexity")
    _draw_panel(right, gaps)
    right.set(xlabel="nats per token", title="Test loss minus that of ln of the same form")
    right.axvline(0, color="gray", linestyle=":", linewidth=1)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    # Equal results give equal files.
    with mpl.rc_context({"svg.hashsalt": "causality", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


def _draw_panel(axes: mpl.axes.Axes, found: Values) -> None:
    """Draw the mean over seeds and a bar from lowest to highest, with one row per norm."""
    norms = list(dict.fromkeys(name.removesuffix("-future") for name, _ in found))
    for index, (mark, label, marker) in enumerate(FORMS):
        for row, norm in enumerate(norms):
            values = [value for (name, _), value in found.items() if name == f"{norm}{mark}"]
            if values:
                mean = np.mean(values)
                axes.errorbar(
                    mean,
                    row + 0.2 * (index - 0.5),
                    xerr=[[mean - min(values)], [max(values) - mean]],
                    fmt=marker,
                    color=f"C{index}",
                    capsize=2,
                    label="" if row else label,
                )
    axes.set_yticks(range(len(norms)), norms)
    axes.invert_yaxis()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    draw(lab.read_comparison(folder), folder / "figure.svg")
