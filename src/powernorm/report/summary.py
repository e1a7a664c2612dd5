"""From runs to one row a norm: averages over finished runs, and what became of the others."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean, stdev

from powernorm.report.magnitudes import mean
from powernorm.report.records import Comparison, Run, ShownStatus

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
    """Test perplexity minus the reference norm's, mean over the seeds that finished with both."""

    difference: float
    ratio: float


@dataclass(frozen=True)
class SummaryRow:
    """One norm, or one baseline, of the table.

    Attributes:
        label: short name of the norm, with its placement where the comparison mixes them.
        parameters: number of parameters of the model; None for a baseline.
        valid: perplexity per word on the validation data over the runs that finished.
        test: the same on the test data.
        gap: to the reference norm; None for itself and where no seed finished with both.
        tid: means over the finished runs by the keys of `powernorm.runs.TID`, as fractions.
        tokens_per_second: mean over the finished runs, or over all where none finished.
        statuses: what became of the runs: status to seeds, in the order of the runs.
        is_baseline: whether this is a model without a network.
    """

    label: str
    parameters: int | None = None
    valid: Spread | None = None
    test: Spread | None = None
    gap: Gap | None = None
    tid: Mapping[str, float | None] | None = None
    tokens_per_second: float | None = None
    statuses: Mapping[ShownStatus, tuple[int, ...]] | None = None
    is_baseline: bool = False

    @property
    def complete(self) -> bool:
        """Whether every run finished."""
        return self.statuses is None or set(self.statuses) == {"finished"}


def summarize(comparison: Comparison) -> list[SummaryRow]:
    """One row a norm in the order of the runs, then the baselines."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in comparison.runs:
        groups.setdefault((run.name, run.placement), []).append(run)
    mixed = len({placement for _, placement in groups}) > 1
    rows = [
        _norm_row(
            f"{norm} ({placement})" if mixed else norm,
            runs,
            [] if norm == REFERENCE else groups.get((REFERENCE, placement), []),
        )
        for (norm, placement), runs in groups.items()
    ]
    return rows + [
        SummaryRow(
            label=baseline.name,
            valid=_spread(_finite([baseline.metrics.get("valid_perplexity")])),
            test=_spread(_finite([baseline.metrics.get("test_perplexity")])),
            is_baseline=True,
        )
        for baseline in comparison.baselines
    ]


def best_rows(rows: Sequence[SummaryRow]) -> set[str]:
    """Labels of the norms with the lowest test perplexity among those whose runs all finished."""
    means = {row.label: row.test.mean for row in rows if _can_win(row) and row.test}
    lowest = min(means.values(), default=None)
    return {label for label, mean in means.items() if mean == lowest}


def _can_win(row: SummaryRow) -> bool:
    return row.complete and not row.is_baseline


def _norm_row(label: str, runs: Sequence[Run], references: Sequence[Run]) -> SummaryRow:
    statuses: dict[ShownStatus, tuple[int, ...]] = {}
    for run in runs:
        statuses[run.shown_status] = (*statuses.get(run.shown_status, ()), run.seed)
    finished = [run for run in runs if run.finished]
    speeds = _finite(run.tokens_per_second for run in finished or runs)
    return SummaryRow(
        label=label,
        parameters=next((run.parameters for run in runs if run.parameters is not None), None),
        valid=_spread(_values(runs, "valid_perplexity")),
        test=_spread(_values(runs, "test_perplexity")),
        gap=_gap(runs, references),
        tid=_mean_tid(finished),
        tokens_per_second=fmean(speeds) if speeds else None,
        statuses=statuses,
    )


def _values(runs: Iterable[Run], metric: str) -> list[float]:
    return _finite(run.metrics.get(metric) for run in runs if run.finished)


def _finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and isfinite(value)]


def _spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    return Spread(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


def _gap(runs: Iterable[Run], references: Iterable[Run]) -> Gap | None:
    ours, theirs = _by_seed(runs), _by_seed(references)
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        return None
    reference = fmean(theirs[seed] for seed in common)
    difference = fmean(ours[seed] for seed in common) - reference
    return Gap(difference, difference / reference)


def _by_seed(runs: Iterable[Run]) -> dict[int, float]:
    """Test perplexity by seed of the runs that finished."""
    return {
        run.seed: value
        for run in runs
        if run.finished and (value := run.metrics.get("test_perplexity")) is not None
    }


def _mean_tid(runs: Sequence[Run]) -> dict[str, float | None] | None:
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
