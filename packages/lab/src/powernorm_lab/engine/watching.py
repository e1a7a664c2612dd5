"""Evaluation mode between steps, and the monitor of a run's norms."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from powernorm.diagnosis import NormMonitor


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Put modules into evaluation mode, and restore the mode of each submodule on exit."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        # `eval` is not called: a norm with frozen statistics treats it as the user's decision.
        for part, _ in modes:
            part.training = False
        yield
    finally:
        for part, training in modes:
            part.training = training


class Monitoring:
    """A monitor of norms, and the function that writes its rows."""

    def __init__(
        self,
        monitor: NormMonitor,
        scale: Callable[[], float | Tensor],
        write: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._monitor = monitor
        self._scale = scale
        self._write = write

    def start(self, step: int) -> None:
        """Prepare for a step."""
        self._monitor.start_step(step, self._scale())

    def finish(self, step: int) -> None:
        """Write the rows of a step."""
        for row in self._monitor.finish_step(step):
            self._write(row)

    def close(self) -> None:
        """Detach the monitor from the model."""
        self._monitor.detach()
