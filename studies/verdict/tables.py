"""Tables and figure of the study from `verdict.json`."""

import csv
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from scores import NORMS, TIDS, mean_gap

WORDS = TIDS | {
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
    """Write each table into a CSV file in `tables`, and `scatter.svg`."""
    tables = {
        norm: [_score_row(score) for score in results["scores"] if score["norm"] == norm]
        for norm in NORMS
    }
    tables["advice"] = [_advice_row(score) for score in results["advice"]]
    tables["settings"] = [_setting_row(setting) for setting in results["settings"]]
    (out / "tables").mkdir(exist_ok=True)
    for name, rows in tables.items():
        if rows:
            with (out / "tables" / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
    # Equal results give equal files.
    with mpl.rc_context({"svg.hashsalt": "verdict", "svg.fonttype": "none"}):
        _figure(results).savefig(out / "scatter.svg", metadata={"Date": None})


def _score_row(score: dict[str, Any]) -> dict[str, str]:
    name = score["predictor"]
    form = "percent" if "_tid_" in name else ".0f" if name == "tokens_per_batch" else ".3f"
    fixed, drawn = (
        f"({100 * low:.0f} to {100 * high:.0f})"
        for low, high in (score["interval"], score["splits_interval"])
    )
    alike = f"{_cell(score['auc_alike'], '.2f')} ({score['num_alike']})"
    return {
        "predictor": WORDS[name],
        "threshold": _cell(score["threshold"], form),
        "right, scored half": f"{_cell(score['hits_scored'], 'share')} {fixed}",
        "right, 1,000 halvings": f"{_cell(score['splits_mean'], 'share')} {drawn}",
        "right, leave one out": _cell(score["leave_one_out"], "share"),
        "the same, clear gaps": _cell(score["leave_one_out_clear"], "share"),
        "right, leave one text out": _cell(score["leave_one_group_out"], "share"),
        "AUC": _cell(score["auc"], ".2f"),
        "AUC, like batches": alike if score["num_alike"] else "–",
        "rank correlation": _cell(score["rank_correlation"], ".2f"),
    }


def _advice_row(score: dict[str, Any]) -> dict[str, str]:
    rule, total = score["rule"], score["num_settings"]
    no_worse, best = (
        f"{count} of {total} ({_cell(count / total, 'share')})"
        for count in (score["num_no_worse"], score["num_best"])
    )
    advised = "the norm that powernorm.diagnose advises"
    return {
        "norm taken": advised if rule == "advice" else f"always {rule}",
        "no worse than ln": no_worse,
        "the best of the four, or as good": best,
    }


def _setting_row(setting: dict[str, Any]) -> dict[str, str]:
    early = setting["early"]
    tids = ("ln_total_tid_last", "bn_mean_tid_last", "bn_var_tid_last")
    ln_tid, mean_tid, var_tid = (_cell(early[key], "percent").removesuffix(" %") for key in tids)
    return {
        "setting": setting["name"],
        "tokens in a batch": f"{setting['tokens_per_batch']:.0f}",
        "early TID of ln, %": ln_tid,
        "early mean TID of bn, %": mean_tid,
        "early var TID of bn, %": var_tid,
        "advice": setting["advice"] or "–",
        "early gap of bn": _cell(early["bn_gap"], "+.3f"),
        "by batch statistics": _cell(early["bn_batch_gap"], "+.3f"),
        "final gap of bn": _gap(setting, "bn"),
        "of rbn": _gap(setting, "rbn"),
        "of pn": _gap(setting, "pn"),
    }


def _gap(setting: dict[str, Any], norm: str) -> str:
    """Return the final gap with the numbers of seeds and of lost runs."""
    record = setting["gaps"].get(norm)
    if record is None:
        return "–"
    parts = [f"{np.mean(record['test']):+.3f} ({len(record['test'])})"] if record["test"] else []
    parts += [f"{record['num_lost']} NaN"] if record["num_lost"] else []
    parts += [f"ln {record['num_base_lost']} NaN"] if record["num_base_lost"] else []
    return ", ".join(parts)


def _cell(value: float | None, form: str) -> str:
    """Return a number, a share without decimals or a percentage with two; a dash for None."""
    if value is None:
        return "–"
    decimals = {"share": 0, "percent": 2}.get(form)
    return format(value, form) if decimals is None else f"{100 * value:.{decimals}f} %"


def _figure(results: dict[str, Any]) -> Figure:
    """Draw early TID against final gap, with a point per setting and a panel per quantity."""
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    panels = figure.subplots(2, 3)
    groups = list(dict.fromkeys(setting["group"] for setting in results["settings"]))
    thresholds = {(one["norm"], one["predictor"]): one["threshold"] for one in results["scores"]}
    for axes, (norm, quantity, title) in zip(panels.flat, DRAWN, strict=False):
        axes.set(xscale="log", xlabel="early TID, %", ylabel="final gap to ln, nats", title=title)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.axhline(0, color="gray", linestyle=":", linewidth=1)
        if thresholds.get((norm, quantity)):
            axes.axvline(100 * thresholds[norm, quantity], color="gray", linewidth=1)
        for setting in results["settings"]:
            value, gap = setting["early"][quantity], mean_gap(setting, norm)
            if value is not None and np.isfinite(gap):
                marker = "o" if setting["placement"] == "pre" else "s"
                color = f"C{groups.index(setting['group'])}"
                fill = "full" if setting["name"] in results["choosing"] else "none"
                axes.plot(100 * value, gap, marker, color=color, fillstyle=fill)
    for index, group in enumerate(groups):
        panels[1, 2].plot([], [], "o", color=f"C{index}", label=group)
    note = "squares: post-norm, circles: pre-norm;\nfilled: the threshold was chosen\n"
    panels[1, 2].legend(loc="center", title=f"{note}on them, hollow: it was scored on them")
    panels[1, 2].axis("off")
    return figure
