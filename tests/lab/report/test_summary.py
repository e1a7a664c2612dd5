"""Golden facts of the table: what is averaged, what is marked, what the texts say."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from powernorm.lab.report import Comparison, Run, markdown_table, read_comparison, summarize
from powernorm.lab.report.columns import COLUMNS
from powernorm.lab.report.comparison_tables import cells, run_cells
from powernorm.lab.report.summary import Gap, SummaryRow, best_rows


@pytest.fixture
def comparison(comparison_folder: Path) -> Comparison:
    return read_comparison(comparison_folder)


def row_of(comparison: Comparison, label: str) -> SummaryRow:
    return next(row for row in summarize(comparison) if row.label == label)


def text_of(row: SummaryRow, key: str) -> str:
    return dict(zip((column.key for column in COLUMNS), cells(row), strict=True))[key]


def test_rows_in_the_order_of_the_runs_and_baselines_last(comparison: Comparison) -> None:
    labels = [row.label for row in summarize(comparison)]
    assert labels == ["ln", "bn", "rbn", "pn", "adanorm", "unigram", "bigram"]


def test_mean_and_sample_deviation_over_seeds(comparison: Comparison) -> None:
    test = row_of(comparison, "rbn").test
    assert test is not None
    assert (test.mean, test.count) == (113.0, 2)
    assert test.std == pytest.approx(math.sqrt(2))
    assert text_of(row_of(comparison, "rbn"), "test") == "113.0 ± 1.4"


def test_gap_to_ln(comparison: Comparison) -> None:
    assert row_of(comparison, "ln").gap is None
    assert row_of(comparison, "rbn").gap == Gap(12.0, pytest.approx(12 / 101))
    assert text_of(row_of(comparison, "rbn"), "gap") == "+12.00 (+11.9 %)"
    assert text_of(row_of(comparison, "adanorm"), "gap") == "-2.00 (-2.0 %)"


def test_gap_is_over_the_seeds_that_finished_with_both(comparison: Comparison) -> None:
    # Seed 0 only: 130 against 100, not against the mean of ln over both seeds.
    assert row_of(comparison, "bn").gap == Gap(30.0, 0.3)


def test_casualties_are_marked_and_not_averaged(comparison: Comparison) -> None:
    row = row_of(comparison, "bn")
    assert row.test is not None
    # The diverged seed has a perplexity of 5000.
    assert (row.test.mean, row.test.std, row.test.count) == (130.0, None, 1)
    assert text_of(row, "test") == "130.0 *"
    assert text_of(row, "status") == "1 of 2 finished; diverged: seed 1"
    assert text_of(row_of(comparison, "pn"), "status") == "1 of 2 finished; NaN: seed 1"
    assert text_of(row_of(comparison, "ln"), "status") == "2 finished"


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


def test_tid_in_percent(comparison: Comparison) -> None:
    assert text_of(row_of(comparison, "rbn"), "tid_last") == "2.00 / 5.00"
    assert text_of(row_of(comparison, "rbn"), "tid_avg") == "1.00 / 2.50"
    assert text_of(row_of(comparison, "pn"), "tid_last") == "– / 5.00"
    assert text_of(row_of(comparison, "ln"), "tid_last") == "–"


def test_baselines_have_perplexities_only(comparison: Comparison) -> None:
    texts = cells(row_of(comparison, "bigram"))
    assert texts == ["bigram", "–", "240.0", "250.0", "–", "–", "–", "–", "–"]


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


def test_every_run_is_listed_with_its_own_numbers(comparison: Comparison) -> None:
    run = next(run for run in comparison.runs if run.status == "diverged")
    assert run_cells(run)[:5] == ["bn", "1", "diverged", "5000", "5000"]
    note = (
        "stopped: diverged <b>here</b>; first not finite in model.blocks.2.attention_norm, step 680"
    )
    assert run_cells(run)[7:] == ["3", note]


def test_run_that_only_began() -> None:
    run = Run(norm="pn", placement="pre", seed=3, status="unfinished", folder="pn-pre-seed3")
    assert run_cells(run) == ["pn", "3", "unfinished", "–", "–", "–", "–", "–", "–"]


def test_markdown(comparison: Comparison) -> None:
    lines = markdown_table(summarize(comparison)).splitlines()
    assert len(lines) == 2 + 7
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert lines[3].startswith("| bn | 1.23M | 130.0 \\* | 130.0 \\* | +30.00 (+30.0 %) |")


def test_markdown_of_a_hostile_name(comparison: Comparison) -> None:
    runs = [replace(comparison.runs[0], norm="a|b <i>\n*c*")]
    text = markdown_table(summarize(replace(comparison, runs=runs, baselines=[])))
    assert "| a\\|b \\<i\\> \\*c\\* |" in text
