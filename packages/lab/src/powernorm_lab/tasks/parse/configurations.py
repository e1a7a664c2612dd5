"""The configurations of many sentences, which advance in lock-step as tensors."""

from dataclasses import dataclass, fields, replace
from typing import Final

import torch
from torch import Tensor

from powernorm_lab.tasks.parse.trees import NO_ID, ROOT_ID, Trees

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
    """Stack, buffer and arcs of a batch of sentences; changed in place by `apply`.

    Nodes are numbered within their sentence: 0 is the root, the last column of each row is no node.
    """

    tokens: Tensor
    """Word and tag of every node, int64, (batch, nodes, 2)."""
    lengths: Tensor
    """Words of the sentences, int64, (batch,)."""
    stack: Tensor
    """Nodes, the bottom first, int64, (batch, nodes)."""
    depth: Tensor
    """Nodes on the stack, int64, (batch,)."""
    front: Tensor
    """First node of the buffer, int64, (batch,)."""
    heads: Tensor
    """Of the arcs so far, int64, (batch, nodes)."""
    labels: Tensor
    """Of the same, int64, (batch, nodes); `NO_ID` where there is no arc."""
    children: Tensor
    """Leftmost and second leftmost child on the left, rightmost and second rightmost on the right,
    int64, (batch, nodes, 4)."""

    @classmethod
    def start(
        cls, trees: Trees, rows: Tensor, device: torch.device | None = None
    ) -> "Configurations":
        """Return the sentences before their first transition.

        Args:
            trees: have the words and tags; their arcs are not looked at.
            rows: numbers of the sentences, int64, (batch,).
            device: of the tensors.
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
        """Return the first sentences of the batch, over the same memory."""
        return replace(
            self, **{item.name: getattr(self, item.name)[:number] for item in fields(self)}
        )

    def top(self, place: int) -> Tensor:
        """Return the node on the stack, 1 is the topmost; no node where it is not so deep."""
        found = self._gathered(self.stack, (self.depth - place).clamp(min=0))
        return found.where(self.depth >= place, self._none)

    def coming(self, place: int) -> Tensor:
        """Return the node in the buffer, 1 is the next; no node where it is not so long."""
        node = self.front + (place - 1)
        return node.where(node <= self.lengths, self._none)

    def is_legal(self) -> Tensor:
        """Return which kinds of transitions are possible, bool, (batch, 3).

        The root takes its one dependent last, so that what comes out is one tree with one root.
        """
        is_empty = self.front > self.lengths
        is_deep = self.depth >= 3
        return torch.stack([~is_empty, is_deep, is_deep | (is_empty & (self.depth == 2))], dim=1)

    def apply(self, kinds: Tensor, labels: Tensor) -> None:
        """Move every sentence on by one transition.

        Args:
            kinds: `SHIFT`, `LEFT` or `RIGHT`, int64, (batch,); possible ones.
            labels: of the arcs that they make, int64, (batch,).
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
        # A head takes its dependents from the inside to the outside, so the newest is outermost.
        self.children[rows, head, side + 1] = self.children[rows, head, side]
        self.children[rows, head, side] = child

    def features(self) -> Tensor:
        """Return what the next transition is chosen by (Chen and Manning 2014, section 3.1).

        Words and tags of the three topmost nodes of the stack, the next three of the buffer, and of
        each of the two topmost of the stack: leftmost and rightmost child, the second of both,
        leftmost child of the leftmost and rightmost of the rightmost; and the labels of these
        twelve children.

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
