"""Paired tests, claims of papers and statistics over seeds against those of scipy."""

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from lab.tests.report.synthetic import made_comparison, made_run
from lab.tests.report.test_tables import compared as by_seed
from scipy.stats import nct, ttest_rel
from scipy.stats import t as student

from powernorm_lab.report import seed_records
from powernorm_lab.report.records import Comparison, ReportedRun
from powernorm_lab.report.results_document import claims
from powernorm_lab.report.statistics import PairedGap, holm, paired_gap
from powernorm_lab.runs import PaperRecord

METRIC = "test_accuracy"


def runs(norm: str, values: list[float], **changes: str) -> list[ReportedRun]:
    return [
        made_run(norm, seed, status=changes.get(f"seed{seed}", "finished"), metrics={METRIC: value})
        for seed, value in enumerate(values)
    ]


def test_the_same_as_a_paired_t_test() -> None:
    dice = random.Random(3)
    ours = [dice.gauss(75, 1) for _ in range(6)]
    theirs = [dice.gauss(74, 1) for _ in range(6)]
    found = paired_gap(runs("bn", ours), runs("ln", theirs), METRIC)
    expected = ttest_rel(ours, theirs)
    interval = expected.confidence_interval(0.95)
    assert found is not None
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.difference == pytest.approx(sum(ours) / 6 - sum(theirs) / 6)
    assert found.count == 6


def test_only_seeds_that_finished_with_both() -> None:
    ours = runs("bn", [1.0, 2.0, 300.0, 4.0], seed2="diverged")
    theirs = runs("ln", [0.0, 0.0, 0.0], seed0="failed")
    found = paired_gap(ours, theirs, METRIC)
    assert found is not None
    assert (found.difference, found.count) == (2.0, 1)
    assert math.isnan(found.p)
    assert not found.is_clear


def test_equal_differences_need_no_test() -> None:
    same = paired_gap(runs("bn", [1.0, 1.0, 1.0]), runs("ln", [1.0, 1.0, 1.0]), METRIC)
    other = paired_gap(runs("bn", [2.0, 2.0, 2.0]), runs("ln", [1.0, 1.0, 1.0]), METRIC)
    assert same == PairedGap(0.0, 0.0, 0.0, 1.0, 3)
    assert other == PairedGap(1.0, 1.0, 1.0, 0.0, 3)
    assert other.is_clear
    assert not same.is_clear


def test_nothing_in_common() -> None:
    assert paired_gap([], runs("ln", [1.0]), METRIC) is None


def record(norm: str, value: float | None, source: str = "A 2020, Table 1") -> PaperRecord:
    return PaperRecord(
        norm=norm, placement="pre", dataset="RT", metric=METRIC, value=value, source=source
    )


def compared(runs: list[ReportedRun], paper: list[PaperRecord]) -> Comparison:
    return made_comparison(runs, METRIC, paper=paper)


@pytest.mark.parametrize(
    ("values", "printed", "outcome"),
    [
        ([76.0, 76.1, 76.2], 78.0, "shown"),
        ([70.0, 70.1, 70.2], 78.0, "opposite"),
        ([70.0, 70.1, 70.2], 70.0, "shown"),
        ([76.0, 70.0, 75.0], 78.0, "undecided"),
        ([76.0, 76.1, 76.2], 74.0, "no sign"),
        ([76.0, 76.1], 74.0, "no sign"),
        ([76.0, 76.1], 78.0, "few seeds"),
        ([], 78.0, "unmeasured"),
    ],
)
def test_whether_a_claim_showed(values: list[float], printed: float, outcome: str) -> None:
    comparison = compared(
        runs=[*runs("ln", [74.0, 74.2, 74.1]), *runs("bn", values)],
        paper=[record("ln", 74.0), record("bn", printed, "A 2020, Table 3"), record("pn", None)],
    )
    (found,) = claims(comparison)
    assert (found.norm, found.printed) == ("bn", printed - 74.0)
    assert found.outcome == outcome


def test_a_claim_is_held_against_the_norms_that_the_paper_names() -> None:
    paper = [record("ln", 77.0), record("ln-simple", 76.0), record("none", 75.0)]
    detached = record("detach-both", 74.0)
    detached["against"] = ["none", "ln-simple", "rms"]
    comparison = compared(
        runs=[
            *runs("ln-simple", [75.0, 75.1, 75.2]),
            *runs("none", [70.0, 70.1, 70.2]),
            *runs("detach-both", [72.0, 72.1, 72.2]),
        ],
        paper=[*paper, detached],
    )
    found = [claim for claim in claims(comparison) if claim.norm == "detach-both"]
    assert [(one.against, one.printed, one.outcome) for one in found] == [
        ("none", -1.0, "opposite"),
        ("ln-simple", -2.0, "shown"),
    ]


def drawn(mean: float, count: int, number: int) -> list[float]:
    dice = random.Random(number)
    return [dice.gauss(mean, 1) for _ in range(count)]


def test_one_and_two_seeds_say_means_and_no_more() -> None:
    for count in (1, 2):
        comparison = by_seed({"ln": drawn(70, count, 0), "bn": drawn(72, count, 1)})
        base, other = seed_records(comparison)
        assert "p" not in base
        assert other["seeds"] == count
        assert other["mean_interval"] is other["interquartile_mean_interval"] is None
        assert other["difference_interval"] is other["p"] is other["p_holm"] is None
        assert other["seeds_needed"] is None
        json.dumps(seed_records(comparison), allow_nan=False)


def test_three_seeds_have_a_test_and_five_have_bootstrap_intervals() -> None:
    for count, has_interval in ((3, False), (5, True)):
        ours, theirs = drawn(70, count, 0), drawn(72, count, 1)
        (_, row) = seed_records(by_seed({"ln": ours, "bn": theirs}))
        assert row["p"] == row["p_holm"] == pytest.approx(ttest_rel(theirs, ours).pvalue)
        assert (row["mean_interval"] is not None) == has_interval


def test_the_middle_half_is_not_moved_by_a_seed_that_broke() -> None:
    comparison = by_seed({"ln": drawn(70, 8, 0), "bn": [*drawn(70, 7, 1), 0.0]})
    base, broken = seed_records(comparison)
    middles = [row["interquartile_mean"] for row in (base, broken)]
    assert abs(middles[1] - middles[0]) < 1 < base["mean"] - broken["mean"]
    for row in (base, broken):
        assert row["mean_interval"] is not None
        assert row["interquartile_mean_interval"] is not None
        assert row["mean_interval"][0] < row["mean"] < row["mean_interval"][1]
        low, high = row["interquartile_mean_interval"]
        assert low <= row["interquartile_mean"] <= high
    assert seed_records(comparison) == [base, broken]


def test_holm_is_for_all_norms_of_the_table() -> None:
    values = {"ln": drawn(70, 5, 0), "bn": drawn(71, 5, 1), "pn": drawn(73, 5, 2)}
    rows = seed_records(by_seed(values))[1:]
    assert [row["p_holm"] for row in rows] == holm([row["p"] or 0 for row in rows])
    assert holm([0.02, 0.9, 0.6]) == pytest.approx([0.06, 1.0, 1.0])


def test_seeds_needed_have_the_power_that_is_promised() -> None:
    gap = PairedGap(0.5, 0.0, 1.0, 0.06, 5, deviation=1.0)
    count = gap.seeds_needed
    assert count == 34  # from tables of the power of the paired t-test, for d = 0.5
    powers = [
        nct.sf(student.isf(0.025, n - 1), n - 1, 0.5 * np.sqrt(n)) for n in (count - 1, count)
    ]
    assert powers[0] < 0.8 <= powers[1]
    assert (replace(gap, num_tests=7).seeds_needed or 0) > count
    assert PairedGap(100.0, 99.0, 101.0, 0.0, 3, deviation=0.1, num_tests=3).seeds_needed == 3
    assert PairedGap(0.001, -1.0, 1.0, 0.9, 5, deviation=1.0).seeds_needed is None
    assert PairedGap(0.0, 0.0, 0.0, 1.0, 3, deviation=0.0).seeds_needed is None
