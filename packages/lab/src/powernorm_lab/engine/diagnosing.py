"""Diagnoses of the model of a run between its steps."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from torch import nn

from powernorm.diagnosis import diagnose
from powernorm.errors import InputError
from powernorm.inspection.batches import Forward
from powernorm.records import DiagnosisRecord, VerdictRecord

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
