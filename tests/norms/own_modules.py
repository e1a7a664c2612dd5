"""Norms as a user writes them: plain modules that know nothing of this library, and others."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import powernorm
from powernorm.norms.feature_dims import Normalized


class Bounded(nn.Module):
    """A per-token norm."""

    def __init__(self, dim, slope: float = 2.0, shift=0.5):  # type: ignore[no-untyped-def]
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.slope, self.shift = slope, shift

    def forward(self, x: Tensor) -> Tensor:
        y = self.slope * x / (1 + x.abs().mean(-1, keepdim=True))
        return self.weight * y + self.bias


class Drawn(nn.Module):
    """Begins with random numbers, and has a linear layer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(size, size)
        self.scale = nn.Parameter(torch.rand(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.gate(x)) * self.scale


class Centered(nn.Module):
    """Batch statistics of its own, over valid tokens; static."""

    is_static = True

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.register_buffer("mean", torch.zeros(dim))

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        mean = self.mean
        if self.training:
            valid = x.new_ones(x.shape[:-1]) if padding_mask is None else (~padding_mask).to(x)
            weight = valid.unsqueeze(-1)
            mean = (x * weight).flatten(0, -2).sum(0) / weight.sum()
            with torch.no_grad():
                self.mean.lerp_(mean.to(self.mean), 0.5)
        return self.weight * (x - mean)


class Mixed(nn.Module):
    """Made of norms of this library."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.batch, self.token = powernorm.BatchNorm(dim), powernorm.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (self.batch(x) + self.token(x))


class Halved(powernorm.Norm):
    """Under the contract by itself."""

    def __init__(self, num_features: int, divisor: float = 2.0) -> None:
        super().__init__(num_features, 1e-5)
        self.divisor = divisor

    def normalize(self, x: Tensor, _: Tensor | None, residual: Tensor | None, /) -> Normalized:
        total = x if residual is None else x + residual
        y = total / self.divisor
        return y if residual is None else (y, total)


PLAIN = (Bounded, Centered, Mixed)
