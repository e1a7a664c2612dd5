"""Which sentence pairs make a batch, so that none has more positions than a budget allows."""

from typing import Final

import torch
from torch import Tensor

_SPAN: Final = 1 << 31
"""More than any sentence is long."""


class LengthGroups:
    """Pairs in the order of their lengths, cut into batches.

    The order is that of the longer side, then of the source, then of the target. Which of equally
    long pairs comes first is all that shuffling changes, so that batches have the same sizes and
    the same numbers of tokens, whatever the order.

    Args:
        source_lengths: end marks included, int64, (number of pairs,).
        target_lengths: the same of the other side.
        batch_tokens: positions of the longer side of a batch, at most; a pair that is longer alone
            makes a batch of its own.
        count_padding: whether padded positions count, so that a batch has number of pairs × length
            of the longest positions, or the sum of the lengths on the side where it is greater.
    """

    def __init__(
        self,
        source_lengths: Tensor,
        target_lengths: Tensor,
        *,
        batch_tokens: int,
        count_padding: bool,
    ) -> None:
        keys = _keys(source_lengths, target_lengths)
        # Two stable sorts make one by (longer, source, target) without a number too large.
        by_target = keys[1].argsort(stable=True)
        order = by_target[keys[0][by_target].argsort(stable=True)]
        sources, targets = source_lengths[order], target_lengths[order]
        self._order = order
        changes = (sources.diff() != 0) | (targets.diff() != 0)
        self._groups = torch.empty_like(order)
        self._groups[order] = torch.cat([changes.new_zeros(1, dtype=torch.long), changes.cumsum(0)])
        if count_padding:
            ends = _ends_of_padded(torch.maximum(sources, targets), batch_tokens)
        else:
            ends = _ends_of_sums(sources.cumsum(0), targets.cumsum(0), batch_tokens)
        self._sizes: list[int] = torch.tensor([0, *ends]).diff().tolist()

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._sizes)

    def batches(self, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        """Return the numbers of the pairs of each batch; equally long ones are shuffled.

        Args:
            generator: of the shuffling; None leaves equally long pairs as they were given.
        """
        order = self._order
        if generator is not None:
            shuffled = torch.randperm(order.numel(), generator=generator)
            order = shuffled[self._groups[shuffled].argsort(stable=True)]
        batches: tuple[Tensor, ...] = order.split(self._sizes)
        return batches


def _keys(sources: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return torch.maximum(sources, targets) * _SPAN + sources, targets


def _ends_of_padded(lengths: Tensor, budget: int) -> list[int]:
    """Cut rising lengths into runs with (number × last length) within the budget."""
    values: list[int] = lengths.tolist()
    ends, start = [], 0
    for index, length in enumerate(values):
        if index > start and (index + 1 - start) * length > budget:
            ends.append(index)
            start = index
    return [*ends, len(values)] if values else ends


def _ends_of_sums(sources: Tensor, targets: Tensor, budget: int) -> list[int]:
    """Cut running sums into runs in which neither grows by more than the budget."""
    ends, start, total = [], 0, sources.numel()
    while start < total:
        limits = [(int(sums[start - 1]) if start else 0) + budget for sums in (sources, targets)]
        end = min(
            int(torch.searchsorted(sums, limit, right=True))
            for sums, limit in zip((sources, targets), limits, strict=True)
        )
        start = max(end, start + 1)
        ends.append(start)
    return ends
