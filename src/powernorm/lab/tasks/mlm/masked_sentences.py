"""Padded batches of sentences for masked language modelling (Devlin et al. 2019).

A row is a document, without its end mark; a longer one than `length` tokens makes several rows. In
every row about 15 % of the tokens, at least one, are replaced by a mask token and asked for. (The
tenths that BERT leaves or replaces by a random token are left out.)
"""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from powernorm.lab.data.batch import IGNORED, Batch
from powernorm.lab.data.rows import Rows, ShuffledRows, SpacedRows
from powernorm.lab.data.segments import SEED_STRIDE
from powernorm.lab.data.subwords import END_ID

MASKED_FRACTION: Final = 0.15
_MASK_SEED: Final = 1 << 31
_EVALUATION_SEED: Final = 3 << 30
# Keep the generators of masks apart from those of the order; torch looks at 32 bits of a seed.


def _batch(tokens: Tensor, rows: Rows, chosen: Tensor, *, mask_id: int, seed: int) -> Batch:
    """Return rows by number, padded to the longest, with masks that `seed` determines."""
    places, padding = rows.places(chosen)
    whole = tokens[places].long().masked_fill(padding, END_ID)
    masked = _masked(padding, seed)
    return Batch(
        tokens=whole.masked_fill(masked, mask_id),
        targets=whole.masked_fill(~masked, IGNORED),
        padding_mask=padding,
        num_tokens=int((~padding).sum()),
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
        self._tokens = tokens
        self._rows = Rows(tokens, length)
        self._order = ShuffledRows(self._rows, batch_size=batch_size, seed=seed)
        self._mask_id = mask_id
        self._seed = seed

    @property
    def batches_per_epoch(self) -> int:
        """Return the number of batches after which the text begins anew."""
        return self._order.batches_per_epoch

    @property
    def tokens_per_batch(self) -> float:
        """Return the mean number of tokens in a batch, padding left out."""
        return self._order.tokens_per_batch

    def batch(self, position: int) -> Batch:
        """Return the batch at `position`, counted from the start of the run over all epochs."""
        return _batch(
            self._tokens,
            self._rows,
            self._order.at(position),
            mask_id=self._mask_id,
            seed=_MASK_SEED + self._seed * SEED_STRIDE + position,
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
        self._tokens = tokens
        self._rows = Rows(tokens, length)
        self._order = SpacedRows(self._rows, batch_size=batch_size, max_tokens=max_tokens)
        self._mask_id = mask_id

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._order)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches in the order of the text."""
        for index, chosen in enumerate(self._order):
            seed = _EVALUATION_SEED + index
            yield _batch(self._tokens, self._rows, chosen, mask_id=self._mask_id, seed=seed)
