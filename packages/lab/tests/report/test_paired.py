import math
import random

import pytest
from lab.tests.report.synthetic import made_comparison, made_run
from scipy.stats import ttest_rel

from powernorm_lab.report.records import Comparison, ReportedRun
from powernorm_lab.report.results_document import claims
from powernorm_lab.report.summary import PairedGap, paired_gap
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
