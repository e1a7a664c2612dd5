"""What rounding may change: a formula computed again with every intermediate result disturbed.

This is Monte Carlo arithmetic (Parker 1997). A tolerance made from it knows how well each single
result is conditioned: a sum whose terms cancel, a feature without spread, a token of large values.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

_POOL: Final = 1 << 20


class Rounding:
    """Random relative errors within ± unit, in all samples but the first.

    Args:
        unit: relative size of a rounding error, as eps of a type.
        seed: of the factors.
    """

    def __init__(self, unit: float, seed: int) -> None:
        self._unit = unit
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, value: Tensor, terms: int = 1) -> Tensor:
        """Return values with rounding errors, whose gradients get rounding errors too.

        Args:
            value: (samples, ...).
            terms: number of terms of a sum, which is rounded log2 times in pairwise addition.
        """
        times = 1 + math.log2(max(terms, 1))
        rounded: Tensor = _Rounded.apply(value, self, times)  # type: ignore[no-untyped-call]
        return rounded

    def disturbed(self, value: Tensor, times: float = 1.0) -> Tensor:
        """Return (samples, ...) with errors of so many roundings."""
        size = value[1:].numel()
        # Slices of one pool, each from another place: drawing the numbers anew takes longer than
        # all the rest.
        start = int(torch.randint(_POOL, (), generator=self._generator))
        noise = _noise()[start : start + size]
        while noise.numel() < size:
            noise = torch.cat([noise, _noise()[: size - noise.numel()]])
        errors = value[1:] * noise.view(value[1:].shape)
        return torch.cat([value[:1], torch.add(value[1:], errors, alpha=times * self._unit)])


@cache
def _noise() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return 2 * torch.rand(_POOL, generator=generator, dtype=torch.float64) - 1


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, rounding: Rounding, times: float) -> Tensor:
        ctx.rounding, ctx.times = rounding, times
        return rounding.disturbed(value, times)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # What goes back through a mean has been summed up over the same terms.
        return ctx.rounding.disturbed(grads[0], ctx.times), None, None
