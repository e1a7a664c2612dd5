"""What running statistics cost in evaluation: the loss by them against that by the batch's own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from powernorm.diagnosis.reestimation import Loss, mean_loss
from powernorm.errors import InputError
from powernorm.norms.observation import (
    check_function,
    check_model,
    check_repeatable,
    observed_layers,
)
from powernorm.norms.preserved_state import preserved_state
from powernorm.surgery.populations import evaluating_by_batches


@dataclass(frozen=True)
class EvaluationGap:
    """Mean losses of the same batches in evaluation.

    Attributes:
        running_loss: by the running statistics.
        batch_loss: by those of each batch.
    """

    running_loss: float
    batch_loss: float

    @property
    def gap(self) -> float:
        """What the running statistics add to the loss."""
        return self.running_loss - self.batch_loss


def evaluation_gap(model: nn.Module, batches: Iterable[Any], loss: Loss) -> EvaluationGap | None:
    """The loss in evaluation by running statistics and by the batch's own.

    The second differs from the first in nothing but the statistics: PowerNorm and MABN, which
    normalise by running statistics in training too, get those of the batch here, and dropout is
    off. Weights, buffers, modes and torch's random numbers are the same afterwards.

    Args:
        model: in any mode.
        batches: gone through twice.
        loss: gives the mean loss of the model on a batch, or (mean loss, number of tokens), by
            which batches are then weighted.

    Returns:
        None for a model without batch statistics.

    Raises:
        InputError: no batches, batches that can be gone through only once, no function.

    Distributed:
        The statistics of this process's batches; nothing is exchanged.
    """
    check_model(model)
    check_function("loss", loss)
    if loss is None:
        raise InputError("loss is None, expected a function of (model, batch)")
    layers = observed_layers(model)
    if not layers:
        return None
    check_repeatable(batches, "two")
    with preserved_state(model, ()):
        running = mean_loss(model, batches, loss)
    # Swapped models hand their mask to norms only where some of them count as in training.
    with preserved_state(model, layers.values()), evaluating_by_batches(layers):
        return EvaluationGap(running, mean_loss(model, batches, loss))
