"""What outputs cost: cross entropy with label smoothing, or the likelihood of the model itself."""

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powernorm.lab.data.batch import IGNORED


@runtime_checkable
class OwnLikelihood(Protocol):
    """A model whose outputs are no logits of independent answers."""

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the summed negative log-likelihood of the targets, 0-d."""
        ...


def training_losses(
    model: nn.Module, outputs: Tensor, targets: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the summed loss that is minimised and the plain one, which has no graph.

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
    return token_nll(outputs, targets)


def token_nll(logits: Tensor, targets: Tensor) -> Tensor:
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
    """Return the summed loss that is minimised and the plain cross entropy, which has no graph.

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
