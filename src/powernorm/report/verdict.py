"""The experiment behind the verdict: early discrepancies against what came of them."""

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Final, cast

from matplotlib.axes import Axes
from rich.console import Console
from rich.text import Text

from powernorm.report import text_tables
from powernorm.report.document import Article, SectionParts, document, gallery, write_page
from powernorm.report.drawing import figure, inline_svg, line_style, plain_axes, reference_style
from powernorm.report.figures import DrawnFigure
from powernorm.report.html_tables import copy_blocks, plain_table
from powernorm.report.json_files import JsonObject, read_object
from powernorm.report.markup import element
from powernorm.report.numerals import number, percent, printable
from powernorm.runs import (
    REPORT_FILE,
    VERDICT_FILE,
    GapRecord,
    PredictorScore,
    VerdictResults,
    VerdictSetting,
)

_FORMAT: Final = 1
_MEND: Final = "write the file again with `powernorm compare verdict --resume`"
_MARKERS: Final = {"pre": "o", "post": "s"}
_PERCENT_PREDICTORS: Final = "_tid_"
DRAWN: Final = (
    ("bn", "ln_total_tid_last", "in the early LayerNorm model, last norm"),
    ("bn", "ln_total_tid_avg", "in the early LayerNorm model, average of all norms"),
    ("bn", "bn_mean_tid_last", "in the early BatchNorm model, last norm, mean"),
    ("rbn", "ln_total_tid_last", "in the early LayerNorm model, last norm"),
    ("pn", "ln_pn_tid_last", "in the early LayerNorm model, last norm, behind GroupScaling"),
)
"""Norm, quantity, and where the quantity was seen."""

WORDS: Final[Mapping[str, str]] = {
    "ln_mean_tid_last": "LayerNorm model: mean TID, last norm",
    "ln_var_tid_last": "LayerNorm model: var TID, last norm",
    "ln_total_tid_last": "LayerNorm model: mean + var TID, last norm",
    "ln_mean_tid_avg": "LayerNorm model: mean TID, average",
    "ln_var_tid_avg": "LayerNorm model: var TID, average",
    "ln_total_tid_avg": "LayerNorm model: mean + var TID, average",
    "ln_pn_tid_last": "LayerNorm model: PowerNorm's TID, last norm",
    "ln_pn_tid_avg": "LayerNorm model: PowerNorm's TID, average",
    "bn_mean_tid_last": "BatchNorm model: mean TID, last norm",
    "bn_var_tid_last": "BatchNorm model: var TID, last norm",
    "bn_mean_tid_avg": "BatchNorm model: mean TID, average",
    "bn_var_tid_avg": "BatchNorm model: var TID, average",
    "early_gap": "early loss gap, threshold chosen",
    "early_gap > 0": "early loss gap, its sign",
    "tokens_per_batch": "tokens in a batch",
    "majority": "majority of the choosing half",
    "verdict": "verdict of powernorm.diagnose, default limits",
}
"""Predictors in words."""


def read_verdict(folder: Path) -> VerdictResults:
    """Reads the `verdict.json` of a study.

    Raises:
        InputError: the file is missing, damaged or of another version.
    """
    found = read_object(folder / VERDICT_FILE, _MEND)
    found.check_format(_FORMAT, "`powernorm compare verdict --resume`")
    for setting in found.children("settings"):
        _check_setting(setting)
    for score in found.children("scores"):
        _check_score(score)
    found.texts("choosing")
    found.sure_number("clear_gap")
    found.whole("num_batches")
    return cast(VerdictResults, dict(found.values))


def _check_setting(setting: JsonObject) -> None:
    for key in ("name", "group", "task", "placement"):
        setting.text(key)
    setting.sure_number("tokens_per_batch")
    early = setting.child("early")
    for key in early.values:
        early.number(key)
    if setting.values.get("advice") is not None:
        setting.text("advice")
    gaps = setting.child("gaps")
    for norm in gaps.values:
        gaps.child(norm).numbers("test")
        gaps.child(norm).whole("num_lost")


def _check_score(score: JsonObject) -> None:
    for key in ("norm", "predictor"):
        score.text(key)
    for key in ("hits_choosing", "hits_scored", "splits_mean", "leave_one_out"):
        score.sure_number(key)
    for key in ("threshold", "auc", "rank_correlation", "leave_one_out_clear"):
        score.number(key)
    for key in ("interval", "splits_interval"):
        if len(score.numbers(key)) != 2:
            raise score.error(f"{key} does not have two numbers")
    for key in ("num_settings", "num_positive", "num_scored", "num_clear"):
        score.whole(key)


def write_verdict_report(folder: Path) -> Path:
    """Writes `report.html` into a study's folder from its `verdict.json`; returns its path.

    Raises:
        InputError: as `read_verdict`.
    """
    return write_page(render_verdict(read_verdict(folder)), folder / REPORT_FILE)


def render_verdict(results: VerdictResults) -> str:
    """The page of a study."""
    heading = "Does the verdict hold?"
    return document(heading, [Article(heading, _lead(results), _sections(results))])


def print_verdict(console: Console, folder: Path) -> None:
    """Prints the scores of a study as lines that no terminal is too narrow for."""
    results = read_verdict(folder)
    console.print(Text(_lead(results)))
    for score in results["scores"]:
        console.print(
            Text(
                f"{score['norm']}: {_words(score)}: right in {_share(score['hits_scored'])} of "
                f"{score['num_scored']} scored settings, in {_share(score['splits_mean'])} over "
                "random halves"
            )
        )


def score_lines(results: VerdictResults, norm: str) -> list[list[str]]:
    """The table of a norm's predictors as texts, in the order of SCORE_HEADINGS."""
    return [
        [
            _words(score),
            _threshold(score),
            f"{_share(score['hits_scored'])} ({_interval(score['interval'])})",
            f"{_share(score['splits_mean'])} ({_interval(score['splits_interval'])})",
            _share(score["leave_one_out"]),
            _share(score["leave_one_out_clear"]),
            number(score["auc"], 2),
            number(score["rank_correlation"], 2),
        ]
        for score in results["scores"]
        if score["norm"] == norm
    ]


SCORE_HEADINGS: Final = (
    ("predictor", False),
    ("threshold", True),
    ("right, scored half", True),
    ("right, 1,000 halvings", True),
    ("right, leave one out", True),
    ("the same, clear gaps", True),
    ("AUC", True),
    ("rank correlation", True),
)


def setting_lines(results: VerdictResults) -> list[list[str]]:
    """The table of settings as texts, in the order of SETTING_HEADINGS."""
    return [
        [
            setting["name"],
            number(setting["tokens_per_batch"], 0),
            percent(setting["early"].get("ln_total_tid_last")),
            percent(setting["early"].get("bn_mean_tid_last")),
            percent(setting["early"].get("bn_var_tid_last")),
            str(setting["advice"] or "–"),
            _signed(setting["early"].get("bn_gap")),
            *(_gap_text(setting["gaps"].get(norm)) for norm in ("bn", "rbn", "pn")),
        ]
        for setting in results["settings"]
    ]


SETTING_HEADINGS: Final = (
    ("setting", False),
    ("tokens in a batch", True),
    ("early TID of ln, %", True),
    ("early mean TID of bn, %", True),
    ("early var TID of bn, %", True),
    ("advice", False),
    ("early gap of bn", True),
    ("final gap of bn", True),
    ("of rbn", True),
    ("of pn", True),
)


def verdict_markdown(results: VerdictResults) -> str:
    """All tables of a study in Markdown, for the documentation."""
    scores = [
        f"### Predicting {norm} against ln\n\n{_markdown_scores(results, norm)}"
        for norm in _norms(results)
    ]
    return "\n".join([*scores, f"### The settings\n\n{_markdown_settings(results)}"])


def _markdown_scores(results: VerdictResults, norm: str) -> str:
    headings, numeric = zip(*SCORE_HEADINGS, strict=True)
    return text_tables.markdown(headings, numeric, score_lines(results, norm))


def _markdown_settings(results: VerdictResults) -> str:
    headings, numeric = zip(*SETTING_HEADINGS, strict=True)
    return text_tables.markdown(headings, numeric, setting_lines(results))


def _sections(results: VerdictResults) -> list[SectionParts]:
    figures = [
        drawn
        for index, (norm, quantity, place) in enumerate(DRAWN)
        if (drawn := _scatter(results, norm, quantity, place, index)) is not None
    ]
    sections: list[SectionParts] = []
    if figures:
        sections.append(("scatter", "Early discrepancy, final gap", [gallery(figures)]))
    for norm in _norms(results):
        contents = [
            plain_table(f"Predictors of {norm}", _caption(results, norm), SCORE_HEADINGS, lines)
            for lines in (score_lines(results, norm),)
        ]
        headings, numeric = zip(*SCORE_HEADINGS, strict=True)
        copies = copy_blocks(
            _markdown_scores(results, norm),
            text_tables.latex(headings, numeric, score_lines(results, norm)),
        )
        sections.append((f"scores-{norm}", f"{norm} against ln", [*contents, copies]))
    headings, numeric = zip(*SETTING_HEADINGS, strict=True)
    lines = setting_lines(results)
    sections.append(
        (
            "settings",
            "The settings",
            [
                plain_table("The settings", _SETTINGS_CAPTION, SETTING_HEADINGS, lines),
                copy_blocks(
                    _markdown_settings(results), text_tables.latex(headings, numeric, lines)
                ),
            ],
        )
    )
    notes = element("p", _METHOD.format(num_batches=results["num_batches"]))
    return [*sections, ("method", "How it was done", [notes])]


_SETTINGS_CAPTION: Final = (
    "One row a setting. Gaps are losses minus LayerNorm's, nats per token on the test split, mean "
    "over the seeds with their number; negative is better than LayerNorm."
)
_METHOD: Final = (
    "In each setting the same model is trained with each norm, alike in everything else, the "
    "learning rate too. At the early checkpoint (a tenth of the training) two-pass TID is measured "
    "on {num_batches} training batches. A predictor says that a norm ends worse than LayerNorm "
    "where its quantity is above a threshold; the threshold is the one with the most right signs "
    "on one half of the settings, and is scored on the other half, which had no say in it. The "
    "halves are drawn once with a fixed seed, evenly from every text; since much hangs on that "
    "draw, the same is done for 1,000 others (mean, and where 95 % of them lie) and with all "
    "settings but the scored one. The majority, the early loss gap and the number of tokens in a "
    "batch cost nothing to know and are what TID has to beat."
)


def _lead(results: VerdictResults) -> str:
    settings = results["settings"]
    means = [gap for setting in settings if (gap := _mean_gap(setting, "bn")) is not None]
    worse = sum(gap > 0 for gap in means)
    text = (
        f"{len(settings)} settings, preset {printable(results['preset'])}. BatchNorm ended worse "
        f"than LayerNorm in {worse} of {len(means)}."
    )
    for score in results["scores"]:
        if (score["norm"], score["predictor"]) == ("bn", "ln_total_tid_last"):
            text += (
                " The early TID of the last norm, with the threshold chosen on the other half, had "
                f"the sign right in {_share(score['hits_scored'])} of {score['num_scored']}."
            )
    return text


def _norms(results: VerdictResults) -> list[str]:
    return list(dict.fromkeys(score["norm"] for score in results["scores"]))


def _caption(results: VerdictResults, norm: str) -> str:
    score = next(score for score in results["scores"] if score["norm"] == norm)
    return (
        f"{printable(norm)} ended worse than ln in {score['num_positive']} of "
        f"{score['num_settings']} settings. Shares of right signs; in brackets 95 % intervals. "
        f"Clear gaps: one sign in all seeds and at least {results['clear_gap']:g} nats "
        f"({score['num_clear']} settings)."
    )


def _words(score: PredictorScore) -> str:
    return WORDS.get(score["predictor"], printable(score["predictor"]))


def _threshold(score: PredictorScore) -> str:
    value = score["threshold"]
    if value is None:
        return "–"
    if _PERCENT_PREDICTORS in score["predictor"]:
        return f"{percent(value)} %"
    return number(value, 0 if score["predictor"] == "tokens_per_batch" else 3)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def _interval(bounds: Sequence[float]) -> str:
    low, high = bounds
    return f"{100 * low:.0f} to {100 * high:.0f}"


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.3f}"


def _gap_text(record: GapRecord | None) -> str:
    if record is None:
        return "–"
    parts = [f"{_signed(fmean(record['test']))} ({len(record['test'])})"] if record["test"] else []
    if record["num_lost"]:
        parts.append(f"{record['num_lost']} NaN")
    return ", ".join(parts) or "–"


def _mean_gap(setting: VerdictSetting, norm: str) -> float | None:
    record = setting["gaps"].get(norm)
    if record is None:
        return None
    if record["num_lost"]:
        return inf
    return fmean(record["test"]) if record["test"] else None


def _scatter(
    results: VerdictResults, norm: str, quantity: str, place: str, index: int
) -> DrawnFigure | None:
    points = [
        (setting, 100 * value, gap)
        for setting in results["settings"]
        if (value := setting["early"].get(quantity)) is not None
        and (gap := _mean_gap(setting, norm)) is not None
        and gap != inf
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
        plain_axes(axes, f"{norm} against ln", "early TID, %, logarithmic", "final gap, nats")
        _draw_points(axes, results, points)
        axes.set_xscale("log")
        ink, dashes = reference_style()
        axes.axhline(0, color=ink, linestyle=dashes, linewidth=1)
        if threshold:
            axes.axvline(100 * threshold, color=ink, linewidth=1)
        axes.legend(loc="best", fontsize=7)
        description = f"Early TID against the final loss gap of {norm} to ln in each setting"
        svg = inline_svg(drawn, f"verdict-{index}", description)
    return DrawnFigure(svg, _scatter_caption(place, threshold))


def _scatter_caption(place: str, threshold: float | None) -> str:
    text = (
        f"TID {place}, at a tenth of the training, against the loss minus LayerNorm's at its end. "
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


__all__ = [
    "print_verdict",
    "read_verdict",
    "render_verdict",
    "verdict_markdown",
    "write_verdict_report",
]
