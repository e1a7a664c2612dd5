"""The columns of the tables: what each is called, what it means, and the text of its cells."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from powernorm.report import numerals
from powernorm.report.measures import MEASURES, PERPLEXITY, TRANSLATION_SCORES, Measure
from powernorm.report.records import Run
from powernorm.report.summary import Spread, SummaryRow


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


def _measured(row: SummaryRow, value: Spread | None) -> str:
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
    "the unigram baseline for good; interrupted: stopped by the user; failed: an error; "
    "unfinished: no result yet. Only finished runs enter an average.",
    lambda row: numerals.outcome(row.statuses),
    numeric=False,
    counts_finished=True,
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
    ),
    Column(
        "test",
        "test perplexity",
        "The same on the test text, which no choice was made on.",
        lambda row: _measured(row, row.test),
        counts_finished=True,
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
    )


def _way(measure: Measure) -> str:
    return "higher" if measure.higher_is_better else "lower"


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
        f"{measure.meaning} Mean ± sample standard deviation over seeds; {_way(measure)} is "
        "better. An asterisk says that not all runs finished: the number averages only those that "
        "did.",
        lambda row: _measured(row, row.test),
        counts_finished=True,
    )


def _translation_columns(measure: Measure) -> tuple[Column, ...]:
    metrics = (*TRANSLATION_SCORES, "test_loss")
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


def columns_of(metric: str) -> Sequence[Column]:
    """The columns of a comparison that is about this metric.

    >>> [column.key for column in columns_of("test_bleu")][:4]
    ['norm', 'parameters', 'test', 'gap']
    """
    if metric == PERPLEXITY:
        return COLUMNS
    measure = MEASURES[metric]
    is_translation = metric in TRANSLATION_SCORES
    return _translation_columns(measure) if is_translation else _task_columns(measure)


def caption_of_results(metric: str) -> str:
    """What the numbers are and which way is up, above the table."""
    measure = MEASURES[metric]
    if metric != PERPLEXITY:
        return (
            f"The {measure.heading} and other scores, {_way(measure)} is better; the best norm "
            "is shaded."
        )
    return f"{PERPLEXITY_MEANING}, lower is better; the best norm is shaded."


@dataclass(frozen=True)
class RunColumn:
    """A column of the table of runs."""

    heading: str
    text: Callable[[Run], str]
    numeric: bool = True


def _metric_column(heading: str, metric: str) -> RunColumn:
    return RunColumn(heading, lambda run: numerals.number(run.metrics.get(metric)))


_RUN_HEAD: Final = (
    RunColumn("norm", lambda run: numerals.printable(run.name), numeric=False),
    RunColumn("seed", lambda run: str(run.seed)),
    RunColumn("status", lambda run: numerals.STATUS_WORDS[run.shown_status], numeric=False),
    _metric_column("valid perplexity", "valid_perplexity"),
)
_RUN_SPEED: Final = (
    RunColumn("time", lambda run: numerals.duration(run.seconds), numeric=False),
    RunColumn("tokens/s", lambda run: numerals.count(run.tokens_per_second)),
)
_RUN_TAIL: Final = (
    RunColumn(
        "non-finite batches",
        lambda run: (
            numerals.NOTHING if run.nonfinite_batches is None else str(run.nonfinite_batches)
        ),
    ),
    RunColumn(
        "note", lambda run: numerals.printable(_note(run)) or numerals.NOTHING, numeric=False
    ),
)

RUN_COLUMNS: Final[Sequence[RunColumn]] = (
    *_RUN_HEAD,
    _metric_column("test perplexity", "test_perplexity"),
    *_RUN_SPEED,
    *_RUN_TAIL,
)
"""Of comparisons that are about perplexity."""

_TRANSLATION_RUN_COLUMNS: Final[Sequence[RunColumn]] = (
    *_RUN_HEAD,
    *(
        _metric_column(MEASURES[metric].heading, metric)
        for metric in ("test_loss", *TRANSLATION_SCORES)
    ),
    *_RUN_SPEED,
    RunColumn(
        "decoding tokens/s",
        lambda run: numerals.count(run.metrics.get("decoding_tokens_per_second")),
    ),
    *_RUN_TAIL,
)


def run_columns_of(metric: str) -> Sequence[RunColumn]:
    """The columns of the table of runs of a comparison that is about this metric."""
    if metric == PERPLEXITY:
        return RUN_COLUMNS
    if metric in TRANSLATION_SCORES:
        return _TRANSLATION_RUN_COLUMNS
    measure = MEASURES[metric]
    return (
        *_RUN_HEAD[:-1],
        *(_metric_column(MEASURES[name].heading, name) for name in (metric, *measure.others)),
        _RUN_SPEED[0],
        RunColumn("examples/s", lambda run: numerals.count(run.examples_per_second))
        if measure.higher_is_better
        else _RUN_SPEED[1],
        *_RUN_TAIL,
    )


def _note(run: Run) -> str:
    place = run.first_nonfinite
    seen = "" if place is None else f"first not finite in {place.layer}, step {place.step}"
    return "; ".join(filter(None, (run.remark, run.message, seen)))
