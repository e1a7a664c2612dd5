"""Golden values of the table: averages, marks and texts."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from lab.tests.report.synthetic import made_comparison, made_run

from powernorm_lab.report import Comparison, read_comparison, summarize
from powernorm_lab.report.columns import norm_columns
from powernorm_lab.report.comparison_tables import run_table, table_of
from powernorm_lab.report.summary import SummaryRow, best_rows


@pytest.fixture
def comparison(comparison_folder: Path) -> Comparison:
    return read_comparison(comparison_folder)


def text_of(comparison: Comparison, row: SummaryRow, key: str) -> str:
    (column,) = [one for one in norm_columns(comparison, [row]) if one.key == key]
    assert column.of_norm is not None
    return column.of_norm(row)


def only(comparison: Comparison, **changes: object) -> SummaryRow:
    """Return the row of a comparison in which every bn run has these changes."""
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
    assert text_of(comparison, row, "test") == text_of(comparison, row, "valid") == mark
    assert text_of(comparison, row, "status") == f"{mark}: seeds 0, 1"
    assert text_of(comparison, row, "speed") == "42.2k"


def test_finished_run_with_a_perplexity_that_is_no_number(comparison: Comparison) -> None:
    row = only(comparison, status="finished", metrics={"test_perplexity": math.nan})
    assert row.statuses == {"nonfinite": (0, 1)}
    assert text_of(comparison, row, "test") == "NaN"


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
    comparison = made_comparison([made_run("pn", 3, status="unfinished")], "test_perplexity")
    table = run_table(comparison)
    assert table.headings == ["norm", "seed", "status"]
    assert table.lines == [["pn", "3", "unfinished"]]


def test_markdown_of_a_hostile_name(comparison: Comparison) -> None:
    runs = [replace(comparison.runs[0], norm="a|b <i>\n*c*")]
    hostile = replace(comparison, runs=runs, baselines=[])
    text = table_of(hostile, summarize(hostile)).markdown()
    assert "| a\\|b \\<i\\> \\*c\\* |" in text


def test_a_run_that_finished_behind_a_baseline_is_said_to(comparison: Comparison) -> None:
    worse = [
        replace(run, metrics={"test_perplexity": 2000.0 + run.seed}) if run.norm == "rbn" else run
        for run in comparison.runs
    ]
    rows = {row.label: row for row in summarize(replace(comparison, runs=worse))}
    said = text_of(comparison, rows["rbn"], "status")
    assert said == "2 finished; worse than a baseline: seeds 0, 1"
    assert text_of(comparison, rows["ln"], "status") == "2 finished"


def test_marks_are_of_the_test_that_is_corrected_for_all_norms() -> None:
    values = {"ln": [70.0, 70.1, 70.2], "bn": [75.0, 75.2, 75.1], "pn": [70.1, 70.0, 70.2]}
    runs = [
        made_run(norm, seed, metrics={"test_perplexity": value})
        for norm, found in values.items()
        for seed, value in enumerate(found)
    ]
    comparison = made_comparison(runs, "test_perplexity")
    table = table_of(comparison, summarize(comparison))
    place = table.keys.index("gap")
    assert [line[place] for line in table.lines] == ["–", "+5.00 (+7.1 %) ▼", "+0.00 (+0.0 %)"]
    assert table.lines[1][place + 1] == "+4.75 to +5.25"
