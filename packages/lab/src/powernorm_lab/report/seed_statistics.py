"""What the seeds of a comparison say: averages with intervals, paired tests, seeds needed."""

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
"""Of fewer seeds there are too few samples to draw: an interval would be far too short."""
NUM_RESAMPLES: Final = 9999
TRIMMED: Final = 0.25
"""Share that the interquartile mean leaves out at each end."""
POWER: Final = 0.8
"""Chance that the paired test shows a gap of the measured size and scatter."""
MOST_SEEDS: Final = 1000
"""More than so many are not counted."""


def seed_records(
    comparison: Comparison, rows: Sequence[SummaryRow] | None = None
) -> list[SeedStatistics]:
    """Return what the seeds say of each norm with a result, in the order of the table.

    Args:
        comparison: what was compared.
        rows: of `summarize`; made where they are not given.

    Returns:
        A record a norm, as in results.json; None for numbers that the seeds are too few for.
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
    """Return the percentile interval of an average over seeds; None of too few.

    The runs of one norm on one task are a stratum: what is drawn, with replacement, are its seeds
    (Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice",
    Section 4.1).

    Args:
        values: one a seed.
        average: of an array along `axis`.
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


def seed_table(comparison: Comparison, rows: Sequence[SummaryRow]) -> Table | None:
    """Return the table of the seeds; None where they are too few to say anything.

    Args:
        comparison: what was compared.
        rows: of `summarize`.
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
    """Return the gap of a norm, its p, alone and corrected, and the seeds that it would need."""
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
