"""Trees of a treebank as tensors, and the configurations of a parser that builds them."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Final

import torch
from torch import Tensor

from powernorm_lab.data.batch import IGNORED

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


# Configurations of a batch of sentences, and transitions between them.


SHIFT: Final = 0
LEFT: Final = 1
RIGHT: Final = 2
NUM_KINDS: Final = 3

NUM_WORDS: Final = 18
NUM_TAGS: Final = 18
NUM_LABELS: Final = 12
NUM_FEATURES: Final = NUM_WORDS + NUM_TAGS + NUM_LABELS
_LEFTMOST, _SECOND_LEFTMOST, _RIGHTMOST, _SECOND_RIGHTMOST = range(4)


@dataclass(frozen=True)
class Configurations:
    """Stack, buffer and arcs of a batch of sentences; `apply` changes them in place.

    Nodes are numbered within their sentence: 0 is the root; the last column of each row is not a
    node.
    """

    tokens: Tensor
    """Word and tag of every node, int64, (batch, nodes, 2)."""
    lengths: Tensor
    """Number of words of each sentence, int64, (batch,)."""
    stack: Tensor
    """Nodes on the stack, the bottom first, int64, (batch, nodes)."""
    depth: Tensor
    """Number of nodes on the stack, int64, (batch,)."""
    front: Tensor
    """First node of the buffer, int64, (batch,)."""
    heads: Tensor
    """Head of each node that has an arc, int64, (batch, nodes)."""
    labels: Tensor
    """Label of each node's arc, int64, (batch, nodes); `NO_ID` without an arc."""
    children: Tensor
    """Leftmost and second leftmost left child, rightmost and second rightmost right child of each
    node, int64, (batch, nodes, 4)."""

    @classmethod
    def start(
        cls, trees: Trees, rows: Tensor, device: torch.device | None = None
    ) -> "Configurations":
        """Return the initial configurations of sentences.

        Args:
            trees: words and tags of the sentences; arcs are ignored.
            rows: numbers of the sentences, int64, (batch,).
            device: device of the tensors.
        """
        columns = [
            trees.nodes(values, rows, root=ROOT_ID, none=NO_ID)
            for values in (trees.words, trees.tags)
        ]
        tokens = torch.stack(columns, dim=-1).to(device)
        batch, nodes = tokens.shape[:2]
        empty = tokens.new_zeros(batch, nodes)
        return cls(
            tokens=tokens,
            lengths=trees.lengths[rows].to(device),
            stack=empty,
            depth=tokens.new_ones(batch),
            front=tokens.new_ones(batch),
            heads=empty.clone(),
            labels=torch.full_like(empty, NO_ID),
            children=tokens.new_full((batch, nodes, 4), nodes - 1),
        )

    def first(self, number: int) -> "Configurations":
        """Return the first sentences of the batch as views."""
        return replace(
            self, **{item.name: getattr(self, item.name)[:number] for item in fields(self)}
        )

    def top(self, place: int) -> Tensor:
        """Return the node at a place of the stack, 1 for the topmost; no node below its bottom."""
        found = self._gathered(self.stack, (self.depth - place).clamp(min=0))
        return found.where(self.depth >= place, self._none)

    def coming(self, place: int) -> Tensor:
        """Return the node at a place of the buffer, 1 for the next; no node beyond its end."""
        node = self.front + (place - 1)
        return node.where(node <= self.lengths, self._none)

    def is_legal(self) -> Tensor:
        """Return the legal kinds of transitions, bool, (batch, 3).

        The root gets its only dependent last, so that the result is a tree with a single root.
        """
        is_empty = self.front > self.lengths
        is_deep = self.depth >= 3
        return torch.stack([~is_empty, is_deep, is_deep | (is_empty & (self.depth == 2))], dim=1)

    def apply(self, kinds: Tensor, labels: Tensor) -> None:
        """Apply one transition to every sentence.

        Args:
            kinds: `SHIFT`, `LEFT` or `RIGHT`, int64, (batch,); must be legal.
            labels: labels of the new arcs, int64, (batch,).
        """
        first, second = self.top(1), self.top(2)
        is_shift, is_left = kinds == SHIFT, kinds == LEFT
        self._attach(
            (~is_shift).nonzero().flatten(),
            heads=first.where(is_left, second),
            children=second.where(is_left, first),
            labels=labels,
            sides=torch.where(is_left, _LEFTMOST, _RIGHTMOST),
        )
        place = self.depth.where(is_shift, self.depth - 2)
        node = self.front.where(is_shift, first.where(is_left, second))
        self.stack.scatter_(1, place[:, None], node[:, None])
        self.depth.copy_(place + 1)
        self.front.add_(is_shift)

    def _attach(
        self, rows: Tensor, *, heads: Tensor, children: Tensor, labels: Tensor, sides: Tensor
    ) -> None:
        head, child, side = heads[rows], children[rows], sides[rows]
        self.heads[rows, child] = head
        self.labels[rows, child] = labels[rows]
        # A head gets its dependents from the inside out, so that the newest is the outermost.
        self.children[rows, head, side + 1] = self.children[rows, head, side]
        self.children[rows, head, side] = child

    def features(self) -> Tensor:
        """Return the features for the next transition (Chen and Manning 2014, section 3.1).

        These are words and tags of the three topmost nodes of the stack, of the next three of the
        buffer, and for each of the two topmost nodes of the stack: leftmost and rightmost child,
        second leftmost and second rightmost child, leftmost child of the leftmost and rightmost
        child of the rightmost child; and the labels of these twelve children.

        Returns:
            int64, (batch, 48): 18 words, 18 tags, 12 labels.
        """
        rows = torch.arange(len(self.depth), device=self.depth.device)[:, None]
        tops = torch.stack([self.top(place) for place in (1, 2, 3)], dim=1)
        buffer = torch.stack([self.coming(place) for place in (1, 2, 3)], dim=1)
        near = self.children[rows, tops[:, :2]]
        far = (
            self.children[rows, near[..., _LEFTMOST], _LEFTMOST],
            self.children[rows, near[..., _RIGHTMOST], _RIGHTMOST],
        )
        family = torch.stack(
            [
                near[..., _LEFTMOST],
                near[..., _RIGHTMOST],
                near[..., _SECOND_LEFTMOST],
                near[..., _SECOND_RIGHTMOST],
                *far,
            ],
            dim=2,
        ).flatten(1)
        tokens = self.tokens[rows, torch.cat([tops, buffer, family], dim=1)]
        return torch.cat([tokens[..., 0], tokens[..., 1], self.labels[rows, family]], dim=1)

    @property
    def _none(self) -> int:
        return self.stack.shape[1] - 1

    @staticmethod
    def _gathered(values: Tensor, places: Tensor) -> Tensor:
        return values.gather(1, places[:, None]).squeeze(1)


@dataclass(frozen=True, slots=True)
class Inventory:
    """The classes of transitions: 0 is SHIFT, then LEFT with each label, then RIGHT with each.

    >>> inventory = Inventory(num_labels=2)
    >>> inventory.kinds.tolist(), inventory.labels.tolist()
    ([0, 1, 1, 2, 2], [0, 2, 3, 2, 3])
    """

    num_labels: int
    """Number of labels of the treebank, without marks."""

    def __len__(self) -> int:
        """Return the number of transitions."""
        return 1 + 2 * self.num_labels

    @property
    def kinds(self) -> Tensor:
        """Return the kind of each transition, int64."""
        sizes = torch.tensor([1, self.num_labels, self.num_labels])
        return torch.tensor([SHIFT, LEFT, RIGHT]).repeat_interleave(sizes)

    @property
    def labels(self) -> Tensor:
        """Return the id of each transition's label, int64; `NO_ID` for SHIFT."""
        ids = torch.arange(self.num_labels) + NUM_LABEL_MARKS
        return torch.cat([torch.tensor([NO_ID]), *[ids] * (NUM_KINDS - 1)])

    def ids(self, kinds: Tensor, labels: Tensor) -> Tensor:
        """Return the ids of transitions by kind and label, int64; `IGNORED` for unknown labels."""
        kinds, places = kinds.long(), labels.long() - NUM_LABEL_MARKS
        ids = 1 + (kinds - LEFT) * self.num_labels + places
        ids = ids.masked_fill_(places < 0, IGNORED)
        return ids.masked_fill_(kinds == SHIFT, 0)
