"""Streams of bytes: every row of a batch goes on where it ended in the batch before."""

from typing import Final

import torch
from torch import Tensor

from powernorm.lab.data.batch import IGNORED, STARTS, Batch, EvaluationBatches, TrainingBatches
from powernorm.lab.data.orders import Streams

FIRST: Final = 10
"""The newline: what stands before the first byte of a split, which is predicted too."""


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
