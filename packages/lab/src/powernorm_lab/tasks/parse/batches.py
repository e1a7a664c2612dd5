"""Batches of transitions: each row is a state, with the oracle's transition as its target."""

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from powernorm_lab.data.batch import IGNORED, Batch
from powernorm_lab.data.corpus import EvaluatedSplit, Split
from powernorm_lab.data.orders import spaced
from powernorm_lab.data.rows import Rows
from powernorm_lab.tasks.parse.encoding import EncodedTreebank
from powernorm_lab.tasks.parse.gold import GoldTransitions
from powernorm_lab.tasks.parse.parsing import Parsed, attachment_scores, parse
from powernorm_lab.tasks.parse.settings import ParsingSettings
from powernorm_lab.training.batches import RowData

STATES: Final = "states"
"""Name of the model's input."""


class TransitionRows(Rows):
    """The gold transitions of a split.

    Args:
        gold: gold transitions of the split, sentence by sentence.
        max_examples: number of evenly spaced transitions to use; None is all.
    """

    unit = "transitions"

    def __init__(self, gold: GoldTransitions, max_examples: int | None = None) -> None:
        self._gold = gold
        self._chosen = spaced(len(gold), max_examples)
        super().__init__(torch.ones_like(self._chosen))

    def batch(self, rows: Tensor) -> Batch:
        """Return a batch of transitions by number."""
        chosen = self._chosen[rows]
        targets = self._gold.targets[chosen]
        return Batch(
            named={STATES: self._gold.states[chosen].long()},
            targets=targets,
            num_tokens=len(rows),
            num_targets=int((targets != IGNORED).sum()),
        )


class ParsingData(RowData[ParsingSettings]):
    """Batches of the gold transitions; scores are over all trees.

    Args:
        encoded: the encoded treebank.
        config: sizes and number of steps.
        seed: seed of the order of the transitions.

    Raises:
        InputError: the train split has fewer transitions than a batch.
    """

    def __init__(self, encoded: EncodedTreebank, config: ParsingSettings, seed: int) -> None:
        self._encoded = encoded

        def transitions(split: Split) -> TransitionRows:
            kept = config.data.max_examples if split == "train" else None
            return TransitionRows(encoded.gold[split], kept)

        super().__init__(config, transitions, seed)

    def scores(
        self, split: EvaluatedSplit, model: nn.Module, device: torch.device, *, brief: bool = False
    ) -> Mapping[str, float]:
        """Return UAS and LAS of all trees of a split, in percent."""
        del brief
        parsed = parse_split(self._encoded, split, model, device)
        return attachment_scores(self._encoded.trees[split], parsed)


def parse_split(
    encoded: EncodedTreebank,
    split: Split,
    model: Callable[[Tensor], Tensor],
    device: torch.device,
) -> Parsed:
    """Parse the sentences of a split with a model in evaluation mode."""
    return parse(encoded.trees[split], model, encoded.inventory, device)
