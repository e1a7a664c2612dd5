"""Diagnoses of the model of a run between its updates."""

from dataclasses import replace
from typing import Final

import torch
from torch import nn

from powernorm.diagnosis import diagnose
from powernorm.errors import InputError
from powernorm.inspection.devices import MovedBatches
from powernorm.lab.data.batch import Batch, TrainingBatches
from powernorm.lab.settings.comparison import ComparisonSettings
from powernorm.lab.settings.training import EPOCH
from powernorm.runs import DiagnosisRecord, VerdictRecord

NUM_BATCHES: Final = 20
"""Training batches in each of a diagnosis's two passes: `powernorm diagnose` takes 50 once."""


class Diagnosing:
    """Says when a model is due, and diagnoses it on the first 20 training batches of the run.

    Weights, buffers and random numbers stay as they are. In several processes each reads the whole
    batches, so that all of them call the layers, and exchange statistics, equally often.

    Args:
        name: of the run.
        model: that trains, on its device.
        config: of the comparison; `training.diagnose_every` is not 0.
        batches: of the training.
        device: of the model.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        config: ComparisonSettings,
        batches: TrainingBatches,
        device: torch.device,
    ) -> None:
        self._name = name
        self._model = model
        self._training = config.training
        self._accumulation = config.optimizer.accumulation
        self._batches_per_epoch = batches.batches_per_epoch
        # Made once: an order keeps the epochs around its latest batch only.
        chosen = [batches.batch(at) for at in range(NUM_BATCHES)]
        self._batches = MovedBatches(chosen, device)

    def is_due(self, step: int) -> bool:
        """Return whether the model is diagnosed after so many updates."""
        every = self._training.diagnose_every
        if step in (0, self._training.max_steps):
            return True
        if every == EPOCH:
            # An update may begin in one epoch and end in the next one.
            before, now = (
                updates * self._accumulation // self._batches_per_epoch
                for updates in (step - 1, step)
            )
            return now > before
        return step % int(every) == 0

    def diagnose(self, step: int) -> DiagnosisRecord:
        """Return the diagnosis after so many updates.

        Of a model that cannot be diagnosed, as one that holds NaN, it has no layers and says why.
        """
        try:
            report = diagnose(self._model, self._batches, _features, batch_sizes=())
            record = replace(report, model=self._name, step=step, scales=()).to_json()
        except InputError as error:
            record = _without_layers(self._name, step, str(error))
        record["epoch"] = step * self._accumulation / self._batches_per_epoch
        return record


def _features(model: nn.Module, batch: Batch) -> object:
    """Run the layers only: the logits are no part of any norm."""
    return model.features(**batch.inputs())  # type: ignore[operator]


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
