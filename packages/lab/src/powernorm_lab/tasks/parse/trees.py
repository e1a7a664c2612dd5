"""Trees of a treebank as tensors of ids."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final

import torch
from torch import Tensor

NO_ID: Final = 0
"""Id of a missing word, tag or label: beyond the end of a sentence, or of a missing child."""
UNKNOWN_ID: Final = 1
"""Id of words, tags and labels that are not in the vocabulary."""
ROOT_ID: Final = 2
"""Word id and tag id of the root, node 0 of each sentence."""
NUM_MARKS: Final = 3
"""Number of ids before those of words and tags."""
NUM_LABEL_MARKS: Final = 2
"""Number of ids before those of labels; the root's arc has a label of the treebank."""


@dataclass(frozen=True)
class Trees:
    """Concatenated sentences with their gold trees."""

    words: Tensor
    """int64, (num_words,)."""
    tags: Tensor
    """int64, (num_words,)."""
    heads: Tensor
    """int64, (num_words,): number of the head in its sentence, from 1; 0 is the root."""
    labels: Tensor
    """int64, (num_words,): relation to the head."""
    is_scored: Tensor
    """bool, (num_words,): whether the word counts in scores; punctuation does not."""
    lengths: Tensor
    """int64, (num_sentences,): number of words of each sentence, at least 1."""

    def __len__(self) -> int:
        """Return the number of sentences."""
        return self.lengths.numel()

    @property
    def starts(self) -> Tensor:
        """Return the position of each sentence's first word, int64, (num_sentences,)."""
        return self.lengths.cumsum(0) - self.lengths

    def values(self) -> Iterator[Tensor]:
        """Yield all tensors."""
        return (getattr(self, item.name) for item in fields(self))

    def part(self, rows: Tensor) -> "Trees":
        """Return some of the sentences.

        Args:
            rows: numbers of the sentences, increasing, int64.
        """
        is_kept = torch.zeros(len(self), dtype=torch.bool).index_fill_(0, rows, True)
        words = is_kept.repeat_interleave(self.lengths)
        return Trees(
            words=self.words[words],
            tags=self.tags[words],
            heads=self.heads[words],
            labels=self.labels[words],
            is_scored=self.is_scored[words],
            lengths=self.lengths[rows],
        )

    def portions(self, size: int) -> Iterator[Tensor]:
        """Yield the numbers of the sentences, at most `size` at a time, the longest first."""
        if len(self):
            yield from self.lengths.argsort(descending=True, stable=True).split(size)

    def nodes(self, values: Tensor, rows: Tensor, *, root: int, none: int) -> Tensor:
        """Arrange values of sentences as rows of nodes: the root, the words, then `none`.

        Args:
            values: values of the words, (num_words,).
            rows: numbers of sentences, int64, (batch,).
            root: value of the root.
            none: value of positions that are not nodes.

        Returns:
            (batch, length of the longest + 2); the last column is `none` for every sentence.
        """
        lengths = self.lengths[rows]
        positions = torch.arange(int(lengths.max()) + 2) - 1
        outside = (positions >= lengths[:, None]) | (positions < 0)
        places = (self.starts[rows][:, None] + positions).masked_fill_(outside, 0)
        laid = values[places].masked_fill_(outside, none)
        laid[:, 0] = root
        return laid

    def places(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mask of words among the nodes of `nodes`, and the positions of these words.

        Args:
            rows: numbers of sentences, int64, (batch,).

        Returns:
            Mask, bool, (batch, length of the longest + 2), and positions in the text, int64, (words
            of these sentences,), in the order of the nodes.
        """
        everywhere = torch.arange(self.heads.numel())
        laid = self.nodes(everywhere, rows, root=-1, none=-1)
        is_word = laid >= 0
        return is_word, laid[is_word]

    def num_roots(self) -> Tensor:
        """Return the number of words without a head in each sentence, int64, (num_sentences,)."""
        sentence = torch.arange(len(self)).repeat_interleave(self.lengths)
        return torch.bincount(sentence[self.heads == 0], minlength=len(self))
