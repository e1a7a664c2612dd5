"""What a model of text is trained and evaluated on: tokens, targets, and where padding is."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from powernorm.lab.data.orders import Order

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


class TrainingBatches:
    """The batches of a training run, in an order that seed and position alone determine.

    Args:
        order: which rows make a batch.
        batch_of: makes one out of the numbers of its rows and its position.
        tokens_per_batch: mean number of positions in a batch that are no padding.
        num_targets: of the rows of a batch, where batches have unequal numbers of them.
        batches_per_update: micro-batches over which the gradient is summed: where there are
            several, each says the mean number of their targets, so that all targets of an update
            count alike.
    """

    def __init__(
        self,
        order: Order,
        batch_of: Callable[[Tensor, int], Any],
        *,
        tokens_per_batch: float,
        num_targets: Callable[[Tensor], int] | None = None,
        batches_per_update: int = 1,
    ) -> None:
        self._order = order
        self._batch_of = batch_of
        self.batches_per_epoch = order.batches_per_epoch
        """Batches after which the rows begin anew."""
        self.tokens_per_batch = tokens_per_batch
        self._num_targets = num_targets
        self._batches_per_update = batches_per_update

    def batch(self, position: int) -> Any:
        """Return the batch at `position`, counted from the start of the run over all epochs."""
        batch = self._batch_of(self._order.at(position), position)
        size = self._batches_per_update
        if self._num_targets is None or size == 1:
            return batch
        first = position - position % size
        total = sum(self._num_targets(self._order.at(first + part)) for part in range(size))
        return batch._replace(loss_targets=total / size)


class EvaluationBatches:
    """The batches of an evaluation, always the same.

    Args:
        parts: what each batch is made of, such as the numbers of its rows.
        batch_of: makes one out of its part and its number.
    """

    def __init__(
        self, parts: "Sequence[Any] | EvaluationBatches", batch_of: Callable[[Any, int], Any]
    ) -> None:
        self._parts = parts
        self._batch_of = batch_of

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._parts)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches."""
        for number, part in enumerate(self._parts):
            yield self._batch_of(part, number)
