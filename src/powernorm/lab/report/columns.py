"""The columns of the tables: what each is called, what it means, and the text of its cells."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from powernorm.lab.report import numerals
from powernorm.lab.report.magnitudes import significant_decimals
from powernorm.lab.report.measures import (
    COMPOUND_BLEU,
    MEASURES,
    PERPLEXITY,
    TRANSLATION_SCORES,
    Measure,
    better_way,
    meaning_of_own,
    own_heading,
)
from powernorm.lab.report.records import Comparison, ReportedRun
from powernorm.lab.report.statistics import REFERENCE, Spread, SummaryRow

MAX_METRICS: Final = 8
"""Other metrics that have a column of their own; the page lists the rest below the table."""


@dataclass(frozen=True)
class Column:
    """A column: its heading, what it means, and the text of a row's cell."""

    key: str
    heading: str
    meaning: str
    text: Callable[[SummaryRow], str]
    numeric: bool = True
    counts_finished: bool = False
    """Whether its number is of the finished runs only, so that it deserves a mark."""
    metric: str = ""
    """Which metric of the runs it averages; empty for other quantities."""


def _measured(row: SummaryRow, value: Spread | None, decimals: int | None = None) -> str:
    if value is None:
        return numerals.NOTHING if row.complete else numerals.mark(row.statuses)
    return numerals.spread(value, decimals) + " *" * row.is_partial(value)


def _tid(row: SummaryRow, layers: str) -> str:
    tid: Mapping[str, float | None] = row.tid or {}
    parts = [tid.get(f"mean_{layers}"), tid.get(f"var_{layers}")]
    if all(part is None for part in parts):
        return numerals.NOTHING
    return " / ".join(numerals.percent(part) for part in parts)


PERPLEXITY_MEANING: Final = (
    "Perplexity per word (of a masked language model per masked token, of a tagger per tag)"
)

_PARAMETERS: Final = Column(
    "parameters",
    "parameters",
    "Trainable parameters of the whole model.",
    lambda row: numerals.count(row.parameters),
)

_DISCREPANCY: Final[Sequence[Column]] = (
    Column(
        "tid_last",
        "TID last, %",
        "Training Inference Discrepancy of the last norm layer, mean / variance, in percent: how "
        "far a batch's statistics lie from the population's, relative to the batch's deviation, "
        "two passes over the data, mean over seeds. A norm that does not center has no mean part. "
        "Per-token norms have none.",
        lambda row: _tid(row, "last"),
    ),
    Column(
        "tid_avg",
        "TID average, %",
        "The same, averaged over the norm layers.",
        lambda row: _tid(row, "avg"),
    ),
)

_SPEED: Final = Column(
    "speed",
    "tokens/s",
    "Training throughput on this machine, mean over seeds.",
    lambda row: numerals.count(row.tokens_per_second),
)

_STATUS: Final = Column(
    "status",
    "runs",
    "What became of the runs. NaN: the loss became NaN or infinite; diverged: it rose above "
    "the unigram baseline for good; interrupted: stopped by the user; failed: an error; dropped: "
    "not needed by a race; unfinished: no result yet. Only finished runs enter an average.",
    lambda row: numerals.outcome(row.statuses),
    numeric=False,
    counts_finished=True,
)
_ALL: Final = (
    "An asterisk says that not all runs gave the number: the average is over those that did."
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
    _PARAMETERS,
    Column(
        "valid",
        "valid perplexity",
        f"{PERPLEXITY_MEANING}, on the validation text: mean ± sample standard deviation over "
        "seeds. Lower is better. An asterisk says that not all runs finished: the number averages "
        "only those that did.",
        lambda row: _measured(row, row.valid),
        counts_finished=True,
        metric="valid_perplexity",
    ),
    Column(
        "test",
        "test perplexity",
        "The same on the test text, which no choice was made on.",
        lambda row: _measured(row, row.test),
        counts_finished=True,
        metric=PERPLEXITY,
    ),
    Column(
        "gap",
        "gap to ln",
        "Test perplexity minus that of LayerNorm, mean over the seeds that finished with both, and "
        "the same in percent. Negative is better than LayerNorm. A norm with a remark is held "
        "against LayerNorm with the same.",
        lambda row: numerals.gap(row.gap),
    ),
    *_DISCREPANCY,
    _SPEED,
    _STATUS,
)
"""Of comparisons that are about perplexity."""


def _score(measure: Measure) -> Column:
    return Column(
        measure.metric,
        measure.heading,
        measure.meaning,
        lambda row: _measured(row, row.metrics.get(measure.metric)),
        counts_finished=True,
        metric=measure.metric,
    )


def _gap(measure: Measure) -> Column:
    sign = "Positive" if measure.higher_is_better else "Negative"
    return Column(
        "gap",
        "gap to ln",
        f"The {measure.heading} minus that of LayerNorm, mean over the seeds that finished with "
        f"both, and the same in percent. {sign} is better than LayerNorm.",
        lambda row: numerals.gap(row.gap),
    )


def _main_score(measure: Measure) -> Column:
    return Column(
        "test",
        measure.heading,
        f"{measure.meaning} Mean ± sample standard deviation over seeds; {better_way(measure)} is "
        "better. An asterisk says that not all runs finished: the number averages only those that "
        "did.",
        lambda row: _measured(row, row.test),
        counts_finished=True,
        metric=measure.metric,
    )


def translation_scores(comparison: Comparison) -> list[str]:
    """The metrics of its translations that a comparison asks for."""
    is_split = any_run(comparison.runs, lambda run: run.metrics.get(COMPOUND_BLEU))
    return [metric for metric in TRANSLATION_SCORES if is_split or metric != COMPOUND_BLEU]


def _translation_columns(comparison: Comparison) -> tuple[Column, ...]:
    measure = comparison.measure
    metrics = (*translation_scores(comparison), "test_loss")
    others = [MEASURES[metric] for metric in metrics if metric != measure.metric]
    return (
        Column(
            "norm",
            "norm",
            "Short name of the normalization layer; copy is the source as it is, taken for its "
            "translation, which every norm has to beat, and unigram a model without a network.",
            lambda row: numerals.printable(row.label),
            numeric=False,
        ),
        _PARAMETERS,
        _main_score(measure),
        _gap(measure),
        *map(_score, others),
        *_DISCREPANCY,
        Column(
            "speed",
            "tokens/s",
            "Training throughput on this machine, source and target, mean over seeds.",
            lambda row: numerals.count(row.tokens_per_second),
        ),
        Column(
            "decoding_speed",
            "decoding tokens/s",
            "Target subwords that the beam search gave in a second on this machine, mean over "
            "seeds.",
            lambda row: numerals.count(row.decoding_speed),
        ),
        _STATUS,
    )


_EXAMPLES: Final = Column(
    "speed",
    "examples/s",
    "Rows of the batches (images, texts, sentences, transitions) that the training took in a "
    "second on this machine, mean over seeds.",
    lambda row: numerals.count(row.examples_per_second),
)


def _task_columns(measure: Measure) -> tuple[Column, ...]:
    """Of comparisons that are about another measure."""
    return (
        Column(
            "norm",
            "norm",
            "Short name of the normalization layer; the rows below are models without a network, "
            "which every norm has to beat.",
            lambda row: numerals.printable(row.label),
            numeric=False,
        ),
        _PARAMETERS,
        _main_score(measure),
        _gap(measure),
        *(_score(MEASURES[metric]) for metric in measure.others),
        *_DISCREPANCY,
        _EXAMPLES if measure.higher_is_better else _SPEED,
        _STATUS,
    )


_OWN_SPEEDS: Final[Sequence[tuple[Callable[[ReportedRun], float | None], Column]]] = (
    (lambda run: run.tokens_per_second, _SPEED),
    (lambda run: run.examples_per_second, _EXAMPLES),
)
"""Of comparisons whose metrics nobody here knows: each is there where a run says it."""


def _own_columns(comparison: Comparison) -> list[Column]:
    """Of comparisons whose metrics nobody here knows, and no column of what no run has."""
    runs = comparison.runs
    baselines = comparison.baselines
    beaten = "; the rows below are baselines, which every norm has to beat" if baselines else ""
    columns = [
        Column(
            "norm",
            "norm",
            f"Short name of the normalization layer{beaten}.",
            lambda row: numerals.printable(row.label),
            numeric=False,
        ),
        _PARAMETERS,
        _own_goal(comparison.measure),
    ]
    if any(run.name == REFERENCE for run in runs):
        columns.append(_own_gap(comparison.measure))
    columns += [own_metric(comparison, name) for name in comparison.other_metrics[:MAX_METRICS]]
    if any_run(runs, lambda run: run.tid):
        columns += _DISCREPANCY
    columns += [column for value, column in _OWN_SPEEDS if any_run(runs, value)]
    return [*columns, _own_status(comparison)]


def any_run(runs: Iterable[ReportedRun], value: Callable[[ReportedRun], object]) -> bool:
    """Whether any run has this value."""
    return any(value(run) is not None for run in runs)


def _own_goal(measure: Measure) -> Column:
    return Column(
        "test",
        measure.heading,
        f"{measure.meaning} Mean ± sample standard deviation over seeds; {better_way(measure)} is "
        f"better. {_ALL}",
        lambda row: _measured(row, row.test, measure.decimals),
        counts_finished=True,
        metric=measure.metric,
    )


def _own_gap(measure: Measure) -> Column:
    sign = "Positive" if measure.higher_is_better else "Negative"
    return Column(
        "gap",
        f"gap to {REFERENCE}",
        f"The {measure.heading} minus that of {REFERENCE}, mean over the seeds that finished with "
        f"both, and the same in percent. {sign} is better than {REFERENCE}.",
        lambda row: numerals.gap(row.gap, measure.decimals),
    )


def own_metric(comparison: Comparison, name: str) -> Column:
    """The column of a metric that nobody here knows."""
    known = MEASURES.get(name) if comparison.function is None else None
    return Column(
        f"metric {name}",
        own_heading(name) if known is None else known.heading,
        meaning_of_own(name) if known is None else known.meaning,
        lambda row: metric_text(row, name),
        counts_finished=True,
        metric=name,
    )


def metric_text(row: SummaryRow, name: str) -> str:
    """A metric that nobody here knows, in four digits."""
    value = row.metrics.get(name)
    return _measured(row, value, None if value is None else significant_decimals(value.mean))


def _own_status(comparison: Comparison) -> Column:
    first = [f"worse than the baseline {row['name']}" for row in comparison.baselines[:1]]
    if not first and any(run.status == "diverged" for run in comparison.runs):
        first = ["as the function recorded it"]
    words = [
        f"NaN: the loss or the {comparison.measure.heading} became NaN or infinite",
        *(f"diverged: {words}" for words in first),
        "interrupted: stopped by the user",
        "failed: an error",
        "dropped: not needed by a race",
        "unfinished: no result yet",
    ]
    return replace(
        _STATUS,
        meaning=f"What became of the runs. {'; '.join(words)}. Only finished runs enter an "
        "average.",
    )


def columns_of(comparison: Comparison) -> Sequence[Column]:
    """The columns of a comparison, by what it is about."""
    if not comparison.has_known_measure:
        return _own_columns(comparison)
    if comparison.metric == PERPLEXITY:
        return COLUMNS
    if comparison.metric in TRANSLATION_SCORES:
        return _translation_columns(comparison)
    return _task_columns(comparison.measure)


def caption_of_results(comparison: Comparison, *, is_shaded: bool) -> str:
    """What the numbers are and which way is up, above the table.

    Args:
        comparison: what was compared.
        is_shaded: whether a norm is, as the best.
    """
    measure = comparison.measure
    shaded = "; the best mean is shaded" if is_shaded else ""
    if comparison.has_known_measure and comparison.metric == PERPLEXITY:
        return f"{PERPLEXITY_MEANING}, lower is better{shaded}."
    others = " and other scores" if comparison.has_known_measure else ""
    return f"The {measure.heading}{others}, {better_way(measure)} is better{shaded}."
