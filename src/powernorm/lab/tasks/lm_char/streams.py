"""Streams of bytes: every row of a batch goes on where it ended in the batch before."""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from powernorm.errors import InputError
from powernorm.lab.data.batch import IGNORED
from powernorm.lab.data.segments import SEED_STRIDE

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


class TrainingStreams:
    """The batches of a training run: pure functions of their position.

    The text is divided into as many streams of equal length as an update has rows, and each batch
    has the next segment of its streams. The micro-batches of an update have streams of their own,
    so that an update has the same bytes however it is divided. Each epoch begins all streams anew,
    up to a remainder further on in the text, which seed and epoch determine: it is cut at other
    places, and no byte is always left out.

    Args:
        text: the train split, uint8, (number of bytes,).
        length: bytes in a segment.
        batch_size: streams, and rows, of a batch.
        seed: of where the epochs begin.
        batches_per_update: micro-batches of an update.
        place: of the text's first byte, see `StreamBatch.starts`.

    Raises:
        InputError: the text is shorter than one update.
    """

    def __init__(
        self,
        text: Tensor,
        *,
        length: int,
        batch_size: int,
        seed: int,
        batches_per_update: int = 1,
        place: int = 0,
    ) -> None:
        rows = batch_size * batches_per_update
        self._segments = text.numel() // (rows * length)
        if not self._segments:
            raise InputError(
                f"The train split has {text.numel()} bytes, fewer than an update of {rows} "
                f"segments of {length}: lower data.batch_size, data.sequence_length or "
                "optimizer.accumulation."
            )
        self._remainder = text.numel() - self._segments * rows * length
        self._text = text
        self._length = length
        self._batch_size = batch_size
        self._batches_per_update = batches_per_update
        self._seed = seed
        self._place = place

    @property
    def batches_per_epoch(self) -> int:
        """Return the number of batches after which the text begins anew."""
        return self._segments * self._batches_per_update

    @property
    def tokens_per_batch(self) -> float:
        """Return the number of bytes in a batch."""
        return self._batch_size * self._length

    def batch(self, position: int) -> StreamBatch:
        """Return the batch at `position`, counted from the start of the run over all epochs."""
        update, part = divmod(position, self._batches_per_update)
        epoch, segment = divmod(update, self._segments)
        streams = part * self._batch_size + torch.arange(self._batch_size)
        first = self._offset(epoch) + segment * self._length
        starts = first + streams * (self._segments * self._length)
        return _cut(self._text, starts, self._length, self._place)

    def _offset(self, epoch: int) -> int:
        generator = torch.Generator().manual_seed(self._seed * SEED_STRIDE + epoch)
        return int(torch.randint(self._remainder + 1, (), generator=generator))


class EvaluationStreams:
    """The batches of an evaluation, in which each byte is predicted once.

    The text is divided into `batch_size` streams of equal length, fewer where they would be shorter
    than a segment, and each batch has the next segment of all; the last one may be shorter. What
    remains at the end of the text, fewer bytes than there are streams, is asked for in whole
    segments of one row, of the first of which not all is asked for again.

    Args:
        text: the split, uint8, (number of bytes,).
        length: bytes in a segment.
        batch_size: streams at most.
        max_tokens: read about so many bytes only, from the beginning of every stream; None reads
            all.
        place: of the text's first byte, see `StreamBatch.starts`.
    """

    def __init__(
        self,
        text: Tensor,
        *,
        length: int,
        batch_size: int,
        max_tokens: int | None = None,
        place: int = 0,
    ) -> None:
        self._text = text
        self._length = length
        self._place = place
        streams = max(1, min(batch_size, text.numel() // length))
        self._stream_length = text.numel() // streams
        self._starts = torch.arange(streams) * self._stream_length
        self._read = self._stream_length
        self._rest = text.numel() - streams * self._stream_length
        if max_tokens is not None and max_tokens < text.numel():
            wanted = max(1, max_tokens // (streams * length)) * length
            self._read = min(wanted, self._stream_length)
            self._rest = 0

    @property
    def num_tokens(self) -> int:
        """Return the number of bytes that one pass predicts."""
        return self._starts.numel() * self._read + self._rest

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-self._read // self._length) + -(-self._rest // self._length)

    def __iter__(self) -> Iterator[StreamBatch]:
        """Yield the batches, every row in the order of the text."""
        for done in range(0, self._read, self._length):
            length = min(self._length, self._read - done)
            yield _cut(self._text, self._starts + done, length, self._place)
        yield from self._remainder()

    def _remainder(self) -> Iterator[StreamBatch]:
        num_segments = -(-self._rest // self._length)
        known = num_segments * self._length - self._rest
        for number in range(num_segments, 0, -1):
            start = torch.tensor([self._text.numel() - number * self._length])
            batch = _cut(self._text, start, self._length, self._place)
            if number == num_segments:
                batch.targets[:, :known] = IGNORED
            yield batch


def _cut(text: Tensor, starts: Tensor, length: int, place: int) -> StreamBatch:
    """Return the segments of a text whose first targets stand at `starts`."""
    positions = starts[:, None] + torch.arange(-1, length)
    # The first byte of the text has none before it.
    segments = text[positions.clamp(min=0)].long()
    segments.masked_fill_(positions < 0, FIRST)
    return StreamBatch(segments[:, :-1], segments[:, 1:].clone(), starts + place)


def _mask(batch: StreamBatch) -> Tensor:
    if batch.padding_mask is not None:
        return batch.padding_mask
    return torch.zeros_like(batch.tokens, dtype=torch.bool)


def _stacked(parts: Sequence[Tensor], length: int, filling: int) -> Tensor:
    return torch.cat([F.pad(part, (0, length - part.shape[1]), value=filling) for part in parts])
