"""Random trees, for the tests of the transitions."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from powernorm_lab.tasks.parse.trees import Trees

NUM_IDS = 9
"""Upper bound of the ids of words, tags and labels."""


class RandomTree(NamedTuple):
    heads: list[int]
    words: list[int]
    tags: list[int]
    labels: list[int]


@st.composite
def projective_heads(draw: st.DrawFn, longest: int = 12) -> list[int]:
    """Draw the heads of a tree without crossing arcs, with one root or several."""
    length = draw(st.integers(1, longest))
    heads = [0] * length
    spans = [(1, length, 0)]
    while spans:
        first, last, head = spans.pop()
        if first > last:
            continue
        # The words of the span are attached to `head` as one tree or two.
        middle = draw(st.integers(first, last)) if draw(st.booleans()) else last
        for begin, end in ((first, middle), (middle + 1, last)):
            if begin <= end:
                node = draw(st.integers(begin, end))
                heads[node - 1] = head
                spans += [(begin, node - 1, node), (node + 1, end, node)]
    return heads


@st.composite
def any_heads(draw: st.DrawFn, longest: int = 8) -> list[int]:
    """Draw the heads of a tree, whose arcs may cross."""
    length = draw(st.integers(1, longest))
    order = draw(st.permutations(range(1, length + 1)))
    heads = [0] * length
    for place, node in enumerate(order):
        heads[node - 1] = draw(st.sampled_from([0, *order[:place]]))
    return heads


@st.composite
def trees_of(draw: st.DrawFn, heads: st.SearchStrategy[list[int]]) -> list[RandomTree]:
    """Draw sentences with such heads."""
    found = []
    for tree in draw(st.lists(heads, min_size=1, max_size=4)):
        ids = st.lists(st.integers(1, NUM_IDS - 1), min_size=len(tree), max_size=len(tree))
        found.append(RandomTree(tree, draw(ids), draw(ids), draw(ids)))
    return found


def put_together(trees: Sequence[RandomTree]) -> Trees:
    """Return trees as tensors, with all words scored."""
    heads, words, tags, labels = (
        torch.tensor([value for tree in trees for value in tree[column]]) for column in range(4)
    )
    return Trees(
        words=words,
        tags=tags,
        heads=heads,
        labels=labels,
        is_scored=torch.ones_like(heads, dtype=torch.bool),
        lengths=torch.tensor([len(tree.heads) for tree in trees]),
    )
