"""Evaluations, monitors and diagnoses between the steps of a run, and its throughput."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from powernorm.diagnosis import NormMonitor, diagnose
from powernorm.errors import InputError
from powernorm.inspection.batches import Forward
from powernorm.records import DiagnosisRecord, VerdictRecord
from powernorm_lab.engine.processes import summed


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

    @property
    def is_unseen(self) -> bool:
        """Whether no evaluation had the metric."""
        return math.isinf(self._best) and not self._waited

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


EPOCH: Final = "epoch"
Epochs = Callable[[int], float]
"""Converts a number of steps to epochs."""


class Diagnosing:
    """Diagnoses a model at regular steps, each time on the same batches.

    Weights, buffers and random states do not change. Several processes read the same batches, so
    that all of them call the layers, and exchange statistics, equally often.

    Args:
        name: name of the run.
        every: steps between two diagnoses, or `epoch`.
        model: the model in training, on its device.
        batches: batches on the same device.
        forward: runs the model on a batch; None calls it.
        epochs: converts a number of steps to epochs; needed for `epoch`.
    """

    def __init__(
        self,
        name: str,
        every: int | Literal["epoch"],
        model: nn.Module,
        batches: Sequence[Any],
        forward: Forward | None,
        epochs: Epochs | None,
    ) -> None:
        self._name = name
        self._every = every
        self._model = model
        self._batches = batches
        self._forward = forward
        self._epochs = epochs

    def is_due(self, step: int) -> bool:
        """Return whether the model is diagnosed after `step` steps."""
        if self._every == EPOCH:
            assert self._epochs is not None
            # A step may begin in one epoch and end in the next one.
            return step == 0 or int(self._epochs(step)) > int(self._epochs(step - 1))
        return step % int(self._every) == 0

    def diagnose(self, step: int) -> DiagnosisRecord:
        """Return the diagnosis after `step` steps.

        If the model cannot be diagnosed, such as with NaN, the record has a reason and no layers.
        """
        try:
            report = diagnose(self._model, self._batches, self._forward, batch_sizes=())
            record = replace(report, model=self._name, step=step, scales=()).to_json()
        except InputError as error:
            record = _without_layers(self._name, step, str(error))
        if self._epochs is not None:
            record["epoch"] = self._epochs(step)
        return record


def _without_layers(name: str, step: int, reason: str) -> DiagnosisRecord:
    return DiagnosisRecord(
        format=1,
        model=name,
        step=step,
        num_batches=0,
        num_tokens=0,
        padding=0.0,
        layers=[],
        verdict=VerdictRecord(
            action="keep", norm=None, lowest=None, reasons=[reason], thresholds=[]
        ),
        batch_sizes=[],
        spectra=[],
        scales=[],
        evaluation=[],
        notes=[reason],
    )
