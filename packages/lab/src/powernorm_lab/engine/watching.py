"""What is done to a model between its steps: evaluation, and the monitor of its norms."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from powernorm.diagnosis import NormMonitor


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Put modules into evaluation mode, and each part of them back into its own afterwards."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        # Not by `eval`, which a norm with frozen statistics takes for a wish of its user.
        for part, _ in modes:
            part.training = False
        yield
    finally:
        for part, training in modes:
            part.training = training


class Monitoring:
    """A monitor and where its rows go."""

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
        """Write what was seen in a step."""
        for row in self._monitor.finish_step(step):
            self._write(row)

    def close(self) -> None:
        """Leave the model as it was."""
        self._monitor.detach()
