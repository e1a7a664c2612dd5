"""Tables of a comparison: norms, runs, seeds, race, tuning and settings.

A new column is one entry in `norm_columns` or `run_columns`. Columns that are empty in every row
are omitted.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from powernorm_lab.report import numerals
from powernorm_lab.report.document import words
from powernorm_lab.report.measures import (
    COMPOUND_BLEU,
    MEASURES,
    PERPLEXITY,
    TRANSLATION_SCORES,
    VALID_PERPLEXITY,
    Measure,
    heading_of,
    measure_of,
    own_measure,
    significant_decimals,
)
from powernorm_lab.report.numerals import NOTHING, counted, printable, setting_text
from powernorm_lab.report.records import Comparison, ReportedRun
from powernorm_lab.report.statistics import (
    REFERENCE,
    SummaryRow,
    is_better,
    values_by_seed,
)
from powernorm_lab.report.tables import Column, Table
from powernorm_lab.runs import BEST_SCORED, ChangesRecord, Goal

MAX_METRICS: Final = 8
"""Largest number of other metrics with columns; the page lists the rest below the table."""
MAX_SEEDS: Final = 20
"""Largest number of seeds in a cell's tooltip."""
FOOTNOTE: Final = "* Not every run gave this number: the average is over those that did."
BETTER: Final = "▲"
WORSE: Final = "▼"
TID_MEANING: Final = (
    "TID: Training Inference Discrepancy, how far a batch's statistics lie from the population's, "
    "relative to the batch's deviation"
)


def headline(comparison: Comparison) -> str:
    """Return a line that names the comparison."""
    study = "" if comparison.study is None else comparison.study["name"]
    parts = (comparison.task, study, comparison.preset, comparison.where)
    return " · ".join(printable(part) for part in parts if part)


# Norms and runs.


def norm_table(
    comparison: Comparison, rows: Sequence[SummaryRow], best: Iterable[str] = ()
) -> Table:
    """Return the table of norms, with the best ones shaded and unfinished runs in alarm color.

    Args:
        comparison: the comparison.
        rows: rows of `summarize`.
        best: labels of `best_rows`.
    """
    shaded = set(best)
    return Table.filled(
        norm_columns(comparison),
        rows,
        kinds=["baseline" if row.is_baseline else "best" * (row.label in shaded) for row in rows],
    )


def run_table(comparison: Comparison) -> Table:
    """Return the table of all runs with their statuses and messages, without averages."""
    return Table.filled(run_columns(comparison), comparison.runs)


def norm_columns(comparison: Comparison) -> list[Column[SummaryRow]]:
    """Return the columns of the table of norms, which depend on the main metric."""
    measure = comparison.measure
    decimals = None if comparison.has_known_measure else measure.decimals
    is_perplexity = comparison.has_known_measure and comparison.metric == PERPLEXITY
    return [
        Column(
            "norm",
            lambda row: row.label,
            numeric=False,
            meaning=words("norm_column", bool(comparison.baselines)),
        ),
        Column(
            "parameters",
            lambda row: numerals.count(row.parameters),
            meaning="Trainable parameters of the whole model.",
        ),
        *([_of_norms(MEASURES[VALID_PERPLEXITY], "valid")] if is_perplexity else []),
        _of_norms(
            measure,
            "test",
            decimals,
            words("test_column", measure),
        ),
        Column(
            f"gap to {REFERENCE}",
            lambda row: f"{numerals.gap(row.gap, decimals)} {told_mark(row, measure)}".rstrip(),
            meaning=words("gap_column", measure, REFERENCE, BETTER, WORSE),
            key="gap",
        ),
        Column(
            "95 % interval",
            lambda row: _ends(numerals.interval(row.gap, measure.decimals)),
            meaning="Interval of the gap by Student's t, for at least three seeds that finished "
            "with both.",
            key="interval",
        ),
        *(_of_norms(*other) for other in _others(comparison)),
        Column(
            "TID last, %",
            lambda row: tid_text(row, "last"),
            meaning=words("tid_column", TID_MEANING),
            key="tid_last",
        ),
        Column(
            "TID average, %",
            lambda row: tid_text(row, "avg"),
            meaning="The same, averaged over the norm layers.",
            key="tid_avg",
        ),
        *(_speed_of_norms(*speed) for speed in _speeds(comparison)),
        Column(
            "runs",
            lambda row: numerals.outcome(row.statuses, row.behind),
            numeric=False,
            meaning=words("status_column", comparison),
            key="status",
            kind=lambda row: "" if row.is_as_expected else "alarm wrap",
        ),
    ]


def run_columns(comparison: Comparison) -> list[Column[ReportedRun]]:
    """Return the columns of the table of runs."""
    is_perplexity = comparison.has_known_measure and comparison.metric == PERPLEXITY
    digits = None if comparison.has_known_measure else -1
    return [
        Column("norm", lambda run: run.name, numeric=False),
        Column("seed", lambda run: str(run.seed)),
        Column(
            "status",
            lambda run: run.status_words,
            numeric=False,
            kind=lambda run: "" if run.is_as_expected else "alarm",
        ),
        *([_of_runs(MEASURES[VALID_PERPLEXITY])] if is_perplexity else []),
        _of_runs(comparison.measure, digits=digits),
        *(_of_runs(measure, digits=digits) for measure, _, digits in _others(comparison)),
        Column(
            "time",
            lambda run: numerals.duration(run.seconds or None),
            value=lambda run: run.seconds or None,
        ),
        *(
            Column(heading, partial(_speed_of_run, speed))
            for heading, _, speed in _speeds(comparison)
        ),
        Column(
            "non-finite batches",
            lambda run: NOTHING if run.nonfinite_batches is None else str(run.nonfinite_batches),
        ),
        Column("note", lambda run: _note(run) or NOTHING, numeric=False, wide=True),
    ]


def _of_norms(
    measure: Measure, key: str = "", decimals: int | None = None, note: str = ""
) -> Column[SummaryRow]:
    """Return the column of a metric; -1 decimals give four digits at any magnitude."""

    def text(row: SummaryRow) -> str:
        value = row.metrics.get(measure.metric)
        if value is None:
            return numerals.mark(row.statuses)
        places = significant_decimals(value.mean) if decimals == -1 else decimals
        return numerals.spread(value, places) + " *" * row.is_partial(value)

    return Column(
        measure.heading,
        text,
        meaning=f"{measure.meaning}{note}",
        key=key or measure.metric,
        kind=lambda row: "" if row.is_as_expected else "alarm",
        title=lambda row: _by_seed(row, measure.metric),
    )


def _of_runs(measure: Measure, *, digits: int | None = None) -> Column[ReportedRun]:
    def text(run: ReportedRun) -> str:
        value = run.metrics.get(measure.metric)
        places = None if digits is None or value is None else significant_decimals(value)
        return numerals.number(value, places)

    return Column(measure.heading, text)


def _ends(interval: str) -> str:
    return interval.partition(" (")[2].rstrip(")") or NOTHING


def _by_seed(row: SummaryRow, metric: str) -> str:
    """Return the value of each seed with six digits; empty for a baseline."""
    values = values_by_seed(row.runs, metric)
    shown = [f"seed {seed}: {value:.6g}" for seed, value in list(values.items())[:MAX_SEEDS]]
    return ", ".join(shown) + "…" * (len(values) > MAX_SEEDS)


def any_partial(rows: Iterable[SummaryRow]) -> bool:
    """Return whether a number of the table needs the footnote."""
    return any(row.is_partial(value) for row in rows for value in row.metrics.values())


def tid_text(row: SummaryRow, layers: str) -> str:
    """Return the TID of the `last` norm layer, or the average (`avg`): mean / deviation."""
    parts = [row.tid[f"mean_{layers}"], row.tid[f"var_{layers}"]]
    if all(part is None for part in parts):
        return NOTHING
    return " / ".join(numerals.percent(part) for part in parts)


def told_mark(row: SummaryRow, measure: Measure) -> str:
    """Return the mark of a norm that is significantly better or worse in the paired test, or ""."""
    if row.gap is None or not row.gap.is_told:
        return ""
    return BETTER if is_better(row.gap.difference, 0, measure) else WORSE


def told_marks(rows: Iterable[SummaryRow], measure: Measure) -> list[str]:
    """Return the marks in the table with their meanings."""
    marks = {told_mark(row, measure) for row in rows}
    return [
        f"{mark} {word}" for mark, word in ((BETTER, "better"), (WORSE, "worse")) if mark in marks
    ]


Speed = Callable[[ReportedRun], float | None]

_TOKENS: Final[tuple[str, str, Speed]] = (
    "tokens/s",
    "Training throughput on this machine, of a translation source and target",
    lambda run: run.tokens_per_second,
)
_EXAMPLES: Final[tuple[str, str, Speed]] = (
    "examples/s",
    "Rows of the batches (images, texts, sentences, transitions) that the training took in a "
    "second on this machine",
    lambda run: run.examples_per_second,
)
_DECODING: Final[tuple[str, str, Speed]] = (
    "decoding tokens/s",
    "Target subwords that the beam search gave in a second on this machine",
    lambda run: run.metrics.get("decoding_tokens_per_second"),
)


def _speeds(comparison: Comparison) -> Sequence[tuple[str, str, Speed]]:
    """Return heading, meaning and quantity of the columns of speeds."""
    if not comparison.has_known_measure:
        return _TOKENS, _EXAMPLES
    if comparison.metric in TRANSLATION_SCORES:
        return _TOKENS, _DECODING
    return (_EXAMPLES,) if comparison.measure.higher_is_better else (_TOKENS,)


def _speed_of_run(speed: Speed, run: ReportedRun) -> str:
    return numerals.count(speed(run))


def _speed_of_norms(heading: str, meaning: str, speed: Speed) -> Column[SummaryRow]:
    return Column(
        heading,
        lambda row: numerals.count(row.mean_of(speed)),
        meaning=f"{meaning}, mean over seeds.",
    )


def _others(comparison: Comparison) -> list[tuple[Measure, str, int | None]]:
    """Return measure, key and decimals of the columns of metrics other than the main one."""
    if not comparison.has_known_measure:
        return [own_column(comparison, name) for name in comparison.other_metrics[:MAX_METRICS]]
    names: Iterable[str] = comparison.measure.others
    if comparison.metric in TRANSLATION_SCORES:
        is_split = any(run.metrics.get(COMPOUND_BLEU) is not None for run in comparison.runs)
        names = [*TRANSLATION_SCORES, "test_loss"]
        names = [name for name in names if is_split or name != COMPOUND_BLEU]
    return [(MEASURES[name], "", None) for name in names if name != comparison.metric]


def own_column(comparison: Comparison, name: str) -> tuple[Measure, str, int | None]:
    """Return the column of a metric of a user's function, or of another goal of a task."""
    own = own_measure(Goal(metric=name, direction="min"))
    return measure_of(name) if comparison.function is None else own, f"metric {name}", -1


def hidden_metrics(comparison: Comparison) -> list[str]:
    """Return the metrics that have no column in the table of norms."""
    return [] if comparison.has_known_measure else comparison.other_metrics[MAX_METRICS:]


def metrics_table(
    comparison: Comparison, rows: Sequence[SummaryRow], names: Sequence[str]
) -> Table:
    """Return a table with one line per metric, for those that do not fit into that of norms."""
    metrics = [_of_norms(*own_column(comparison, name)) for name in names]
    columns: list[Column[Column[SummaryRow]]] = [
        Column("metric", lambda one: one.heading, numeric=False)
    ]
    columns += [Column(row.label, partial(_text_of, row)) for row in rows]
    return Table(columns, metrics)


def _text_of(row: SummaryRow, column: Column[SummaryRow]) -> str:
    return column.text(row)


def _note(run: ReportedRun) -> str:
    place = run.first_nonfinite
    seen = "" if place is None else f"first not finite in {place[0]}, step {place[1]}"
    return "; ".join(filter(None, (run.remark, run.message, seen)))


def scored_weights(comparison: Comparison) -> str:
    """Return a sentence about the scored weights.

    It is empty if no run names them, and for the usual case, perplexities of the best checkpoint.
    """
    found = _by_text((run.scored, run.name) for run in comparison.runs if run.scored)
    if not found or (set(found) == {BEST_SCORED} and not comparison.measure.higher_is_better):
        return ""
    return f"Scored: {'; '.join(_with_names(found))}."


def signatures(comparison: Comparison) -> list[tuple[str, str]]:
    """Return heading and full signature of each score, without repetitions."""
    runs = comparison.runs
    metrics = dict.fromkeys([*MEASURES, *(metric for run in runs for metric in run.signatures)])
    return [
        (printable(heading_of(metric)), text)
        for metric in metrics
        for text in _with_names(
            _by_text((run.signatures[metric], run.name) for run in runs if metric in run.signatures)
        )
    ]


def _by_text(pairs: Iterable[tuple[str, str]]) -> dict[str, dict[str, None]]:
    """Return the distinct names by text."""
    found: dict[str, dict[str, None]] = {}
    for text, name in pairs:
        found.setdefault(text, {})[name] = None
    return found


def _with_names(found: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """Yield each text, followed by the names that it applies to unless it applies to all."""
    for text, names in found.items():
        yield printable(text if len(found) == 1 else f"{text} ({', '.join(names)})")


# Settings.


_DEFAULT: Final = "its default"


def settings_table(settings: Mapping[str, Any], changes: ChangesRecord | None = None) -> Table:
    """Return a table of nested settings, with one row per value and dotted name.

    Args:
        settings: the values.
        changes: differences from the preset, whose rows are marked.
    """
    preset = {} if changes is None else _values(changes, "preset")
    lines = [
        (name, f"{text} (preset: {preset[name]})" if name in preset else text)
        for name, text in _flat(settings)
    ]
    return Table(
        [
            Column[tuple[str, str]]("setting", lambda line: line[0], numeric=False),
            Column[tuple[str, str]](
                "value", lambda line: line[1], numeric=False, kind=lambda _: "wrap"
            ),
        ],
        lines,
        kinds=["changed" * (name in preset) for name, _ in lines],
        has_head=False,
    )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted names and texts, in the form of `--set`."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", setting_text(value)


def changes_sentence(changes: ChangesRecord) -> str:
    """Return a sentence with the number of changed settings.

    >>> changes_sentence({"preset": "big", "settings": {"data.path": {"here": "sotu"}}})
    '1 setting differs from the preset big'
    """
    count = len(changes["settings"])
    verb = "differs" if count == 1 else "differ"
    return f"{counted(count, 'setting')} {verb} from the preset {printable(changes['preset'])}"


def changes_table(changes: ChangesRecord) -> Table:
    """Return the table of changed settings, with their values here and in the preset."""
    here, there = (_values(changes, side) for side in ("here", "preset"))
    # The name of a preset may be one of the other headings.
    return Table(
        [
            Column[str](heading, text, numeric=False)
            for heading, text in (
                ("setting", str),
                ("here", here.__getitem__),
                (printable(changes["preset"]), there.__getitem__),
            )
        ],
        list(changes["settings"]),
    )


def _values(changes: ChangesRecord, side: str) -> dict[str, str]:
    # A TypedDict takes literal keys only.
    found: Mapping[str, Mapping[str, object]] = {**changes["settings"]}
    return {
        name: setting_text(change[side]) if side in change else _DEFAULT
        for name, change in found.items()
    }
