"""Batches of sentence pairs, as many at a time as a budget of tokens allows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from powernorm.errors import InputError
from powernorm.lab.data.batch import IGNORED, EvaluationBatches, TrainingBatches
from powernorm.lab.data.orders import WithinBudget, spaced_by_tokens
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


def training_pairs(
    split: EncodedPairSplit,
    *,
    batch_tokens: int,
    count_padding: bool,
    seed: int,
    batches_per_update: int,
) -> TrainingBatches:
    """Return the batches of a training run: pairs of like length, each in one batch an epoch.

    Every epoch shuffles the batches, and which of equally long pairs are together.

    Args:
        split: to train on.
        batch_tokens: positions of the longer side of a batch at most, over all processes.
        count_padding: whether padded positions count.
        seed: of the shuffling.
        batches_per_update: micro-batches over which the gradient is summed.

    Raises:
        InputError: a pair has more than `batch_tokens` subwords.
    """
    source_lengths, target_lengths = split.source.lengths, split.target.lengths
    longest = int(torch.maximum(source_lengths, target_lengths).max())
    if longest > batch_tokens:
        raise InputError(
            f"data.batch_tokens={batch_tokens} is less than the {longest} subwords of the "
            "longest training pair: raise it, or lower the greatest length of a pair."
        )
    groups = LengthGroups(
        source_lengths, target_lengths, batch_tokens=batch_tokens, count_padding=count_padding
    )
    return TrainingBatches(
        WithinBudget(groups, seed=seed, row_seed=_PAIR_SEED + seed),
        lambda rows, _: _batch(split, rows),
        tokens_per_batch=int(source_lengths.sum() + target_lengths.sum()) / len(groups),
        num_targets=lambda rows: int(target_lengths[rows].sum()),
        batches_per_update=batches_per_update,
    )


def evaluation_pairs(
    split: EncodedPairSplit, *, batch_tokens: int, max_tokens: int | None = None
) -> EvaluationBatches:
    """Return the batches of an evaluation, in which each pair is once, short pairs first.

    Args:
        split: to evaluate on.
        batch_tokens: positions of the longer side of a batch at most, padding included; a pair
            that is longer makes a batch of its own.
        max_tokens: read only so many pairs, evenly spaced, that they have about so many targets.
    """
    chosen = spaced_by_tokens(split.target.lengths, max_tokens)
    groups = LengthGroups(
        split.source.lengths[chosen],
        split.target.lengths[chosen],
        batch_tokens=batch_tokens,
        count_padding=True,
    )
    parts = [chosen[part] for part in groups.batches()]
    return EvaluationBatches(parts, lambda rows, _: _batch(split, rows))


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
