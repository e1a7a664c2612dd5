"""Losses: cross entropy with label smoothing, or a model's own likelihood."""

from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powernorm.integrations.trainers import process_penalty
from powernorm_lab.data.batch import IGNORED, Batch

TaskModel = nn.Module
"""A model of a task: `forward(**batch.inputs())` returns logits with classes in the last dimension,
or the argument of its own `nll(outputs, targets)`; `features(**batch.inputs())` runs only the
layers."""


@runtime_checkable
class OwnLikelihood(Protocol):
    """A model whose outputs are not logits of independent predictions."""

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the summed negative log-likelihood of the targets, 0-d."""
        ...


class Losses(NamedTuple):
    """Losses of a micro-batch."""

    minimized: Tensor
    """Minimized loss, 0-d, with a graph; in one of several processes its share."""
    cross_entropy: Tensor
    """Logged loss, 0-d, without a graph."""


class TrainingLoss(nn.Module):
    """The losses of a model per target, as a module that DistributedDataParallel can wrap.

    With `loss_targets` in the batches, the mean over the micro-batches of an update and over
    processes is (Σ cross entropies) / (targets of the update), even if their numbers of targets
    differ.

    Args:
        model: returns logits, or the argument of its own `nll`.
        smoothing: label smoothing.
        compile: whether to compile the model's forward and backward with `torch.compile`. Other
            calls of the model, such as validations, are not compiled.
    """

    def __init__(self, model: nn.Module, smoothing: float, *, compile: bool = False) -> None:  # noqa: A002
        super().__init__()
        self.model = model
        self._smoothing = smoothing
        self._compile = compile
        # Not an attribute of nn.Module, which would register every parameter a second time.
        self.__dict__["_call"] = None

    def forward(self, batch: Batch) -> Losses:
        """Return the losses of a batch."""
        if self.__dict__["_call"] is None:
            # Compiled at the first call, after hooks of a monitor are registered.
            self.__dict__["_call"] = torch.compile(self.model) if self._compile else self.model
        outputs = self.__dict__["_call"](**batch.inputs())
        minimized, plain = training_losses(self.model, outputs, batch.targets, self._smoothing)
        tokens = _loss_tokens(batch)
        # Some tasks minimize a mean over sentences and log one over words.
        return Losses(minimized / tokens, plain / (batch.logged_targets or tokens))


def _loss_tokens(batch: Batch) -> float:
    """Return the divisor of the summed loss of a batch.

    In one of several processes it is the process's share of all targets, which may be below 1.
    """
    return batch.num_targets if batch.loss_targets is None else batch.loss_targets


def batch_penalty(model: nn.Module, batch: Batch) -> Tensor | None:
    """Return the penalty of RBN layers for a batch after its forward; None without such layers."""
    # A tensor, because the penalty refuses numbers of tokens below 1, as a process's share may be.
    return process_penalty(model, "mean", torch.tensor(_loss_tokens(batch)))


def training_losses(
    model: nn.Module, outputs: Tensor, targets: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the summed minimized loss, and the summed loss without smoothing, without a graph.

    Args:
        model: model that computed the outputs.
        outputs: logits, (…, classes), or the argument of the model's `nll`.
        targets: int64, (…); `IGNORED` targets do not count.
        smoothing: label smoothing; a model with its own `nll` ignores it.

    Returns:
        Both 0-d, in nats.
    """
    if isinstance(model, OwnLikelihood):
        loss = model.nll(outputs, targets)
        return loss, loss.detach()
    return smoothed_cross_entropy(outputs.flatten(0, -2), targets.flatten(), smoothing)


def outputs_nll(model: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the summed negative log-likelihood of the targets, 0-d.

    Args:
        model: model that computed the outputs.
        outputs: logits, (…, classes), or the argument of the model's `nll`.
        targets: int64, (…); `IGNORED` targets do not count.
    """
    if isinstance(model, OwnLikelihood):
        return model.nll(outputs, targets)
    return _token_nll(outputs, targets)


def _token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the summed negative log-likelihood of the targets, 0-d float32.

    Args:
        logits: (…, classes).
        targets: int64, (…); `IGNORED` targets do not count.
    """
    return F.cross_entropy(
        logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def smoothed_cross_entropy(
    logits: Tensor, targets: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the summed minimized loss, and the summed cross entropy without a graph.

    With smoothing ε the target distribution is (1 - ε) on the target and ε spread over the whole
    vocabulary (Szegedy et al. 2016; torch's definition).

    Args:
        logits: (positions, vocabulary).
        targets: int64, (positions,); `IGNORED` targets do not count.
        smoothing: ε, 0 ≤ ε < 1.

    Returns:
        Both 0-d, in nats.
    """
    # One softmax for both: it takes much of a step with a large vocabulary.
    log_probabilities = F.log_softmax(logits.float(), dim=-1)
    plain = F.nll_loss(log_probabilities, targets, ignore_index=IGNORED, reduction="sum")
    if not smoothing:
        return plain, plain.detach()
    counted = torch.where(targets == IGNORED, 0.0, log_probabilities.mean(dim=-1))
    return (1 - smoothing) * plain - smoothing * counted.sum(), plain.detach()
