"""Statistics over seeds of a comparison: averages with intervals, paired tests, seeds needed."""

from collections.abc import Callable, Sequence
from math import isnan, sqrt
from typing import Any, Final

import numpy as np
from markupsafe import Markup

from powernorm_lab.report import numerals
from powernorm_lab.report.records import Comparison
from powernorm_lab.report.summary import (
    CONFIDENCE,
    LEAST_SEEDS,
    REFERENCE,
    PairedGap,
    SummaryRow,
    summarize,
    values_by_seed,
)
from powernorm_lab.report.tables import Table, copies
from powernorm_lab.runs import SeedStatistics

LEAST_RESAMPLED: Final = 5
"""Smallest number of seeds for a bootstrap interval; with fewer it would be far too short."""
NUM_RESAMPLES: Final = 9999
TRIMMED: Final = 0.25
"""Fraction that the interquartile mean leaves out at each end."""
POWER: Final = 0.8
"""Power of the paired test for `seeds_needed`."""
MOST_SEEDS: Final = 1000
"""Largest result of `seeds_needed`."""


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
    num_tests = sum(row.gap is not None and not isnan(row.gap.p) for row in rows)
    found = []
    for row in rows:
        values = list(values_by_seed(row.runs, comparison.metric).values())
        if not values:
            continue
        mean, middle = _mean(values), _interquartile_mean(values)
        record = SeedStatistics(
            label=row.label,
            seeds=len(values),
            mean=float(mean),
            mean_interval=_bootstrapped(values, _mean),
            interquartile_mean=float(middle),
            interquartile_mean_interval=_bootstrapped(values, _interquartile_mean),
        )
        if (gap := row.gap) is not None:
            is_tested = not isnan(gap.p)
            record["against"] = REFERENCE
            record["difference"] = gap.difference
            record["difference_interval"] = None if isnan(gap.low) else [gap.low, gap.high]
            record["p"] = gap.p if is_tested else None
            record["p_holm"] = None if isnan(gap.adjusted_p) else gap.adjusted_p
            record["seeds_needed"] = seeds_needed(gap, num_tests) if is_tested else None
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


def _mean(values: Any, axis: int = 0) -> Any:
    return np.mean(values, axis=axis)


def _interquartile_mean(values: Any, axis: int = 0) -> Any:
    from scipy.stats import trim_mean

    return trim_mean(values, TRIMMED, axis=axis)


def seeds_needed(gap: PairedGap, num_tests: int) -> int | None:
    """Return the number of seeds that would detect a gap of the measured size and spread.

    It follows from the power of the two-sided paired t-test: with n seeds, t has a noncentral t
    distribution with n - 1 degrees of freedom and noncentrality √n · gap / deviation.

    Args:
        gap: measured gap with an interval.
        num_tests: number of tests in the comparison, by which the level of each is divided, as for
            the smallest p in Holm's correction.

    Returns:
        The smallest number with a power of POWER, at least LEAST_SEEDS; None without a gap, or if
        MOST_SEEDS are too few.
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
        # Far from the limit, the power is 1 and the distribution cannot be computed.
        return center > 20 * limit or bool(nct.sf(limit, freedom, center) >= POWER)

    counts = range(LEAST_SEEDS, MOST_SEEDS + 1)
    return next((count for count in counts if is_enough(count)), None)


def seed_table(comparison: Comparison, rows: Sequence[SummaryRow]) -> Table | None:
    """Return the table of statistics over seeds; None if the seeds are too few.

    Args:
        comparison: the comparison.
        rows: rows of `summarize`.
    """
    found = seed_records(comparison, rows)
    is_tested = any(record.get("p") is not None for record in found)
    if not is_tested and all(record["mean_interval"] is None for record in found):
        return None
    decimals = comparison.measure.decimals
    gaps = {row.label: row.gap for row in rows}
    lines = [
        {
            "norm": record["label"],
            "seeds": str(record["seeds"]),
            "mean (95 %)": _estimate(record["mean"], record["mean_interval"], decimals),
            "middle half (95 %)": _estimate(
                record["interquartile_mean"], record["interquartile_mean_interval"], decimals
            ),
        }
        | (tested_cells(gaps[record["label"]], record, decimals, "gap (95 %)") if is_tested else {})
        for record in found
    ]
    return Table.of(lines, texts=["norm"])


def tested_cells(
    gap: PairedGap | None, record: SeedStatistics | None, decimals: int, heading: str
) -> dict[str, str]:
    """Return the cells of a norm's gap, its p, alone and corrected, and the seeds needed."""
    needed = numerals.NOTHING
    if record is not None and record.get("p_holm") is not None:
        number = record.get("seeds_needed")
        needed = f"> {MOST_SEEDS:,}" if number is None else str(number)
    return {
        heading: numerals.interval(gap, decimals),
        "p": numerals.probability(None if gap is None else gap.p),
        "p (Holm)": numerals.probability(None if gap is None else gap.adjusted_p),
        "seeds needed": needed,
    }


def _estimate(value: float, interval: Sequence[float] | None, decimals: int) -> str:
    text = numerals.number(value, decimals)
    if interval is None:
        return text
    return f"{text} ({' to '.join(numerals.number(end, decimals) for end in interval)})"


def seed_contents(comparison: Comparison, rows: Sequence[SummaryRow]) -> list[Markup]:
    """Return the section of the page; empty if the seeds are too few."""
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
    """Return an explanation of the columns."""
    text = (
        f"The {comparison.measure.heading}. Middle half: the interquartile mean, without the best "
        "and the worst quarter of the seeds. In parentheses: 95 % bootstrap intervals over the "
        f"seeds, from {LEAST_RESAMPLED} seeds on (for five they are too short and cover the mean "
        "in 85 % of the cases)"
    )
    if not has_tests:
        return f"{text}."
    return (
        f"{text}, and of the gap to {REFERENCE} Student's, paired by seed. p: of the paired "
        "t-test, alone and with Holm's correction for the number of norms. Seeds needed: number "
        "for which the test detects a gap of this size and spread with a power of "
        f"{100 * POWER:.0f} %; a guess if it is estimated from few seeds."
    )
