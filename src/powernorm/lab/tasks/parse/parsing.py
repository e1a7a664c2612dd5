"""Greedy parsing of many sentences at once."""

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from powernorm.lab.tasks.parse.configurations import Configurations
from powernorm.lab.tasks.parse.inventory import Inventory
from powernorm.lab.tasks.parse.trees import Trees

PORTION: Final = 1024
"""Sentences that advance together."""


class Parsed(NamedTuple):
    """The trees of all sentences, one after the other."""

    heads: Tensor
    """int64, (num_words,), as in `Trees`."""
    labels: Tensor
    """int64, (num_words,)."""


@torch.no_grad()
def parse(
    trees: Trees,
    score: Callable[[Tensor], Tensor],
    inventory: Inventory,
    device: torch.device | None = None,
) -> Parsed:
    """Build a tree for each sentence by the best-scored possible transition at every step.

    All sentences advance together, and each has one score a step: what comes out is always a tree
    with one root and no crossing arcs, after 2 n transitions.

    Args:
        trees: have the words and tags; their arcs are not looked at.
        score: gives (batch, num_transitions) for features, int64, (batch, 48).
        inventory: the transitions that there are.
        device: of the features.
    """
    heads, labels = torch.empty_like(trees.heads), torch.empty_like(trees.labels)
    for rows in trees.portions(PORTION):
        whole = Configurations.start(trees, rows, device)
        _advance(whole, (2 * trees.lengths[rows]).tolist(), score, inventory)
        is_word, places = trees.places(rows)
        heads[places] = whole.heads.cpu()[is_word]
        labels[places] = whole.labels.cpu()[is_word]
    return Parsed(heads, labels)


def _advance(
    whole: Configurations,
    ends: list[int],
    score: Callable[[Tensor], Tensor],
    inventory: Inventory,
) -> None:
    """Parse sentences to the end, the longest first; `ends` are their numbers of transitions."""
    device = whole.depth.device
    kinds, labels = inventory.kinds.to(device), inventory.labels.to(device)
    number = len(ends)
    active = whole
    for step in range(ends[0]):
        while ends[number - 1] <= step:
            number -= 1
        if number < len(active.depth):
            active = whole.first(number)
        is_possible = active.is_legal()[:, kinds]
        scores = score(active.features()).masked_fill(~is_possible, -torch.inf)
        chosen = scores.argmax(dim=1)
        active.apply(kinds[chosen], labels[chosen])
