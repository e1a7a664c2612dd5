"""The tables and the figure of the study, from the contents of its `verdict.json`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from scores import NORMS, mean_gap

WORDS = {
    **{
        f"ln_{part}_tid_{of}": f"LayerNorm model: {what}, {where}"
        for part, what in (
            ("mean", "mean TID"),
            ("var", "var TID"),
            ("total", "mean + var TID"),
            ("pn", "PowerNorm's TID"),
        )
        for of, where in (("last", "last norm"), ("avg", "average"))
    },
    **{
        f"bn_{part}_tid_{of}": f"BatchNorm model: {part} TID, {where}"
        for part in ("mean", "var")
        for of, where in (("last", "last norm"), ("avg", "average"))
    },
    "early_gap": "early loss gap, threshold chosen",
    "early_gap > 0": "early loss gap, its sign",
    "early_gap_batch": "early loss gap by batch statistics, threshold chosen",
    "early_gap_batch > 0": "early loss gap by batch statistics, its sign",
    "tokens_per_batch": "tokens in a batch",
    "majority": "majority of the choosing half",
    "always worse": "a constant: always worse",
    "always better": "a constant: always better",
    "verdict": "its default limit of powernorm.diagnose alone",
}

DRAWN = [
    ("bn", "ln_total_tid_last", "bn by the ln model's last TID"),
    ("bn", "ln_total_tid_avg", "bn by the ln model's average TID"),
    ("bn", "bn_var_tid_last", "bn by its own last var TID"),
    ("rbn", "ln_total_tid_last", "rbn by the ln model's last TID"),
    ("pn", "ln_pn_tid_last", "pn by the ln model's last TID"),
]
"""Norm, quantity, title."""


def write_tables(results: dict[str, Any], out: Path) -> None:
    """Write `tables.md` and `scatter.svg`."""
    text = "\n".join(f"### {heading}\n\n{table}" for heading, table in _sections(results))
    (out / "tables.md").write_text(text, encoding="utf-8")
    # Equal results make an equal file.
    with mpl.rc_context({"svg.hashsalt": "verdict", "svg.fonttype": "none"}):
        _figure(results).savefig(out / "scatter.svg", metadata={"Date": None})


def _sections(results: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for norm in NORMS:
        scores = [score for score in results["scores"] if score["norm"] == norm]
        if scores:
            yield f"Predicting {norm} against ln", _markdown(list(map(_score_row, scores)))
    if results["advice"]:
        yield "Following the advice", _markdown(list(map(_advice_row, results["advice"])))
    yield "The settings", _markdown(list(map(_setting_row, results["settings"])))


def _markdown(rows: Sequence[dict[str, str]]) -> str:
    """Return a table; columns of words to the left, of numbers to the right."""
    left = ("predictor", "norm taken", "setting", "advice")
    lines = [list(rows[0]), [":---" if name in left else "---:" for name in rows[0]]]
    return "".join(f"| {' | '.join(line)} |\n" for line in [*lines, *(r.values() for r in rows)])


def _score_row(score: dict[str, Any]) -> dict[str, str]:
    def interval(key: str) -> str:
        low, high = score[key]
        return f"({100 * low:.0f} to {100 * high:.0f})"

    alike = f"{_number(score['auc_alike'])} ({score['num_alike']})"
    return {
        "predictor": WORDS[score["predictor"]],
        "threshold": _threshold(score),
        "right, scored half": f"{_share(score['hits_scored'])} {interval('interval')}",
        "right, 1,000 halvings": f"{_share(score['splits_mean'])} {interval('splits_interval')}",
        "right, leave one out": _share(score["leave_one_out"]),
        "the same, clear gaps": _share(score["leave_one_out_clear"]),
        "right, leave one text out": _share(score["leave_one_group_out"]),
        "AUC": _number(score["auc"]),
        "AUC, like batches": alike if score["num_alike"] else "–",
        "rank correlation": _number(score["rank_correlation"]),
    }


def _advice_row(score: dict[str, Any]) -> dict[str, str]:
    total = score["num_settings"]

    def part(count: int) -> str:
        return f"{count} of {total} ({_share(count / total)})"

    return {
        "norm taken": "the norm that powernorm.diagnose advises"
        if score["rule"] == "advice"
        else f"always {score['rule']}",
        "no worse than ln": part(score["num_no_worse"]),
        "the best of the four, or as good": part(score["num_best"]),
    }


def _setting_row(setting: dict[str, Any]) -> dict[str, str]:
    early = setting["early"]
    return {
        "setting": setting["name"],
        "tokens in a batch": f"{setting['tokens_per_batch']:.0f}",
        "early TID of ln, %": _percent(early["ln_total_tid_last"]),
        "early mean TID of bn, %": _percent(early["bn_mean_tid_last"]),
        "early var TID of bn, %": _percent(early["bn_var_tid_last"]),
        "advice": setting["advice"] or "–",
        "early gap of bn": _signed(early["bn_gap"]),
        "by batch statistics": _signed(early["bn_batch_gap"]),
        "final gap of bn": _gap(setting, "bn"),
        "of rbn": _gap(setting, "rbn"),
        "of pn": _gap(setting, "pn"),
    }


def _threshold(score: dict[str, Any]) -> str:
    value = score["threshold"]
    if value is None:
        return "–"
    if "_tid_" in score["predictor"]:
        return f"{_percent(value)} %"
    return f"{value:.0f}" if score["predictor"] == "tokens_per_batch" else f"{value:.3f}"


def _gap(setting: dict[str, Any], norm: str) -> str:
    """Return the final gap with its number of seeds, and how many were lost."""
    record = setting["gaps"].get(norm)
    if record is None:
        return "–"
    parts = [f"{np.mean(record['test']):+.3f} ({len(record['test'])})"] if record["test"] else []
    parts += [f"{record['num_lost']} NaN"] if record["num_lost"] else []
    parts += [f"ln {record['num_base_lost']} NaN"] if record["num_base_lost"] else []
    return ", ".join(parts)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f}"


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.3f}"


def _figure(results: dict[str, Any]) -> Figure:
    """Return early TID against final gap, a point a setting and a panel a quantity."""
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    panels = figure.subplots(2, 3)
    groups = list(dict.fromkeys(setting["group"] for setting in results["settings"]))
    for axes, (norm, quantity, title) in zip(panels.flat, DRAWN, strict=False):
        axes.set(xscale="log", xlabel="early TID, %", ylabel="final gap to ln, nats", title=title)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.axhline(0, color="gray", linestyle=":", linewidth=1)
        for score in results["scores"]:
            if (score["norm"], score["predictor"]) == (norm, quantity) and score["threshold"]:
                axes.axvline(100 * score["threshold"], color="gray", linewidth=1)
        for setting in results["settings"]:
            value, gap = setting["early"][quantity], mean_gap(setting, norm)
            if value is not None and np.isfinite(gap):
                is_choosing = setting["name"] in results["choosing"]
                axes.plot(
                    100 * value,
                    gap,
                    "o" if setting["placement"] == "pre" else "s",
                    color=f"C{groups.index(setting['group'])}",
                    fillstyle="full" if is_choosing else "none",
                )
    for index, group in enumerate(groups):
        panels[1, 2].plot([], [], "o", color=f"C{index}", label=group)
    panels[1, 2].legend(
        loc="center",
        title="squares: post-norm, circles: pre-norm;\nfilled: the threshold was chosen\n"
        "on them, hollow: it was scored on them",
    )
    panels[1, 2].axis("off")
    return figure
