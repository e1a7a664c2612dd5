"""Streams of bytes as the batches of a run; every row goes on where it ended in the last batch."""

import math
from typing import Final

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm_lab.data.batch import IGNORED, STARTS, Batch, EvaluationBatches, TrainingBatches
from powernorm_lab.data.corpus import Split
from powernorm_lab.data.orders import Order
from powernorm_lab.tasks.lm_char.settings import CharacterSettings
from powernorm_lab.tasks.lm_char.texts import EncodedBytes
from powernorm_lab.training.batches import RowData

FIRST: Final = 10
"""The newline: what stands before the first byte of a split, which is predicted too."""


class Streams(Order):
    """Where the segments of a text begin whose rows go on from batch to batch.

    The text is divided into as many streams of equal length as an update has rows, and each batch
    has the next segment of its streams. The micro-batches of an update have streams of their own,
    so that an update has the same tokens however it is divided. Each epoch begins all streams anew,
    up to a remainder further on in the text, which seed and epoch determine: it is cut at other
    places, and no token is always left out.

    Args:
        num_tokens: of the text.
        length: tokens in a segment.
        batch_size: streams, and rows, of a batch.
        seed: of where the epochs begin.
        batches_per_update: micro-batches of an update.

    Raises:
        InputError: the text is shorter than one update.
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
        self._num_rows = batch_size * batches_per_update
        self._num_segments = num_tokens // (self._num_rows * length)
        if not self._num_segments:
            raise InputError(
                f"the train split has {num_tokens} bytes, fewer than an update of "
                f"{self._num_rows} segments of {length}: lower data.batch_size, "
                "data.sequence_length or optimizer.accumulation"
            )
        super().__init__(self._num_segments * batches_per_update, seed)
        self._remainder = num_tokens - self._num_segments * self._num_rows * length
        self._length = length
        self._batch_size = batch_size

    def _drawn(self, epoch: int) -> Tensor:
        offset = torch.randint(self._remainder + 1, (), generator=self._generator(epoch))
        segments = torch.arange(self._num_segments)[:, None] * self._length
        streams = torch.arange(self._num_rows) * (self._num_segments * self._length)
        return (offset + segments + streams).view(-1, self._batch_size)


class TextStreams:
    """Segments of a text, whose rows go on from batch to batch.

    Args:
        text: a split, uint8, (number of bytes,).
        length: bytes in a segment.
        place: of the text's first byte, see `STARTS`.
    """

    def __init__(self, text: Tensor, *, length: int, place: int = 0) -> None:
        self._text = text
        self._length = length
        self._place = place

    def batch(self, starts: Tensor, length: int | None = None, known: int = 0) -> Batch:
        """Return the segments of the text whose first targets stand at some places.

        Args:
            starts: int64, (batch,).
            length: bytes in a segment; None is that of all.
            known: so many targets at the beginning of each segment are not asked for.
        """
        positions = starts[:, None] + torch.arange(-1, length or self._length)
        # The first byte of the text has none before it.
        segments = self._text[positions.clamp(min=0)].long()
        segments.masked_fill_(positions < 0, FIRST)
        targets = segments[:, 1:].clone()
        targets[:, :known] = IGNORED
        return Batch(
            named={"tokens": segments[:, :-1], STARTS: starts + self._place},
            targets=targets,
            num_tokens=targets.numel(),
            num_targets=targets.numel() - len(targets) * known,
        )

    def training(
        self, *, batch_size: int, seed: int, batches_per_update: int = 1
    ) -> TrainingBatches:
        """Return the batches of a training run; the arguments are those of `Streams`.

        Raises:
            InputError: the text is shorter than one update.
        """
        order = Streams(
            self._text.numel(),
            length=self._length,
            batch_size=batch_size,
            seed=seed,
            batches_per_update=batches_per_update,
        )
        return TrainingBatches(
            order, lambda starts, _: self.batch(starts), tokens_per_batch=batch_size * self._length
        )

    def evaluation(self, *, batch_size: int, max_tokens: int | None = None) -> EvaluationBatches:
        """Return the batches of an evaluation, in which each byte is predicted once.

        The text is divided into `batch_size` streams of equal length, fewer where they would be
        shorter than a segment, and each batch has the next segment of all; the last one may be
        shorter. What remains at the end of the text, fewer bytes than there are streams, is asked
        for in whole segments of one row, of the first of which not all is asked for again.

        Args:
            batch_size: streams at most.
            max_tokens: read about so many bytes only, from the beginning of every stream; None
                reads all.
        """
        total, length = self._text.numel(), self._length
        num_streams = max(1, min(batch_size, total // length))
        whole = read = total // num_streams
        rest = total - num_streams * whole
        if max_tokens is not None and max_tokens < total:
            read = min(max(1, max_tokens // (num_streams * length)) * length, whole)
            rest = 0
        starts = torch.arange(num_streams) * whole
        parts = [(starts + done, min(length, read - done), 0) for done in range(0, read, length)]
        for begin in range(total - -(-rest // length) * length, total, length):
            known = max(0, total - rest - begin)
            parts.append((torch.tensor([begin]), length, known))
        return EvaluationBatches(parts, lambda part, _: self.batch(*part))


class CharacterData(RowData[CharacterSettings]):
    """Streams of bytes, in which each one is predicted from those before it.

    Args:
        encoded: the text.
        config: lengths, sizes and number of steps.
        seed: of where the epochs begin in the text.

    Raises:
        InputError: the train split is shorter than one update.
    """

    def __init__(self, encoded: EncodedBytes, config: CharacterSettings, seed: int) -> None:
        def streams(split: Split) -> TextStreams:
            return TextStreams(
                encoded.splits[split],
                length=config.data.sequence_length,
                place=encoded.start_of(split),
            )

        super().__init__(config, streams, seed)

    def from_loss(self, loss: float) -> dict[str, float]:
        """Return the bits per character, which is a byte, of a loss in nats."""
        return {"bits_per_character": loss / math.log(2)}
