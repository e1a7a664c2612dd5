"""The table of a comparison as text: one list of columns for terminal, page and Markdown."""

from collections.abc import Iterable, Sequence
from typing import Final

from powernorm.lab.report import numerals, text_tables
from powernorm.lab.report.columns import COLUMNS, Column
from powernorm.lab.report.records import Comparison, Run
from powernorm.lab.report.run_columns import RUN_COLUMNS, RunColumn
from powernorm.lab.report.summary import SummaryRow


def cells(row: SummaryRow, columns: Sequence[Column] = COLUMNS) -> list[str]:
    """The row's texts, one a column."""
    return [column.text(row) for column in columns]


FOOTNOTE: Final = "* Not every run gave this number: the average is over those that did."


def any_partial(rows: Iterable[SummaryRow]) -> bool:
    """Whether a number of the table needs the footnote."""
    return any(
        row.is_partial(value)
        for row in rows
        for value in (row.valid, row.test, *row.metrics.values())
        if value is not None
    )


def run_cells(run: Run, columns: Sequence[RunColumn] = RUN_COLUMNS) -> list[str]:
    """One run's texts, one a column; nothing is averaged and nothing left out."""
    return [column.text(run) for column in columns]


def markdown_table(rows: Sequence[SummaryRow], columns: Sequence[Column] = COLUMNS) -> str:
    """The table in GitHub's Markdown."""
    return text_tables.markdown(*_plain(rows, columns))


def latex_table(rows: Sequence[SummaryRow], columns: Sequence[Column] = COLUMNS) -> str:
    """The table in LaTeX, for booktabs."""
    return text_tables.latex(*_plain(rows, columns))


def _plain(
    rows: Sequence[SummaryRow], columns: Sequence[Column]
) -> tuple[list[str], list[bool], list[list[str]]]:
    """Headings, which columns are numbers, and the lines."""
    return (
        [column.heading for column in columns],
        [column.numeric for column in columns],
        [cells(row, columns) for row in rows],
    )


def headline(comparison: Comparison) -> str:
    """One line that names the comparison."""
    study = "" if comparison.study is None else comparison.study["name"]
    parts = (comparison.task, study, comparison.preset, comparison.where)
    return " · ".join(numerals.printable(part) for part in parts if part)
