"""Batches of segments of a text stream."""

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm_lab.data.batch import Batch, EvaluationBatches, TrainingBatches
from powernorm_lab.data.corpus import Split
from powernorm_lab.data.orders import Order, spaced
from powernorm_lab.data.subwords import END_ID, EncodedCorpus
from powernorm_lab.tasks.lm.settings import LanguageModelSettings
from powernorm_lab.training.batches import RowData


class Segments(Order):
    """The starts of a stream's segments, with another offset and order in each epoch.

    Tokens that do not fill a segment or an update are left out of the epoch, so that updates have
    the same segments for any division into batches.

    Args:
        num_tokens: number of tokens in the stream.
        length: tokens in a segment.
        batch_size: segments in a batch.
        seed: seed of the offsets and the order.
        batches_per_update: batches in an update; an epoch has whole updates unless the stream is
            too short for one update.

    Raises:
        InputError: the stream is shorter than one batch.
    """

    def __init__(
        self,
        num_tokens: int,
        *,
        length: int,
        batch_size: int,
        seed: int,
        batches_per_update: int = 1,
    ) -> None:
        # One segment less than fits, so that all of them fit for every offset below `length`.
        self._num_segments = (num_tokens - length + 1) // length
        if self._num_segments < batch_size:
            raise InputError(
                f"the train split has {num_tokens} tokens, fewer than a batch of {batch_size} "
                f"segments of {length}: lower data.batch_size or data.sequence_length"
            )
        batches = self._num_segments // batch_size
        super().__init__(batches - batches % batches_per_update or batches, seed)
        self._length = length
        self._batch_size = batch_size

    def _drawn(self, epoch: int) -> Tensor:
        generator = self._generator(epoch)
        offset = torch.randint(self._length, (), generator=generator)
        order = torch.randperm(self._num_segments, generator=generator)
        kept = order[: self.batches_per_epoch * self._batch_size]
        return offset + kept.view(-1, self._batch_size) * self._length


class TextSegments:
    """Segments of a token stream; the target of each token is the next token.

    Args:
        tokens: the stream, int32 or int64, (num_tokens,).
        length: tokens in a segment.
    """

    def __init__(self, tokens: Tensor, *, length: int) -> None:
        self._num_tokens = tokens.numel()
        # An end mark before the stream, so that its first token is a target, too.
        self._stream = torch.cat([tokens.new_tensor([END_ID]), tokens])
        self._length = length

    def batch(self, starts: Tensor) -> Batch:
        """Return the segments at some starts; the last segment of the stream may be shorter.

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
        """Return the batches of an evaluation, in which each token is a target once.

        The context of a token begins with its segment, so that perplexities depend on `length`. The
        last segment may be shorter and is then a batch by itself.

        Args:
            batch_size: segments in a batch.
            max_tokens: approximate number of tokens, in evenly spaced whole segments; None is all.
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


class LanguageModelData(RowData[EncodedCorpus, LanguageModelSettings]):
    """Batches of segments of a text stream."""

    def rows(self, split: Split) -> TextSegments:
        """Return the segments of a split."""
        tokens = self._encoded.splits[split].tokens
        return TextSegments(tokens, length=self._config.data.sequence_length)

    def words_per_token(self, split: Split) -> float:
        """Return the divisor that converts nats per token to nats per word."""
        part = self._encoded.splits[split]
        return part.num_words / part.num_tokens
