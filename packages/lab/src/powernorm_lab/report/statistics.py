"""Statistics over seeds: rows of norms, paired tests against LayerNorm, intervals, seeds needed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import fsum, isfinite, isnan, nan, sqrt
from statistics import fmean, stdev
from typing import Any, Final

import numpy as np

from powernorm.records import TID
from powernorm_lab.report.measures import MEASURES, PERPLEXITY, Measure
from powernorm_lab.report.records import Comparison, ReportedRun, ShownStatus
from powernorm_lab.runs import SeedStatistics

REFERENCE: Final = "ln"
"""Norm that the others are compared with."""
LEAST_SEEDS: Final = 3
"""Smallest number of seeds for an interval."""
CONFIDENCE: Final = 0.95
LEAST_RESAMPLED: Final = 5
"""Smallest number of seeds for a bootstrap interval; with fewer it would be far too short."""
NUM_RESAMPLES: Final = 9999
TRIMMED: Final = 0.25
"""Fraction that the interquartile mean leaves out at each end."""
POWER: Final = 0.8
"""Power of the paired test for `PairedGap.seeds_needed`."""
MOST_SEEDS: Final = 1000
"""Largest result of `PairedGap.seeds_needed`."""

TID_KEYS: Final = tuple(TID.__annotations__)

# Comparison of two norms, paired by seed.


@dataclass(frozen=True)
class PairedGap:
    """Difference of a metric to the reference over the seeds that finished with both.

    Attributes:
        difference: mean of the seeds' differences.
        low: lower end of the 95 % interval of that mean, by Student's t; NaN for too few seeds.
        high: upper end.
        p: p-value of the two-sided paired t-test; NaN for too few seeds.
        count: number of seeds.
        deviation: sample standard deviation of the seeds' differences; NaN for too few seeds.
        ratio: difference divided by the reference's mean; None if that is 0 or not known.
        adjusted_p: p-value with Holm's correction for the number of norms; NaN without a test.
        num_tests: number of norms with a test in the comparison.
    """

    difference: float
    low: float
    high: float
    p: float
    count: int
    deviation: float = field(default=nan, compare=False)
    ratio: float | None = field(default=None, compare=False)
    adjusted_p: float = field(default=nan, compare=False)
    num_tests: int = field(default=1, compare=False)

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0

    @property
    def is_told(self) -> bool:
        """Whether the norms differ, with at most one false alarm in 20 comparisons."""
        return self.adjusted_p < 1 - CONFIDENCE

    @property
    def is_tested(self) -> bool:
        """Whether there are enough seeds for a test, and no race."""
        return not isnan(self.p)

    @cached_property
    def seeds_needed(self) -> int | None:
        """Number of seeds that would detect a gap of the measured size and spread.

        It follows from the power of the two-sided paired t-test: with n seeds, t has a noncentral t
        distribution with n - 1 degrees of freedom and noncentrality √n · gap / deviation. The level
        is divided by the number of tests, as for the smallest p in Holm's correction. The result is
        the smallest number with a power of POWER, at least LEAST_SEEDS; None without a gap, or if
        MOST_SEEDS are too few.
        """
        from scipy.stats import nct
        from scipy.stats import t as student

        if self.difference == 0 or isnan(self.deviation):
            return None
        if self.deviation == 0:
            return LEAST_SEEDS
        effect = abs(self.difference) / self.deviation
        tail = (1 - CONFIDENCE) / (2 * self.num_tests)

        def is_enough(count: int) -> bool:
            freedom, center = count - 1, effect * sqrt(count)
            limit = student.isf(tail, freedom)
            # Far from the limit, the power is 1 and the distribution cannot be computed.
            return center > 20 * limit or bool(nct.sf(limit, freedom, center) >= POWER)

        counts = range(LEAST_SEEDS, MOST_SEEDS + 1)
        return next((count for count in counts if is_enough(count)), None)


def paired_gap(
    runs: Iterable[ReportedRun], references: Iterable[ReportedRun], metric: str
) -> PairedGap | None:
    """Compare two norms over the seeds that finished with both; return None without one."""
    ours, theirs = values_by_seed(runs, metric), values_by_seed(references, metric)
    common = sorted(ours.keys() & theirs.keys())
    gap = gap_of([ours[seed] - theirs[seed] for seed in common])
    reference = fmean(theirs[seed] for seed in common) if common else 0
    return replace(gap, ratio=gap.difference / reference) if gap and reference else gap


def gap_of(differences: Sequence[float]) -> PairedGap | None:
    """Return mean, interval and test of the seeds' differences; None without one."""
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
    """Return a difference without interval and p, which are invalid for the seeds of a race."""
    return None if gap is None else replace(gap, low=nan, high=nan, p=nan)


def values_by_seed(runs: Iterable[ReportedRun], metric: str) -> dict[int, float]:
    """Return a metric of the finished runs by seed."""
    return {
        run.seed: value
        for run in runs
        if run.finished and (value := run.metrics.get(metric)) is not None and isfinite(value)
    }


def holm(probabilities: Sequence[float]) -> list[float]:
    """Return the p-values of several tests with Holm's correction for their number.

    The k-th smallest is multiplied by the number of remaining tests, and is at least as large as
    the previous one (Holm 1979). At 5 %, at most one in 20 families of tests with equal norms has
    a false alarm.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    values = np.array(probabilities, dtype=float)
    order = np.argsort(values)
    products = values[order] * np.arange(len(values), 0, -1)
    values[order] = np.minimum(np.maximum.accumulate(products), 1)
    return [float(value) for value in values]


# Rows of norms.


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and sample standard deviation (n - 1) over runs; no deviation for a single run."""

    mean: float
    std: float | None
    count: int


@dataclass(frozen=True)
class SummaryRow:
    """Row of the table, for a norm or a baseline.

    Attributes:
        label: short name of the norm, with its placement if the comparison has several.
        runs: runs of the row; empty for a baseline, which is a model without a network.
        metrics: metrics over the finished runs.
        test: main measure of the comparison, on the test data.
        gap: difference to the reference norm; None for the reference and if no seed finished with
            both. A race has no interval and test, which require a fixed number of seeds.
        behind: seeds of finished runs that are worse than the first baseline.
    """

    label: str
    runs: Sequence[ReportedRun] = field(default=(), repr=False, compare=False)
    metrics: Mapping[str, Spread] = field(default_factory=dict)
    test: Spread | None = None
    gap: PairedGap | None = None
    behind: tuple[int, ...] = ()

    @property
    def is_baseline(self) -> bool:
        """Whether this is a model without a network."""
        return not self.runs

    @property
    def remark(self) -> str:
        """Caveat shown with its numbers, which are then never marked as the best."""
        return self.runs[0].remark if self.runs else ""

    @property
    def parameters(self) -> int | None:
        """Number of parameters of the model; None for a baseline."""
        return next((run.parameters for run in self.runs if run.parameters is not None), None)

    @cached_property
    def statuses(self) -> Mapping[ShownStatus, tuple[int, ...]]:
        """Seeds by status, in the order of the runs."""
        found: dict[ShownStatus, tuple[int, ...]] = {}
        for run in self.runs:
            found[run.shown_status] = (*found.get(run.shown_status, ()), run.seed)
        return found

    @cached_property
    def tid(self) -> Mapping[str, float | None]:
        """Means over the finished runs by the keys of `powernorm.records.TID`, as fractions.

        A mean is NaN if a value is, so that a broken layer stays visible.
        """
        finished = [run for run in self.runs if run.finished]
        columns = {key: [run.tid_of(key) for run in finished] for key in TID_KEYS}
        known = {key: [v for v in values if v is not None] for key, values in columns.items()}
        return {key: mean(values) if values else None for key, values in known.items()}

    @property
    def complete(self) -> bool:
        """Whether every run finished."""
        return set(self.statuses) <= {"finished"}

    @property
    def is_as_expected(self) -> bool:
        """Whether every run finished or was not needed by a race."""
        return set(self.statuses) <= {"finished", "dropped"}

    def mean_of(self, measure: Callable[[ReportedRun], float | None]) -> float | None:
        """Return the mean of a quantity over the finished runs, or over all if none finished."""
        timed = [run for run in self.runs if run.finished] or self.runs
        found = spread(map(measure, timed))
        return None if found is None else found.mean

    def is_partial(self, value: Spread) -> bool:
        """Return whether an average leaves out runs that did not finish or have no such number."""
        return not self.complete or value.count < len(self.runs)


def summarize(comparison: Comparison) -> list[SummaryRow]:
    """Return a row for each norm in the order of the runs, then the baselines."""
    groups: dict[tuple[str, str | None], list[ReportedRun]] = {}
    for run in comparison.runs:
        groups.setdefault((run.name, run.placement), []).append(run)
    mixed = len({placement for _, placement in groups}) > 1
    rows = [
        _norm_row(f"{norm} ({placement})" if mixed else norm, runs, comparison)
        for (norm, placement), runs in groups.items()
    ]
    if comparison.race is None:
        tested = {i: row.gap for i, row in enumerate(rows) if row.gap and row.gap.is_tested}
        adjusted = holm([gap.p for gap in tested.values()])
        for (index, gap), p in zip(tested.items(), adjusted, strict=True):
            gap = replace(gap, adjusted_p=p, num_tests=len(tested))
            rows[index] = replace(rows[index], gap=gap)
    else:
        rows = [replace(row, gap=untested(row.gap)) for row in rows]
    for baseline in comparison.baselines:
        metrics = _spreads({name: [value] for name, value in baseline["metrics"].items()})
        test = metrics.get(comparison.metric)
        rows.append(SummaryRow(baseline["name"], metrics=metrics, test=test))
    return rows


def _norm_row(label: str, runs: Sequence[ReportedRun], comparison: Comparison) -> SummaryRow:
    metric, remark = comparison.metric, runs[0].remark
    floors = finite(one["metrics"].get(metric) for one in comparison.baselines)[:1]
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    metrics = _spreads({name: values_by_seed(runs, name).values() for name in names})
    return SummaryRow(
        f"{label} ({remark})" if remark else label,
        runs,
        metrics,
        test=metrics.get(metric),
        gap=paired_gap(runs, _references_of(comparison.runs, runs[0]), metric),
        behind=tuple(
            seed
            for seed, value in values_by_seed(runs, metric).items()
            if any(is_better(floor, value, comparison.measure) for floor in floors)
        ),
    )


def _references_of(runs: Sequence[ReportedRun], run: ReportedRun) -> list[ReportedRun]:
    """Return the runs of the reference norm with the same placement and remark as a run.

    Runs without a remark are compared with runs named after the reference; runs with one, as in a
    study that varies it, with runs of that norm.
    """
    if run.name == REFERENCE or (run.remark and run.norm == REFERENCE):
        return []
    return [
        one
        for one in runs
        if (one.norm if run.remark else one.name) == REFERENCE
        and (one.placement, one.remark) == (run.placement, run.remark)
    ]


def best_rows(rows: Sequence[SummaryRow], measure: Measure = MEASURES[PERPLEXITY]) -> set[str]:
    """Return the labels of the norms with the best mean among those whose runs all finished.

    It is empty if a best norm would mean nothing: with one seed, with one norm, or if a baseline is
    at least as good.

    Args:
        rows: rows of `summarize`.
        measure: main measure of the comparison.
    """
    rivals = {
        row.label: row.test
        for row in rows
        if row.test and not (row.is_partial(row.test) or row.is_baseline or row.remark)
    }
    if len(rivals) < 2:
        return set()
    choose = max if measure.higher_is_better else min
    best = choose(value.mean for value in rivals.values())
    found = {label for label, value in rivals.items() if value.mean == best}
    baseline = best_baseline(rows, measure)
    is_beaten = baseline is None or is_better(best, baseline[1], measure)
    return found if is_beaten and all(rivals[label].count > 1 for label in found) else set()


def best_baseline(rows: Sequence[SummaryRow], measure: Measure) -> tuple[str, float] | None:
    """Name and value of the best model without a network; None without one."""
    known = [(row.label, row.test.mean) for row in rows if row.is_baseline and row.test]
    choose = max if measure.higher_is_better else min
    return choose(known, key=lambda pair: pair[1], default=None)


def is_better(value: float, other: float, measure: Measure) -> bool:
    """Return whether a value of the measure is better than another."""
    return value > other if measure.higher_is_better else value < other


def _spreads(columns: Mapping[str, Iterable[float | None]]) -> dict[str, Spread]:
    return {name: found for name, values in columns.items() if (found := spread(values))}


def spread(values: Iterable[float | None]) -> Spread | None:
    """Return mean and deviation of the finite values; None without one."""
    known = finite(values)
    if not known:
        return None
    return Spread(fmean(known), stdev(known) if len(known) > 1 else None, len(known))


def finite(values: Iterable[float | None]) -> list[float]:
    """Return the values that are finite numbers."""
    return [value for value in values if value is not None and isfinite(value)]


def average(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Return the mean over the rows with a value; None without one."""
    known = [row[key] for row in rows if row.get(key) is not None]
    return fmean(known) if known else None


def mean(values: Iterable[float]) -> float:
    """Return the mean; infinities of both signs give NaN instead of an error.

    >>> mean([1.0, 2.0]), mean([1.0, float("inf")])
    (1.5, inf)
    """
    known = list(values)
    total = fsum(known) if all(map(isfinite, known)) else sum(known)
    return total / len(known)


# What the seeds of a norm say.


def seed_records(
    comparison: Comparison, rows: Sequence[SummaryRow] | None = None
) -> list[SeedStatistics]:
    """Return the statistics over seeds of each norm with a result, in the order of the table.

    Args:
        comparison: the comparison.
        rows: rows of `summarize`; None computes them.

    Returns:
        A record per norm, as in results.json; values are None if the seeds are too few.
    """
    rows = summarize(comparison) if rows is None else rows
    found = []
    for row in rows:
        values = list(values_by_seed(row.runs, comparison.metric).values())
        if not values:
            continue
        mean, middle = np.mean(values), _interquartile_mean(values)
        record = SeedStatistics(
            label=row.label,
            seeds=len(values),
            mean=float(mean),
            mean_interval=_bootstrapped(values, np.mean),
            interquartile_mean=float(middle),
            interquartile_mean_interval=_bootstrapped(values, _interquartile_mean),
        )
        if (gap := row.gap) is not None:
            record["against"] = REFERENCE
            record["difference"] = gap.difference
            record["difference_interval"] = None if isnan(gap.low) else [gap.low, gap.high]
            record["p"] = gap.p if gap.is_tested else None
            record["p_holm"] = None if isnan(gap.adjusted_p) else gap.adjusted_p
            record["seeds_needed"] = gap.seeds_needed if gap.is_tested else None
        found.append(record)
    return found


def _bootstrapped(values: Sequence[float], average: Callable[..., Any]) -> list[float] | None:
    """Return the percentile interval of an average over seeds; None for too few seeds.

    The runs of one norm on one task are a stratum, whose seeds are drawn with replacement (Agarwal
    et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice", Section
    4.1).

    Args:
        values: one value per seed.
        average: function that averages an array along `axis`.
    """
    if len(values) < LEAST_RESAMPLED:
        return None
    from scipy.stats import bootstrap

    result = bootstrap(
        (values,),
        average,
        vectorized=True,
        n_resamples=NUM_RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),  # the same interval every time
    )
    ends = result.confidence_interval
    return [float(ends.low), float(ends.high)]


def _interquartile_mean(values: Any, axis: int = 0) -> Any:
    from scipy.stats import trim_mean

    return trim_mean(values, TRIMMED, axis=axis)
