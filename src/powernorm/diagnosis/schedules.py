"""Schedules of a monitor: every N steps, or at steps evenly spaced on a logarithmic axis."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from powernorm.errors import InputError

DEFAULT_PER_DECADE: Final = 10
_LOGARITHMIC: Final = re.compile(r"log(?::(\d+))?")
_EXPECTED: Final = (
    "expected a number of steps of at least 1, or 'log' or 'log:N' for N steps per decade"
)


@dataclass(frozen=True)
class Schedule:
    """Steps at which a monitor observes; exactly one of the two attributes is set.

    Attributes:
        every: number of steps between observations, ≥ 1: its multiples are observed.
        per_decade: number of observations per factor of ten in the step, ≥ 1: the integers nearest
            to 10^(i/per_decade) are observed, and step 0.

    Raises:
        InputError: both or none are set, or one is below 1.

    >>> [step for step in range(30) if Schedule.of("log:4").is_due(step)]
    [0, 1, 2, 3, 6, 10, 18]
    >>> [step for step in range(30) if Schedule.of(10).is_due(step)]
    [0, 10, 20]
    """

    every: int | None = None
    per_decade: int | None = None

    def __post_init__(self) -> None:
        if (self.every is None) == (self.per_decade is None):
            raise InputError("a Schedule needs either every or per_decade, not both")
        for name, value in (("every", self.every), ("per_decade", self.per_decade)):
            if value is not None and (not _is_integer(value) or value < 1):
                raise InputError(f"{name} is {value!r}, expected an integer of at least 1")

    @classmethod
    def of(cls, value: Schedule | int | str) -> Schedule:
        """Return the schedule for 10, "10", "log" (10 steps per decade), "log:20" or a schedule.

        Raises:
            InputError: the value is none of these.
        """
        if isinstance(value, Schedule):
            return value
        given: object = value
        if isinstance(given, str):
            found = _LOGARITHMIC.fullmatch(given.strip())
            if found is not None:
                per_decade = int(found[1] or DEFAULT_PER_DECADE)
                if per_decade >= 1:
                    return cls(per_decade=per_decade)
            elif given.strip().isdecimal():
                given = int(given)
        if not isinstance(given, int) or not _is_integer(given) or given < 1:
            raise InputError(f"every is {value!r}, {_EXPECTED}")
        return cls(every=given)

    def is_due(self, step: int) -> bool:
        """Return whether a step is observed.

        Args:
            step: number of the optimizer's step, ≥ 0.
        """
        if self.every is not None:
            return step % self.every == 0
        assert self.per_decade is not None
        if step <= 1:
            return True
        index = round(self.per_decade * math.log10(step))
        near = (index - 1, index, index + 1)
        return any(round(10 ** (i / self.per_decade)) == step for i in near)

    def __str__(self) -> str:
        """Return the schedule in the form that `of` reads."""
        return f"log:{self.per_decade}" if self.every is None else str(self.every)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
