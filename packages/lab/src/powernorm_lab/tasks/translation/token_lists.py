"""Many lists of token ids, concatenated in a single tensor."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from powernorm_lab.data.subwords import END_ID


class TokenLists:
    """The ids of sentences; batches are gathered without a loop over the sentences.

    Args:
        flat: an end mark, then every sentence followed by an end mark, int32 or int64; it may be
            memory-mapped.
        lengths: lengths of the sentences, each with its end mark, integers.
    """

    def __init__(self, flat: Tensor, lengths: Tensor) -> None:
        self.lengths = lengths.long()
        """int64, (number of sentences,), including end marks."""
        self._flat = flat
        self._starts = self.lengths.cumsum(0) - self.lengths + 1

    @classmethod
    def from_lists(cls, lists: Iterable[Sequence[int]]) -> "TokenLists":
        """Concatenate lists of ids, which have no end marks."""
        rows = list(lists)
        flat = chain([END_ID], *([*row, END_ID] for row in rows))
        return cls(
            torch.tensor(list(flat), dtype=torch.int32),
            torch.tensor([len(row) + 1 for row in rows], dtype=torch.int64),
        )

    def __len__(self) -> int:
        """Return the number of sentences."""
        return self.lengths.numel()

    @property
    def tokens(self) -> Tensor:
        """Return all sentences as one stream, each followed by the end mark, (num_tokens,)."""
        return self._flat[1:]

    def row(self, index: int) -> Tensor:
        """Return the ids of a sentence with its end mark, (length,)."""
        start = int(self._starts[index])
        return self._flat[start : start + int(self.lengths[index])]

    def padded(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return sentences, each with its end mark, and their padding mask.

        Args:
            rows: numbers of at least one sentence, int64, (batch,).

        Returns:
            Ids, int64, 0 at padding, and a mask, bool, True = padding, both (batch, length of the
            longest); the mask is None without padding.
        """
        return self._gathered(rows, 0)

    def shifted(self, rows: Tensor) -> Tensor:
        """Return the ids of `padded`, with the end mark before instead of after each sentence."""
        return self._gathered(rows, -1)[0]

    def _gathered(self, rows: Tensor, shift: int) -> tuple[Tensor, Tensor | None]:
        lengths = self.lengths[rows]
        positions = torch.arange(int(lengths.max()))
        padding = positions >= lengths[:, None]
        places = self._starts[rows][:, None] + positions + shift
        # Index 0 at padding: positions after the last sentence would be out of range.
        ids = self._flat[places.masked_fill_(padding, 0)].long()
        return ids.masked_fill_(padding, END_ID), padding if padding.any() else None


@dataclass(frozen=True)
class EncodedPairSplit:
    """The encoded sentence pairs of a split."""

    source: TokenLists
    target: TokenLists

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.source)
