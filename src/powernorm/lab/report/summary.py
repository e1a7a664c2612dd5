"""From runs to one row a norm: averages over finished runs, and what became of the others."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import fmean, stdev

from powernorm.lab.report.magnitudes import mean
from powernorm.lab.report.measures import MEASURES, PERPLEXITY, Measure
from powernorm.lab.report.paired import values_by_seed
from powernorm.lab.report.records import Comparison, ReportedRun
from powernorm.runs import Baseline, Status

REFERENCE = "ln"
"""The norm that the others are compared with."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and sample standard deviation (n - 1) over runs; no deviation for a single run."""

    mean: float
    std: float | None
    count: int


@dataclass(frozen=True, slots=True)
class Gap:
    """The comparison's measure minus the reference norm's, mean over seeds that finished with both.

    The ratio is None where the reference norm's is 0.
    """

    difference: float
    ratio: float | None


@dataclass(frozen=True)
class SummaryRow:
    """One norm, or one baseline, of the table.

    Attributes:
        label: short name of the norm, with its placement where the comparison mixes them.
        parameters: number of parameters of the model; None for a baseline.
        valid: perplexity per word on the validation data over the runs that finished.
        test: the comparison's measure on the test data; the same, but for translations a score.
        gap: to the reference norm; None for itself and where no seed finished with both.
        tid: means over the finished runs by the keys of `powernorm.runs.TID`, as fractions.
        tokens_per_second: mean over the finished runs, or over all where none finished.
        examples_per_second: the same in rows of the batches, where the runs say it.
        statuses: what became of the runs: status to seeds, in the order of the runs.
        is_baseline: whether this is a model without a network.
        remark: what has to stand beside its numbers, which then are never the best.
        metrics: each that the runs have, over those that finished.
        decoding_speed: target subwords a second in the search, mean as of `tokens_per_second`.
        runs: those that the row is about; none of a baseline.
        references: those of the reference norm that they are held against.
    """

    label: str
    parameters: int | None = None
    valid: Spread | None = None
    test: Spread | None = None
    gap: Gap | None = None
    tid: Mapping[str, float | None] | None = None
    tokens_per_second: float | None = None
    statuses: Mapping[Status, tuple[int, ...]] | None = None
    is_baseline: bool = False
    remark: str = ""
    metrics: Mapping[str, Spread] = field(default_factory=dict)
    decoding_speed: float | None = None
    examples_per_second: float | None = None
    runs: Sequence[ReportedRun] = field(default=(), repr=False, compare=False)
    references: Sequence[ReportedRun] = field(default=(), repr=False, compare=False)

    @property
    def complete(self) -> bool:
        """Whether every run finished."""
        return self.statuses is None or set(self.statuses) == {"finished"}

    @property
    def is_as_expected(self) -> bool:
        """Whether every run finished, or a race had no more need of it."""
        return self.statuses is None or set(self.statuses) <= {"finished", "dropped"}

    def is_partial(self, value: Spread) -> bool:
        """Whether an average is not over all runs: one did not finish, or has no such number."""
        return not self.complete or value.count < len(self.runs)


def summarize(comparison: Comparison) -> list[SummaryRow]:
    """One row a norm in the order of the runs, then the baselines."""
    groups: dict[tuple[str, str | None], list[ReportedRun]] = {}
    for run in comparison.runs:
        groups.setdefault((run.name, run.placement), []).append(run)
    mixed = len({placement for _, placement in groups}) > 1
    rows = [
        _norm_row(
            f"{norm} ({placement})" if mixed else norm,
            runs,
            _references_of(comparison.runs, runs[0]),
            comparison.metric,
        )
        for (norm, placement), runs in groups.items()
    ]
    return rows + [_baseline_row(baseline, comparison.metric) for baseline in comparison.baselines]


def _references_of(runs: Sequence[ReportedRun], run: ReportedRun) -> list[ReportedRun]:
    """The reference norm's runs that a run can be held against, which bear the same remark.

    They are those called like it; with a remark, as in a study that varies this, those of it.
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
        valid=_spread(values("valid_perplexity")),
        test=_spread(values(metric)),
        is_baseline=True,
        metrics=_spreads(baseline["metrics"], values),
    )


def best_rows(rows: Sequence[SummaryRow], measure: Measure = MEASURES[PERPLEXITY]) -> set[str]:
    """Labels of the norms with the best mean among those whose runs all finished with one.

    Empty where that says nothing: of one seed, of one norm, or where a baseline is no worse.

    Args:
        rows: of `summarize`.
        measure: what the comparison is about.
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
    """Whether a value of the measure is better than another."""
    return value > other if measure.higher_is_better else value < other


def _can_win(row: SummaryRow, value: Spread) -> bool:
    return not (row.is_partial(value) or row.is_baseline or row.remark)


def _norm_row(
    label: str, runs: Sequence[ReportedRun], references: Sequence[ReportedRun], metric: str
) -> SummaryRow:
    statuses: dict[Status, tuple[int, ...]] = {}
    for run in runs:
        statuses[run.shown_status] = (*statuses.get(run.shown_status, ()), run.seed)
    finished = [run for run in runs if run.finished]
    timed = finished or runs
    remark = runs[0].remark
    return SummaryRow(
        label=f"{label} ({remark})" if remark else label,
        remark=remark,
        parameters=next((run.parameters for run in runs if run.parameters is not None), None),
        valid=_spread(_values(runs, "valid_perplexity")),
        test=_spread(_values(runs, metric)),
        gap=_gap(runs, references, metric),
        tid=_mean_tid(finished),
        tokens_per_second=_known_mean(run.tokens_per_second for run in timed),
        examples_per_second=_known_mean(run.examples_per_second for run in timed),
        statuses=statuses,
        metrics=_spreads(
            dict.fromkeys(name for run in runs for name in run.metrics),
            lambda name: _values(runs, name),
        ),
        decoding_speed=_known_mean(run.metrics.get("decoding_tokens_per_second") for run in timed),
        runs=runs,
        references=references,
    )


def spread_of(runs: Iterable[ReportedRun], metric: str) -> Spread | None:
    """Mean and deviation of a metric over the runs that finished; None without one."""
    return _spread(_values(runs, metric))


def _known_mean(values: Iterable[float | None]) -> float | None:
    known = _finite(values)
    return fmean(known) if known else None


def _spreads(names: Iterable[str], values: Callable[[str], list[float]]) -> dict[str, Spread]:
    found = {metric: _spread(values(metric)) for metric in names}
    return {metric: spread for metric, spread in found.items() if spread is not None}


def _values(runs: Iterable[ReportedRun], metric: str) -> list[float]:
    return _finite(run.metrics.get(metric) for run in runs if run.finished)


def _finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and isfinite(value)]


def _spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    return Spread(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


def _gap(runs: Iterable[ReportedRun], references: Iterable[ReportedRun], metric: str) -> Gap | None:
    ours, theirs = values_by_seed(runs, metric), values_by_seed(references, metric)
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        return None
    reference = fmean(theirs[seed] for seed in common)
    difference = fmean(ours[seed] for seed in common) - reference
    return Gap(difference, difference / reference if reference else None)


def _mean_tid(runs: Sequence[ReportedRun]) -> dict[str, float | None] | None:
    parts = [run.tid for run in runs if run.tid is not None]
    if not parts:
        return None
    columns: dict[str, list[float | None]] = {
        "mean_last": [tid["mean_last"] for tid in parts],
        "var_last": [*(tid["var_last"] for tid in parts)],
        "mean_avg": [tid["mean_avg"] for tid in parts],
        "var_avg": [*(tid["var_avg"] for tid in parts)],
    }
    return {key: _plain_mean(values) for key, values in columns.items()}


def _plain_mean(values: Iterable[float | None]) -> float | None:
    """The mean, NaN where one value is NaN: a broken layer stays visible."""
    known = [value for value in values if value is not None]
    return mean(known) if known else None
