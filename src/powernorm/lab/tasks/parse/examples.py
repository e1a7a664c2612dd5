"""Batches of transitions: each row is a state, its target the oracle's transition."""

from typing import Final

import torch
from torch import Tensor

from powernorm.lab.data.batch import IGNORED, Batch
from powernorm.lab.data.orders import spaced
from powernorm.lab.data.rows import Rows
from powernorm.lab.tasks.parse.gold import GoldTransitions

STATES: Final = "states"
"""Name of the model's input."""


class TransitionRows(Rows):
    """The gold transitions of a split.

    Args:
        gold: of the split, sentence after sentence.
        max_examples: only about so many transitions, evenly spaced; None is all.
    """

    unit = "transitions"

    def __init__(self, gold: GoldTransitions, max_examples: int | None = None) -> None:
        self._gold = gold
        self._chosen = spaced(len(gold), max_examples)
        super().__init__(torch.ones_like(self._chosen))

    def batch(self, rows: Tensor) -> Batch:
        """Return transitions by number."""
        chosen = self._chosen[rows]
        targets = self._gold.targets[chosen]
        return Batch(
            named={STATES: self._gold.states[chosen].long()},
            targets=targets,
            num_tokens=len(rows),
            num_targets=int((targets != IGNORED).sum()),
        )
