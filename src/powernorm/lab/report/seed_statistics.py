"""What the seeds of a comparison say: averages with intervals, paired tests, seeds needed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan, nan, sqrt
from typing import Any, Final

from markupsafe import Markup

from powernorm.lab.report import numerals
from powernorm.lab.report.records import Comparison
from powernorm.lab.report.statistics import (
    CONFIDENCE,
    LEAST_SEEDS,
    REFERENCE,
    PairedGap,
    SummaryRow,
    summarize,
    values_by_seed,
)
from powernorm.lab.report.tables import Table, copies
from powernorm.runs import SeedStatistics

LEAST_RESAMPLED: Final = 5
"""Of fewer seeds there are too few samples to draw: an interval would be far too short."""
NUM_RESAMPLES: Final = 9999
TRIMMED: Final = 0.25
"""Share that the interquartile mean leaves out at each end."""
POWER: Final = 0.8
"""Chance that the paired test shows a gap of the measured size and scatter."""
MOST_SEEDS: Final = 1000
"""More than so many are not counted."""
_HEADINGS: Final = ("norm", "seeds", "mean (95 %)", "middle half (95 %)")
_TESTS: Final = ("gap (95 %)", "p", "p (Holm)", "seeds needed")


@dataclass(frozen=True, slots=True)
class Estimate:
    """An average over seeds with its bootstrap interval; NaN ends of too few seeds."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class SeedRow:
    """What the seeds say of one norm.

    Attributes:
        label: as in the table of results.
        count: seeds that finished with a number.
        mean: of them.
        middle: interquartile mean.
        gap: to the reference norm, seed by seed; None for itself.
        num_needed: seeds by which a test of POWER shows a gap of this size; None where that is not
            known, or more than MOST_SEEDS.
    """

    label: str
    count: int
    mean: Estimate
    middle: Estimate
    gap: PairedGap | None = None
    num_needed: int | None = None


def seed_rows(comparison: Comparison, rows: Sequence[SummaryRow] | None = None) -> list[SeedRow]:
    """Return a row for each norm with a result, in the order of the table.

    Args:
        comparison: what was compared.
        rows: of `summarize`; made where they are not given.
    """
    rows = summarize(comparison) if rows is None else rows
    num_tests = sum(row.gap is not None and not isnan(row.gap.p) for row in rows)
    found = []
    for row in rows:
        values = list(values_by_seed(row.runs, comparison.metric).values())
        if values:
            is_tested = row.gap is not None and not isnan(row.gap.p)
            found.append(
                SeedRow(
                    row.label,
                    len(values),
                    _bootstrapped(values, _mean),
                    _bootstrapped(values, _interquartile_mean),
                    row.gap,
                    seeds_needed(row.gap, num_tests) if row.gap and is_tested else None,
                )
            )
    return found


def _bootstrapped(values: Sequence[float], average: Callable[..., Any]) -> Estimate:
    """Return an average over seeds with its percentile interval.

    The runs of one norm on one task are a stratum: what is drawn, with replacement, are its seeds
    (Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice",
    Section 4.1).

    Args:
        values: one a seed.
        average: of an array along `axis`.
    """
    import numpy as np
    from scipy.stats import bootstrap

    value = float(average(np.array(values), axis=0))
    if len(values) < LEAST_RESAMPLED:
        return Estimate(value, nan, nan)
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
    return Estimate(value, float(ends.low), float(ends.high))


def _mean(values: Any, axis: int) -> Any:
    return values.mean(axis=axis)


def _interquartile_mean(values: Any, axis: int) -> Any:
    from scipy.stats import trim_mean

    return trim_mean(values, TRIMMED, axis=axis)


def seeds_needed(gap: PairedGap, num_tests: int) -> int | None:
    """Return how many seeds would decide a gap of the size and scatter that were measured.

    By the power of the two-sided paired t-test: with n seeds t follows a noncentral t distribution
    of n - 1 degrees of freedom and the noncentrality √n · gap / deviation.

    Args:
        gap: that was measured, with an interval.
        num_tests: in the same comparison; the level of each is divided by it, as of the smallest
            p in Holm's correction.

    Returns:
        The smallest number with a power of POWER, LEAST_SEEDS at least; None where there is no gap,
        or MOST_SEEDS are too few.
    """
    from scipy.stats import nct
    from scipy.stats import t as student

    if gap.difference == 0 or isnan(gap.deviation):
        return None
    if gap.deviation == 0:
        return LEAST_SEEDS
    effect = abs(gap.difference) / gap.deviation
    tail = (1 - CONFIDENCE) / (2 * num_tests)

    def is_enough(count: int) -> bool:
        freedom, center = count - 1, effect * sqrt(count)
        limit = student.isf(tail, freedom)
        # Far from the limit the distribution is beyond what can be computed, and of no interest.
        return center > 20 * limit or bool(nct.sf(limit, freedom, center) >= POWER)

    counts = range(LEAST_SEEDS, MOST_SEEDS + 1)
    return next((count for count in counts if is_enough(count)), None)


def seed_records(comparison: Comparison) -> list[SeedStatistics]:
    """Return what results.json says of the seeds; None for numbers that they are too few for."""
    return [_record(row) for row in seed_rows(comparison)]


def _record(row: SeedRow) -> SeedStatistics:
    record = SeedStatistics(
        label=row.label,
        seeds=row.count,
        mean=row.mean.value,
        mean_interval=_ends(row.mean),
        interquartile_mean=row.middle.value,
        interquartile_mean_interval=_ends(row.middle),
    )
    if row.gap is not None:
        record["against"] = REFERENCE
        record["difference"] = row.gap.difference
        record["difference_interval"] = _ends(row.gap)
        record["p"] = _number(row.gap.p)
        record["p_holm"] = _number(row.gap.adjusted_p)
        record["seeds_needed"] = row.num_needed
    return record


def _ends(value: Estimate | PairedGap) -> list[float] | None:
    return None if isnan(value.low) else [value.low, value.high]


def _number(value: float) -> float | None:
    return None if isnan(value) else value


def seed_table(comparison: Comparison, rows: Sequence[SummaryRow]) -> Table | None:
    """Return the table of the seeds; None where they are too few to say anything.

    Args:
        comparison: what was compared.
        rows: of `summarize`.
    """
    found = seed_rows(comparison, rows)
    is_tested = any(row.gap is not None and not isnan(row.gap.p) for row in found)
    if not is_tested and all(isnan(row.mean.low) for row in found):
        return None
    decimals = comparison.measure.decimals
    return Table(
        [*_HEADINGS, *(_TESTS if is_tested else ())],
        [False, *(True for _ in (*_HEADINGS[1:], *(_TESTS if is_tested else ())))],
        [_line(row, decimals)[: None if is_tested else len(_HEADINGS)] for row in found],
    )


def _line(row: SeedRow, decimals: int) -> list[str]:
    gap = row.gap
    return [
        row.label,
        str(row.count),
        _estimate(row.mean, decimals),
        _estimate(row.middle, decimals),
        numerals.interval(gap, decimals),
        numerals.probability(None if gap is None else gap.p),
        numerals.probability(None if gap is None else gap.adjusted_p),
        needed(row),
    ]


def _estimate(value: Estimate, decimals: int) -> str:
    text = numerals.number(value.value, decimals)
    if isnan(value.low):
        return text
    ends = (numerals.number(end, decimals) for end in (value.low, value.high))
    return f"{text} ({' to '.join(ends)})"


def needed(row: SeedRow) -> str:
    """Return in words how many seeds would decide a gap of this size."""
    if row.gap is None or isnan(row.gap.adjusted_p):
        return numerals.NOTHING
    return f"> {MOST_SEEDS:,}" if row.num_needed is None else str(row.num_needed)


def seed_contents(comparison: Comparison, rows: Sequence[SummaryRow]) -> list[Markup]:
    """Return the section of the page; empty where the seeds are too few to say anything."""
    table = seed_table(comparison, rows)
    if table is None:
        return []
    return [
        table.html(
            "What the seeds say", explanation(comparison, has_tests=len(table.headings) > 4)
        ),
        copies(table),
    ]


def explanation(comparison: Comparison, *, has_tests: bool) -> str:
    """Return what the columns are, in a few sentences."""
    text = (
        f"The {comparison.measure.heading}. Middle half: the interquartile mean, without the best "
        "and the worst quarter of the seeds. In parentheses: 95 % bootstrap intervals over the "
        f"seeds, from {LEAST_RESAMPLED} on (of five they are too short: they hold the mean in 85 % "
        "of the cases)"
    )
    if not has_tests:
        return f"{text}."
    return (
        f"{text}, and of the gap to {REFERENCE} Student's, paired by seed. p: of the paired "
        "t-test, alone and by Holm's correction for the number of norms. Seeds needed: by so many "
        "the test shows a gap of this size and scatter with a chance of "
        f"{100 * POWER:.0f} %; a guess where few seeds have measured them."
    )
