"""Moments: what a batch of tokens adds to a statistic, mergeable in any order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from powernorm.ops.processes import all_reduce_sum


@dataclass(frozen=True, eq=False)
class Moments:
    """Count and first two sums of a set of tokens, per feature, in float64.

    Float64 sums stay exact where float32 sums of squares do not: at mean 1e4 and standard
    deviation 1 the variance is right to 1e-7, against an error of several hundred percent.

    Attributes:
        count: number of valid tokens, 0-d.
        total: sum over valid tokens, shape (C,).
        total_squares: sum of squares over valid tokens, shape (C,).

    >>> a = Moments.of(torch.tensor([[1.0], [3.0]]))
    >>> b = Moments.of(torch.tensor([[5.0]]))
    >>> a.merge(b).mean.item(), round(a.merge(b).var.item(), 6)
    (3.0, 2.666667)
    """

    count: Tensor
    total: Tensor
    total_squares: Tensor

    @classmethod
    def of(cls, x: Tensor, padding_mask: Tensor | None = None) -> Moments:
        """Moments of the valid tokens of `x`.

        Args:
            x: shape (..., C).
            padding_mask: bool, shape `x.shape[:-1]`, True = padding.
        """
        tokens = x.detach().reshape(-1, x.shape[-1]).double()
        if padding_mask is not None:
            # `where`, not a product: padding may hold infinities.
            tokens = torch.where(padding_mask.reshape(-1, 1), 0.0, tokens)
            count = (~padding_mask).sum().double()
        else:
            count = tokens.new_full((), float(tokens.shape[0]))
        return cls(count, tokens.sum(0), tokens.square().sum(0))

    @classmethod
    def zero(cls, num_features: int, device: torch.device | None = None) -> Moments:
        """Moments of no token: the neutral element of `merge`."""
        zeros = torch.zeros(num_features, dtype=torch.float64, device=device)
        return cls(torch.zeros((), dtype=torch.float64, device=device), zeros, zeros)

    @property
    def mean(self) -> Tensor:
        """Mean per feature, shape (C,); 0 where there is no token."""
        return self.total / self.count.clamp(min=1)

    @property
    def second_moment(self) -> Tensor:
        """Quadratic mean per feature (ψ²), shape (C,); 0 where there is no token."""
        return self.total_squares / self.count.clamp(min=1)

    @property
    def var(self) -> Tensor:
        """Biased variance per feature (divided by the count), shape (C,)."""
        return (self.second_moment - self.mean.square()).clamp(min=0)

    def merge(self, other: Moments) -> Moments:
        """Moments of both sets together; associative and commutative."""
        return Moments(
            self.count + other.count,
            self.total + other.total,
            self.total_squares + other.total_squares,
        )

    def all_reduce(self, group_name: str) -> Moments:
        """Moments over all processes of the group; one collective. `""` means no group."""
        if not group_name:
            return self
        packed = torch.cat([self.count.reshape(1), self.total, self.total_squares])
        packed = all_reduce_sum(packed, group_name)
        features = self.total.shape[0]
        return Moments(packed[0], packed[1 : 1 + features], packed[1 + features :])
