"""What a model of text is trained and evaluated on: tokens, targets, and where padding is."""

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED: Final = -100
"""The target of positions that are no part of the loss, as in torch's cross entropy."""


class Batch(NamedTuple):
    """Sequences and, at every position, what the model shall say there."""

    tokens: Tensor
    """int64, (batch, length)."""
    targets: Tensor
    """int64, (batch, length); `IGNORED` where nothing is asked."""
    padding_mask: Tensor | None
    """bool, (batch, length), True = padding; None without padding."""
    num_tokens: int
    """Positions that are no padding."""
    num_targets: int
    """Positions that are asked for."""

    def inputs(self) -> dict[str, Tensor]:
        """Return the keyword arguments of the model's forward."""
        if self.padding_mask is None:
            return {"tokens": self.tokens}
        return {"tokens": self.tokens, "padding_mask": self.padding_mask}

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device."""
        mask = None if self.padding_mask is None else self.padding_mask.to(device)
        return self._replace(
            tokens=self.tokens.to(device), targets=self.targets.to(device), padding_mask=mask
        )


def joined(batches: Sequence[Batch]) -> Batch:
    """Return one batch of all rows, padded to the longest."""
    length = max(batch.tokens.shape[1] for batch in batches)
    padded = any(
        batch.padding_mask is not None or batch.tokens.shape[1] < length for batch in batches
    )
    masks = [
        torch.zeros_like(batch.tokens, dtype=torch.bool)
        if batch.padding_mask is None
        else batch.padding_mask
        for batch in batches
    ]
    return Batch(
        tokens=_stacked([batch.tokens for batch in batches], length, 0),
        targets=_stacked([batch.targets for batch in batches], length, IGNORED),
        padding_mask=_stacked(masks, length, True) if padded else None,
        num_tokens=sum(batch.num_tokens for batch in batches),
        num_targets=sum(batch.num_targets for batch in batches),
    )


def _stacked(parts: Sequence[Tensor], length: int, filling: int) -> Tensor:
    return torch.cat([F.pad(part, (0, length - part.shape[1]), value=filling) for part in parts])


class TrainingBatches(Protocol):
    """The batches of a training run, in an order that seed and position alone determine."""

    @property
    def batches_per_epoch(self) -> int:
        """Return the number of batches after which the text begins anew."""
        ...

    @property
    def tokens_per_batch(self) -> float:
        """Return the mean number of positions in a batch that are no padding."""
        ...

    def batch(self, position: int) -> Batch:
        """Return the batch at `position`, counted from the start of the run over all epochs."""
        ...
