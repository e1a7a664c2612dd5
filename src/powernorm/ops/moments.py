"""Moments of a batch of tokens, mergeable in any order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from powernorm.ops.processes import all_gather


def merge_moments(counts: Tensor, means: Tensor, squares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (count, mean, sum of squared deviations) of several sets together, by Chan's formula.

    The mean's square is never added to the variance, which would vanish in it where |mean| >> std.

    Args:
        counts: (sets, C) or (sets, 1).
        means: (sets, C), of each set.
        squares: (sets, C), sums of squared deviations from each set's own mean.
    """
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count.clamp(min=1)
    return count, mean, (squares + counts * (means - mean).square()).sum(0)


@dataclass(frozen=True, eq=False)
class Moments:
    """Count, mean and squared deviations of a set of tokens, per feature, in float64.

    At mean 1e9 and standard deviation 1 the variance of float64 tokens is right to 1e-6; raw sums
    of squares would lose all of its digits.

    Attributes:
        count: number of valid tokens, 0-d.
        mean: mean over valid tokens, shape (C,); 0 where there is no token.
        squares: sum of squared deviations from that mean, shape (C,).

    >>> a = Moments.of(torch.tensor([[1.0], [3.0]]))
    >>> b = Moments.of(torch.tensor([[5.0]]))
    >>> a.merge(b).mean.item(), round(a.merge(b).var.item(), 6)
    (3.0, 2.666667)
    """

    count: Tensor
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, x: Tensor, padding_mask: Tensor | None = None) -> Moments:
        """Compute the moments of the valid tokens of `x`.

        Args:
            x: shape (..., C).
            padding_mask: bool, shape `x.shape[:-1]`, True = padding.
        """
        tokens = x.detach().reshape(-1, x.shape[-1]).double()
        if padding_mask is None:
            mean = tokens.sum(0) / max(tokens.shape[0], 1)
            count = tokens.new_full((), float(tokens.shape[0]))
            return cls(count, mean, (tokens - mean).square().sum(0))
        padding = padding_mask.reshape(-1, 1)
        count = (~padding).sum().double()
        # `where`, not a product: padding may hold infinities.
        mean = torch.where(padding, 0.0, tokens).sum(0) / count.clamp(min=1)
        return cls(count, mean, torch.where(padding, 0.0, tokens - mean).square().sum(0))

    @classmethod
    def from_sums(cls, count: Tensor, total: Tensor, total_squares: Tensor) -> Moments:
        """Compute moments from sums of values and squares, which lose digits if `|mean| >> std`."""
        mean = total / count.clamp(min=1)
        return cls(count, mean, (total_squares - total * mean).clamp(min=0))

    @classmethod
    def zero(cls, num_features: int, device: torch.device | None = None) -> Moments:
        """Return the moments of no token: the neutral element of `merge`."""
        zeros = torch.zeros(num_features, dtype=torch.float64, device=device)
        return cls(torch.zeros((), dtype=torch.float64, device=device), zeros, zeros)

    @property
    def var(self) -> Tensor:
        """Biased variance per feature (divided by the count), shape (C,)."""
        return self.squares / self.count.clamp(min=1)

    @property
    def second_moment(self) -> Tensor:
        """Quadratic mean per feature (ψ²), shape (C,); 0 where there is no token."""
        return self.var + self.mean.square()

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both sets together; associative and commutative."""
        return _merged(torch.stack([self._packed(), other._packed()]))

    def all_reduce(self, group_name: str) -> Moments:
        """Return the moments over all processes of the group; one collective, none for `""`."""
        return _merged(all_gather(self._packed(), group_name)) if group_name else self

    def _packed(self) -> Tensor:
        return torch.cat([self.count.reshape(1), self.mean, self.squares])


def _merged(packed: Tensor) -> Moments:
    """Merge the moments of several sets, the rows of (sets, 1 + 2 C)."""
    features = packed.shape[1] // 2
    counts, means, squares = packed.split([1, features, features], dim=1)
    count, mean, total = merge_moments(counts, means, squares)
    return Moments(count.reshape(()), mean, total)
