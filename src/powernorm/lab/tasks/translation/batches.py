"""Batches of sentence pairs, as many at a time as a budget of tokens allows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from powernorm.errors import InputError
from powernorm.lab.data.batch import IGNORED
from powernorm.lab.data.segments import SEED_STRIDE
from powernorm.lab.data.subwords import END_ID
from powernorm.lab.data.token_budget import LengthGroups
from powernorm.lab.tasks.translation.token_lists import TokenLists

_PAIR_SEED: Final = 1 << 20
"""Keeps the generator of the pairs apart from that of the batches."""


@dataclass(frozen=True)
class EncodedPairSplit:
    """The sentence pairs of a split over the ids of their subwords."""

    source: TokenLists
    target: TokenLists

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.source)


class PairBatch(NamedTuple):
    """Sentences, their translations one position late, and what the model shall say there."""

    source: Tensor
    """int64, (batch, source length): each sentence with its end mark."""
    source_padding_mask: Tensor | None
    """bool, of the same shape, True = padding; None without padding."""
    target: Tensor
    """int64, (batch, target length): the end mark, then the translation."""
    target_padding_mask: Tensor | None
    """bool, of the same shape, True = padding; None without padding."""
    targets: Tensor
    """int64, of the same shape: the translation, then the end mark; `IGNORED` at padding."""
    num_tokens: int
    """Positions of both sides that are no padding."""
    num_targets: int
    """Positions that are asked for."""
    loss_targets: float | None = None
    """What the summed loss is divided by, so that the mean over the micro-batches of an update is
    that over the update's targets; None is `num_targets`."""

    def inputs(self) -> dict[str, Tensor]:
        """Return the keyword arguments of the model's forward."""
        inputs = {"source": self.source, "target": self.target}
        if self.source_padding_mask is not None:
            inputs["source_padding_mask"] = self.source_padding_mask
        if self.target_padding_mask is not None:
            inputs["target_padding_mask"] = self.target_padding_mask
        return inputs

    def to(self, device: torch.device) -> "PairBatch":
        """Return the batch on a device."""
        source_mask, target_mask = self.source_padding_mask, self.target_padding_mask
        return self._replace(
            source=self.source.to(device),
            source_padding_mask=None if source_mask is None else source_mask.to(device),
            target=self.target.to(device),
            target_padding_mask=None if target_mask is None else target_mask.to(device),
            targets=self.targets.to(device),
        )

    def shard(self, rank: int, size: int) -> "PairBatch":
        """Return the rows of one of `size` processes: those from `rank` in steps of `size`.

        A process without rows gets one of padding alone, so that it calls every layer, and every
        exchange of statistics, as often as the others. Losses divided by `loss_targets` have the
        same mean over all processes as that of the batch.
        """
        source, source_mask = _rows(self.source, self.source_padding_mask, rank, size)
        target, target_mask = _rows(self.target, self.target_padding_mask, rank, size)
        targets = self.targets[rank::size, : target.shape[1]]
        if not len(targets):
            targets = torch.full_like(target, IGNORED)
        num_targets = int((targets != IGNORED).sum())
        num_sources = source.numel() - (0 if source_mask is None else int(source_mask.sum()))
        return PairBatch(
            source=source,
            source_padding_mask=source_mask,
            target=target,
            target_padding_mask=target_mask,
            targets=targets,
            num_tokens=num_sources + num_targets,
            num_targets=num_targets,
            loss_targets=(self.loss_targets or self.num_targets) / size,
        )

    def joined_with(self, others: Sequence["PairBatch"]) -> "PairBatch":
        """Return one batch of all rows, padded to the longest."""
        return joined_pairs([self, *others])


def _rows(ids: Tensor, mask: Tensor | None, rank: int, size: int) -> tuple[Tensor, Tensor | None]:
    """Return some rows, no wider than they need, and their padding."""
    if len(ids) <= rank:
        return torch.full_like(ids[:1, :1], END_ID), torch.ones_like(ids[:1, :1], dtype=torch.bool)
    if mask is None:
        return ids[rank::size], None
    own = mask[rank::size]
    width = int((~own).sum(1).max())
    own = own[:, :width]
    return ids[rank::size, :width], own if own.any() else None


def joined_pairs(batches: Sequence[PairBatch]) -> PairBatch:
    """Return one batch of all rows, padded to the longest."""
    shares = [batch.loss_targets for batch in batches if batch.loss_targets is not None]
    source, source_mask = _stacked(
        [batch.source for batch in batches], [batch.source_padding_mask for batch in batches]
    )
    target, target_mask = _stacked(
        [batch.target for batch in batches], [batch.target_padding_mask for batch in batches]
    )
    return PairBatch(
        source=source,
        source_padding_mask=source_mask,
        target=target,
        target_padding_mask=target_mask,
        targets=_widened([batch.targets for batch in batches], target.shape[1], IGNORED),
        num_tokens=sum(batch.num_tokens for batch in batches),
        num_targets=sum(batch.num_targets for batch in batches),
        loss_targets=sum(shares) if len(shares) == len(batches) else None,
    )


def padded_sources(sentences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
    """Return the source side of a batch: sentences with their end marks, and their padding mask.

    Args:
        sentences: ids without end marks, at least one sentence.
    """
    return TokenLists.from_lists(sentences).padded(torch.arange(len(sentences)))


class TrainingPairs:
    """The batches of a training run, in an order that seed and position alone determine.

    Pairs of like length make a batch, each pair in one batch an epoch. Every epoch shuffles the
    batches, and which of equally long pairs are together.

    Args:
        split: to train on.
        batch_tokens: positions of the longer side of a batch at most, over all processes.
        count_padding: whether padded positions count.
        seed: of the shuffling.
        batches_per_update: micro-batches over which the gradient is summed.

    Raises:
        InputError: a pair has more than `batch_tokens` subwords.
    """

    def __init__(
        self,
        split: EncodedPairSplit,
        *,
        batch_tokens: int,
        count_padding: bool,
        seed: int,
        batches_per_update: int,
    ) -> None:
        longest = int(torch.maximum(split.source.lengths, split.target.lengths).max())
        if longest > batch_tokens:
            raise InputError(
                f"data.batch_tokens={batch_tokens} is less than the {longest} subwords of the "
                "longest training pair: raise it, or lower the greatest length of a pair."
            )
        self._split = split
        self._groups = LengthGroups(
            split.source.lengths,
            split.target.lengths,
            batch_tokens=batch_tokens,
            count_padding=count_padding,
        )
        self._seed = seed
        self._batches_per_update = batches_per_update
        self._batch_orders: dict[int, Tensor] = {}
        self._pair_order: tuple[int, Tensor] = (-1, torch.empty(0))

    @property
    def batches_per_epoch(self) -> int:
        """Return the number of batches after which the text begins anew."""
        return len(self._groups)

    @property
    def tokens_per_batch(self) -> float:
        """Return the mean number of positions in a batch that are no padding."""
        total = int(self._split.source.lengths.sum() + self._split.target.lengths.sum())
        return total / len(self._groups)

    def batch(self, position: int) -> PairBatch:
        """Return the batch at `position`, counted from the start of the run over all epochs."""
        epoch, index = divmod(position, len(self._groups))
        number = int(self._order_of_batches(epoch)[index])
        first, last = self._groups.bounds[number : number + 2]
        rows = self._order_of_pairs(epoch)[first:last]
        return _batch(self._split, rows)._replace(loss_targets=self._share(position))

    def _share(self, position: int) -> float:
        """Return the targets of the update over its micro-batches."""
        first = position - position % self._batches_per_update
        total = 0
        for place in range(first, first + self._batches_per_update):
            epoch, index = divmod(place, len(self._groups))
            total += int(self._groups.num_targets[self._order_of_batches(epoch)[index]])
        return total / self._batches_per_update

    def _order_of_batches(self, epoch: int) -> Tensor:
        if epoch not in self._batch_orders:
            # An update may begin in one epoch and end in a later one.
            self._batch_orders = {
                known: order
                for known, order in self._batch_orders.items()
                if abs(known - epoch) == 1
            }
            generator = _generator(self._seed, epoch)
            self._batch_orders[epoch] = torch.randperm(len(self._groups), generator=generator)
        return self._batch_orders[epoch]

    def _order_of_pairs(self, epoch: int) -> Tensor:
        if epoch != self._pair_order[0]:
            generator = _generator(_PAIR_SEED + self._seed, epoch)
            self._pair_order = epoch, self._groups.order(generator)
        return self._pair_order[1]


class EvaluationPairs:
    """The batches of an evaluation, in which each pair is once; pairs of like length together.

    Args:
        split: to evaluate on.
        batch_tokens: positions of the longer side of a batch at most, padding included; a pair
            that is longer makes a batch of its own.
        max_tokens: read only so many pairs, evenly spaced, that they have about so many targets.
    """

    def __init__(
        self,
        split: EncodedPairSplit,
        *,
        batch_tokens: int,
        max_tokens: int | None = None,
    ) -> None:
        chosen = _spaced(split.target.lengths, max_tokens)
        groups = LengthGroups(
            split.source.lengths[chosen],
            split.target.lengths[chosen],
            batch_tokens=batch_tokens,
            count_padding=True,
        )
        order = chosen[groups.order()]
        bounds = zip(groups.bounds, groups.bounds[1:], strict=False)
        self._split = split
        self._rows = [order[first:last] for first, last in bounds]

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._rows)

    def __iter__(self) -> Iterator[PairBatch]:
        """Yield the batches, short pairs first."""
        for rows in self._rows:
            yield _batch(self._split, rows)


def _generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * SEED_STRIDE + epoch)


def _batch(split: EncodedPairSplit, rows: Tensor) -> PairBatch:
    source, source_mask = split.source.padded(rows)
    targets, target_mask = split.target.padded(rows)
    num_targets = int(split.target.lengths[rows].sum())
    return PairBatch(
        source=source,
        source_padding_mask=source_mask,
        target=split.target.shifted(rows),
        target_padding_mask=target_mask,
        targets=targets if target_mask is None else targets.masked_fill_(target_mask, IGNORED),
        num_tokens=int(split.source.lengths[rows].sum()) + num_targets,
        num_targets=num_targets,
    )


def _spaced(lengths: Tensor, max_tokens: int | None) -> Tensor:
    """Return numbers of evenly spaced rows that have about `max_tokens` tokens."""
    total = kept = lengths.numel()
    if max_tokens is not None:
        kept = min(total, max(1, max_tokens * total // int(lengths.sum())))
    return torch.arange(kept) * total // kept


def _stacked(
    parts: Sequence[Tensor], masks: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    length = max(part.shape[1] for part in parts)
    whole = [
        torch.zeros_like(part, dtype=torch.bool) if mask is None else mask
        for part, mask in zip(parts, masks, strict=True)
    ]
    mask = _widened(whole, length, True)
    return _widened(parts, length, END_ID), mask if mask.any() else None


def _widened(parts: Sequence[Tensor], length: int, filling: int) -> Tensor:
    return torch.cat([F.pad(part, (0, length - part.shape[1]), value=filling) for part in parts])
