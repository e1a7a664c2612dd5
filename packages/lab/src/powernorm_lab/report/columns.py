"""Columns of the tables of norms and of runs: headings, meanings, and the text of cells.

A new column is one entry in `columns_of`. Columns that are empty in every row are omitted.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from powernorm_lab.report import numerals
from powernorm_lab.report.measures import (
    COMPOUND_BLEU,
    MEASURES,
    PERPLEXITY,
    TRANSLATION_SCORES,
    VALID_PERPLEXITY,
    Measure,
    better_way,
    measure_of,
    own_measure,
    significant_decimals,
)
from powernorm_lab.report.numerals import NOTHING
from powernorm_lab.report.records import Comparison, ReportedRun
from powernorm_lab.report.summary import REFERENCE, Spread, SummaryRow, is_better
from powernorm_lab.runs import Goal

MAX_METRICS: Final = 8
"""Largest number of other metrics with columns; the page lists the rest below the table."""


@dataclass(frozen=True)
class Column:
    """A column of the table of norms, the table of runs, or both.

    Attributes:
        key: identifier.
        heading: heading of the column.
        meaning: description for the glossary.
        of_norm: text of a norm's cell; None if the table of norms does not have it.
        of_run: text of a run's cell; None if the table of runs does not have it.
        numeric: whether it is aligned to the right.
        counts_finished: whether it uses finished runs only, so that missing runs are marked.
        metric: metric of the runs that it averages; empty for other quantities.
    """

    key: str
    heading: str
    meaning: str = ""
    of_norm: Callable[[SummaryRow], str] | None = None
    of_run: Callable[[ReportedRun], str] | None = None
    numeric: bool = True
    counts_finished: bool = False
    metric: str = ""


def _measured(row: SummaryRow, value: Spread | None, decimals: int | None) -> str:
    if value is None:
        return NOTHING if row.complete else numerals.mark(row.statuses)
    return numerals.spread(value, decimals) + " *" * row.is_partial(value)


def _metric(measure: Measure, key: str = "", decimals: int | None = None, note: str = "") -> Column:
    """Return the column of a metric; -1 decimals give four digits at any magnitude."""

    def places(value: float) -> int | None:
        return significant_decimals(value) if decimals == -1 else decimals

    def of_norm(row: SummaryRow) -> str:
        value = row.metrics.get(measure.metric)
        return _measured(row, value, None if value is None else places(value.mean))

    def of_run(run: ReportedRun) -> str:
        value = run.metrics.get(measure.metric)
        if decimals is None or value is None:
            return numerals.number(value)
        return numerals.number(value, significant_decimals(value))

    return Column(
        key or measure.metric,
        measure.heading,
        f"{measure.meaning}{note}",
        of_norm,
        of_run,
        counts_finished=True,
        metric=measure.metric,
    )


def _main(comparison: Comparison) -> Column:
    measure = comparison.measure
    note = (
        f" Mean ± sample standard deviation over seeds; {better_way(measure)} is better. An "
        "asterisk marks an average over some of the runs, because others lack the number."
    )
    return _metric(
        measure, "test", None if comparison.has_known_measure else measure.decimals, note
    )


def tid_text(row: SummaryRow, layers: str) -> str:
    """Return the TID of the `last` norm layer, or the average (`avg`): mean / deviation."""
    tid = row.tid or {}
    parts = [tid.get(f"mean_{layers}"), tid.get(f"var_{layers}")]
    if all(part is None for part in parts):
        return NOTHING
    return " / ".join(numerals.percent(part) for part in parts)


def _interval(row: SummaryRow, decimals: int) -> str:
    text = numerals.interval(row.gap, decimals)
    return text.partition(" (")[2].rstrip(")") or NOTHING


def told_mark(row: SummaryRow, measure: Measure) -> str:
    """Return the mark of a norm that is significantly better or worse in the paired test, or ""."""
    if row.gap is None or not row.gap.is_told:
        return ""
    return BETTER if is_better(row.gap.difference, 0, measure) else WORSE


BETTER: Final = "▲"
WORSE: Final = "▼"


def _against_reference(comparison: Comparison) -> Iterable[Column]:
    measure = comparison.measure
    sign = "Positive" if measure.higher_is_better else "Negative"
    decimals = None if comparison.has_known_measure else measure.decimals
    yield Column(
        "gap",
        f"gap to {REFERENCE}",
        f"The {measure.heading} minus that of {REFERENCE}, mean over the seeds that finished with "
        f"both, and the same in percent. {sign} is better than {REFERENCE}. A norm with a remark "
        f"is held against {REFERENCE} with the same. {BETTER} is better, {WORSE} worse by the "
        "paired t-test over the seeds, two-sided, at 5 %, corrected for the number of norms.",
        lambda row: f"{numerals.gap(row.gap, decimals)} {told_mark(row, measure)}".rstrip(),
    )
    yield Column(
        "interval",
        "95 % interval",
        "Interval of the gap by Student's t, for at least three seeds that finished with both.",
        lambda row: _interval(row, measure.decimals),
    )


TID_MEANING: Final = (
    "TID: Training Inference Discrepancy, how far a batch's statistics lie from the population's, "
    "relative to the batch's deviation"
)
_DISCREPANCY: Final = (
    Column(
        "tid_last",
        "TID last, %",
        f"{TID_MEANING}; of the last norm layer, mean / variance, in percent, two passes over the "
        "data, mean over seeds. A norm that does not center has no mean part. Per-token norms have "
        "none.",
        lambda row: tid_text(row, "last"),
    ),
    Column(
        "tid_avg",
        "TID average, %",
        "The same, averaged over the norm layers.",
        lambda row: tid_text(row, "avg"),
    ),
)


def _speed(
    key: str, heading: str, meaning: str, speed: Callable[[ReportedRun], float | None]
) -> Column:
    return Column(
        key,
        heading,
        f"{meaning}, mean over seeds.",
        lambda row: numerals.count(row.mean_of(speed)),
        lambda run: numerals.count(speed(run)),
    )


_TOKENS: Final = _speed(
    "speed",
    "tokens/s",
    "Training throughput on this machine, of a translation source and target",
    lambda run: run.tokens_per_second,
)
_EXAMPLES: Final = _speed(
    "examples",
    "examples/s",
    "Rows of the batches (images, texts, sentences, transitions) that the training took in a "
    "second on this machine",
    lambda run: run.examples_per_second,
)
_DECODING: Final = _speed(
    "decoding_speed",
    "decoding tokens/s",
    "Target subwords that the beam search gave in a second on this machine",
    lambda run: run.metrics.get("decoding_tokens_per_second"),
)


def _speeds(comparison: Comparison) -> Sequence[Column]:
    if not comparison.has_known_measure:
        return _TOKENS, _EXAMPLES
    if comparison.metric in TRANSLATION_SCORES:
        return _TOKENS, _DECODING
    return (_EXAMPLES,) if comparison.measure.higher_is_better else (_TOKENS,)


def _others(comparison: Comparison) -> list[Column]:
    """Return the columns of metrics other than the main one."""
    if not comparison.has_known_measure:
        return [own_metric(comparison, name) for name in comparison.other_metrics[:MAX_METRICS]]
    names: Iterable[str] = comparison.measure.others
    if comparison.metric in TRANSLATION_SCORES:
        is_split = any(run.metrics.get(COMPOUND_BLEU) is not None for run in comparison.runs)
        names = [*TRANSLATION_SCORES, "test_loss"]
        names = [name for name in names if is_split or name != COMPOUND_BLEU]
    return [_metric(MEASURES[name]) for name in names if name != comparison.metric]


def own_metric(comparison: Comparison, name: str) -> Column:
    """Return the column of a metric from a user's function or an older version."""
    own = own_measure(Goal(metric=name, direction="min"))
    return _metric(measure_of(name) if comparison.function is None else own, f"metric {name}", -1)


def _status_meaning(comparison: Comparison) -> str:
    if comparison.has_known_measure:
        lost = "the loss became NaN or infinite"
        above = "diverged: it rose above the unigram baseline for good"
    else:
        lost = f"the loss or the {comparison.measure.heading} became NaN or infinite"
        above = "diverged: as the function recorded it"
    return (
        f"Status of the runs. NaN: {lost}; {above}; worse than a baseline: the run was completed "
        "but is no better than a model without a network; interrupted: stopped by the user; "
        "failed: an error; dropped: not needed by a race; unfinished: no result yet. Averages use "
        "finished runs only."
    )


def _note(run: ReportedRun) -> str:
    place = run.first_nonfinite
    seen = "" if place is None else f"first not finite in {place[0]}, step {place[1]}"
    return "; ".join(filter(None, (run.remark, run.message, seen)))


def columns_of(comparison: Comparison) -> list[Column]:
    """Return the columns of a comparison's tables, which depend on its main metric."""
    main, others = _main(comparison), _others(comparison)
    is_perplexity = comparison.has_known_measure and comparison.metric == PERPLEXITY
    has_baselines = bool(comparison.baselines)
    return [
        Column(
            "norm",
            "norm",
            "Short name of the normalization layer"
            + "; the rows below are models without a network, which every norm has to beat"
            * has_baselines
            + ".",
            lambda row: numerals.printable(row.label),
            lambda run: numerals.printable(run.name),
            numeric=False,
        ),
        Column("seed", "seed", of_run=lambda run: str(run.seed)),
        Column(
            "run_status",
            "status",
            of_run=lambda run: numerals.STATUS_WORDS[run.shown_status],
            numeric=False,
        ),
        Column(
            "parameters",
            "parameters",
            "Trainable parameters of the whole model.",
            lambda row: numerals.count(row.parameters),
        ),
        *([_metric(MEASURES[VALID_PERPLEXITY], "valid")] if is_perplexity else []),
        main,
        *_against_reference(comparison),
        *others,
        *_DISCREPANCY,
        Column("time", "time", of_run=lambda run: numerals.duration(run.seconds or None)),
        *_speeds(comparison),
        Column(
            "status",
            "runs",
            _status_meaning(comparison),
            lambda row: numerals.outcome(row.statuses, row.behind),
            numeric=False,
            counts_finished=True,
        ),
        Column(
            "nonfinite",
            "non-finite batches",
            of_run=lambda run: (
                NOTHING if run.nonfinite_batches is None else str(run.nonfinite_batches)
            ),
        ),
        Column(
            "note",
            "note",
            of_run=lambda run: numerals.printable(_note(run)) or NOTHING,
            numeric=False,
        ),
    ]


def norm_columns(comparison: Comparison, rows: Sequence[SummaryRow]) -> list[Column]:
    """Return the columns of the table of norms that are not empty."""
    return [
        column
        for column in columns_of(comparison)
        if (text := column.of_norm) is not None
        and (column.key == "norm" or any(text(row) != NOTHING for row in rows))
    ]


def run_columns(comparison: Comparison) -> list[Column]:
    """Return the columns of the table of runs that are not empty."""
    return [
        column
        for column in columns_of(comparison)
        if (text := column.of_run) is not None
        and (column.key == "norm" or any(text(run) != NOTHING for run in comparison.runs))
    ]
