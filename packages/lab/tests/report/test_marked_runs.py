"""Runs that see the future are marked wherever their numbers are shown, and never win."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from lab.tests.report.study_folders import Row, write_study

from powernorm_lab.report import read_comparison, summarize
from powernorm_lab.report.comparison_tables import run_table, table_of
from powernorm_lab.report.results_document import claims
from powernorm_lab.report.summary import best_rows
from powernorm_lab.runs import PaperRecord

MARK = "sees the future"
STUDY = {"name": "future", "title": "With and without the causal mask"}
ROWS = (
    Row("ln", "ln", [3.0, 3.2]),
    Row("bn", "bn", [3.1, 3.3]),
    Row("ln-future", "ln", [2.0, 2.2], remark=MARK),
    Row("bn-future", "bn", [1.9, "diverged"], remark=MARK),
    Row("pn-future", "pn", ["nonfinite", "failed"], remark=MARK),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_study(tmp_path / "study", STUDY, ROWS)


def test_rows_bear_the_mark(folder: Path) -> None:
    comparison = read_comparison(folder)
    rows = summarize(comparison)
    labels = [row.label for row in rows if not row.is_baseline]
    assert labels == ["ln", "bn", *(f"{row.label} ({MARK})" for row in ROWS[2:])]
    # Its perplexity is by far the lowest, but not that of a language model.
    assert best_rows(rows) == {"ln"}
    assert f"bn-future ({MARK})" in table_of(comparison, rows).markdown()
    notes = [line[-1] for line in run_table(comparison).lines]
    assert [note.startswith(MARK) for note in notes] == [
        bool(run.remark) for run in comparison.runs
    ]


def test_gap_is_to_layer_norm_of_the_same_form(folder: Path) -> None:
    rows = {row.label.partition(" ")[0]: row for row in summarize(read_comparison(folder))}
    assert rows["ln"].gap is None
    assert rows["ln-future"].gap is None
    causal, hidden = rows["bn"].gap, rows["bn-future"].gap
    assert causal is not None
    assert causal.difference == pytest.approx(
        (math.exp(3.1) + math.exp(3.3) - math.exp(3.0) - math.exp(3.2)) / 2
    )
    assert hidden is not None
    assert hidden.difference == pytest.approx(math.exp(1.9) - math.exp(2.0))


def test_a_papers_difference_is_held_against_layer_norm_of_the_same_form(
    tmp_path: Path,
) -> None:
    rows = (
        Row("ln", "ln", [3.0, 3.2, 3.1]),
        Row("bn", "bn", [3.1, 3.3, 3.2]),
        Row("ln-future", "ln", [2.0, 2.2, 2.1], remark=MARK),
        Row("bn-future", "bn", [1.8, 2.0, 1.9], remark=MARK),
    )
    folder = write_study(tmp_path / "study", STUDY, rows)
    paper = [
        PaperRecord(
            norm=f"{norm}{mark}",
            placement="pre",
            dataset="Penn Treebank",
            metric="test_perplexity",
            value=value,
            source="A. Paper 2020, Table 2",
            against=[f"ln{mark}"],
        )
        for mark in ("", "-future")
        for norm, value in (("ln", 50.0), ("bn", 45.0))
    ]
    comparison = replace(read_comparison(folder), paper=paper)
    found = {claim.norm: claim for claim in claims(comparison)}
    assert found["bn"].printed == found["bn-future"].printed == -5.0
    assert found["bn"].outcome == "opposite"
    assert found["bn-future"].outcome == "shown"
    gap = found["bn-future"].measured
    assert gap is not None
    assert gap.difference == pytest.approx(
        sum(math.exp(b) - math.exp(a) for a, b in ((2.0, 1.8), (2.2, 2.0), (2.1, 1.9))) / 3
    )
    assert "ln-future" not in found
