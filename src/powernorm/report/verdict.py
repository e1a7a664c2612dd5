"""The experiment behind the verdict: early discrepancies against what came of them."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

from rich.console import Console
from rich.text import Text

from powernorm.report import text_tables
from powernorm.report.document import Article, SectionParts, document, gallery, write_page
from powernorm.report.html_tables import copy_blocks, plain_table
from powernorm.report.markup import Markup, element
from powernorm.report.numerals import number, percent, printable
from powernorm.report.verdict_figures import scatters
from powernorm.report.verdict_records import WORDS, mean_gap, read_verdict
from powernorm.runs import REPORT_FILE
from powernorm.verdict_runs import GapRecord, PredictorScore, VerdictResults

_PERCENT_PREDICTORS: Final = "_tid_"
_CONSTANTS: Final = {
    "always worse": "always saying “worse”",
    "always better": "always saying “better”",
}


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
            _share(score["leave_one_group_out"]),
            number(score["auc"], 2),
            _alike(score),
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
    ("right, leave one text out", True),
    ("AUC", True),
    ("AUC, like batches", True),
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
            _signed(setting["early"].get("bn_batch_gap")),
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
    ("by batch statistics", True),
    ("final gap of bn", True),
    ("of rbn", True),
    ("of pn", True),
)


def advice_lines(results: VerdictResults) -> list[list[str]]:
    """The table of what following the advice is worth, in the order of ADVICE_HEADINGS."""
    return [
        [
            ADVICE_WORDS.get(score["rule"], f"always {printable(score['rule'])}"),
            _part(score["num_no_worse"], score["num_settings"]),
            _part(score["num_best"], score["num_settings"]),
        ]
        for score in results["advice"]
    ]


ADVICE_WORDS: Final = {"advice": "the norm that powernorm.diagnose advises"}
ADVICE_HEADINGS: Final[tuple[tuple[str, bool], ...]] = (
    ("norm taken", False),
    ("no worse than ln", True),
    ("the best of the four, or as good", True),
)


def verdict_markdown(results: VerdictResults) -> str:
    """All tables of a study in Markdown, for the documentation."""
    parts = [
        f"### Predicting {norm} against ln\n\n{_markdown_scores(results, norm)}"
        for norm in _norms(results)
    ]
    if results["advice"]:
        parts.append(f"### Following the advice\n\n{_markdown_advice(results)}")
    return "\n".join([*parts, f"### The settings\n\n{_markdown_settings(results)}"])


def _markdown_advice(results: VerdictResults) -> str:
    headings, numeric = zip(*ADVICE_HEADINGS, strict=True)
    return text_tables.markdown(headings, numeric, advice_lines(results))


def _markdown_scores(results: VerdictResults, norm: str) -> str:
    headings, numeric = zip(*SCORE_HEADINGS, strict=True)
    return text_tables.markdown(headings, numeric, score_lines(results, norm))


def _markdown_settings(results: VerdictResults) -> str:
    headings, numeric = zip(*SETTING_HEADINGS, strict=True)
    return text_tables.markdown(headings, numeric, setting_lines(results))


def _sections(results: VerdictResults) -> list[SectionParts]:
    figures = scatters(results)
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
    if results["advice"]:
        sections.append(("advice", "Following the advice", _advice_contents(results)))
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


def _advice_contents(results: VerdictResults) -> list[Markup]:
    headings, numeric = zip(*ADVICE_HEADINGS, strict=True)
    lines = advice_lines(results)
    caption = _ADVICE_CAPTION.format(
        num_settings=results["advice"][0]["num_settings"], clear_gap=f"{results['clear_gap']:g}"
    )
    return [
        plain_table("Following the advice", caption, ADVICE_HEADINGS, lines),
        copy_blocks(_markdown_advice(results), text_tables.latex(headings, numeric, lines)),
    ]


_ADVICE_CAPTION: Final = (
    "Of the {num_settings} settings in which ln, bn, rbn and pn were all trained: in how many the "
    "norm that the early diagnosis advises with its default limits ended at most {clear_gap} nats "
    "worse than ln, and at most so much worse than the best of the four; below, what always taking "
    "the same norm gives. Advice to swap only the lowest layers counts as keeping ln: such models "
    "were not trained."
)
_SETTINGS_CAPTION: Final = (
    "One row a setting. Gaps are losses minus LayerNorm's, nats per token on the test split, mean "
    "over the seeds with their number; negative is better than LayerNorm. Seeds whose loss became "
    "NaN are counted apart."
)
_METHOD: Final = (
    "In each setting the same model is trained with each norm, alike in everything else, the "
    "learning rate too. At the early checkpoint (a tenth of the training) two-pass TID is measured "
    "on {num_batches} training batches. A predictor says that a norm ends worse than LayerNorm "
    "where its quantity is above a threshold; the threshold is the one with the most right signs "
    "on one half of the settings, and is scored on the other half, which had no say in it. The "
    "halves are drawn once with a fixed seed, evenly from every text; since much hangs on that "
    "draw, the same is done for 1,000 others (mean, and where 95 % of them lie), with all settings "
    "but the scored one, and with all settings of other texts, since settings of one text are not "
    "independent. The constant, the majority, the early loss gap and the number of tokens in a "
    "batch cost nothing to know and are what TID has to beat. The early loss gap is measured by "
    "running statistics, as in use, and by the statistics of each batch of the evaluation, since "
    "running statistics lag behind weights that change quickly."
)


def _lead(results: VerdictResults) -> str:
    settings = results["settings"]
    means = [gap for setting in settings if (gap := mean_gap(setting, "bn")) is not None]
    worse = sum(gap > 0 for gap in means)
    text = (
        f"{len(settings)} settings, preset {printable(results['preset'])}. BatchNorm ended worse "
        f"than LayerNorm in {worse} of {len(means)}."
    )
    return text + _lead_rates(results) + _lead_advice(results)


def _lead_rates(results: VerdictResults) -> str:
    scores = [score for score in results["scores"] if score["norm"] == "bn"]
    tid = [score for score in scores if _PERCENT_PREDICTORS in score["predictor"]]
    size = [score for score in scores if score["predictor"] == "tokens_per_batch"]
    constant = [score for score in scores if score["predictor"] in _CONSTANTS]
    if not (tid and size and constant):
        return ""
    best = max(tid, key=lambda score: score["splits_mean"])
    return (
        " Which of the two it would be was predicted rightly, on halves of the settings that had "
        f"no say in the threshold, in {_share(best['splits_mean'])} by the best of {len(tid)} "
        f"discrepancies at a tenth of the training ({_words(best)}; picked afterwards), in "
        f"{_share(size[0]['splits_mean'])} by the number of tokens in a batch, and in "
        f"{_share(constant[0]['splits_mean'])} by {_CONSTANTS[constant[0]['predictor']]}."
    )


def _lead_advice(results: VerdictResults) -> str:
    followed = next((score for score in results["advice"] if score["rule"] == "advice"), None)
    others = [score for score in results["advice"] if score["rule"] != "advice"]
    if followed is None or not others:
        return ""
    best = max(others, key=lambda score: score["num_best"])
    return (
        " The norm that powernorm.diagnose advised was no worse than LayerNorm in "
        f"{followed['num_no_worse']} and the best of four, or as good, in {followed['num_best']} "
        f"of {followed['num_settings']} settings; always {printable(best['rule'])} would have been "
        f"so in {best['num_no_worse']} and {best['num_best']}."
    )


def _norms(results: VerdictResults) -> list[str]:
    return list(dict.fromkeys(score["norm"] for score in results["scores"]))


def _caption(results: VerdictResults, norm: str) -> str:
    score = next(score for score in results["scores"] if score["norm"] == norm)
    return (
        f"{printable(norm)} ended worse than ln in {score['num_positive']} of "
        f"{score['num_settings']} settings. Shares of right signs. Brackets: for the scored half a "
        "95 % interval (Wilson); for the 1,000 halvings where 95 % of them lie, which is a spread "
        "over divisions of the same settings and no interval for other settings. Clear gaps: one "
        f"sign in all seeds and at least {results['clear_gap']:g} nats ({score['num_clear']} "
        "settings). Leave one text out: the threshold is chosen on the other texts, since settings "
        "of one text, pre-norm and post-norm above all, are not independent. The constant is "
        "whichever of the two is right more often over all settings. The majority of the choosing "
        "half suffers from drawing without replacement: what one half has too many of, the other "
        "lacks. A norm that was lost in more seeds than ln (one lost seed of several is enough) "
        "counts as worse, the other way round as better. AUC: the chance that of a setting in "
        "which it ended worse and one in which it did not, the former has the larger value (fewer "
        "tokens); like batches: of pairs whose batches are of about the same size, with their "
        "number."
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


def _alike(score: PredictorScore) -> str:
    if score["auc_alike"] is None:
        return "–"
    return f"{number(score['auc_alike'], 2)} ({score['num_alike']})"


def _part(count: int, number_of_all: int) -> str:
    share = _share(count / number_of_all if number_of_all else None)
    return f"{count} of {number_of_all} ({share})"


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
    if record["num_base_lost"]:
        parts.append(f"ln {record['num_base_lost']} NaN")
    return ", ".join(parts) or "–"


__all__ = [
    "print_verdict",
    "read_verdict",
    "render_verdict",
    "verdict_markdown",
    "write_verdict_report",
]
