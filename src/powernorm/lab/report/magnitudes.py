"""Means and decimals of numbers of any size."""

from collections.abc import Iterable
from math import floor, fsum, isfinite, log10


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
