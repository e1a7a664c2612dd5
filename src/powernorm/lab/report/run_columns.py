"""The columns of the table of runs, of which nothing is averaged."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from powernorm.lab.report import numerals
from powernorm.lab.report.columns import (
    MAX_METRICS,
    any_run,
    own_metric,
    translation_scores,
)
from powernorm.lab.report.magnitudes import significant_decimals
from powernorm.lab.report.measures import MEASURES, PERPLEXITY, TRANSLATION_SCORES
from powernorm.lab.report.records import Comparison, ReportedRun


@dataclass(frozen=True)
class RunColumn:
    """A column of the table of runs."""

    heading: str
    text: Callable[[ReportedRun], str]
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
    RunColumn("time", lambda run: numerals.duration(run.seconds or None), numeric=False),
    RunColumn("tokens/s", lambda run: numerals.count(run.tokens_per_second)),
)
_RUN_EXAMPLES: Final = RunColumn("examples/s", lambda run: numerals.count(run.examples_per_second))
_RUN_NOTE: Final = RunColumn(
    "note", lambda run: numerals.printable(_note(run)) or numerals.NOTHING, numeric=False
)
_RUN_TAIL: Final = (
    RunColumn(
        "non-finite batches",
        lambda run: (
            numerals.NOTHING if run.nonfinite_batches is None else str(run.nonfinite_batches)
        ),
    ),
    _RUN_NOTE,
)

RUN_COLUMNS: Final[Sequence[RunColumn]] = (
    *_RUN_HEAD,
    _metric_column("test perplexity", "test_perplexity"),
    *_RUN_SPEED,
    *_RUN_TAIL,
)
"""Of comparisons that are about perplexity."""


def _translation_run_columns(comparison: Comparison) -> list[RunColumn]:
    metrics = ("test_loss", *translation_scores(comparison))
    return [
        *_RUN_HEAD,
        *(_metric_column(MEASURES[metric].heading, metric) for metric in metrics),
        *_RUN_SPEED,
        RunColumn(
            "decoding tokens/s",
            lambda run: numerals.count(run.metrics.get("decoding_tokens_per_second")),
        ),
        *_RUN_TAIL,
    ]


_OWN_SPEEDS: Final[Sequence[tuple[Callable[[ReportedRun], float | None], RunColumn]]] = (
    (lambda run: run.tokens_per_second, _RUN_SPEED[1]),
    (lambda run: run.examples_per_second, _RUN_EXAMPLES),
)
"""Each is there where a run says it, as in the table of norms."""


def _own_run_columns(comparison: Comparison) -> list[RunColumn]:
    runs = comparison.runs
    metrics = [comparison.metric, *comparison.other_metrics[:MAX_METRICS]]
    return [
        *_RUN_HEAD[:-1],
        *(_own_run_metric(comparison, name) for name in metrics),
        _RUN_SPEED[0],
        *(of_run for value, of_run in _OWN_SPEEDS if any_run(runs, value)),
        *(_RUN_TAIL[:1] if any_run(runs, lambda run: run.nonfinite_batches) else ()),
        _RUN_NOTE,
    ]


def _own_run_metric(comparison: Comparison, name: str) -> RunColumn:
    heading = own_metric(comparison, name).heading

    def text(run: ReportedRun) -> str:
        value = run.metrics.get(name)
        return numerals.number(value, None if value is None else significant_decimals(value))

    return RunColumn(heading, text)


def run_columns_of(comparison: Comparison) -> Sequence[RunColumn]:
    """The columns of the table of runs of a comparison, by what it is about."""
    if not comparison.has_known_measure:
        return _own_run_columns(comparison)
    if comparison.metric == PERPLEXITY:
        return RUN_COLUMNS
    if comparison.metric in TRANSLATION_SCORES:
        return _translation_run_columns(comparison)
    measure = comparison.measure
    return (
        *_RUN_HEAD[:-1],
        *(
            _metric_column(MEASURES[name].heading, name)
            for name in (measure.metric, *measure.others)
        ),
        _RUN_SPEED[0],
        _RUN_EXAMPLES if measure.higher_is_better else _RUN_SPEED[1],
        *_RUN_TAIL,
    )


def _note(run: ReportedRun) -> str:
    place = run.first_nonfinite
    seen = "" if place is None else f"first not finite in {place.layer}, step {place.step}"
    return "; ".join(filter(None, (run.remark, run.message, seen)))
