"""Batches of transitions: each row is a state, its target the oracle's transition."""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm.lab.data.batch import IGNORED
from powernorm.lab.data.examples import Examples
from powernorm.lab.data.segments import SEED_STRIDE
from powernorm.lab.tasks.parse.gold import GoldTransitions

STATES: Final = "states"
"""Name of the model's input."""


class TrainingTransitions:
    """The transitions of each training batch, in an order that seed and position determine.

    Each epoch shuffles the transitions of all sentences; what does not fill a batch waits for the
    next one.

    Args:
        gold: of the train split.
        batch_size: transitions in a batch.
        seed: of the order.
        max_examples: only about so many transitions, evenly spaced; None is all.

    Raises:
        InputError: there are fewer transitions than a batch has.
    """

    def __init__(
        self, gold: GoldTransitions, *, batch_size: int, seed: int, max_examples: int | None = None
    ) -> None:
        self._gold = gold
        self._chosen = _spaced(len(gold), max_examples)
        if len(self._chosen) < batch_size:
            raise InputError(
                f"The train split has {len(self._chosen)} transitions, fewer than a batch of "
                f"{batch_size}: lower data.batch_size."
            )
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.long)

    @property
    def batches_per_epoch(self) -> int:
        """Return the number of batches after which the transitions begin anew."""
        return len(self._chosen) // self._batch_size

    @property
    def tokens_per_batch(self) -> float:
        """Return the number of transitions in a batch."""
        return float(self._batch_size)

    def batch(self, position: int) -> Examples:
        """Return the batch at `position`, counted from the start of the run over all epochs."""
        epoch, index = divmod(position, self.batches_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * SEED_STRIDE + epoch)
            self._order = torch.randperm(len(self._chosen), generator=generator)
            self._epoch = epoch
        first = index * self._batch_size
        return _batch(self._gold, self._chosen[self._order[first : first + self._batch_size]])


class EvaluationTransitions:
    """The transitions of each evaluation batch, sentence after sentence.

    Args:
        gold: of the split.
        batch_size: transitions in a batch.
        max_examples: only about so many, evenly spaced; None is all.
    """

    def __init__(
        self, gold: GoldTransitions, *, batch_size: int, max_examples: int | None = None
    ) -> None:
        self._gold = gold
        self._portions = _spaced(len(gold), max_examples).split(batch_size)

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._portions)

    def __iter__(self) -> Iterator[Examples]:
        """Yield the batches."""
        return (_batch(self._gold, rows) for rows in self._portions)


def _spaced(number: int, wanted: int | None) -> Tensor:
    kept = number if wanted is None else min(number, wanted)
    return torch.arange(kept) * number // max(kept, 1)


def _batch(gold: GoldTransitions, rows: Tensor) -> Examples:
    targets = gold.targets[rows]
    return Examples(
        named={STATES: gold.states[rows].long()},
        targets=targets,
        num_tokens=len(rows),
        num_targets=int((targets != IGNORED).sum()),
    )
