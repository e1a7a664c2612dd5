"""Streams of bytes: every row of a batch goes on where it ended in the batch before."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from powernorm.lab.data.batch import IGNORED, EvaluationBatches, TrainingBatches
from powernorm.lab.data.orders import Streams

FIRST: Final = 10
"""The newline: what stands before the first byte of a split, which is predicted too."""
NOWHERE: Final = -1
"""Where a row of padding begins."""


class StreamBatch(NamedTuple):
    """Segments of bytes, the next byte at every position, and where in the text they begin."""

    tokens: Tensor
    """int64, (batch, length)."""
    targets: Tensor
    """int64, (batch, length); `IGNORED` where nothing is asked."""
    starts: Tensor | None
    """int64, (batch,), of each row the place of its first target in the text; a model with a
    memory goes on where they follow on an earlier batch. None asks for no memory."""
    padding_mask: Tensor | None = None
    """bool, (batch, length), True = padding, at the end of rows; None without padding."""
    loss_targets: float | None = None
    """What the summed loss is divided by; None is `num_targets`."""

    @property
    def num_tokens(self) -> int:
        """Return the number of positions that are no padding."""
        if self.padding_mask is None:
            return self.tokens.numel()
        return int((~self.padding_mask).sum())

    @property
    def num_targets(self) -> int:
        """Return the number of bytes that are asked for."""
        return int((self.targets != IGNORED).sum())

    def inputs(self) -> dict[str, Tensor]:
        """Return the keyword arguments of the model's forward."""
        named = {"tokens": self.tokens, "starts": self.starts, "padding_mask": self.padding_mask}
        return {name: value for name, value in named.items() if value is not None}

    def to(self, device: torch.device) -> "StreamBatch":
        """Return the batch on a device; `starts` stays, for its values are looked at."""
        mask = None if self.padding_mask is None else self.padding_mask.to(device)
        return self._replace(
            tokens=self.tokens.to(device), targets=self.targets.to(device), padding_mask=mask
        )

    def shard(self, rank: int, size: int) -> "StreamBatch":
        """Return the rows of one of `size` processes: those from `rank` in steps of `size`.

        A process without rows gets one of padding alone, so that it calls every layer as often as
        the others.
        """
        loss_targets = (self.loss_targets or self.num_targets) / size
        if rank < len(self.tokens):
            rows = slice(rank, None, size)
            return StreamBatch(
                tokens=self.tokens[rows],
                targets=self.targets[rows],
                starts=None if self.starts is None else self.starts[rows],
                padding_mask=None if self.padding_mask is None else self.padding_mask[rows],
                loss_targets=loss_targets,
            )
        return StreamBatch(
            tokens=torch.zeros_like(self.tokens[:1]),
            targets=torch.full_like(self.targets[:1], IGNORED),
            starts=None if self.starts is None else torch.full_like(self.starts[:1], NOWHERE),
            padding_mask=torch.ones_like(self.tokens[:1], dtype=torch.bool),
            loss_targets=loss_targets,
        )

    def joined_with(self, others: Sequence["StreamBatch"]) -> "StreamBatch":
        """Return one batch of all rows, padded to the longest, which asks for no memory.

        Where batches that follow one another become rows of one, none can see the one before.
        """
        parts = [self, *others]
        length = max(part.tokens.shape[1] for part in parts)
        masks = [_mask(part) for part in parts]
        is_padded = any(bool(mask.any()) or mask.shape[1] < length for mask in masks)
        return StreamBatch(
            tokens=_stacked([part.tokens for part in parts], length, 0),
            targets=_stacked([part.targets for part in parts], length, IGNORED),
            starts=None,
            padding_mask=_stacked(masks, length, True) if is_padded else None,
        )


class TextStreams:
    """Segments of a text, whose rows go on from batch to batch.

    Args:
        text: a split, uint8, (number of bytes,).
        length: bytes in a segment.
        place: of the text's first byte, see `StreamBatch.starts`.
    """

    def __init__(self, text: Tensor, *, length: int, place: int = 0) -> None:
        self._text = text
        self._length = length
        self._place = place

    def batch(self, starts: Tensor, length: int | None = None, known: int = 0) -> StreamBatch:
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
        return StreamBatch(segments[:, :-1], targets, starts + self._place)

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


def _mask(batch: StreamBatch) -> Tensor:
    if batch.padding_mask is not None:
        return batch.padding_mask
    return torch.zeros_like(batch.tokens, dtype=torch.bool)


def _stacked(parts: Sequence[Tensor], length: int, filling: int) -> Tensor:
    return torch.cat([F.pad(part, (0, length - part.shape[1]), value=filling) for part in parts])
