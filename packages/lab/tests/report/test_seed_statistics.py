"""Statistics over seeds: none for too few seeds, otherwise those of scipy."""

import json
import random

import numpy as np
import pytest
from lab.tests.report.test_conclusion import compared
from scipy.stats import nct, ttest_rel
from scipy.stats import t as student

from powernorm_lab.report import seed_records, summarize
from powernorm_lab.report.seed_statistics import seed_table, seeds_needed
from powernorm_lab.report.summary import PairedGap, holm


def drawn(mean: float, count: int, number: int) -> list[float]:
    dice = random.Random(number)
    return [dice.gauss(mean, 1) for _ in range(count)]


def test_one_and_two_seeds_say_means_and_no_more() -> None:
    for count in (1, 2):
        comparison = compared({"ln": drawn(70, count, 0), "bn": drawn(72, count, 1)})
        assert seed_table(comparison, summarize(comparison)) is None
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
        (_, row) = seed_records(compared({"ln": ours, "bn": theirs}))
        assert row["p"] == row["p_holm"] == pytest.approx(ttest_rel(theirs, ours).pvalue)
        assert (row["mean_interval"] is not None) == has_interval


def test_the_middle_half_is_not_moved_by_a_seed_that_broke() -> None:
    comparison = compared({"ln": drawn(70, 8, 0), "bn": [*drawn(70, 7, 1), 0.0]})
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
    rows = seed_records(compared(values))[1:]
    assert [row["p_holm"] for row in rows] == holm([row["p"] or 0 for row in rows])
    assert holm([0.02, 0.9, 0.6]) == pytest.approx([0.06, 1.0, 1.0])


def test_seeds_needed_have_the_power_that_is_promised() -> None:
    gap = PairedGap(0.5, 0.0, 1.0, 0.06, 5, deviation=1.0)
    count = seeds_needed(gap, 1)
    assert count == 34  # from tables of the power of the paired t-test, for d = 0.5
    powers = [
        nct.sf(student.isf(0.025, n - 1), n - 1, 0.5 * np.sqrt(n)) for n in (count - 1, count)
    ]
    assert powers[0] < 0.8 <= powers[1]
    assert (seeds_needed(gap, 7) or 0) > count
    assert seeds_needed(PairedGap(100.0, 99.0, 101.0, 0.0, 3, deviation=0.1), 3) == 3
    assert seeds_needed(PairedGap(0.001, -1.0, 1.0, 0.9, 5, deviation=1.0), 1) is None
    assert seeds_needed(PairedGap(0.0, 0.0, 0.0, 1.0, 3, deviation=0.0), 1) is None


def test_the_table_says_more_than_can_be_counted() -> None:
    same = drawn(70, 6, 0)
    other = [value + (-1) ** index * 0.01 + 1e-5 for index, value in enumerate(same)]
    comparison = compared({"ln": same, "bn": other})
    table = seed_table(comparison, summarize(comparison))
    assert table is not None
    assert table.headings[-1] == "seeds needed"
    assert [line[-1] for line in table.lines] == ["–", "> 1,000"]
    assert "p (Holm)" in table.markdown()
    assert "seeds needed" in table.latex()
