"""The gold transitions of trees as examples to learn from."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from powernorm.lab.tasks.parse.inventory import Inventory
from powernorm.lab.tasks.parse.oracle import derive, gold_states
from powernorm.lab.tasks.parse.trees import Trees


@dataclass(frozen=True)
class GoldTransitions:
    """What the oracle does, and what it sees when it does it.

    Trees with crossing arcs cannot be built by transitions, and those with several roots not by the
    ones that the parser allows itself: they are left out.
    """

    states: Tensor
    """int16 or int32, (num_transitions, 48): the features before each transition."""
    targets: Tensor
    """int64, (num_transitions,): ids of transitions, `IGNORED` for a label that is unknown."""
    num_crossing: int
    """Sentences that are left out for crossing arcs."""
    num_several_roots: int
    """And those that are left out for several roots alone."""

    def __len__(self) -> int:
        """Return the number of transitions."""
        return len(self.targets)

    @property
    def left_out(self) -> Mapping[str, int]:
        """Return the sentences without gold transitions, by reason."""
        return MappingProxyType(
            {
                "trees with crossing arcs": self.num_crossing,
                "trees with several roots": self.num_several_roots,
            }
        )


def gold_transitions(trees: Trees, inventory: Inventory) -> GoldTransitions:
    """Derive the gold transitions of trees.

    Nothing is cached: it takes less time than reading the files.

    Args:
        trees: the sentences.
        inventory: the transitions that there are.
    """
    derivations = derive(trees)
    has_one_root = trees.num_roots() == 1
    rows = (derivations.is_found & has_one_root).nonzero().flatten()
    kept, steps = trees.part(rows), derivations.part(rows)
    return GoldTransitions(
        states=gold_states(kept, steps, _smallest_dtype(trees)),
        targets=inventory.ids(steps.kinds, steps.labels),
        num_crossing=int((~derivations.is_found).sum()),
        num_several_roots=int((derivations.is_found & ~has_one_root).sum()),
    )


def _smallest_dtype(trees: Trees) -> torch.dtype:
    """Return what holds every id: the states of a large treebank are hundreds of megabytes."""
    largest = max(int(ids.max()) for ids in (trees.words, trees.tags, trees.labels))
    return torch.int16 if largest <= torch.iinfo(torch.int16).max else torch.int32
