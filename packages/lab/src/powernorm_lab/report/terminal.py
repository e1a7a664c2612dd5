"""Tables of a comparison in a terminal, or 80 characters wide in a pipe or a file."""

import os
from collections.abc import Iterable, Sequence
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from powernorm.records import DiagnosisRecord
from powernorm_lab.report.columns import MAX_METRICS
from powernorm_lab.report.comparison_tables import (
    FOOTNOTE,
    any_partial,
    changes_sentence,
    changes_table,
    headline,
    scored_weights,
    signatures,
    table_of,
)
from powernorm_lab.report.conclusion import conclusion
from powernorm_lab.report.numerals import counted, printable
from powernorm_lab.report.paper_tables import evaluation_table, paper_table, score_tables, tid_table
from powernorm_lab.report.records import Comparison
from powernorm_lab.report.seed_statistics import seed_table
from powernorm_lab.report.summary import best_rows, summarize
from powernorm_lab.report.tables import Table
from powernorm_lab.report.tuning import budget_table, tuning_sentence
from powernorm_lab.runs import REPORT_FILE, RESULTS_FILE

_LONGEST: Final = 30
"""Longest cell in characters that is never broken into lines."""
_GAP: Final = 2
"""Characters between columns."""
_WIDTH: Final = 80
"""Characters of a line in a file or a pipe, unless `COLUMNS` is set."""
_WIDEST: Final = 10_000
_IMPORTANT: Final = ("norm", "test", "gap", "status", "valid", "tid_avg", "speed", "examples")
"""Keys of the most important columns, which are shown if the others do not fit."""


def print_comparison(console: Console, comparison: Comparison, *, wide: bool = False) -> None:
    """Print the results of a comparison in tables as wide as the terminal.

    Args:
        console: console to print to; lines in a file or a pipe have 80 characters, unless `COLUMNS`
            is set.
        comparison: the comparison.
        wide: show all columns, with each row in one line; else the most important that fit.
    """
    console = _of_width(console, wide=wide)
    rows = summarize(comparison)
    console.print(Text(headline(comparison), style="bold"))
    for sentence in conclusion(comparison, rows):
        console.print(Text(sentence))
    results = table_of(comparison, rows, best_rows(rows, comparison.measure))
    print_table(
        console,
        results,
        [results.keys.index(key) for key in _IMPORTANT if key in results.keys],
        wide=wide,
    )
    if any_partial(rows):
        console.print(Text(FOOTNOTE))
    seeds = seed_table(comparison, rows)
    if seeds is not None:
        console.print(Text("what the seeds say", style="bold"))
        print_table(console, seeds, [0, 1, 4, 6, 2, 5, 7, 3], wide=wide)
    for note in _notes(comparison):
        console.print(Text(note))
    if comparison.tuning is not None:
        console.print(Text(tuning_sentence(comparison.tuning)))
        print_table(console, budget_table(comparison.tuning), [0, 3, 2, 5], wide=wide)
    if comparison.reduced:
        console.print(Text(printable(comparison.reduced)))
    if comparison.changes is not None:
        console.print(Text(f"{changes_sentence(comparison.changes)}:"))
        print_table(console, changes_table(comparison.changes), wide=wide)
    if comparison.paper:
        console.print(Text("paper and measured", style="bold"))
        print_table(console, paper_table(comparison), [0, 2, 3, 4], wide=wide)


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
    number = len(comparison.other_metrics) - MAX_METRICS
    has_more = number > 0 and not comparison.has_known_measure
    more = f"{counted(number, 'more metric')}: in {RESULTS_FILE} and {REPORT_FILE}."
    notes = (more if has_more else "", scored_weights(comparison))
    return [note for note in (*notes, *map(": ".join, signatures(comparison))) if note]


def _of_width(console: Console, *, wide: bool) -> Console:
    if not wide and (console.is_terminal or "COLUMNS" in os.environ):
        return console
    return Console(
        file=console.file,
        width=_WIDEST if wide else _WIDTH,
        force_terminal=console.is_terminal,
        color_system="auto" if console.is_terminal else None,
    )


def print_table(
    console: Console, table: Table, order: Iterable[int] = (), *, wide: bool = False
) -> None:
    """Print the columns that fit, and name the others.

    Args:
        console: as for `print_comparison`.
        table: table to print.
        order: indices of columns, the most important first; the others follow in their order.
        wide: as for `print_comparison`.
    """
    console = _of_width(console, wide=wide)
    needed, wanted = _widths(table)
    left = console.width + _GAP
    shown: list[int] = []
    for index in dict.fromkeys([*order, *range(len(needed))]):
        if not shown or needed[index] + _GAP <= left:
            shown.append(index)
            left -= needed[index] + _GAP
    shown.sort()
    rich = RichTable(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for index in shown:
        # Text instead of str, because rich would parse markup in names from files.
        more = max(0, min(left, wanted[index] - needed[index]))
        rich.add_column(
            Text(table.headings[index]),
            justify="right" if table.numeric[index] else "left",
            overflow="fold",
            width=needed[index] + more,
        )
        left -= more
    for place, line in enumerate(table.lines):
        kind = table.row_kinds[place] if table.row_kinds else ""
        alarms = ["alarm" in table.cell_kinds.get((place, index), "") for index in shown]
        rich.add_row(
            *(
                Text(printable(line[index]), "red" * is_alarm)
                for index, is_alarm in zip(shown, alarms, strict=True)
            ),
            style="bold" if "best" in kind else "dim" if "baseline" in kind else "",
        )
    console.print(rich, "")
    left_out = [heading for index, heading in enumerate(table.headings) if index not in shown]
    if left_out:
        text = f"not shown, see {REPORT_FILE}: {'; '.join(left_out)}"
        console.print(Text(text, style="dim"))


def _widths(table: Table) -> tuple[list[int], list[int]]:
    """Return the smallest width of each column, with broken lines, and the width without them."""
    columns = list(zip(table.headings, *table.lines, strict=True))
    wanted = [max(map(cell_len, column)) for column in columns]
    needed = [
        max([min(_LONGEST, max(map(cell_len, cells), default=0)), *map(cell_len, heading.split())])
        for heading, *cells in columns
    ]
    return needed, wanted
