"""Rows of a padded batch, cut out of a stream of documents."""

from collections.abc import Iterator

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm.lab.data.segments import SEED_STRIDE
from powernorm.lab.data.subwords import END_ID


class Rows:
    """Where the rows of a stream begin and how long they are.

    A row is a document without its end mark; a longer one than `length` makes several rows.

    Args:
        tokens: every document followed by the end mark, (num_tokens,).
        length: tokens in a row at most.
    """

    def __init__(self, tokens: Tensor, length: int) -> None:
        ends = (tokens == END_ID).nonzero().flatten()
        starts = torch.cat([ends.new_zeros(1), ends[:-1] + 1])
        pieces = -(-(ends - starts) // length)
        first = pieces.cumsum(0) - pieces
        number = torch.arange(int(pieces.sum())) - first.repeat_interleave(pieces)
        self._last = max(tokens.numel() - 1, 0)
        self.starts = starts.repeat_interleave(pieces) + number * length
        self.lengths = (ends.repeat_interleave(pieces) - self.starts).clamp(max=length)

    def __len__(self) -> int:
        return self.starts.numel()

    def places(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return where in the stream the tokens of rows stand, and what is padding there.

        Args:
            rows: numbers, int64, (batch,).

        Returns:
            int64 and bool (True = padding), both (batch, length of the longest).
        """
        lengths = self.lengths[rows]
        positions = torch.arange(int(lengths.max()))
        places = (self.starts[rows][:, None] + positions).clamp(max=self._last)
        return places, positions >= lengths[:, None]


class ShuffledRows:
    """The rows of each training batch, in an order that seed and position determine.

    Each epoch shuffles the rows; what does not fill a batch waits for the next one.

    Args:
        rows: of the train split.
        batch_size: rows in a batch.
        seed: of the order.

    Raises:
        InputError: there are fewer rows than a batch has.
    """

    def __init__(self, rows: Rows, *, batch_size: int, seed: int) -> None:
        if len(rows) < batch_size:
            raise InputError(
                f"The train split has {len(rows)} documents, fewer than a batch of "
                f"{batch_size}: lower data.batch_size."
            )
        self._rows = rows
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.long)

    @property
    def batches_per_epoch(self) -> int:
        """Return the number of batches after which the text begins anew."""
        return len(self._rows) // self._batch_size

    @property
    def tokens_per_batch(self) -> float:
        """Return the mean number of tokens in a batch, padding left out."""
        return float(self._rows.lengths.double().mean()) * self._batch_size

    def at(self, position: int) -> Tensor:
        """Return the numbers of the rows at `position`, counted from the start of the run."""
        epoch, index = divmod(position, self.batches_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * SEED_STRIDE + epoch)
            self._order = torch.randperm(len(self._rows), generator=generator)
            self._epoch = epoch
        first = index * self._batch_size
        return self._order[first : first + self._batch_size]


class SpacedRows:
    """The rows of each evaluation batch, in the order of the text.

    Args:
        rows: of the split.
        batch_size: rows in a batch.
        max_tokens: only about so many tokens, in evenly spaced rows.
    """

    def __init__(self, rows: Rows, *, batch_size: int, max_tokens: int | None = None) -> None:
        total = len(rows)
        kept = total
        if max_tokens is not None and total:
            kept = min(total, max(1, max_tokens * total // int(rows.lengths.sum())))
        self._chosen = torch.arange(kept) * total // max(kept, 1)
        self._batch_size = batch_size

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-self._chosen.numel() // self._batch_size)

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the numbers of the rows of each batch."""
        if len(self):
            yield from self._chosen.split(self._batch_size)
