"""Golden facts of the table: what is averaged, what is marked, what the texts say."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from lab.report.synthetic import made_run
from powernorm.lab.report import Comparison, markdown_table, read_comparison, summarize
from powernorm.lab.report.columns import COLUMNS
from powernorm.lab.report.comparison_tables import cells, run_cells
from powernorm.lab.report.statistics import SummaryRow, best_rows


@pytest.fixture
def comparison(comparison_folder: Path) -> Comparison:
    return read_comparison(comparison_folder)


def text_of(row: SummaryRow, key: str) -> str:
    return dict(zip((column.key for column in COLUMNS), cells(row), strict=True))[key]


def only(comparison: Comparison, **changes: object) -> SummaryRow:
    """The row of a comparison in which every bn run has these changes."""
    runs = [replace(run, **changes) for run in comparison.runs if run.norm == "bn"]
    return summarize(replace(comparison, runs=runs, baselines=[]))[0]


@pytest.mark.parametrize(
    ("status", "mark"),
    [
        ("nonfinite", "NaN"),
        ("diverged", "diverged"),
        ("failed", "failed"),
        ("interrupted", "interrupted"),
        ("unfinished", "unfinished"),
    ],
)
def test_norm_without_a_finished_run_shows_the_mark_as_its_number(
    comparison: Comparison, status: str, mark: str
) -> None:
    row = only(comparison, status=status)
    assert row.test is None
    assert text_of(row, "test") == text_of(row, "valid") == mark
    assert text_of(row, "status") == f"{mark}: seeds 0, 1"
    assert text_of(row, "speed") == "42.2k"


def test_finished_run_with_a_perplexity_that_is_no_number(comparison: Comparison) -> None:
    row = only(comparison, status="finished", metrics={"test_perplexity": math.nan})
    assert row.statuses == {"nonfinite": (0, 1)}
    assert text_of(row, "test") == "NaN"


def test_best_is_a_norm_all_of_whose_runs_finished(comparison: Comparison) -> None:
    assert best_rows(summarize(comparison)) == {"adanorm"}
    cheap = [
        replace(run, metrics={"test_perplexity": 1.0}) if run.norm == "bn" else run
        for run in comparison.runs
    ]
    assert best_rows(summarize(replace(comparison, runs=cheap))) == {"adanorm"}


def test_mixed_placements_are_kept_apart(comparison: Comparison) -> None:
    post = [replace(run, placement="post") for run in comparison.runs if run.norm == "ln"]
    rows = summarize(replace(comparison, runs=[*comparison.runs, *post], baselines=[]))
    assert (rows[0].label, rows[-1].label) == ("ln (pre)", "ln (post)")


def test_run_that_only_began() -> None:
    run = made_run("pn", 3, status="unfinished")
    assert run_cells(run) == ["pn", "3", "unfinished", "–", "–", "–", "–", "–", "–"]


def test_markdown_of_a_hostile_name(comparison: Comparison) -> None:
    runs = [replace(comparison.runs[0], norm="a|b <i>\n*c*")]
    text = markdown_table(summarize(replace(comparison, runs=runs, baselines=[])))
    assert "| a\\|b \\<i\\> \\*c\\* |" in text
