"""Whether a norm differs from another, LayerNorm for most, seed by seed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, nan, sqrt
from statistics import fmean, stdev
from typing import Final

from powernorm.lab.report.records import ReportedRun

LEAST_SEEDS: Final = 3
"""Of fewer, an interval says nothing."""
CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True)
class PairedGap:
    """The difference of a metric to the reference, over the seeds that finished with both.

    Attributes:
        difference: mean of the seeds' differences.
        low: lower end of the 95 % interval of that mean, by Student's t; NaN of too few seeds.
        high: upper end.
        p: of the two-sided paired t-test; NaN of too few seeds.
        count: number of seeds.
        deviation: sample standard deviation of the seeds' differences; NaN of too few seeds.
    """

    difference: float
    low: float
    high: float
    p: float
    count: int
    deviation: float = field(default=nan, compare=False)

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low > 0 or self.high < 0


def paired_gap(
    runs: Iterable[ReportedRun], references: Iterable[ReportedRun], metric: str
) -> PairedGap | None:
    """Compare two norms by the seeds that finished with both; None without one."""
    ours, theirs = values_by_seed(runs, metric), values_by_seed(references, metric)
    return gap_of([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])


def gap_of(differences: Sequence[float]) -> PairedGap | None:
    """Return what the seeds' differences say; None without one."""
    if not differences:
        return None
    mean = fmean(differences)
    if len(differences) < LEAST_SEEDS:
        return PairedGap(mean, nan, nan, nan, len(differences))
    from scipy.stats import t as student

    deviation = stdev(differences)
    error = deviation / sqrt(len(differences))
    freedom = len(differences) - 1
    half = float(student.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    if error == 0:
        p = 1.0 if mean == 0 else 0.0
    else:
        p = 2 * float(student.sf(abs(mean) / error, freedom))
    return PairedGap(mean, mean - half, mean + half, p, len(differences), deviation)


def untested(gap: PairedGap | None) -> PairedGap | None:
    """Return a difference without interval and p, which are wrong of the seeds of a race."""
    return None if gap is None else replace(gap, low=nan, high=nan, p=nan)


def values_by_seed(runs: Iterable[ReportedRun], metric: str) -> dict[int, float]:
    """Return a metric by seed, of the runs that finished."""
    return {
        run.seed: value
        for run in runs
        if run.finished and (value := run.metrics.get(metric)) is not None and isfinite(value)
    }


def holm(probabilities: Sequence[float]) -> list[float]:
    """Return the p of several tests, corrected for their number.

    The k-th smallest is multiplied by the number of tests that are left, and is no smaller than
    the one before it (Holm 1979): with p below 5 % for any, one of twenty families of tests whose
    norms are all alike gives a false alarm.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(probabilities)), key=probabilities.__getitem__)
    found = [nan] * len(probabilities)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, probabilities[index] * (len(probabilities) - rank)))
        found[index] = largest
    return found
