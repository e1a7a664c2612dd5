"""Summary of a comparison's norms: averages over runs, and paired tests against LayerNorm."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum, isfinite, isnan, nan, sqrt
from statistics import fmean, stdev
from typing import Any, Final

from powernorm_lab.report.measures import MEASURES, PERPLEXITY, Measure
from powernorm_lab.report.records import Comparison, ReportedRun, ShownStatus
from powernorm_lab.runs import Baseline

REFERENCE: Final = "ln"
"""Norm that the others are compared with."""
LEAST_SEEDS: Final = 3
"""Smallest number of seeds for an interval."""
CONFIDENCE: Final = 0.95
# Comparison of two norms, paired by seed.


@dataclass(frozen=True, slots=True)
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
    """

    difference: float
    low: float
    high: float
    p: float
    count: int
    deviation: float = field(default=nan, compare=False)
    ratio: float | None = field(default=None, compare=False)
    adjusted_p: float = field(default=nan, compare=False)

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0

    @property
    def is_told(self) -> bool:
        """Whether the norms differ, with at most one false alarm in 20 comparisons."""
        return self.adjusted_p < 1 - CONFIDENCE


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
    order = sorted(range(len(probabilities)), key=probabilities.__getitem__)
    found = [nan] * len(probabilities)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, probabilities[index] * (len(probabilities) - rank)))
        found[index] = largest
    return found


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
        parameters: number of parameters of the model; None for a baseline.
        test: main measure of the comparison, on the test data.
        gap: difference to the reference norm; None for the reference and if no seed finished with
            both. A race has no interval and test, which require a fixed number of seeds.
        tid: means over the finished runs by the keys of `powernorm.records.TID`, as fractions.
        statuses: seeds by status, in the order of the runs.
        is_baseline: whether this is a model without a network.
        remark: caveat shown with its numbers, which are then never marked as the best.
        metrics: metrics over the finished runs.
        runs: runs of the row; empty for a baseline.
        references: runs of the reference norm that they are compared with.
        behind: seeds of finished runs that are worse than the first baseline.
    """

    label: str
    parameters: int | None = None
    test: Spread | None = None
    gap: PairedGap | None = None
    tid: Mapping[str, float | None] | None = None
    statuses: Mapping[ShownStatus, tuple[int, ...]] | None = None
    is_baseline: bool = False
    remark: str = ""
    metrics: Mapping[str, Spread] = field(default_factory=dict)
    runs: Sequence[ReportedRun] = field(default=(), repr=False, compare=False)
    references: Sequence[ReportedRun] = field(default=(), repr=False, compare=False)
    behind: tuple[int, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every run finished."""
        return self.statuses is None or set(self.statuses) == {"finished"}

    @property
    def is_as_expected(self) -> bool:
        """Whether every run finished or was not needed by a race."""
        return self.statuses is None or set(self.statuses) <= {"finished", "dropped"}

    def mean_of(self, measure: Callable[[ReportedRun], float | None]) -> float | None:
        """Return the mean of a quantity over the finished runs, or over all if none finished."""
        timed = [run for run in self.runs if run.finished] or self.runs
        known = _finite(map(measure, timed))
        return fmean(known) if known else None

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
    rows = _tested(rows, is_race=comparison.race is not None)
    return rows + [_baseline_row(baseline, comparison.metric) for baseline in comparison.baselines]


def _tested(rows: Sequence[SummaryRow], *, is_race: bool) -> list[SummaryRow]:
    """Correct the p-values of the rows for their number, or remove them for a race."""
    if is_race:
        return [replace(row, gap=untested(row.gap)) for row in rows]
    gaps = [row.gap for row in rows if row.gap is not None and not isnan(row.gap.p)]
    adjusted = dict(zip(map(id, gaps), holm([gap.p for gap in gaps]), strict=True))
    return [
        replace(row, gap=replace(row.gap, adjusted_p=adjusted[id(row.gap)]))
        if row.gap is not None and id(row.gap) in adjusted
        else row
        for row in rows
    ]


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


def _baseline_row(baseline: Baseline, metric: str) -> SummaryRow:
    def values(name: str) -> list[float]:
        return _finite([baseline["metrics"].get(name)])

    return SummaryRow(
        label=baseline["name"],
        test=spread(values(metric)),
        is_baseline=True,
        metrics=_spreads(baseline["metrics"], values),
    )


def best_rows(rows: Sequence[SummaryRow], measure: Measure = MEASURES[PERPLEXITY]) -> set[str]:
    """Return the labels of the norms with the best mean among those whose runs all finished.

    It is empty if a best norm would mean nothing: with one seed, with one norm, or if a baseline is
    at least as good.

    Args:
        rows: rows of `summarize`.
        measure: main measure of the comparison.
    """
    rivals = {row.label: row.test for row in rows if row.test and _can_win(row, row.test)}
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


def _can_win(row: SummaryRow, value: Spread) -> bool:
    return not (row.is_partial(value) or row.is_baseline or row.remark)


def _norm_row(label: str, runs: Sequence[ReportedRun], comparison: Comparison) -> SummaryRow:
    metric = comparison.metric
    references = _references_of(comparison.runs, runs[0])
    floors = _finite(one["metrics"].get(metric) for one in comparison.baselines)[:1]
    statuses: dict[ShownStatus, tuple[int, ...]] = {}
    for run in runs:
        statuses[run.shown_status] = (*statuses.get(run.shown_status, ()), run.seed)
    finished = [run for run in runs if run.finished]
    remark = runs[0].remark
    return SummaryRow(
        label=f"{label} ({remark})" if remark else label,
        remark=remark,
        parameters=next((run.parameters for run in runs if run.parameters is not None), None),
        test=spread(_values(runs, metric)),
        gap=paired_gap(runs, references, metric),
        tid=_mean_tid(finished),
        statuses=statuses,
        metrics=_spreads(
            dict.fromkeys(name for run in runs for name in run.metrics),
            lambda name: _values(runs, name),
        ),
        runs=runs,
        references=references,
        behind=tuple(
            seed
            for seed, value in values_by_seed(runs, metric).items()
            for floor in floors
            if is_better(floor, value, comparison.measure)
        ),
    )


def spread_of(runs: Iterable[ReportedRun], metric: str) -> Spread | None:
    """Return mean and deviation of a metric over the finished runs; None without one."""
    return spread(_values(runs, metric))


def _spreads(names: Iterable[str], values: Callable[[str], list[float]]) -> dict[str, Spread]:
    found = {metric: spread(values(metric)) for metric in names}
    return {metric: spread for metric, spread in found.items() if spread is not None}


def _values(runs: Iterable[ReportedRun], metric: str) -> list[float]:
    return list(values_by_seed(runs, metric).values())


def _finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and isfinite(value)]


def spread(values: Sequence[float]) -> Spread | None:
    """Return mean and deviation of values; None without one."""
    if not values:
        return None
    return Spread(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


def _mean_tid(runs: Sequence[ReportedRun]) -> dict[str, float | None] | None:
    parts = [run.tid for run in runs if run.tid is not None]
    if not parts:
        return None
    # A TypedDict takes literal keys only.
    columns = [dict[str, float | None](tid) for tid in parts]  # type: ignore[arg-type]
    return {key: _plain_mean(tid[key] for tid in columns) for key in columns[0]}


def _plain_mean(values: Iterable[float | None]) -> float | None:
    """Return the mean, which is NaN if a value is, so that a broken layer stays visible."""
    known = [value for value in values if value is not None]
    return mean(known) if known else None


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
