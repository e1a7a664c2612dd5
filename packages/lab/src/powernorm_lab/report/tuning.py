"""Tables and figures of a tuning: budgets, ranges, importances of settings, and trials."""

from collections.abc import Iterator
from typing import Any

from matplotlib.axes import Axes
from pandas import DataFrame, Series

from powernorm_lab.report.document import words
from powernorm_lab.report.drawing import (
    DrawnFigure,
    add_legend,
    figure,
    hover_name,
    inline_svg,
    legend_label,
    line_style,
    logarithmic_scale,
    name_rows,
    plain_axes,
)
from powernorm_lab.report.lines import Band, Panel, panels_figure
from powernorm_lab.report.loading import numbers, read_trials
from powernorm_lab.report.measures import own_heading
from powernorm_lab.report.numerals import NOTHING, printable
from powernorm_lab.report.records import STATUS_WORDS, Comparison
from powernorm_lab.report.tables import Table
from powernorm_lab.runs import ChosenTrial, TuningRecord


def tuning_sentence(tuning: TuningRecord) -> str:
    """Return a sentence about the budget and the selection."""
    return words("tuning", tuning, own_heading(tuning["select_by"]["metric"]))


def budget_table(tuning: TuningRecord) -> Table:
    """Return the table of the trials' results for each norm."""
    name = own_heading(tuning["select_by"]["metric"])
    words: dict[str, str] = {str(key): word for key, word in STATUS_WORDS.items()}
    lines = []
    for norm, one in tuning["norms"].items():
        best = one["best"]
        settings = {} if best is None else best["settings"]
        chosen = [f"{_short(key, norm)} {_setting(value)}" for key, value in settings.items()]
        trials = [f"{number} {words.get(key, key)}" for key, number in one["trials"].items()]
        lines.append(
            {
                "norm": norm,
                "trials": ", ".join(trials),
                f"{name}, untuned": _four_digits(one["untuned"]),
                f"{name}, best": _four_digits(None if best is None else best["value"]),
                "trial": NOTHING if best is None else str(best["trial"]),
                "chosen settings": NOTHING if best is None else ", ".join(chosen),
            }
        )
    return Table.of(lines, ["norm", "trials", "chosen settings"], wide="chosen settings")


def ranges_table(tuning: TuningRecord) -> Table:
    """Return the table of ranges and importances for each norm."""
    lines = []
    for norm, one in tuning["norms"].items():
        chosen = {} if one["best"] is None else one["best"]["settings"]
        for key, text in one["search"].items():
            share = one["importance"].get(key)
            lines.append(
                {
                    "norm": norm,
                    "setting": _short(key, norm),
                    "range": text,
                    "chosen": _setting(chosen[key]) if key in chosen else NOTHING,
                    "importance": NOTHING if share is None else f"{100 * share:.0f} %",
                }
            )
    return Table.of(lines, ["norm", "setting", "range"])


def _short(key: str, norm: str) -> str:
    """Return the key of a setting without its norm."""
    return key.removeprefix(f"norm_options.{norm}.")


def _four_digits(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4g}"


def _setting(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def budgets(comparison: Comparison) -> list[DrawnFigure]:
    """Draw the best value after 1 … T trials, and the importance of the settings."""
    tuning = comparison.tuning
    assert tuning is not None
    prefix = f"{comparison.anchor}tuning"
    name = own_heading(tuning["select_by"]["metric"])
    curves = {norm: Series(one["curve"], dtype=float) for norm, one in tuning["norms"].items()}
    bands = [
        Band(norm, style, (known.index + 1).tolist(), known.tolist())
        for style, (norm, curve) in enumerate(curves.items())
        if len(known := curve.dropna())
    ]
    drawn = panels_figure(
        [Panel("Budget", f"best {name}", bands)],
        caption=f"Best {name} against the number of trials of a norm. A line that still changes at "
        "its end calls for more trials.",
        x_label="trials",
        prefix=f"{prefix}-budget",
    )
    return [*drawn, *_importances(tuning, f"{prefix}-importance")]


def _importances(tuning: TuningRecord, prefix: str) -> Iterator[DrawnFigure]:
    """Draw bars of the importance by norm and setting."""
    rows = [
        (f"{norm}: {_last(key)}", style, value)
        for style, (norm, one) in enumerate(tuning["norms"].items())
        if len(one["importance"]) > 1
        for key, value in one["importance"].items()
    ]
    if not rows:
        return
    names = [printable(name) for name, _, _ in rows]
    with figure(0.65 + 0.16 * len(rows)) as drawn:
        axes = drawn.subplots()
        plain_axes(axes, "Importance", "% of the norm's", "")
        for place, (_, style, value) in enumerate(rows):
            axes.barh(place, 100 * value, height=0.7, color=line_style(style)[0])
        name_rows(axes, names, 6.5)
        svg = inline_svg(drawn, prefix, "Importance of each setting, by norm")
    yield DrawnFigure(svg, "Share of each setting in the differences between trials.")


def trials_by_setting(comparison: Comparison) -> list[DrawnFigure]:
    """Draw values of trials against each setting."""
    tuning, trials = comparison.tuning, read_trials(comparison.folder)
    assert tuning is not None
    norms = tuning["norms"]
    keys = dict.fromkeys(key for one in norms.values() for key in one["search"])
    drawn_figures = []
    name = own_heading(tuning["select_by"]["metric"])
    for index, key in enumerate(keys):
        if key not in trials:
            continue
        rows = trials.assign(x=numbers(trials[key])).dropna(subset="x")
        # A single trial shows nothing.
        rows = rows[rows.groupby("norm")["x"].transform("size") > 1]
        if not rows["norm"].isin(list(norms)).any():
            continue
        with figure(2.2) as drawn:
            axes = drawn.subplots()
            plain_axes(axes, _last(key), "", name)
            for style, (norm, one) in enumerate(norms.items()):
                of_norm = rows[rows["norm"] == norm]
                if not of_norm.empty:
                    _draw_slice(axes, of_norm, norm, style, one["best"], key)
            is_log = any(one["search"].get(key, "").startswith("log:") for one in norms.values())
            if is_log and rows["x"].min() > 0:
                logarithmic_scale(axes.xaxis)
            add_legend(drawn, [axes])
            svg = inline_svg(
                drawn,
                f"{comparison.anchor}tuning-slice-{index}",
                f"{name} against {key}",
                unit=_last(key),
            )
        drawn_figures.append(DrawnFigure(svg, f"The {name} of completed trials by {key}."))
    return drawn_figures


def _draw_slice(
    axes: Axes, rows: DataFrame, norm: str, style: int, best: ChosenTrial | None, key: str
) -> None:
    """Draw the trials of a norm as dots, with a ring around the chosen one."""
    look: dict[str, Any] = {"marker": "o", "linestyle": "", "color": line_style(style)[0]}
    (line,) = axes.plot(
        rows["x"], rows["value"], markersize=4, alpha=0.8, label=legend_label(norm), **look
    )
    line.set_gid(hover_name(norm))
    chosen = numbers(Series([None if best is None else best["settings"].get(key)]))
    if best is not None and chosen.notna().all():
        axes.plot(chosen, [best["value"]], markersize=9, fillstyle="none", **look)


def _last(key: str) -> str:
    return key.rpartition(".")[2]
