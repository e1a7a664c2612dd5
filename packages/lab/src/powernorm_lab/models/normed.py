"""Modules followed by a norm with a padding mask, and learned scales of heads."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

NormFactory = Callable[[int], nn.Module]
"""Builds a norm for a number of features; its forward takes `(x, padding_mask)`."""


class Normed(nn.Module):
    """A module followed by a norm: `norm(inner(x), padding_mask)`.

    Args:
        inner: module whose forward takes only x.
        norm: norm of its output.
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
    """Call a module, with the padding mask if it is `Normed`."""
    y: Tensor = module(x, padding_mask) if isinstance(module, Normed) else module(x)
    return y


class HeadScale(nn.Module):
    """A learned scale of each head, initially 1 (NormFormer, Shleifer et al. 2021).

    Args:
        num_heads: number of heads; the features of a head are contiguous.

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
