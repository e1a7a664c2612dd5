"""The best evaluation of a run, and early stopping by patience."""

import math
from collections.abc import Mapping
from typing import Any, Literal

Direction = Literal["min", "max"]


class Best:
    """The best value of a metric over the evaluations of a run.

    Args:
        metric: name among the values of an evaluation; evaluations without it do not count.
        direction: whether lower or higher values are better.
        patience: evaluations without a better value after which the run ends; None never ends it.
    """

    def __init__(self, metric: str, direction: Direction, patience: int | None) -> None:
        self.metric = metric
        self._sign = 1.0 if direction == "min" else -1.0
        self._patience = patience
        self._best = math.inf
        self._waited = 0

    @property
    def is_out_of_patience(self) -> bool:
        """Whether `patience` evaluations in a row brought no better value."""
        return self._patience is not None and self._waited >= self._patience

    def sees(self, values: Mapping[str, float | None]) -> bool:
        """Record an evaluation and return whether it is the best so far."""
        if values.get(self.metric) is None:
            return False
        self._best, self._waited = self._after(values)
        return self._waited == 0

    def ends_with(self, values: Mapping[str, float | None]) -> bool:
        """Return whether these values would exhaust the patience, without recording them."""
        waited = self._waited if values.get(self.metric) is None else self._after(values)[1]
        return self._patience is not None and waited >= self._patience

    def _after(self, values: Mapping[str, float | None]) -> tuple[float, int]:
        value = self._sign * float(values[self.metric] or 0.0)
        # NaN is no better than anything.
        return (value, 0) if value < self._best else (self._best, self._waited + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the checkpoint."""
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._best, self._waited = float(state["best"]), int(state["waited"])
