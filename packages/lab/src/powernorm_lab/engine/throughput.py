"""Speed of training, without what stands around it."""

import time
from collections.abc import Mapping

import torch

from powernorm_lab.engine.processes import summed

NUM_SKIPPED_STEPS = 5
"""The first steps allocate memory and choose kernels; they are not counted."""


class Throughput:
    """Counts tokens, examples and seconds of training steps.

    The clock runs from `begin` to `pause`, so that time spent in validation and in writing
    checkpoints is left out when `pause` comes before it. On a GPU the clock waits for the device
    when it starts and stops only, not at every batch.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.tokens = 0
        self.examples = 0
        self._skipped = 0
        self._started: float | None = None

    def begin(self) -> None:
        """Start the clock unless it runs already or the run has only just begun."""
        if self._started is None and self._skipped >= NUM_SKIPPED_STEPS:
            self._started = _now()

    def count(self, num_tokens: int, num_examples: int = 0) -> None:
        """Count what a step trains on if the clock runs."""
        if self._started is not None:
            self.tokens += num_tokens
            self.examples += num_examples

    def end(self) -> None:
        """Take note of a step that was not counted."""
        if self._started is None:
            self._skipped += 1

    def pause(self) -> None:
        """Stop the clock."""
        if self._started is not None:
            self.seconds += _now() - self._started
            self._started = None

    def total(self) -> dict[str, float]:
        """Return the speeds of all processes together, by their names in results; all call it."""
        self.pause()
        counts = (self.tokens, self.examples)
        speeds = summed([count / self.seconds if self.seconds else 0.0 for count in counts])
        named = zip(("tokens_per_second", "examples_per_second"), speeds, strict=True)
        return {name: speed for name, speed in named if speed}

    def state_dict(self) -> dict[str, float]:
        """Return what a run that resumes has to know."""
        return {"seconds": self.seconds, "tokens": self.tokens, "examples": self.examples}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take what `state_dict` returned."""
        self.seconds = state["seconds"]
        self.tokens, self.examples = int(state["tokens"]), int(state["examples"])


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
