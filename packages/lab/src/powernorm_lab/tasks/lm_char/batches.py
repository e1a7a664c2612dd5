"""Batches of byte streams, in which every row continues that of the previous batch."""

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
"""The newline, as the context of a split's first byte, which is a target, too."""


class Streams(Order):
    """The starts of a text's segments, where the rows of a batch continue those of the last batch.

    The text is divided into as many streams of equal length as an update has rows, and each batch
    has the next segment of its streams. Each micro-batch of an update has different streams, so
    that an update has the same tokens for any division into micro-batches. Each epoch restarts all
    streams at an offset up to the remainder of the division, which is drawn from seed and epoch.
    Segments then begin at different positions, and no token is always left out.

    Args:
        num_tokens: number of tokens in the text.
        length: tokens in a segment.
        batch_size: number of streams, and of rows, of a batch.
        seed: seed of the offsets.
        batches_per_update: number of micro-batches of an update.

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
    """Segments of a text; the rows of a batch continue those of the previous batch.

    Args:
        text: a split, uint8, (number of bytes,).
        length: bytes in a segment.
        place: position of the text's first byte, see `STARTS`.
    """

    def __init__(self, text: Tensor, *, length: int, place: int = 0) -> None:
        self._text = text
        self._length = length
        self._place = place

    def batch(self, starts: Tensor, length: int | None = None, known: int = 0) -> Batch:
        """Return the segments of the text with first targets at some positions.

        Args:
            starts: positions of the first targets, int64, (batch,).
            length: bytes in a segment; None is the default length.
            known: number of targets at the beginning of each segment to ignore.
        """
        positions = starts[:, None] + torch.arange(-1, length or self._length)
        # The first byte of the text has no predecessor.
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
        """Return the batches of an evaluation, in which each byte is a target once.

        The text is divided into `batch_size` streams of equal length, or fewer if they would be
        shorter than a segment, and each batch has the next segment of every stream; the last one
        may be shorter. The remainder at the end of the text, fewer bytes than streams, is evaluated
        in whole segments of one row; targets that were evaluated before are ignored.

        Args:
            batch_size: maximal number of streams.
            max_tokens: approximate number of bytes, from the beginning of every stream; None is
                all.
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
    """Batches of byte streams; the target of each byte is the next one.

    Args:
        encoded: the text.
        config: lengths, sizes and number of steps.
        seed: seed of the offsets of epochs in the text.

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
        """Return bits per character (a byte) from a loss in nats."""
        return {"bits_per_character": loss / math.log(2)}
