"""Tables of a comparison: norms, runs and settings."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from markupsafe import Markup

from powernorm_lab.report import numerals
from powernorm_lab.report.columns import (
    BETTER,
    TID_MEANING,
    WORSE,
    norm_columns,
    run_columns,
    told_mark,
)
from powernorm_lab.report.document import part
from powernorm_lab.report.measures import MEASURES, better_way, heading_of
from powernorm_lab.report.numerals import counted, printable, setting_text
from powernorm_lab.report.records import Comparison
from powernorm_lab.report.summary import REFERENCE, SummaryRow, best_rows, values_by_seed
from powernorm_lab.report.tables import Table, copies
from powernorm_lab.runs import BEST_SCORED, ChangesRecord

FOOTNOTE: Final = "* Not every run gave this number: the average is over those that did."
MAX_SEEDS: Final = 20
"""Largest number of seeds in a cell's tooltip."""


def any_partial(rows: Iterable[SummaryRow]) -> bool:
    """Return whether a number of the table needs the footnote."""
    return any(row.is_partial(value) for row in rows for value in row.metrics.values())


def headline(comparison: Comparison) -> str:
    """Return a line that names the comparison."""
    study = "" if comparison.study is None else comparison.study["name"]
    parts = (comparison.task, study, comparison.preset, comparison.where)
    return " · ".join(numerals.printable(part) for part in parts if part)


def table_of(comparison: Comparison, rows: Sequence[SummaryRow], best: Iterable[str] = ()) -> Table:
    """Return the table of norms, with the best ones shaded and unfinished runs in alarm color.

    Args:
        comparison: the comparison.
        rows: rows of `summarize`.
        best: labels of `best_rows`.
    """
    columns = norm_columns(comparison, rows)
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
        [[column.of_norm(row) for column in columns if column.of_norm] for row in rows],
        meanings=[column.meaning for column in columns],
        keys=[column.key for column in columns],
        row_kinds=[
            " ".join(["baseline"] * row.is_baseline + ["best"] * (row.label in set(best)))
            for row in rows
        ],
        cell_kinds=cell_kinds,
        titles=titles,
    )


def _by_seed(row: SummaryRow, metric: str) -> str:
    """Return the value of each seed with six digits; empty for a baseline."""
    values = values_by_seed(row.runs, metric)
    shown = [f"seed {seed}: {value:.6g}" for seed, value in list(values.items())[:MAX_SEEDS]]
    return ", ".join(shown) + "…" * (len(values) > MAX_SEEDS)


def summary_table(comparison: Comparison, rows: Sequence[SummaryRow]) -> Markup:
    """Return the table of a comparison's norms for its page."""
    best = best_rows(rows, comparison.measure)
    table = table_of(comparison, rows, best)
    return table.html("Results", " ".join(_caption(comparison, table, rows, is_shaded=bool(best))))


def _caption(
    comparison: Comparison, table: Table, rows: Sequence[SummaryRow], *, is_shaded: bool
) -> Iterator[str]:
    """Yield sentences that explain the numbers and marks of the table."""
    measure = comparison.measure
    shaded = "; the best mean is shaded" if is_shaded else ""
    yield f"The {measure.heading}, {better_way(measure)} is better{shaded}."
    marks = {told_mark(row, measure) for row in rows} - {""}
    if marks:
        words = {BETTER: "better", WORSE: "worse"}
        named = " and ".join(f"{mark} {words[mark]}" for mark in (BETTER, WORSE) if mark in marks)
        yield f"{named} than {REFERENCE} by the paired test."
    if any(key.startswith("tid") for key in table.keys):
        yield f"{TID_MEANING}: mean / variance."
    if any_partial(rows):
        yield FOOTNOTE


def run_table(comparison: Comparison) -> Table:
    """Return the table of all runs with their statuses and messages, without averages."""
    columns = run_columns(comparison)
    places = {column.key: place for place, column in enumerate(columns)}
    return Table(
        [column.heading for column in columns],
        [column.numeric for column in columns],
        [[column.of_run(run) for column in columns if column.of_run] for run in comparison.runs],
        cell_kinds={
            (index, places["run_status"]): "alarm"
            for index, run in enumerate(comparison.runs)
            if not run.is_as_expected
        },
        values={
            (index, places["time"]): run.seconds
            for index, run in enumerate(comparison.runs)
            if run.seconds
        },
        wide="note",
    )


def glossary(table: Table) -> Markup:
    """Return the meanings of the columns of the table of norms."""
    return part("definitions", list(zip(table.headings, table.meanings, strict=True)))


def settings_table(
    settings: Mapping[str, Any], caption: str, preset: Mapping[str, str] = MappingProxyType({})
) -> Markup:
    """Return a table of nested settings, with one row per value and dotted name.

    Args:
        settings: the values.
        caption: title of the table.
        preset: values of the preset that differ; their rows are marked.
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
    """Yield dotted names and texts, in the form of `--set`."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", setting_text(value)


def scored_weights(comparison: Comparison) -> str:
    """Return a sentence about the scored weights.

    It is empty if no run names them, and for the usual case, perplexities of the best checkpoint.
    """
    found = _by_text((run.scored, run.name) for run in comparison.runs if run.scored)
    if not found or (set(found) == {BEST_SCORED} and not comparison.measure.higher_is_better):
        return ""
    return f"Scored: {'; '.join(_with_names(text, names, found) for text, names in found.items())}."


def signatures(comparison: Comparison) -> list[tuple[str, str]]:
    """Return heading and full signature of each score, without repetitions."""
    metrics = dict.fromkeys(
        [*MEASURES, *(metric for run in comparison.runs for metric in run.signatures)]
    )
    lines = []
    for metric in metrics:
        found = _by_text(
            (run.signatures[metric], run.name)
            for run in comparison.runs
            if metric in run.signatures
        )
        lines += [
            (printable(heading_of(metric)), _with_names(text, names, found))
            for text, names in found.items()
        ]
    return lines


def _by_text(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the distinct names by text."""
    found: dict[str, list[str]] = {}
    for text, name in pairs:
        names = found.setdefault(text, [])
        if name not in names:
            names.append(name)
    return found


def _with_names(text: str, names: list[str], found: dict[str, list[str]]) -> str:
    """Return the text, followed by the names that it applies to unless it applies to all."""
    return printable(text if len(found) == 1 else f"{text} ({', '.join(names)})")


def scoring_notes(comparison: Comparison) -> list[Markup]:
    """Return scored weights and signatures for the page; empty without any."""
    weights, lines = scored_weights(comparison), signatures(comparison)
    return [part("scoring", weights, lines)] if weights or lines else []


# Settings that differ from the reference preset.


_DEFAULT: Final = "its default"


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
    preset = printable(changes["preset"])
    lines = [[printable(name), here[name], there[name]] for name in changes["settings"]]
    return Table(["setting", "here", preset], [False] * 3, lines)


def preset_values(changes: ChangesRecord | None) -> dict[str, str]:
    """Return the preset's values of changed settings."""
    return {} if changes is None else _values(changes, "preset")


def _values(changes: ChangesRecord, side: str) -> dict[str, str]:
    # A TypedDict takes literal keys only.
    found: Mapping[str, Mapping[str, object]] = {**changes["settings"]}
    return {
        name: setting_text(change[side]) if side in change else _DEFAULT
        for name, change in found.items()
    }


def difference_note(comparison: Comparison) -> list[Markup]:
    """Return the differences from the reference preset, even without a published result.

    The papers' presets may have no result for this placement.
    """
    parts = []
    if comparison.reduced:
        parts.append(part("paragraph", comparison.reduced, kind="reduced"))
    if comparison.changes is not None:
        table = changes_table(comparison.changes)
        title = f"Not as in the preset {comparison.changes['preset']}"
        parts += [table.html(title, f"{title}."), copies(table)]
    return parts
