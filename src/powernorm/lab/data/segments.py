"""Batches of contiguous segments for a language model."""

import torch
from torch import Tensor

from powernorm.lab.data.batch import Batch, EvaluationBatches, TrainingBatches
from powernorm.lab.data.orders import Segments, spaced
from powernorm.lab.data.subwords import END_ID


class TextSegments:
    """Segments of a stream, in which each token is predicted from those before it.

    Args:
        tokens: the stream, int32 or int64, (num_tokens,).
        length: tokens in a segment.
    """

    def __init__(self, tokens: Tensor, *, length: int) -> None:
        self._num_tokens = tokens.numel()
        # The end mark before the stream, so that its first token is predicted too.
        self._stream = torch.cat([tokens.new_tensor([END_ID]), tokens])
        self._length = length

    def batch(self, starts: Tensor) -> Batch:
        """Return the segments that begin at some places; the last of the stream may be shorter.

        Args:
            starts: int64, (batch,).
        """
        length = min(self._length, self._num_tokens - int(starts[-1]))
        segments = self._stream[starts[:, None] + torch.arange(length + 1)].long()
        tokens, targets = segments[:, :-1], segments[:, 1:]
        return Batch({"tokens": tokens}, targets, tokens.numel(), targets.numel())

    def training(
        self, *, batch_size: int, seed: int, batches_per_update: int = 1
    ) -> TrainingBatches:
        """Return the batches of a training run; the arguments are those of `Segments`.

        Raises:
            InputError: the stream is shorter than one batch.
        """
        order = Segments(
            self._num_tokens,
            length=self._length,
            batch_size=batch_size,
            seed=seed,
            batches_per_update=batches_per_update,
        )
        return TrainingBatches(
            order, lambda starts, _: self.batch(starts), tokens_per_batch=batch_size * self._length
        )

    def evaluation(self, *, batch_size: int, max_tokens: int | None = None) -> EvaluationBatches:
        """Return the batches of an evaluation: segments in which each token is predicted once.

        A token's context begins with its segment, so perplexities depend on `length`. The last
        segment may be shorter and then makes a batch of its own.

        Args:
            batch_size: segments in a batch.
            max_tokens: read only about so many tokens, in evenly spaced whole segments.
        """
        num_whole, rest = divmod(self._num_tokens, self._length)
        wanted = None
        if max_tokens is not None and num_whole and max_tokens < self._num_tokens:
            wanted, rest = max(1, max_tokens // self._length), 0
        starts = spaced(num_whole, wanted) * self._length
        parts = [*starts.split(batch_size)] if len(starts) else []
        if rest:
            parts.append(torch.tensor([num_whole * self._length]))
        return EvaluationBatches(parts, lambda part, _: self.batch(part))
