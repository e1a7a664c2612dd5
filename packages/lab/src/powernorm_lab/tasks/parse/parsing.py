"""Parsing of many sentences together: by a static oracle, and greedily by scores."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from powernorm_lab.data.corpus import Split
from powernorm_lab.tasks.parse.trees import (
    LEFT,
    NO_ID,
    NUM_FEATURES,
    RIGHT,
    SHIFT,
    Configurations,
    Inventory,
    Trees,
)

# Derivations: the transitions that build given trees.


GOLD_PORTION = 2048
"""Number of sentences that advance together."""
_ROOTS_HEAD, _NO_HEAD = -1, -2


@dataclass(frozen=True)
class Derivations:
    """The concatenated transitions of all sentences, 2 n for a sentence of n words."""

    kinds: Tensor
    """int8, (2 · num_words,)."""
    labels: Tensor
    """int32, (2 · num_words,): labels of the arcs; `NO_ID` for SHIFT."""
    is_found: Tensor
    """bool, (num_sentences,): False if arcs cross, so that no transitions build the tree."""
    lengths: Tensor
    """Number of transitions of each sentence, int64, (num_sentences,)."""

    def part(self, rows: Tensor) -> "Derivations":
        """Return the derivations of some sentences.

        Args:
            rows: numbers of the sentences, increasing, int64.
        """
        is_kept = torch.zeros_like(self.is_found).index_fill_(0, rows, True)
        steps = is_kept.repeat_interleave(self.lengths)
        return Derivations(
            self.kinds[steps], self.labels[steps], self.is_found[rows], self.lengths[rows]
        )


def derive(trees: Trees) -> Derivations:
    """Return the transitions that build each tree, by the static oracle.

    It chooses LEFT if the tree has this arc, else RIGHT if the tree has this arc and the dependent
    has all of its dependents, else SHIFT. Of all derivations of a tree, this one has the shortest
    stacks.
    """
    num_transitions = 2 * trees.heads.numel()
    kinds = torch.zeros(num_transitions, dtype=torch.int8)
    labels = torch.zeros(num_transitions, dtype=torch.int32)
    is_found = torch.ones(len(trees), dtype=torch.bool)
    for rows in trees.portions(GOLD_PORTION):
        oracle = _Oracle(trees, rows)
        for places in _steps(trees, rows):
            kind, label = oracle.advance(len(places))
            kinds[places], labels[places] = kind.to(torch.int8), label.to(torch.int32)
        is_found[rows] = ~oracle.is_stuck
    return Derivations(kinds, labels, is_found, 2 * trees.lengths)


def gold_states(trees: Trees, derivations: Derivations, dtype: torch.dtype) -> Tensor:
    """Return the features before each transition.

    Args:
        trees: the sentences.
        derivations: derivations of the sentences.
        dtype: dtype of the result; must hold the largest id.

    Returns:
        (2 · num_words, 48).
    """
    states = torch.empty(2 * trees.heads.numel(), NUM_FEATURES, dtype=dtype)
    for rows in trees.portions(GOLD_PORTION):
        whole = Configurations.start(trees, rows)
        for places in _steps(trees, rows):
            active = whole.first(len(places))
            states[places] = active.features().to(dtype)
            active.apply(derivations.kinds[places].long(), derivations.labels[places].long())
    return states


def _steps(trees: Trees, rows: Tensor) -> Iterator[Tensor]:
    """Yield for each step the positions of the transitions of unfinished sentences."""
    ends = 2 * trees.lengths[rows]
    first = 2 * trees.starts[rows]
    for step in range(int(ends[0])):
        yield first[: int((ends > step).sum())] + step


class _Oracle:
    """Advances sentences along their trees.

    Args:
        trees: the sentences.
        rows: numbers of sentences, the longest first.
    """

    def __init__(self, trees: Trees, rows: Tensor) -> None:
        self._whole = Configurations.start(trees, rows)
        self._heads = trees.nodes(trees.heads, rows, root=_ROOTS_HEAD, none=_NO_HEAD)
        self._labels = trees.nodes(trees.labels, rows, root=NO_ID, none=NO_ID)
        self._missing = self._num_dependents()
        self.is_stuck = torch.zeros(len(rows), dtype=torch.bool)

    def _num_dependents(self) -> Tensor:
        counted = torch.zeros_like(self._heads)
        ones = (self._heads >= 0).long()
        return counted.scatter_add_(1, self._heads.clamp(min=0), ones)

    def advance(self, number: int) -> tuple[Tensor, Tensor]:
        """Advance the first `number` sentences; return kinds and labels, int64, (number,)."""
        now = self._whole.first(number)
        heads, missing = self._heads[:number], self._missing[:number]
        first, second = now.top(1), now.top(2)
        is_left = heads.gather(1, second[:, None]).squeeze(1) == first
        is_right = heads.gather(1, first[:, None]).squeeze(1) == second
        is_right &= missing.gather(1, first[:, None]).squeeze(1) == 0
        is_shift = now.front <= now.lengths
        kinds = torch.where(is_left, LEFT, torch.where(is_right | ~is_shift, RIGHT, SHIFT))
        # If no transition fits, continue with any: the tree is marked as not found.
        self.is_stuck[:number] |= ~(is_left | is_right | is_shift)
        is_arc = kinds != SHIFT
        child, head = second.where(is_left, first), first.where(is_left, second)
        labels = self._labels[:number].gather(1, child[:, None]).squeeze(1).where(is_arc, NO_ID)
        missing.scatter_add_(1, head[:, None], -is_arc.long()[:, None])
        now.apply(kinds, labels)
        return kinds, labels


@dataclass(frozen=True)
class GoldTransitions:
    """States and transitions of the oracle.

    Trees with crossing arcs cannot be built by transitions, and trees with several roots not by
    legal ones. Both are left out.
    """

    states: Tensor
    """int16 or int32, (num_transitions, 48): features before each transition."""
    targets: Tensor
    """int64, (num_transitions,): ids of transitions, `IGNORED` for unknown labels."""
    left_out: Mapping[str, int]
    """Numbers of sentences without gold transitions, by reason; crossing arcs come first."""

    def __len__(self) -> int:
        """Return the number of transitions."""
        return len(self.targets)


def gold_transitions(trees: Trees, inventory: Inventory) -> GoldTransitions:
    """Derive the gold transitions of trees.

    They are not cached, because this takes less time than reading the files.

    Args:
        trees: the sentences.
        inventory: the classes of transitions.
    """
    derivations = derive(trees)
    has_one_root = trees.num_roots() == 1
    rows = (derivations.is_found & has_one_root).nonzero().flatten()
    kept, steps = trees.part(rows), derivations.part(rows)
    return GoldTransitions(
        states=gold_states(kept, steps, _smallest_dtype(trees)),
        targets=inventory.ids(steps.kinds, steps.labels),
        left_out={
            "trees with crossing arcs": int((~derivations.is_found).sum()),
            "trees with several roots": int((derivations.is_found & ~has_one_root).sum()),
        },
    )


def _smallest_dtype(trees: Trees) -> torch.dtype:
    """Return a dtype for all ids; the states of a large treebank take hundreds of megabytes."""
    largest = max(int(ids.max()) for ids in (trees.words, trees.tags, trees.labels))
    return torch.int16 if largest <= torch.iinfo(torch.int16).max else torch.int32


# Greedy parsing, and attachment scores.


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
