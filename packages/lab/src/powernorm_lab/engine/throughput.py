"""Throughput of training, without evaluations and checkpoints."""

import time
from collections.abc import Mapping

import torch

from powernorm_lab.engine.processes import summed

NUM_SKIPPED_STEPS = 5
"""Number of first steps that are not counted: they allocate memory and choose kernels."""


class Throughput:
    """Counts tokens, examples and seconds of training steps.

    The clock runs from `begin` to `pause`; call `pause` before validations and checkpoints to leave
    their time out. On a GPU the device is synchronized only when the clock starts and stops, not
    for every batch.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.tokens = 0
        self.examples = 0
        self._skipped = 0
        self._started: float | None = None

    def begin(self) -> None:
        """Start the clock unless it runs already or the first steps are not done."""
        if self._started is None and self._skipped >= NUM_SKIPPED_STEPS:
            self._started = _now()

    def count(self, num_tokens: int, num_examples: int = 0) -> None:
        """Count the tokens and examples of a step if the clock runs."""
        if self._started is not None:
            self.tokens += num_tokens
            self.examples += num_examples

    def end(self) -> None:
        """Count a step as skipped if the clock does not run."""
        if self._started is None:
            self._skipped += 1

    def pause(self) -> None:
        """Stop the clock."""
        if self._started is not None:
            self.seconds += _now() - self._started
            self._started = None

    def total(self) -> dict[str, float]:
        """Return the total throughput of all processes, by its names in results; all call it."""
        self.pause()
        counts = (self.tokens, self.examples)
        speeds = summed([count / self.seconds if self.seconds else 0.0 for count in counts])
        named = zip(("tokens_per_second", "examples_per_second"), speeds, strict=True)
        return {name: speed for name, speed in named if speed}

    def state_dict(self) -> dict[str, float]:
        """Return the state for the checkpoint."""
        return {"seconds": self.seconds, "tokens": self.tokens, "examples": self.examples}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state that `state_dict` returned."""
        self.seconds = state["seconds"]
        self.tokens, self.examples = int(state["tokens"]), int(state["examples"])


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
