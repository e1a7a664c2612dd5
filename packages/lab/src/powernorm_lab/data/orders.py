"""Orders of rows in batches, as numbers of rows.

Orders for training are pure functions of seed and position: any batch can be computed at any time,
so that a run resumes exactly where it stopped, and nothing depends on the model or on the global
random state.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from powernorm.errors import InputError

SEED_STRIDE: Final = 1_000_003
"""Distance of seeds, so that the generators of (seed, epoch) differ for any plausible epoch."""
BUCKET: Final = 32
"""Number of batches whose shuffled rows are sorted by length together."""
_SPAN: Final = 1 << 31
"""An upper bound of sentence lengths."""


class Order(ABC):
    """The rows of each training batch, drawn again in every epoch.

    Args:
        batches_per_epoch: number of batches in an epoch.
        seed: seed of the order.
    """

    def __init__(self, batches_per_epoch: int, seed: int) -> None:
        self.batches_per_epoch = batches_per_epoch
        self._seed = seed
        self._epochs: dict[int, Sequence[Tensor] | Tensor] = {}

    def at(self, position: int) -> Tensor:
        """Return the numbers of the rows at `position`, counted from the start of the run."""
        epoch, index = divmod(position, self.batches_per_epoch)
        if epoch not in self._epochs:
            # An update may begin in one epoch and end in the next one.
            self._epochs = {
                known: batches for known, batches in self._epochs.items() if abs(known - epoch) == 1
            }
            self._epochs[epoch] = self._drawn(epoch)
        return self._epochs[epoch][index]

    @abstractmethod
    def _drawn(self, epoch: int) -> Sequence[Tensor] | Tensor:
        """Return the rows of each batch of an epoch."""

    def _generator(self, epoch: int) -> torch.Generator:
        return generator_of(self._seed, epoch)


class Shuffled(Order):
    """All rows in random order; rows that do not fill a batch are left out of the epoch.

    Args:
        num_rows: number of rows of the train split.
        batch_size: rows in a batch.
        seed: seed of the order.
        unit: name of the rows, in the plural.

    Raises:
        InputError: there are fewer rows than `batch_size`.
    """

    def __init__(self, num_rows: int, *, batch_size: int, seed: int, unit: str) -> None:
        if num_rows < batch_size:
            raise InputError(
                f"the train split has {num_rows} {unit}, fewer than a batch of {batch_size}: "
                "lower data.batch_size"
            )
        super().__init__(num_rows // batch_size, seed)
        self._num_rows = num_rows
        self._batch_size = batch_size

    def _drawn(self, epoch: int) -> Sequence[Tensor] | Tensor:
        return self._kept(self._generator(epoch)).view(-1, self._batch_size)

    def _kept(self, generator: torch.Generator) -> Tensor:
        order = torch.randperm(self._num_rows, generator=generator)
        return order[: self.batches_per_epoch * self._batch_size]


class ShuffledByLength(Shuffled):
    """Random order with rows of similar length in a batch, to reduce padding.

    The shuffled rows of every `BUCKET` batches are sorted by length and divided into batches; then
    the batches of the epoch are shuffled.

    Args:
        lengths: lengths of the rows, int64, (rows,).
        batch_size: rows in a batch.
        seed: seed of the order.
        unit: name of the rows, in the plural.

    Raises:
        InputError: there are fewer rows than `batch_size`.
    """

    def __init__(self, lengths: Tensor, *, batch_size: int, seed: int, unit: str) -> None:
        super().__init__(len(lengths), batch_size=batch_size, seed=seed, unit=unit)
        self._lengths = lengths

    def _drawn(self, epoch: int) -> Tensor:
        generator = self._generator(epoch)
        buckets = self._kept(generator).split(BUCKET * self._batch_size)
        order = torch.cat([b[self._lengths[b].argsort(stable=True)] for b in buckets])
        batches = order.view(-1, self._batch_size)
        return batches[torch.randperm(len(batches), generator=generator)]


class LengthGroups:
    """Batches of pairs that are sorted by length.

    Pairs are sorted by the length of the longer side, then of the source, then of the target.
    Shuffling permutes only pairs of equal lengths, so that the sizes of batches and their numbers
    of tokens are always the same.

    Args:
        source_lengths: lengths including end marks, int64, (number of pairs,).
        target_lengths: the same for the other side.
        batch_tokens: maximal number of positions of the longer side of a batch, including padding;
            a longer pair is a batch by itself.
    """

    def __init__(
        self, source_lengths: Tensor, target_lengths: Tensor, *, batch_tokens: int
    ) -> None:
        keys = _keys(source_lengths, target_lengths)
        # Two stable sorts by (longer, source) and target; one combined key would overflow.
        by_target = keys[1].argsort(stable=True)
        order = by_target[keys[0][by_target].argsort(stable=True)]
        sources, targets = source_lengths[order], target_lengths[order]
        self._order = order
        changes = (sources.diff() != 0) | (targets.diff() != 0)
        self._groups = torch.empty_like(order)
        self._groups[order] = torch.cat([changes.new_zeros(1, dtype=torch.long), changes.cumsum(0)])
        ends = _ends_of_padded(torch.maximum(sources, targets), batch_tokens)
        self._sizes: list[int] = torch.tensor([0, *ends]).diff().tolist()

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._sizes)

    def batches(self, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        """Return the numbers of the pairs of each batch, with pairs of equal lengths shuffled.

        Args:
            generator: generator of the shuffling; None keeps the original order.
        """
        order = self._order
        if generator is not None:
            shuffled = torch.randperm(order.numel(), generator=generator)
            order = shuffled[self._groups[shuffled].argsort(stable=True)]
        batches: tuple[Tensor, ...] = order.split(self._sizes)
        return batches


class WithinBudget(Order):
    """Batches of similar lengths within a budget of tokens, in random order.

    Every epoch permutes the batches, and the rows of equal lengths; the sizes of batches do not
    change.

    Args:
        groups: the batches.
        seed: seed of the order of the batches.
        row_seed: seed of the order of the rows; None draws both from one generator.
    """

    def __init__(self, groups: LengthGroups, *, seed: int, row_seed: int | None = None) -> None:
        super().__init__(len(groups), seed)
        self._groups = groups
        self._row_seed = row_seed

    def _drawn(self, epoch: int) -> Sequence[Tensor]:
        generator = self._generator(epoch)
        own = generator if self._row_seed is None else generator_of(self._row_seed, epoch)
        batches = self._groups.batches(own)
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def generator_of(seed: int, epoch: int) -> torch.Generator:
    """Return the random generator of an epoch."""
    return torch.Generator().manual_seed(seed * SEED_STRIDE + epoch)


def spaced(num_rows: int, wanted: int | None = None) -> Tensor:
    """Return the numbers of `wanted` evenly spaced rows, at most all; None is all.

    Returns:
        int64, (rows,), increasing.
    """
    kept = num_rows if wanted is None else min(num_rows, wanted)
    return torch.arange(kept) * num_rows // max(kept, 1)


def spaced_by_tokens(lengths: Tensor, max_tokens: int | None) -> Tensor:
    """Return the numbers of evenly spaced rows with about `max_tokens` tokens; None is all rows.

    Args:
        lengths: tokens of each row, int64, (rows,).
        max_tokens: approximate number of tokens; at least one row is returned.
    """
    if max_tokens is None or not len(lengths):
        return spaced(len(lengths))
    return spaced(len(lengths), max(1, max_tokens * len(lengths) // int(lengths.sum())))


def _keys(sources: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return torch.maximum(sources, targets) * _SPAN + sources, targets


def _ends_of_padded(lengths: Tensor, budget: int) -> list[int]:
    """Divide increasing lengths into groups with (number × last length) within the budget."""
    values: list[int] = lengths.tolist()
    ends, start = [], 0
    for index, length in enumerate(values):
        if index > start and (index + 1 - start) * length > budget:
            ends.append(index)
            start = index
    return [*ends, len(values)] if values else ends
