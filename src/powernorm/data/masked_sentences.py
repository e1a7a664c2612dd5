"""Padded batches of sentences for masked language modelling (Devlin et al. 2019).

A row is a document, without its end mark; a longer one than `length` tokens makes several rows. In
every row about 15 % of the tokens, at least one, are replaced by a mask token and asked for. (The
tenths that BERT leaves or replaces by a random token are left out.)
"""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from powernorm.data.batch import IGNORED, Batch
from powernorm.data.segments import SEED_STRIDE
from powernorm.data.subwords import END_ID
from powernorm.errors import InputError

MASKED_FRACTION: Final = 0.15
_MASK_SEED: Final = 1 << 31
_EVALUATION_SEED: Final = 3 << 30
# Keep the generators of masks apart from those of the order; torch looks at 32 bits of a seed.


class _Rows:
    """Where the rows of a stream begin and how long they are.

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
        self.tokens = tokens
        self.starts = starts.repeat_interleave(pieces) + number * length
        self.lengths = (ends.repeat_interleave(pieces) - self.starts).clamp(max=length)

    def __len__(self) -> int:
        return self.starts.numel()

    def batch(self, rows: Tensor, mask_id: int, seed: int) -> Batch:
        """Return rows by number, padded to the longest, with masks that `seed` determines."""
        lengths = self.lengths[rows]
        positions = torch.arange(int(lengths.max()))
        padding = positions >= lengths[:, None]
        places = (self.starts[rows][:, None] + positions).clamp(max=self.tokens.numel() - 1)
        tokens = self.tokens[places].long().masked_fill(padding, END_ID)
        masked = _masked(padding, seed)
        return Batch(
            tokens=tokens.masked_fill(masked, mask_id),
            targets=tokens.masked_fill(~masked, IGNORED),
            padding_mask=padding,
            num_tokens=int(lengths.sum()),
            num_targets=int(masked.sum()),
        )


def _masked(padding: Tensor, seed: int) -> Tensor:
    """Choose positions: each with probability `MASKED_FRACTION`, and at least one in a row."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(padding.shape, generator=generator).masked_fill(padding, torch.inf)
    return (draws < MASKED_FRACTION) | (draws == draws.amin(dim=1, keepdim=True))


class TrainingSentences:
    """The batches of a training run, in an order and with masks that seed and position determine.

    Each epoch shuffles the rows; what does not fill a batch waits for the next one.

    Args:
        tokens: the stream, every document followed by the end mark, (num_tokens,).
        mask_id: of the mask token.
        length: tokens in a row at most.
        batch_size: rows in a batch.
        seed: of the order and the masks.

    Raises:
        InputError: there are fewer rows than a batch has.
    """

    def __init__(
        self, tokens: Tensor, *, mask_id: int, length: int, batch_size: int, seed: int
    ) -> None:
        self._rows = _Rows(tokens, length)
        if len(self._rows) < batch_size:
            raise InputError(
                f"The train split has {len(self._rows)} documents, fewer than a batch of "
                f"{batch_size}: lower data.batch_size."
            )
        self._mask_id = mask_id
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

    def batch(self, position: int) -> Batch:
        """Return the batch at `position`, counted from the start of the run over all epochs."""
        epoch, index = divmod(position, self.batches_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * SEED_STRIDE + epoch)
            self._order = torch.randperm(len(self._rows), generator=generator)
            self._epoch = epoch
        first = index * self._batch_size
        rows = self._order[first : first + self._batch_size]
        return self._rows.batch(
            rows, self._mask_id, _MASK_SEED + self._seed * SEED_STRIDE + position
        )


class EvaluationSentences:
    """The batches of an evaluation, whose masks are always the same.

    Args:
        tokens: the stream, every document followed by the end mark, (num_tokens,).
        mask_id: of the mask token.
        length: tokens in a row at most.
        batch_size: rows in a batch.
        max_tokens: read only about so many tokens, in evenly spaced rows.
    """

    def __init__(
        self,
        tokens: Tensor,
        *,
        mask_id: int,
        length: int,
        batch_size: int,
        max_tokens: int | None = None,
    ) -> None:
        self._rows = _Rows(tokens, length)
        total = len(self._rows)
        kept = total
        if max_tokens is not None and total:
            kept = min(total, max(1, max_tokens * total // int(self._rows.lengths.sum())))
        self._chosen = torch.arange(kept) * total // max(kept, 1)
        self._mask_id = mask_id
        self._batch_size = batch_size

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-self._chosen.numel() // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches in the order of the text."""
        for index, rows in enumerate(self._chosen.split(self._batch_size)):
            yield self._rows.batch(rows, self._mask_id, _EVALUATION_SEED + index)
