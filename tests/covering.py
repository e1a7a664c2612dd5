"""Covering subsets of a grid of parameters, which the default suite runs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet

T = TypeVar("T")


def covering(rows: Sequence[Mapping[str, Hashable]], strength: int) -> list[int]:
    """Return indices of few rows in which all combinations of `strength` values occur.

    Greedy: the row with the most combinations that are still missing comes next.

    Args:
        rows: the grid, each row the value of every axis.
        strength: 1 for every value of every axis, 2 for every pair of values of two axes.
    """
    combined = [set(combinations(sorted(row.items()), min(strength, len(row)))) for row in rows]
    missing = set().union(*combined)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda index: len(combined[index] & missing))
        chosen.append(best)
        missing -= combined[best]
    return sorted(chosen)


def some_default(values: Iterable[T], *default: T) -> list[T | ParameterSet]:
    """Return values for `parametrize`: those named run in the default suite, the rest is slow."""
    return [
        value if value in default else pytest.param(value, marks=pytest.mark.slow)
        for value in values
    ]
