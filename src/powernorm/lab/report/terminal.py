"""The table of a comparison in a terminal of any width."""

import os
from collections.abc import Sequence
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from powernorm.lab.report import tables
from powernorm.lab.report.changes import changes_sentence, changes_table
from powernorm.lab.report.columns import MAX_METRICS, Column, columns_of
from powernorm.lab.report.comparison_tables import FOOTNOTE, any_partial, cells, headline
from powernorm.lab.report.conclusion import conclusion
from powernorm.lab.report.numerals import NOTHING, counted, printable
from powernorm.lab.report.paper_tables import paper_table
from powernorm.lab.report.records import Comparison
from powernorm.lab.report.scoring import scored_weights, signatures
from powernorm.lab.report.seed_statistics import seed_table
from powernorm.lab.report.statistics_tables import evaluation_table, score_tables, tid_table
from powernorm.lab.report.summary import SummaryRow, best_rows, summarize
from powernorm.lab.report.tuning import budget_table, tuning_sentence
from powernorm.runs import REPORT_FILE, RESULTS_FILE, DiagnosisRecord

_MAX_CELL: Final = 26
"""A longer cell (only the last column has them) may break into lines."""

_MAX_NAME: Final = 16
"""A longer name of a norm may break, too."""

_LONGEST_KIND: Final = 26
"""Kinds of statistics never break."""

_FRAME: Final = 3
"""Width of the frame and padding that a column adds."""


_UNLIMITED: Final = 10_000
"""Columns of a file or a pipe: nobody reads them side by side with a window's edge."""


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print what a comparison shows, and one table, or several where a terminal has no room for it.

    No column is ever left out. In a file or a pipe no line is broken, unless `COLUMNS` asks for it.
    """
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(file=console.file, width=_UNLIMITED, color_system=None)
    rows = summarize(comparison)
    console.print(Text(headline(comparison), style="bold"))
    for sentence in conclusion(comparison, rows):
        console.print(Text(sentence))
    best = best_rows(rows, comparison.measure)
    for columns in _fitting_parts(console.width, rows, columns_of(comparison)):
        console.print(_table(_rows_with_content(rows, columns), columns, best))
    if any_partial(rows):
        console.print(Text(FOOTNOTE))
    _print_seeds(console, comparison, rows)
    notes = (_left_out(comparison), scored_weights(comparison))
    for note in (*notes, *map(": ".join, signatures(comparison))):
        if note:
            console.print(Text(note))
    _print_tuning(console, comparison)
    if comparison.reduced:
        console.print(Text(printable(comparison.reduced)))
    if comparison.changes is not None:
        console.print(Text(f"{changes_sentence(comparison.changes)}:"))
        console.print(_plain_table(changes_table(comparison.changes)))
    if comparison.paper:
        console.print(Text("paper and measured", style="bold"))
        console.print(_plain_table(paper_table(comparison)))


def _print_seeds(console: Console, comparison: Comparison, rows: Sequence[SummaryRow]) -> None:
    table = seed_table(comparison, rows)
    if table is not None:
        console.print(Text("what the seeds say", style="bold"))
        console.print(_plain_table(table))


def _print_tuning(console: Console, comparison: Comparison) -> None:
    """Print how the settings were chosen, where they were."""
    if comparison.tuning is not None:
        console.print(Text(tuning_sentence(comparison.tuning)))
        console.print(_plain_table(budget_table(comparison.tuning)))


def print_evaluation(console: Console, record: DiagnosisRecord) -> None:
    """Print the TID beside a paper's, and the scores by kind of statistics, as far as there are."""
    tid = tid_table(record)
    if tid is not None:
        console.print(_plain_table(tid))
    if any("scores" in row for row in record["evaluation"]):
        table = evaluation_table(record, has_tokens=False)
        console.print(_plain_table(table, longest_name=_LONGEST_KIND))


def print_scores(console: Console, comparisons: Sequence[Comparison]) -> None:
    """Print the scores of norms and placements by kind of statistics (W22, Tables 7 and 8)."""
    for heading, table in score_tables(comparisons):
        console.print(Text(heading, style="bold"))
        console.print(_plain_table(table, longest_name=_LONGEST_KIND))


def _left_out(comparison: Comparison) -> str:
    number = len(comparison.other_metrics) - MAX_METRICS
    if comparison.has_known_measure or number <= 0:
        return ""
    return f"{counted(number, 'more metric')}: in {RESULTS_FILE} and {REPORT_FILE}."


def _plain_table(texts: tables.Table, longest_name: int = _MAX_NAME) -> Table:
    """A table beside the results; a longer name in its first column may break."""
    table = Table(box=SIMPLE_HEAD)
    longest = max(cell_len(line[0]) for line in texts.lines)
    columns = zip(texts.headings, texts.numeric, strict=True)
    # A name breaks only where it would leave no room for the rest.
    is_whole = longest <= longest_name
    for index, (heading, is_number) in enumerate(columns):
        table.add_column(
            Text(heading),
            justify="right" if is_number else "left",
            overflow="fold",
            width=max(longest, cell_len(heading)) if not index and is_whole else None,
        )
    for line in texts.lines:
        table.add_row(*map(Text, line))
    return table


def _fitting_parts(
    width: int, rows: Sequence[SummaryRow], columns: Sequence[Column]
) -> list[list[Column]]:
    """The columns in as few tables as fit, each of which begins with the norm."""
    label, *others = columns
    parts = [[label]]
    for column in others:
        wider = [*parts[-1], column]
        if len(parts[-1]) > 1 and _width(wider, rows) > width:
            parts.append([label, column])
        else:
            parts[-1] = wider
    return parts


def _width(columns: Sequence[Column], rows: Sequence[SummaryRow]) -> int:
    widest = (
        max([cell_len(column.heading), *(cell_len(column.text(row)) for row in rows)])
        for column in columns
    )
    return 1 + sum(min(width, _MAX_CELL) + _FRAME for width in widest)


def _rows_with_content(
    rows: Sequence[SummaryRow], columns: Sequence[Column]
) -> Sequence[SummaryRow]:
    """Without the baselines where these columns say nothing of them."""
    return [
        row
        for row in rows
        if not row.is_baseline or any(text != NOTHING for text in cells(row, columns)[1:])
    ]


def _table(rows: Sequence[SummaryRow], columns: Sequence[Column], best: set[str]) -> Table:
    table = Table()
    for column in columns:
        # Text, never str: a name from a file must not be taken for rich's markup.
        table.add_column(
            Text(column.heading),
            justify="right" if column.numeric else "left",
            overflow="fold",
        )
    for index, row in enumerate(rows):
        style = "bold" if row.label in best else "dim" if row.is_baseline else ""
        table.add_row(
            *(Text(cell, style=_cell_style(row, column)) for column, cell in _pairs(row, columns)),
            style=style,
            end_section=index + 1 < len(rows)
            and rows[index + 1].is_baseline
            and not row.is_baseline,
        )
    return table


def _pairs(row: SummaryRow, columns: Sequence[Column]) -> list[tuple[Column, str]]:
    return list(zip(columns, cells(row, columns), strict=True))


def _cell_style(row: SummaryRow, column: Column) -> str:
    return "red" if column.counts_finished and not row.is_as_expected else ""
