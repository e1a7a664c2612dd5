"""What running statistics cost in evaluation: the loss by them against that by the batch's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from powernorm.diagnosis.reestimation import Loss, mean_loss
from powernorm.errors import InputError
from powernorm.norms import BatchStatisticsNorm
from powernorm.norms.observation import (
    check_function,
    check_model,
    check_repeatable,
    moments_of_call,
    observed_layers,
)
from powernorm.norms.untouched import untouched


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
    with untouched(model, ()):
        running = mean_loss(model, batches, loss)
        with _by_batch_statistics(layers.values()):
            return EvaluationGap(running, mean_loss(model, batches, loss))


@contextmanager
def _by_batch_statistics(layers: Iterable[BatchStatisticsNorm]) -> Iterator[None]:
    """Every call puts its own statistics where the layer evaluates by the running ones."""
    handles = [
        layer.register_forward_pre_hook(_take_over, with_kwargs=True, prepend=True)
        for layer in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _take_over(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert isinstance(layer, BatchStatisticsNorm)
    moments = moments_of_call(layer, args, kwargs)
    if layer.centered:
        _fill(layer, "running_mean", moments.mean, moments.count)
        _fill(layer, "running_var", moments.var, moments.count)
    else:
        _fill(layer, "running_second_moment", moments.second_moment, moments.count)


def _fill(layer: BatchStatisticsNorm, name: str, value: Tensor, count: Tensor) -> None:
    buffer = layer.get_buffer(name)
    buffer.copy_(torch.where(count > 0, value.to(buffer.dtype), buffer))
