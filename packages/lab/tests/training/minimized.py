"""The minimized loss of a run."""

from torch import Tensor, nn

from powernorm_lab.data.batch import Batch
from powernorm_lab.training.losses import TrainingLoss, batch_penalty


def training_losses(model: nn.Module, batch: Batch, smoothing: float = 0.0) -> dict[str, Tensor]:
    """Return `loss`, with the penalty of RBN layers, and the logged `cross_entropy`."""
    minimized, cross_entropy = TrainingLoss(model, smoothing)(batch)
    added = batch_penalty(model, batch)
    return {
        "loss": minimized if added is None else minimized + added,
        "cross_entropy": cross_entropy,
    }
