"""Trials of a tuning: runs without test data, pruned if they fall behind earlier ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from powernorm_lab.runs import Goal

Limits = Mapping[int, float]
"""Values by step; a run whose best value so far is worse is pruned."""


@dataclass(frozen=True)
class TrialRules:
    """Rules for the runs of a grid that are trials: their metric, and when they are pruned.

    The limits are fixed before a run starts, so that a run has the same outcome in every worker and
    after every restart.
    """

    goal: Goal
    """Metric of the valid split and its direction."""
    limits: Mapping[str, Limits] = field(default_factory=dict)
    """Limits by norm."""

    def better(self, one: float | None, other: float) -> float:
        """Return the better of two values; the second if the first is None."""
        if one is None:
            return other
        return min(one, other) if self.goal["direction"] == "min" else max(one, other)

    def is_behind(self, norm: str, step: int, best: float | None) -> bool:
        """Return whether to prune a run after a validation.

        Args:
            norm: norm of the run.
            step: step of the validation.
            best: best value so far; None if no value was finite.
        """
        limit = self.limits.get(norm, {}).get(step)
        if limit is None or best is None:
            return False
        return best > limit if self.goal["direction"] == "min" else best < limit

    def to_json(self) -> dict[str, Any]:
        """Return the rules for work.json, which workers read."""
        return {"goal": dict(self.goal), "limits": {n: {**one} for n, one in self.limits.items()}}


def median_limits(histories: Sequence[Limits], *, at_least: int, first_step: int) -> Limits:
    """Return the limits of the median rule: at each step the median of the earlier runs' values.

    A run whose best value so far is worse than its limit is pruned, as by Optuna's MedianPruner.

    Args:
        histories: values by step of the earlier runs that were trained to their end.
        at_least: minimal number of earlier runs; with fewer there are no limits.
        first_step: first step at which a run may be pruned.
    """
    if len(histories) < at_least:
        return {}
    steps = sorted({step for history in histories for step in history if step >= first_step})
    return {step: median(one[step] for one in histories if step in one) for step in steps}
