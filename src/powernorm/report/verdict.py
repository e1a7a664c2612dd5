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
from powernorm.report.markup import element
from powernorm.report.numerals import number, percent, printable
from powernorm.report.verdict_figures import scatters
from powernorm.report.verdict_records import WORDS, mean_gap, read_verdict
from powernorm.runs import REPORT_FILE, GapRecord, PredictorScore, VerdictResults

_PERCENT_PREDICTORS: Final = "_tid_"


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
    means = [gap for setting in settings if (gap := mean_gap(setting, "bn")) is not None]
    worse = sum(gap > 0 for gap in means)
    text = (
        f"{len(settings)} settings, preset {printable(results['preset'])}. BatchNorm ended worse "
        f"than LayerNorm in {worse} of {len(means)}."
    )
    for score in results["scores"]:
        if (score["norm"], score["predictor"]) == ("bn", "ln_total_tid_last"):
            text += (
                " The early TID of the last norm, with the threshold chosen on the other half, had "
                f"the right sign in {_share(score['hits_scored'])} of {score['num_scored']}."
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
        f"({score['num_clear']} settings). AUC: the chance that of a setting in which it ended "
        "worse and one in which it did not, the former has the larger value (fewer tokens); like "
        "batches: of pairs whose batches are of about the same size, with their number."
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


__all__ = [
    "print_verdict",
    "read_verdict",
    "render_verdict",
    "verdict_markdown",
    "write_verdict_report",
]
