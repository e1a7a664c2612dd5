"""The table of a comparison as text: one list of columns for terminal, page and Markdown."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from powernorm.report import numerals, text_tables
from powernorm.report.records import Comparison, Run
from powernorm.report.summary import Spread, SummaryRow


@dataclass(frozen=True)
class Column:
    """A column: its heading, what it means, and the text of a row's cell."""

    key: str
    heading: str
    meaning: str
    text: Callable[[SummaryRow], str]
    numeric: bool = True


def _perplexity(row: SummaryRow, value: Spread | None) -> str:
    if value is None:
        return numerals.NOTHING if row.complete else numerals.mark(row.statuses)
    partial = "" if row.complete else " *"
    return numerals.spread(value) + partial


def _tid(row: SummaryRow, layers: str) -> str:
    tid: Mapping[str, float | None] = row.tid or {}
    parts = [tid.get(f"mean_{layers}"), tid.get(f"var_{layers}")]
    if all(part is None for part in parts):
        return numerals.NOTHING
    return " / ".join(numerals.percent(part) for part in parts)


PERPLEXITY: Final = (
    "Perplexity per word (of a masked language model per masked token, of a tagger per tag)"
)

COLUMNS: Final[Sequence[Column]] = (
    Column(
        "norm",
        "norm",
        "Short name of the normalization layer; unigram and bigram are models without a network "
        "over the same subwords, which every norm has to beat. (Of a tagger: tags by their own "
        "frequency, and by that for each word.)",
        lambda row: numerals.printable(row.label),
        numeric=False,
    ),
    Column(
        "parameters",
        "parameters",
        "Trainable parameters of the whole model.",
        lambda row: numerals.count(row.parameters),
    ),
    Column(
        "valid",
        "valid perplexity",
        f"{PERPLEXITY}, on the validation text: mean ± sample standard deviation over seeds. "
        "Lower is better. An asterisk says that not all runs finished: the number averages only "
        "those that did.",
        lambda row: _perplexity(row, row.valid),
    ),
    Column(
        "test",
        "test perplexity",
        "The same on the test text, which no choice was made on.",
        lambda row: _perplexity(row, row.test),
    ),
    Column(
        "gap",
        "gap to ln",
        "Test perplexity minus that of LayerNorm, mean over the seeds that finished with both, and "
        "the same in percent. Negative is better than LayerNorm.",
        lambda row: numerals.gap(row.gap),
    ),
    Column(
        "tid_last",
        "TID last, %",
        "Training Inference Discrepancy of the last norm layer, mean / variance, in percent: how "
        "far a batch's statistics lie from the population's, relative to the batch's deviation, "
        "two passes over the data, mean over seeds. A norm that does not centre has no mean part. "
        "Per-token norms have none.",
        lambda row: _tid(row, "last"),
    ),
    Column(
        "tid_avg",
        "TID average, %",
        "The same, averaged over the norm layers.",
        lambda row: _tid(row, "avg"),
    ),
    Column(
        "speed",
        "tokens/s",
        "Training throughput on this machine, mean over seeds.",
        lambda row: numerals.count(row.tokens_per_second),
    ),
    Column(
        "status",
        "runs",
        "What became of the runs. NaN: the loss became NaN or infinite; diverged: it rose above "
        "the unigram baseline for good; interrupted: stopped by the user; failed: an error; "
        "unfinished: no result yet. Only finished runs enter an average.",
        lambda row: numerals.outcome(row.statuses),
        numeric=False,
    ),
)


def cells(row: SummaryRow, columns: Sequence[Column] = COLUMNS) -> list[str]:
    """The row's texts, one a column."""
    return [column.text(row) for column in columns]


FOOTNOTE: Final = "* Not every run finished: the average is over those that did."


RUN_HEADINGS: Final[Sequence[str]] = (
    "norm",
    "seed",
    "status",
    "valid perplexity",
    "test perplexity",
    "time",
    "tokens/s",
    "non-finite batches",
    "note",
)


def run_cells(run: Run) -> list[str]:
    """One run's texts under `RUN_HEADINGS`; nothing is averaged and nothing left out."""
    return [
        numerals.printable(run.name),
        str(run.seed),
        numerals.STATUS_WORDS[run.shown_status],
        numerals.number(run.metrics.get("valid_perplexity")),
        numerals.number(run.metrics.get("test_perplexity")),
        numerals.duration(run.seconds),
        numerals.count(run.tokens_per_second),
        numerals.NOTHING if run.nonfinite_batches is None else str(run.nonfinite_batches),
        numerals.printable(_note(run)) or numerals.NOTHING,
    ]


def _note(run: Run) -> str:
    place = run.first_nonfinite
    if place is None:
        return run.message
    seen = f"first not finite in {place.layer}, step {place.step}"
    return f"{run.message}; {seen}" if run.message else seen


def markdown_table(rows: Sequence[SummaryRow]) -> str:
    """The table in GitHub's Markdown."""
    return text_tables.markdown(*_plain(rows))


def latex_table(rows: Sequence[SummaryRow]) -> str:
    """The table in LaTeX, for booktabs."""
    return text_tables.latex(*_plain(rows))


def _plain(rows: Sequence[SummaryRow]) -> tuple[list[str], list[bool], list[list[str]]]:
    """Headings, which columns are numbers, and the lines."""
    return (
        [column.heading for column in COLUMNS],
        [column.numeric for column in COLUMNS],
        [cells(row) for row in rows],
    )


def headline(comparison: Comparison) -> str:
    """One line that names the comparison."""
    study = "" if comparison.study is None else comparison.study["name"]
    parts = (comparison.task, study, comparison.preset, f"{comparison.placement}-norm")
    return " · ".join(numerals.printable(part) for part in parts if part)
