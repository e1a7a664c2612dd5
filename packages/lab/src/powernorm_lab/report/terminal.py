"""Tables of a comparison in a terminal, or 80 characters wide in a pipe or a file."""

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.text import Text

from powernorm.records import DiagnosisRecord
from powernorm_lab.report.comparison_tables import (
    FOOTNOTE,
    any_partial,
    changes_sentence,
    changes_table,
    headline,
    hidden_metrics,
    norm_table,
    scored_weights,
    signatures,
)
from powernorm_lab.report.conclusion import conclusion, seed_table
from powernorm_lab.report.numerals import counted, printable
from powernorm_lab.report.paper_tables import evaluation_table, paper_table, score_tables, tid_table
from powernorm_lab.report.records import Comparison
from powernorm_lab.report.statistics import best_rows, summarize
from powernorm_lab.report.tables import of_width, print_table
from powernorm_lab.report.tuning import budget_table, tuning_sentence
from powernorm_lab.runs import REPORT_FILE, RESULTS_FILE

_OF_NORMS: Final = ("norm", "test", "gap", "status", "valid", "tid_avg", "tokens/s", "examples/s")
_OF_SEEDS: Final = ("norm", "seeds", "gap (95 %)", "p (Holm)", "mean (95 %)", "p", "seeds needed")
_OF_PAPERS: Final = ("norm", "paper", "measured", "measure")
"""Keys of the most important columns, which are shown if the others do not fit."""


def print_comparison(console: Console, comparison: Comparison, *, wide: bool = False) -> None:
    """Print the results of a comparison in tables as wide as the terminal.

    Args:
        console: console to print to; lines in a file or a pipe have 80 characters, unless `COLUMNS`
            is set.
        comparison: the comparison.
        wide: show all columns, with each row in one line; else the most important that fit.
    """
    console = of_width(console, wide=wide)
    rows = summarize(comparison)
    console.print(Text(headline(comparison), style="bold"))
    for sentence in conclusion(comparison, rows):
        console.print(Text(sentence))
    results = norm_table(comparison, rows, best_rows(rows, comparison.measure))
    print_table(console, results, _OF_NORMS, wide=wide)
    if any_partial(rows):
        console.print(Text(FOOTNOTE))
    seeds = seed_table(comparison, rows)
    if seeds is not None:
        console.print(Text("what the seeds say", style="bold"))
        print_table(console, seeds, _OF_SEEDS, wide=wide)
    for note in _notes(comparison):
        console.print(Text(note))
    if comparison.tuning is not None:
        console.print(Text(tuning_sentence(comparison.tuning)))
        budgets = budget_table(comparison.tuning)
        important = [budgets.headings[index] for index in (0, 3, 2, 5)]
        print_table(console, budgets, important, wide=wide)
    if comparison.reduced:
        console.print(Text(printable(comparison.reduced)))
    if comparison.changes is not None:
        console.print(Text(f"{changes_sentence(comparison.changes)}:"))
        print_table(console, changes_table(comparison.changes), wide=wide)
    if comparison.paper:
        console.print(Text("paper and measured", style="bold"))
        print_table(console, paper_table(comparison), _OF_PAPERS, wide=wide)


def print_evaluation(console: Console, record: DiagnosisRecord) -> None:
    """Print the TID next to the published one, and scores by kind of statistics, if any."""
    tid = tid_table(record)
    if tid is not None:
        print_table(console, tid)
    if any("scores" in row for row in record["evaluation"]):
        print_table(console, evaluation_table(record, has_tokens=False))


def print_scores(console: Console, comparisons: Sequence[Comparison]) -> None:
    """Print the scores of norms and placements by kind of statistics (W22, Tables 7 and 8)."""
    for heading, table in score_tables(comparisons):
        console.print(Text(heading, style="bold"))
        print_table(console, table)


def _notes(comparison: Comparison) -> list[str]:
    hidden = len(hidden_metrics(comparison))
    more = f"{counted(hidden, 'more metric')}: in {RESULTS_FILE} and {REPORT_FILE}."
    notes = (more * bool(hidden), scored_weights(comparison))
    return [note for note in (*notes, *map(": ".join, signatures(comparison))) if note]
