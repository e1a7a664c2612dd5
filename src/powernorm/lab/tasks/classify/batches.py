"""Padded batches of texts, each with its class."""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm.lab.data.examples import Examples
from powernorm.lab.data.segments import SEED_STRIDE
from powernorm.lab.data.token_budget import LengthGroups
from powernorm.lab.tasks.classify.encoded_texts import EncodedTextSplit

PADDING_ID: Final = 0


class TextRows:
    """The texts of a split; batches of them are cut out without a loop over the texts.

    Args:
        split: over ids.
    """

    def __init__(self, split: EncodedTextSplit) -> None:
        self._split = split
        self._starts = split.lengths.cumsum(0) - split.lengths

    def batch(self, rows: Tensor) -> Examples:
        """Return a batch of texts, padded to the longest.

        Args:
            rows: their numbers, int64, (rows,).
        """
        lengths = self._split.lengths[rows]
        positions = torch.arange(int(lengths.max()))
        padding = positions >= lengths[:, None]
        places = (self._starts[rows][:, None] + positions).masked_fill_(padding, 0)
        words = self._split.words[places].long().masked_fill_(padding, PADDING_ID)
        return Examples(
            named={"tokens": words, "padding_mask": padding},
            targets=self._split.labels[rows],
            num_tokens=int(lengths.sum()),
            num_targets=rows.numel(),
        )


class TrainingTexts:
    """The batches of a training run, in an order that seed and position determine.

    With `batch_tokens`, texts of about the same length make a batch: which of equally long texts
    come together and which batch comes first changes with every epoch, the sizes of the batches do
    not. Without it every batch has `batch_size` texts at random, and what does not fill one waits
    for the next epoch.

    Args:
        split: the train split.
        batch_size: texts in a batch, where `batch_tokens` is None.
        batch_tokens: positions of a batch at most, padding included; a text that is longer alone
            makes a batch of its own.
        seed: of the order.
        batches_per_update: micro-batches over which the gradient is summed: where there are
            several, each says the mean number of their texts, so that all texts of an update count
            alike.

    Raises:
        InputError: there are fewer texts than a batch has.
    """

    def __init__(
        self,
        split: EncodedTextSplit,
        *,
        batch_size: int,
        batch_tokens: int | None,
        seed: int,
        batches_per_update: int = 1,
    ) -> None:
        self._rows = TextRows(split)
        self._split = split
        self._seed = seed
        self._batch_size = batch_size
        self._batches_per_update = batches_per_update
        self._groups = None if batch_tokens is None else length_groups(split, batch_tokens)
        if self._groups is None and len(split) < batch_size:
            raise InputError(
                f"The train split has {len(split)} texts, fewer than a batch of {batch_size}: "
                "lower data.batch_size."
            )
        self._epoch = -1
        self._batches: list[Tensor] = []

    @property
    def batches_per_epoch(self) -> int:
        """Return the number of batches after which the texts begin anew."""
        if self._groups is None:
            return len(self._split) // self._batch_size
        return len(self._groups)

    @property
    def tokens_per_batch(self) -> float:
        """Return the mean number of words in a batch, padding left out."""
        if self._groups is None:
            return float(self._split.lengths.double().mean()) * self._batch_size
        return float(self._split.lengths.sum()) / len(self._groups)

    def batch(self, position: int) -> Examples:
        """Return the batch at `position`, counted from the start of the run over all epochs."""
        batch = self._rows.batch(self._numbers(position))
        if self._batches_per_update == 1:
            return batch
        first = position - position % self._batches_per_update
        places = range(first, first + self._batches_per_update)
        total = sum(len(self._numbers(place)) for place in places)
        return batch._replace(loss_targets=total / self._batches_per_update)

    def _numbers(self, position: int) -> Tensor:
        """Return the numbers of the texts of a batch."""
        epoch, index = divmod(position, self.batches_per_epoch)
        if epoch != self._epoch:
            self._batches = self._shuffled(epoch)
            self._epoch = epoch
        return self._batches[index]

    def _shuffled(self, epoch: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self._seed * SEED_STRIDE + epoch)
        if self._groups is None:
            order = torch.randperm(len(self._split), generator=generator)
            return list(order.split(self._batch_size))[: self.batches_per_epoch]
        batches = list(cut(self._groups, self._groups.order(generator)))
        return [batches[i] for i in torch.randperm(len(batches), generator=generator)]


class EvaluationTexts:
    """The batches of an evaluation: texts in the order of their lengths.

    Args:
        split: over ids.
        batch_size: texts in a batch, where `batch_tokens` is None.
        batch_tokens: positions of a batch at most, padding included.
        max_tokens: read only about so many words, in evenly spaced texts.
    """

    def __init__(
        self,
        split: EncodedTextSplit,
        *,
        batch_size: int,
        batch_tokens: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        total = kept = len(split)
        if max_tokens is not None:
            kept = min(total, max(1, max_tokens * total // int(split.lengths.sum())))
        chosen = split if kept == total else split.chosen(torch.arange(kept) * total // kept)
        self._rows = TextRows(chosen)
        if batch_tokens is None:
            self._batches = list(chosen.lengths.argsort(stable=True).split(batch_size))
        else:
            groups = length_groups(chosen, batch_tokens)
            self._batches = list(cut(groups, groups.order()))

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Examples]:
        """Yield the batches, the shortest texts first."""
        return map(self._rows.batch, self._batches)


def length_groups(split: EncodedTextSplit, batch_tokens: int) -> LengthGroups:
    """Return texts of about the same length, batch by batch."""
    lengths = split.lengths
    return LengthGroups(lengths, lengths, batch_tokens=batch_tokens, count_padding=True)


def cut(groups: LengthGroups, order: Tensor) -> Iterator[Tensor]:
    """Yield the numbers of the texts of each batch."""
    for first, last in zip(groups.bounds, groups.bounds[1:], strict=False):
        yield order[first:last]
