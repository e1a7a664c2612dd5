"""Numbers that figures and averages can carry: what a file holds may be larger than that."""

from collections.abc import Iterable, Sequence
from math import floor, fsum, isfinite, log10
from typing import Final

from powernorm.lab.schema import LARGEST

SMALLEST: Final = 1e-100
"""Where a logarithmic axis begins at the latest."""


def mean(values: Iterable[float]) -> float:
    """The mean; NaN, not an error, where infinities of both signs meet.

    >>> mean([1.0, 2.0]), mean([1.0, float("inf")])
    (1.5, inf)
    """
    known = list(values)
    total = fsum(known) if all(map(isfinite, known)) else sum(known)
    return total / len(known)


def significant_decimals(value: float) -> int:
    """How many decimals show a number in four digits, whatever its size.

    >>> [significant_decimals(value) for value in (7251.0, 72.51, 0.9132, 0.002143, 0.0)]
    [0, 2, 4, 6, 2]
    """
    if not value or not isfinite(value):
        return 2
    return max(0, 3 - floor(log10(abs(value))))


def linear_limits(values: Sequence[float], share: float, least: float) -> tuple[float, float]:
    """Ends of a linear axis around the values.

    Args:
        values: finite, at least one.
        share: of their extent, the margin at each end.
        least: margin where they have no extent.
    """
    drawn = [min(max(value, -LARGEST), LARGEST) for value in values]
    low, high = min(drawn), max(drawn)
    margin = share * (high - low) or max(least, share * abs(high))
    return low - margin, high + margin


def logarithmic_limits(values: Sequence[float], factor: float) -> tuple[float, float]:
    """Ends of a logarithmic axis around the values.

    Args:
        values: finite and positive, at least one.
        factor: margin at each end.
    """
    low, high = max(min(values), SMALLEST), min(max(values), LARGEST)
    return min(low, LARGEST) / factor, max(high, SMALLEST) * factor
