"""Speed of training, without what stands around it."""

import time

import torch

NUM_SKIPPED_BATCHES = 5
"""The first batches allocate memory and choose kernels; they are not counted."""


class Throughput:
    """Counts tokens, examples and seconds of training steps.

    The clock runs from `begin_batch` to `pause`, so that time spent in validation and in writing
    checkpoints is left out when `pause` comes before it. On a GPU the clock waits for the device
    when it starts and stops only, not at every batch.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.tokens = 0
        self.examples = 0
        self._skipped = 0
        self._started: float | None = None

    def begin_batch(self) -> None:
        """Start the clock unless it runs already or the run has only just begun."""
        if self._started is None and self._skipped >= NUM_SKIPPED_BATCHES:
            self._started = _now()

    def end_batch(self, num_tokens: int, num_examples: int = 0) -> None:
        """Count a batch if the clock runs."""
        if self._started is None:
            self._skipped += 1
        else:
            self.tokens += num_tokens
            self.examples += num_examples

    def pause(self) -> None:
        """Stop the clock."""
        if self._started is not None:
            self.seconds += _now() - self._started
            self._started = None

    @property
    def tokens_per_second(self) -> float | None:
        """Return the speed so far; None where nothing was counted."""
        return self.tokens / self.seconds if self.seconds > 0 and self.tokens else None

    @property
    def examples_per_second(self) -> float | None:
        """Return the speed in rows so far; None where nothing was counted."""
        return self.examples / self.seconds if self.seconds > 0 and self.examples else None


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
