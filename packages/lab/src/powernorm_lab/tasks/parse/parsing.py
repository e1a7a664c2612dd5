"""Greedy parsing of many sentences together, and attachment scores."""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor

from powernorm_lab.data.corpus import Split
from powernorm_lab.tasks.parse.configurations import Configurations
from powernorm_lab.tasks.parse.inventory import Inventory
from powernorm_lab.tasks.parse.trees import Trees

PORTION: Final = 1024
"""Number of sentences that advance together."""


class Parsed(NamedTuple):
    """The concatenated trees of all sentences."""

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
    portion: int = PORTION,
) -> Parsed:
    """Build a tree for each sentence by the best-scored legal transition at every step.

    All sentences of a portion advance together. After 2 n transitions the result is always a tree
    with a single root and no crossing arcs.

    Args:
        trees: words and tags of the sentences; arcs are ignored.
        score: returns scores, (batch, num_transitions), for features, int64, (batch, 48).
        inventory: the classes of transitions.
        device: device of the features.
        portion: number of sentences that advance together.
    """
    heads, labels = torch.empty_like(trees.heads), torch.empty_like(trees.labels)
    for rows in trees.portions(portion):
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
    """Parse sentences, sorted by decreasing length; `ends` are their numbers of transitions."""
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


def attachment_scores(gold: Trees, parsed: Parsed) -> dict[str, float]:
    """Return the percentages of correctly attached words, over all words of all sentences.

    Punctuation does not count: with Penn Treebank's tags the tags that Chen and Manning (2014)
    exclude, with Universal Dependencies' tags PUNCT.

    Returns:
        `uas`: the head is correct; `las`: head and label are correct.
    """
    counted = gold.is_scored
    is_attached = (gold.heads == parsed.heads)[counted]
    is_labeled = is_attached & (gold.labels == parsed.labels)[counted]
    number = int(counted.sum())
    return {
        "uas": 100 * int(is_attached.sum()) / number,
        "las": 100 * int(is_labeled.sum()) / number,
    }


def neighbor_scores(trees: Mapping[Split, Trees]) -> dict[str, float]:
    """Return the `uas` of attaching every word to its neighbor, as `valid_uas` and `test_uas`.

    The neighbor is the previous word (the root for the first word) or the next word (the root for
    the last one), depending on which has the higher score in the train split.
    """
    found = {
        is_before: {
            split: attachment_scores(part, Parsed(_neighbors(part, is_before), part.labels))["uas"]
            for split, part in trees.items()
        }
        for is_before in (True, False)
    }
    best = max(found.values(), key=lambda scores: scores["train"])
    return {"valid_uas": best["valid"], "test_uas": best["test"]}


def _neighbors(trees: Trees, is_before: bool) -> Tensor:
    number = torch.arange(trees.heads.numel()) - trees.starts.repeat_interleave(trees.lengths) + 1
    if is_before:
        return number - 1
    is_last = number == trees.lengths.repeat_interleave(trees.lengths)
    return (number + 1).masked_fill(is_last, 0)
