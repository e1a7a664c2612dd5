"""Batches of contiguous segments for a language model."""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm.lab.data.batch import Batch
from powernorm.lab.data.subwords import END_ID

SEED_STRIDE: Final = 1_000_003
"""Keeps the generators of (seed, epoch) apart for every plausible number of epochs."""


class TrainingSegments:
    """The batches of a training run, in an order that seed and position alone determine.

    Each epoch cuts the stream at another offset into segments of `length` tokens and shuffles
    them; what does not fill a segment or an update waits for the next epoch, so that updates hold
    the same segments however they are divided into batches. Nothing here depends on the model or
    on the global random state.

    Args:
        tokens: the stream, int32 or int64, (num_tokens,).
        length: tokens in a segment.
        batch_size: segments in a batch.
        seed: of the offsets and the shuffling.
        batches_per_update: whole updates fill an epoch; batches do where the stream is too short
            for one update.

    Raises:
        InputError: the stream is shorter than one batch.
    """

    def __init__(
        self,
        tokens: Tensor,
        *,
        length: int,
        batch_size: int,
        seed: int,
        batches_per_update: int = 1,
    ) -> None:
        # One segment is kept in reserve, so that every offset below `length` leaves room for all.
        self._num_segments = (tokens.numel() - length + 1) // length
        if self._num_segments < batch_size:
            raise InputError(
                f"The train split has {tokens.numel()} tokens, fewer than a batch of {batch_size} "
                f"segments of {length}: lower data.batch_size or data.sequence_length."
            )
        self._stream = _with_start(tokens)
        self._length = length
        self._batch_size = batch_size
        self._batches_per_update = batches_per_update
        self._seed = seed
        self._epoch = -1
        self._starts = torch.empty(0, dtype=torch.long)

    @property
    def batches_per_epoch(self) -> int:
        """Return the number of batches after which the text begins anew."""
        batches = self._num_segments // self._batch_size
        return batches - batches % self._batches_per_update or batches

    @property
    def tokens_per_batch(self) -> float:
        """Return the number of tokens in a batch."""
        return self._batch_size * self._length

    def batch(self, position: int) -> Batch:
        """Return the batch at `position`, counted from the start of the run over all epochs."""
        epoch, index = divmod(position, self.batches_per_epoch)
        if epoch != self._epoch:
            self._starts = self._shuffled_starts(epoch)
            self._epoch = epoch
        first = index * self._batch_size
        return _cut(self._stream, self._starts[first : first + self._batch_size], self._length)

    def _shuffled_starts(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(self._seed * SEED_STRIDE + epoch)
        offset = torch.randint(self._length, (), generator=generator)
        order = torch.randperm(self._num_segments, generator=generator)
        return offset + order * self._length


class EvaluationSegments:
    """The batches of an evaluation: consecutive segments in which each token is predicted once.

    A token's context begins with its segment, so perplexities depend on `length`. The last segment
    may be shorter and then makes a batch of its own.

    Args:
        tokens: the stream, int32 or int64, (num_tokens,).
        length: tokens in a segment.
        batch_size: segments in a batch.
        max_tokens: read only about so many tokens, in evenly spaced whole segments.
    """

    def __init__(
        self, tokens: Tensor, *, length: int, batch_size: int, max_tokens: int | None = None
    ) -> None:
        self._stream = _with_start(tokens)
        self._length = length
        self._batch_size = batch_size
        num_whole, rest = divmod(tokens.numel(), length)
        kept = num_whole
        if max_tokens is not None and num_whole and max_tokens < tokens.numel():
            kept, rest = min(num_whole, max(1, max_tokens // length)), 0
        self._starts = torch.arange(kept) * num_whole // max(kept, 1) * length
        self._rest = rest
        self._rest_start = num_whole * length

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that one pass predicts."""
        return self._starts.numel() * self._length + self._rest

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-self._starts.numel() // self._batch_size) + bool(self._rest)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches in the order of the text."""
        for first in range(0, self._starts.numel(), self._batch_size):
            yield _cut(self._stream, self._starts[first : first + self._batch_size], self._length)
        if self._rest:
            yield _cut(self._stream, torch.tensor([self._rest_start]), self._rest)


def _with_start(tokens: Tensor) -> Tensor:
    """Put the end mark before the stream, so that its first token is predicted too."""
    return torch.cat([tokens.new_tensor([END_ID]), tokens])


def _cut(stream: Tensor, starts: Tensor, length: int) -> Batch:
    """Return the segments of the stream that begin at `starts`."""
    positions = starts[:, None] + torch.arange(length + 1)
    segments = stream[positions].long()
    tokens, targets = segments[:, :-1], segments[:, 1:]
    return Batch(tokens, targets, None, tokens.numel(), targets.numel())
