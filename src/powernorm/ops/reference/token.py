"""Norms of one token by its own features: no state, the same in training and evaluation.

Plain differentiable torch; statistics in float32 (float64 for float64 input), the result in the
input's type.
"""

from __future__ import annotations

import torch
from torch import Tensor

from powernorm.ops.reference.arrays import accumulation_dtype, scale_and_shift


def standardize(
    x: Tensor, eps: float, released: bool, detach_mean: bool = False, detach_std: bool = False
) -> Tensor:
    """`y = (x - μ)/σ` over the features, in the accumulation type (Xu et al. 2019, eq. 1 and 4).

    Args:
        x: (..., C).
        eps: inside the root; released: added to the standard deviation.
        released: divide the variance by C - 1 and add eps outside the root.
        detach_mean: no gradient through μ.
        detach_std: no gradient through σ (the standard deviation, not the variance).
    """
    wide = x.to(accumulation_dtype(x))
    mean = wide.mean(-1, keepdim=True)
    centered = wide - mean
    if released:
        var = centered.square().sum(-1, keepdim=True) / (x.shape[-1] - 1)
        # The root's gradient at 0 is infinite; of a token whose features are all equal it is 0.
        varies = var > 0
        std = torch.where(varies, torch.where(varies, var, 1.0).sqrt(), 0.0) + eps
    else:
        std = (centered.square().mean(-1, keepdim=True) + eps).sqrt()
    if detach_mean:
        centered = wide - mean.detach()
    return centered / (std.detach() if detach_std else std)


def simple_layer_norm(
    x: Tensor, eps: float, released: bool, detach_mean: bool = False, detach_std: bool = False
) -> Tensor:
    """LayerNorm without γ and β; DetachNorm where a statistic is a constant in the backward."""
    return standardize(x, eps, released, detach_mean, detach_std).to(x.dtype)


def ada_norm(x: Tensor, scale: float, k: float, eps: float, released: bool) -> Tensor:
    """`z = C (1 - k y) ⊙ y` with the factor a constant in the backward (Xu et al. 2019, eq. 9)."""
    y = standardize(x, eps, released)
    return (scale * (1 - k * y).detach() * y).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`γ x / sqrt(mean x² + eps)` over the features."""
    wide = x.to(accumulation_dtype(x))
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return scale_and_shift(scaled, weight, None).to(x.dtype)


def group_scaling(x: Tensor, groups: int, eps: float) -> Tensor:
    """`x / sqrt(mean_group x² + eps)` per token and group of features (Shen et al., App. A)."""
    wide = x.to(accumulation_dtype(x)).reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return scaled.flatten(-2).to(x.dtype)


def group_norm(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Each token's features in groups, each group to mean 0 and variance 1 (Wu and He 2018)."""
    wide = x.to(accumulation_dtype(x)).reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    centered = wide - wide.mean(-1, keepdim=True)
    scaled = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    return scale_and_shift(scaled.flatten(-2), weight, bias).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Torch's LayerNorm over the features."""
    if weight is not None and weight.dtype != x.dtype:
        wide = x.to(accumulation_dtype(x))
        normalized = torch.nn.functional.layer_norm(wide, x.shape[-1:], None, None, eps)
        return scale_and_shift(normalized, weight, bias).to(x.dtype)
    # Autocast on some devices returns float32.
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps).to(x.dtype)


def dynamic_tanh(x: Tensor, alpha: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """`γ tanh(α x) + β` (Zhu et al. 2025)."""
    wide = torch.tanh(alpha.to(accumulation_dtype(x)) * x.to(accumulation_dtype(x)))
    return scale_and_shift(wide, weight, bias).to(x.dtype)
