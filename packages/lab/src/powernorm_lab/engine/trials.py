"""Trials of a tuning: runs that see no test data, and end early where they fall behind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from powernorm_lab.runs import Goal

Limits = Mapping[int, float]
"""By step: the value that a run has to have reached there."""


@dataclass(frozen=True)
class TrialRules:
    """What makes the runs of a grid trials: how they are judged, and when one is given up.

    The limits are fixed before a run begins, so that it comes to the same end wherever and however
    often it is trained.
    """

    goal: Goal
    """The value of the valid split by which trials are judged, and which way it is better."""
    limits: Mapping[str, Limits] = field(default_factory=dict)
    """By norm."""

    def better(self, one: float | None, other: float) -> float:
        """Return the better one of two values; the other where there is no one."""
        if one is None:
            return other
        return min(one, other) if self.goal["direction"] == "min" else max(one, other)

    def is_behind(self, norm: str, step: int, best: float | None) -> bool:
        """Return whether a run is to be given up after a validation.

        Args:
            norm: of the run.
            step: at which it was validated.
            best: its best value so far; None where none was a number.
        """
        limit = self.limits.get(norm, {}).get(step)
        if limit is None or best is None:
            return False
        return best > limit if self.goal["direction"] == "min" else best < limit

    def to_json(self) -> dict[str, Any]:
        """Return the rules for the file that tells workers what to train."""
        return {"goal": dict(self.goal), "limits": {n: {**one} for n, one in self.limits.items()}}


def median_limits(histories: Sequence[Limits], *, at_least: int, first_step: int) -> Limits:
    """Return the limits of the median rule: at each step the median of the earlier runs' values.

    A run whose best value so far is worse than that is given up, as by Optuna's MedianPruner.

    Args:
        histories: of the earlier runs that came to their end, value by step.
        at_least: so many of them are needed.
        first_step: before this step no run is given up.
    """
    if len(histories) < at_least:
        return {}
    steps = sorted({step for history in histories for step in history if step >= first_step})
    return {step: median(one[step] for one in histories if step in one) for step in steps}
