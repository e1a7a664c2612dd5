"""What a model of text is trained and evaluated on: tokens, targets, and where padding is."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED: Final = -100
"""The target of positions that are no part of the loss, as in torch's cross entropy."""


class AnyBatch(Protocol):
    """What the training of every task asks a batch for."""

    @property
    def targets(self) -> Tensor:
        """Return what the model shall say, int64; `IGNORED` where nothing is asked."""
        ...

    @property
    def num_tokens(self) -> int:
        """Return the number of positions that are no padding."""
        ...

    @property
    def num_targets(self) -> int:
        """Return the number of positions that are asked for."""
        ...

    @property
    def loss_targets(self) -> float | None:
        """Return what the summed loss is divided by; None is `num_targets`."""
        ...

    def inputs(self) -> dict[str, Tensor]:
        """Return the keyword arguments of the model's forward."""
        ...

    def to(self, device: torch.device) -> Self:
        """Return the batch on a device."""
        ...

    def shard(self, rank: int, size: int) -> Self:
        """Return the rows of one of `size` processes."""
        ...

    def joined_with(self, others: Sequence[Self]) -> Self:
        """Return one batch of all rows."""
        ...


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
    loss_targets: float | None = None
    """What the summed loss is divided by; None is `num_targets`. A process that has a part of the
    batch divides by its share of all, so that the mean over processes is that over the batch."""

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

    def shard(self, rank: int, size: int) -> "Batch":
        """Return the rows of one of `size` processes: those from `rank` in steps of `size`.

        A process without rows gets one of padding alone, so that it calls every layer, and every
        exchange of statistics, as often as the others.
        """
        return Batch(
            tokens=_rows(self.tokens, rank, size, 0),
            targets=(targets := _rows(self.targets, rank, size, IGNORED)),
            padding_mask=(mask := _mask_rows(self.tokens, self.padding_mask, rank, size)),
            num_tokens=int((~mask).sum()) if mask is not None else targets.numel(),
            num_targets=int((targets != IGNORED).sum()),
            loss_targets=(self.loss_targets or self.num_targets) / size,
        )

    def joined_with(self, others: Sequence["Batch"]) -> "Batch":
        """Return one batch of all rows, padded to the longest."""
        return joined([self, *others])


def _rows(values: Tensor, rank: int, size: int, filling: int) -> Tensor:
    own = values[rank::size]
    return own if len(own) else torch.full_like(values[:1], filling)


def _mask_rows(tokens: Tensor, mask: Tensor | None, rank: int, size: int) -> Tensor | None:
    if len(tokens) <= rank:
        return torch.ones_like(tokens[:1], dtype=torch.bool)
    return None if mask is None else mask[rank::size]


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

    def batch(self, position: int) -> Any:
        """Return the batch at `position`, counted from the start of the run over all epochs."""
        ...
