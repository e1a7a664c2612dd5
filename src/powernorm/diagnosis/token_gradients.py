"""What is asked of every token by itself: its gradient's mean and variance, its outliers.

Xu et al. 2019: Theorem 1 says what each norm does to the mean and the variance over features of a
token's gradient; equation 7 is the share of normalised values above 1/k, which AdaNorm assumes to
be small.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from powernorm.norms import AdaNorm, SimpleLayerNorm

NUM_GRADIENT_SUMS: Final = 3
NUM_INPUT_SUMS: Final = 4
_PAPERS_K: Final = 0.1


def wide(x: Tensor) -> Tensor:
    """Half precision as float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def gradient_sums(gradient: Tensor) -> Tensor:
    """Σ of squares, Σ over tokens of the mean and of the variance over features, (3,) float64.

    Args:
        gradient: (..., C).
    """
    gradient = wide(gradient).reshape(-1, gradient.shape[-1])
    size = gradient.shape[-1]
    mean = gradient.sum(-1).double() / size
    squares = torch.linalg.vector_norm(gradient, dim=-1).double().square()
    variance = squares / size - mean.square()
    return torch.stack([squares.sum(), mean.sum(), variance.sum()])


def input_sums(module: nn.Module, x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Tokens, a sum that is finite if all values are, outliers and values that could be: (4,).

    Args:
        module: the norm.
        x: what it gets, (..., C).
        padding_mask: True = padding, which is not looked at.
    """
    tokens = wide(x).reshape(-1, x.shape[-1])
    size = tokens.shape[-1]
    total = tokens.sum(-1, dtype=torch.float64)
    above = _above(module, tokens, total)
    if padding_mask is None:
        count = total.new_full((), float(tokens.shape[0]))
    else:
        valid = ~padding_mask.reshape(-1)
        count = valid.sum(dtype=torch.float64)
        total = torch.where(valid, total, 0.0)
        above = None if above is None else torch.where(valid, above, 0)
    if above is None:
        zero = torch.zeros_like(count)
        return torch.stack([count, total.sum(), zero, zero])
    return torch.stack([count, total.sum(), above.sum(dtype=torch.float64), count * size])


def _above(module: nn.Module, tokens: Tensor, total: Tensor) -> Tensor | None:
    """How many |y| of each token are above 1/k, (tokens,); None for norms without the question."""
    if not isinstance(module, AdaNorm | SimpleLayerNorm):
        return None
    k = module.k if isinstance(module, AdaNorm) else _PAPERS_K
    size = tokens.shape[-1]
    deviations = tokens - (total / size).to(tokens.dtype).unsqueeze(-1)
    squares = torch.linalg.vector_norm(deviations, dim=-1, keepdim=True).square()
    if module.released:
        root = (squares / (size - 1)).sqrt() + module.eps
    else:
        root = (squares / size + module.eps).sqrt()
    above: Tensor = (deviations.abs() * abs(k) > root).sum(-1)
    return above
