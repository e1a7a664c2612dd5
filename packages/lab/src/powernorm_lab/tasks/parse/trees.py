"""The trees of a treebank as numbers."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final

import torch
from torch import Tensor

NO_ID: Final = 0
"""Of a word, tag or label where there is none: beyond an end, or of a child that is not there."""
UNKNOWN_ID: Final = 1
"""Of what the train split does not have, or too seldom."""
ROOT_ID: Final = 2
"""Word and tag of the node above each sentence, which is its node 0."""
NUM_MARKS: Final = 3
"""Ids below those of words and tags."""
NUM_LABEL_MARKS: Final = 2
"""Ids below those of labels; nothing is the label of the root's arc but the treebank's own."""


@dataclass(frozen=True)
class Trees:
    """Sentences one after the other, with their gold trees."""

    words: Tensor
    """int64, (num_words,)."""
    tags: Tensor
    """int64, (num_words,)."""
    heads: Tensor
    """int64, (num_words,): number of the head in its sentence, counted from 1; 0 is the root."""
    labels: Tensor
    """int64, (num_words,): relation to the head."""
    is_scored: Tensor
    """bool, (num_words,): whether the word counts in scores; punctuation does not."""
    lengths: Tensor
    """int64, (num_sentences,): words of each sentence, at least one."""

    def __len__(self) -> int:
        """Return the number of sentences."""
        return self.lengths.numel()

    @property
    def starts(self) -> Tensor:
        """Return where each sentence begins, int64, (num_sentences,)."""
        return self.lengths.cumsum(0) - self.lengths

    def values(self) -> Iterator[Tensor]:
        """Yield all tensors."""
        return (getattr(self, item.name) for item in fields(self))

    def part(self, rows: Tensor) -> "Trees":
        """Return some of the sentences.

        Args:
            rows: their numbers, rising, int64.
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
        """Yield the numbers of the sentences, `size` at a time at most, the longest first."""
        if len(self):
            yield from self.lengths.argsort(descending=True, stable=True).split(size)

    def nodes(self, values: Tensor, rows: Tensor, *, root: int, none: int) -> Tensor:
        """Lay sentences out as rows of nodes: the root, the words, and nothing after them.

        Args:
            values: of the words, (num_words,).
            rows: numbers of sentences, int64, (batch,).
            root: value of the root.
            none: value of what is no node.

        Returns:
            (batch, length of the longest + 2); the last column is nothing for every sentence.
        """
        lengths = self.lengths[rows]
        positions = torch.arange(int(lengths.max()) + 2) - 1
        outside = (positions >= lengths[:, None]) | (positions < 0)
        places = (self.starts[rows][:, None] + positions).masked_fill_(outside, 0)
        laid = values[places].masked_fill_(outside, none)
        laid[:, 0] = root
        return laid

    def places(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return which nodes of laid-out sentences are words, and where those stand in the text.

        Args:
            rows: numbers of sentences, int64, (batch,).

        Returns:
            bool, (batch, length of the longest + 2), and int64, (words of these sentences,), in the
            order of the nodes.
        """
        everywhere = torch.arange(self.heads.numel())
        laid = self.nodes(everywhere, rows, root=-1, none=-1)
        is_word = laid >= 0
        return is_word, laid[is_word]

    def num_roots(self) -> Tensor:
        """Return the words of each sentence that have no head, int64, (num_sentences,)."""
        sentence = torch.arange(len(self)).repeat_interleave(self.lengths)
        return torch.bincount(sentence[self.heads == 0], minlength=len(self))
