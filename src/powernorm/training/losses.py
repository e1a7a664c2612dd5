"""Cross entropy with label smoothing, and without, of the same logits."""

import torch
import torch.nn.functional as F
from torch import Tensor

from powernorm.data.batch import IGNORED


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
