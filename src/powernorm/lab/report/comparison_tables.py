"""The tables of a comparison: one list of columns for terminal, page, Markdown and LaTeX."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from markupsafe import Markup

from powernorm.lab.report import numerals
from powernorm.lab.report.columns import (
    COLUMNS,
    MAX_METRICS,
    Column,
    any_run,
    caption_of_results,
    columns_of,
    own_metric,
    translation_scores,
)
from powernorm.lab.report.magnitudes import significant_decimals
from powernorm.lab.report.measures import MEASURES, PERPLEXITY, TRANSLATION_SCORES
from powernorm.lab.report.records import Comparison, ReportedRun
from powernorm.lab.report.statistics import SummaryRow, best_rows, values_by_seed
from powernorm.lab.report.tables import Table
from powernorm.lab.report.templates import part

# The columns of the table of runs, of which nothing is averaged.


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


FOOTNOTE: Final = "* Not every run gave this number: the average is over those that did."
MAX_SEEDS: Final = 20
"""Seeds whose values a cell says under the pointer."""


def cells(row: SummaryRow, columns: Sequence[Column] = COLUMNS) -> list[str]:
    """The row's texts, one a column."""
    return [column.text(row) for column in columns]


def any_partial(rows: Iterable[SummaryRow]) -> bool:
    """Whether a number of the table needs the footnote."""
    return any(
        row.is_partial(value)
        for row in rows
        for value in (row.valid, row.test, *row.metrics.values())
        if value is not None
    )


def run_cells(run: ReportedRun, columns: Sequence[RunColumn] = RUN_COLUMNS) -> list[str]:
    """One run's texts, one a column; nothing is averaged and nothing left out."""
    return [column.text(run) for column in columns]


def headline(comparison: Comparison) -> str:
    """One line that names the comparison."""
    study = "" if comparison.study is None else comparison.study["name"]
    parts = (comparison.task, study, comparison.preset, comparison.where)
    return " · ".join(numerals.printable(part) for part in parts if part)


def table_of(
    rows: Sequence[SummaryRow], columns: Sequence[Column] = COLUMNS, best: Iterable[str] = ()
) -> Table:
    """One row a norm: the best shaded, runs that did not finish in alarm color.

    Args:
        rows: of `summarize`.
        columns: of `columns_of`.
        best: labels of `best_rows`.
    """
    best = set(best)
    cell_kinds, titles = {}, {}
    for index, row in enumerate(rows):
        for place, column in enumerate(columns):
            if not row.is_as_expected and column.counts_finished:
                cell_kinds[index, place] = "alarm wrap" if column.key == "status" else "alarm"
            if column.metric:
                titles[index, place] = _by_seed(row, column.metric)
    return Table(
        [column.heading for column in columns],
        [column.numeric for column in columns],
        [cells(row, columns) for row in rows],
        row_kinds=[
            " ".join(["baseline"] * row.is_baseline + ["best"] * (row.label in best))
            for row in rows
        ],
        cell_kinds=cell_kinds,
        titles=titles,
    )


def _by_seed(row: SummaryRow, metric: str) -> str:
    """What each seed gave, in as many digits as tell them apart; empty for a baseline."""
    values = values_by_seed(row.runs, metric)
    shown = [f"seed {seed}: {value:.6g}" for seed, value in list(values.items())[:MAX_SEEDS]]
    return ", ".join(shown) + "…" * (len(values) > MAX_SEEDS)


def summary_table(comparison: Comparison, rows: Sequence[SummaryRow]) -> Markup:
    """The table of a comparison for its page."""
    best = best_rows(rows, comparison.measure)
    note = caption_of_results(comparison, is_shaded=bool(best))
    if any_partial(rows):
        note += " " + FOOTNOTE
    return table_of(rows, columns_of(comparison), best).html("Results", note)


def markdown_table(rows: Sequence[SummaryRow], columns: Sequence[Column] = COLUMNS) -> str:
    """The table in GitHub's Markdown."""
    return table_of(rows, columns).markdown()


def run_table(comparison: Comparison) -> Markup:
    """One row a run with its status and its message."""
    columns = run_columns_of(comparison)
    headings = [column.heading for column in columns]
    table = Table(
        headings,
        [column.numeric for column in columns],
        [run_cells(run, columns) for run in comparison.runs],
        cell_kinds={
            (index, headings.index("status")): "alarm"
            for index, run in enumerate(comparison.runs)
            if not run.is_as_expected
        },
        values={
            (index, headings.index("time")): run.seconds
            for index, run in enumerate(comparison.runs)
            if run.seconds
        },
        wide="note",
    )
    return table.html("Every run", "One row a run, nothing averaged.")


def glossary(comparison: Comparison) -> Markup:
    """What each column of the table means."""
    pairs = [(column.heading, column.meaning) for column in columns_of(comparison)]
    return part("definitions", pairs)


def settings_table(
    settings: Mapping[str, Any], caption: str, preset: Mapping[str, str] = MappingProxyType({})
) -> Markup:
    """Nested settings, one row a value under its dotted name.

    Args:
        settings: the values.
        caption: what they are of.
        preset: values of the preset where it has others; their rows are marked.
    """
    lines = [
        [name, f"{text} (preset: {preset[name]})" if name in preset else text]
        for name, text in _flat(settings)
    ]
    table = Table(
        ["setting", "value"],
        [False, False],
        lines,
        row_kinds=["changed" if name in preset else "" for name, _ in lines],
        cell_kinds={(index, 1): "wrap" for index in range(len(lines))},
        has_head=False,
    )
    return table.html(caption, caption)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and texts, the form that `--set` takes."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", numerals.setting_text(value)
