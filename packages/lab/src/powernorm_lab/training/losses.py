"""What outputs cost: cross entropy with label smoothing, or the likelihood of the model itself."""

from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powernorm.integrations.trainers import process_penalty
from powernorm_lab.data.batch import IGNORED, Batch

TaskModel = nn.Module
"""`forward(**batch.inputs())` gives logits, the classes in the last dimension, or what its own
`nll(outputs, targets)` takes; `features(**batch.inputs())` runs the layers only."""


@runtime_checkable
class OwnLikelihood(Protocol):
    """A model whose outputs are no logits of independent answers."""

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the summed negative log-likelihood of the targets, 0-d."""
        ...


class Losses(NamedTuple):
    """What a micro-batch costs."""

    minimized: Tensor
    """0-d, with a graph; of one of several processes, its share of all targets."""
    cross_entropy: Tensor
    """0-d, without a graph: what is logged."""


class TrainingLoss(nn.Module):
    """The losses of a model per target, as a module, for processes to average its gradients.

    Where batches say by `loss_targets` what to divide by, the mean over the micro-batches of an
    update, and over processes, is (Σ cross entropies) / (targets of the update), also where they
    have unequal numbers of targets.

    Args:
        model: gives logits, or what its own `nll` takes.
        smoothing: of the labels.
        compile: whether `torch.compile` makes kernels of the model's forward and backward. What
            else calls the model, such as a validation, calls it as it is.
    """

    def __init__(self, model: nn.Module, smoothing: float, *, compile: bool = False) -> None:  # noqa: A002
        super().__init__()
        self.model = model
        self._smoothing = smoothing
        self._compile = compile
        # Not as a module, which would register every parameter a second time.
        self.__dict__["_call"] = None

    def forward(self, batch: Batch) -> Losses:
        """Return the losses of a batch."""
        if self.__dict__["_call"] is None:
            # At the first call: hooks of a monitor come before.
            self.__dict__["_call"] = torch.compile(self.model) if self._compile else self.model
        outputs = self.__dict__["_call"](**batch.inputs())
        minimized, plain = training_losses(self.model, outputs, batch.targets, self._smoothing)
        tokens = _loss_tokens(batch)
        # Some minimize a mean over sentences and report one over words.
        return Losses(minimized / tokens, plain / (batch.logged_targets or tokens))


def _loss_tokens(batch: Batch) -> float:
    """Return what the summed loss of a batch is divided by.

    Of one of several processes: its share of all targets, which may be below 1.
    """
    return batch.num_targets if batch.loss_targets is None else batch.loss_targets


def batch_penalty(model: nn.Module, batch: Batch) -> Tensor | None:
    """Return what the penalty of RBN layers adds to the loss of a batch after its forward."""
    # A tensor: no number of tokens is below 1, but the share of one process may be.
    return process_penalty(model, "mean", torch.tensor(_loss_tokens(batch)))


def training_losses(
    model: nn.Module, outputs: Tensor, targets: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the summed loss that is minimized and the plain one, which has no graph.

    Args:
        model: gave the outputs.
        outputs: logits, (…, classes), or what the model's `nll` takes.
        targets: int64, (…); those that are `IGNORED` do not count.
        smoothing: of the labels; means nothing to a likelihood of the model's own.

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
        model: gave the outputs.
        outputs: logits, (…, classes), or what the model's `nll` takes.
        targets: int64, (…); those that are `IGNORED` do not count.
    """
    if isinstance(model, OwnLikelihood):
        return model.nll(outputs, targets)
    return _token_nll(outputs, targets)


def _token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the summed negative log-likelihood of the targets, 0-d float32.

    Args:
        logits: (…, classes).
        targets: int64, (…); those that are `IGNORED` do not count.
    """
    return F.cross_entropy(
        logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def smoothed_cross_entropy(
    logits: Tensor, targets: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the summed loss that is minimized and the plain cross entropy, which has no graph.

    With smoothing ε the target distribution is (1 - ε) on the target and ε spread over the whole
    vocabulary (Szegedy et al. 2016; torch's definition).

    Args:
        logits: (positions, vocabulary).
        targets: int64, (positions,); those that are `IGNORED` do not count.
        smoothing: ε, 0 ≤ ε < 1.

    Returns:
        Both 0-d, in nats.
    """
    # One softmax for both: it is a good part of the step where the vocabulary is large.
    log_probabilities = F.log_softmax(logits.float(), dim=-1)
    plain = F.nll_loss(log_probabilities, targets, ignore_index=IGNORED, reduction="sum")
    if not smoothing:
        return plain, plain.detach()
    counted = torch.where(targets == IGNORED, 0.0, log_probabilities.mean(dim=-1))
    return (1 - smoothing) * plain - smoothing * counted.sum(), plain.detach()
