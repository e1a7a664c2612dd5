"""Modules with a norm behind them, which needs the padding mask, and the scale of heads."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

NormFactory = Callable[[int], nn.Module]
"""Makes the norm of a number of features, whose forward takes `(x, padding_mask)`."""


class Normed(nn.Module):
    """A module, and a norm of its output: `norm(inner(x), padding_mask)`.

    Args:
        inner: takes x alone.
        norm: of its output.
    """

    def __init__(self, inner: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.norm = norm

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the normalized output."""
        normalized: Tensor = self.norm(self.inner(x), padding_mask)
        return normalized


def apply_masked(module: nn.Module, x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Call a module, with the padding mask where a norm is behind it."""
    y: Tensor = module(x, padding_mask) if isinstance(module, Normed) else module(x)
    return y


class HeadScale(nn.Module):
    """A learned scale of each head (NormFormer, Shleifer et al. 2021), which begins at 1.

    Args:
        num_heads: number of heads, each with features of its own side by side.

    Shape:
        - x: (…, features)
        - output: the same
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_heads))

    def forward(self, x: Tensor) -> Tensor:
        """Return x with the features of each head scaled."""
        return x * self.weight.repeat_interleave(x.shape[-1] // len(self.weight))
