"""Norms of one token by its own features: no state, the same in training and evaluation.

Statistics in float32 (float64 for float64 input), the result in the input's type.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from powernorm.ops.plain import num_features_of
from powernorm.ops.reference.arrays import (
    accumulation_dtype,
    add_residual,
    scale_and_shift,
    tokens_of,
    where_arriving,
)


class TokenNormOutput(NamedTuple):
    """What the forward returns."""

    y: Tensor
    total: Tensor
    """x + residual; empty without a residual."""
    statistics: Tensor
    """(2, tokens, groups): mean (0 if uncentered) and 1/σ."""


def token_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    centered: bool,
    eps: float,
    released: bool,
    scale: float,
    k: float,
) -> TokenNormOutput:
    """`z = s (1 - k y) ⊙ y` with `y = (x - μ)/σ` per token and group of features, then γ z + β.

    LayerNorm's statistics for one group (Xu et al. 2019, eq. 1), GroupNorm's for several; without
    a mean RMSNorm and GroupScaling (Shen et al. 2020, App. A). s = 1 and k = 0 leave y; AdaNorm has
    k = 0.1 (Xu et al. 2019, eq. 9).

    Args:
        x: (..., C).
        residual: added to x first, same shape.
        weight: γ, (C,).
        bias: β, (C,).
        groups: number of equal groups of features, ≥ 1.
        centered: subtract the mean.
        eps: inside the root; released: added to the standard deviation.
        released: divide the variance by one less than the group's size, eps outside the root.
        scale: s, AdaNorm's C.
        k: AdaNorm's k; its factor is a constant in the backward.
    """
    inputs, total = add_residual(x, residual)
    parts = tokens_of(inputs).unflatten(-1, (groups, x.shape[-1] // groups))
    mean = parts.mean(-1) if centered else torch.zeros_like(parts[..., 0])
    deviations = parts - mean.unsqueeze(-1) if centered else parts
    rstd = 1 / _standard_deviation(deviations, eps, released)
    y = (deviations * rstd.unsqueeze(-1)).flatten(-2)
    z = y * scale * (1 - k * y)
    out = scale_and_shift(z, weight, bias).to(x.dtype).reshape(x.shape).contiguous()
    return TokenNormOutput(out, total, torch.stack([mean, rstd]))


def token_norm_backward(
    grad_y: Tensor,
    grad_total: Tensor | None,
    inputs: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    centered: bool,
    released: bool,
    scale: float,
    k: float,
    detach_mean: bool,
    detach_std: bool,
    affine: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of (x and residual, weight, bias); Xu et al. 2019, Theorem 1.

    `∂L/∂x = (g - mean g)/σ - (x - μ) Σ g (x - μ) / (σ² N σ₀)`, over the N features of a group, with
    σ₀ = σ (released: σ without eps, N one less); detached statistics drop their term. Where no
    gradient arrives none leaves, whatever the token holds: padding may be NaN.

    Args:
        grad_y: as y.
        grad_total: gradient of the sum with the residual; None without.
        inputs: what was normalized: x, or the sum with the residual.
        weight: γ.
        statistics: the forward's.
        centered: as in the forward.
        released: as in the forward.
        scale: as in the forward.
        k: as in the forward.
        detach_mean: no gradient through μ.
        detach_std: no gradient through σ (the standard deviation, not the variance).
        affine: are the gradients of γ and β wanted? Else they are None.
    """
    mean, rstd = (part.unsqueeze(-1) for part in statistics.unbind())
    groups = mean.shape[-2]
    tokens, grad = tokens_of(inputs), tokens_of(grad_y)
    deviations = tokens.unflatten(-1, (groups, tokens.shape[-1] // groups)) - mean
    y = (deviations * rstd).flatten(-2)
    factor = scale * (1 - k * y)
    grad_weight, grad_bias = where_arriving(grad, grad * factor * y).sum(0), grad.sum(0)
    g = grad * factor if weight is None else grad * weight.to(grad.dtype) * factor
    g = where_arriving(grad, g).unflatten(-1, deviations.shape[-2:])
    grad_x = where_arriving(g, g * rstd)
    if centered and not detach_mean:
        mean_g = g.mean(-1, keepdim=True)
        grad_x = grad_x - where_arriving(mean_g, mean_g * rstd)
    if not detach_std:
        along = where_arriving(g, g * deviations).sum(-1, keepdim=True)
        along = where_arriving(along, along * rstd.square())
        share = deviations * along / _root_of(deviations, rstd, released)
        grad_x = grad_x - where_arriving(along, share)
    grad_x = grad_x.flatten(-2)
    if grad_total is not None:
        grad_x = grad_x + tokens_of(grad_total)
    grad_x = grad_x.to(inputs.dtype).reshape(inputs.shape).contiguous()
    return (grad_x, grad_weight, grad_bias) if affine else (grad_x, None, None)


def _standard_deviation(deviations: Tensor, eps: float, released: bool) -> Tensor:
    if not released:
        return (deviations.square().mean(-1) + eps).sqrt()
    var = deviations.square().sum(-1) / (deviations.shape[-1] - 1)
    # The root's gradient at 0 is infinite; of a token whose features are all equal it is 0.
    varies = var != 0  # NaN too, which stays NaN
    return torch.where(varies, torch.where(varies, var, 1.0).sqrt(), 0.0) + eps


def _root_of(deviations: Tensor, rstd: Tensor, released: bool) -> Tensor:
    """N σ₀ of the backward; 1 where a token's features are all equal, whose term is 0."""
    size = deviations.shape[-1]
    if not released:
        return size / rstd
    # From the data: 1/rstd - eps would cancel where eps is the larger part.
    root = (deviations.square().sum(-1, keepdim=True) * (size - 1)).sqrt()
    return torch.where(root > 0, root, 1.0)


def differentiable_token_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    centered: bool,
    eps: float,
    released: bool,
    scale: float,
    k: float,
    detach_mean: bool,
    detach_std: bool,
) -> Tensor:
    """The same in differentiable torch, for derivatives of the derivative."""
    parts = tokens_of(x).unflatten(-1, (groups, num_features_of(x) // groups))
    deviations = parts
    constant = parts
    if centered:
        mean = parts.mean(-1, keepdim=True)
        deviations = parts - mean
        constant = parts - mean.detach() if detach_mean else deviations
    std = _standard_deviation(deviations, eps, released).unsqueeze(-1)
    y = (constant / (std.detach() if detach_std else std)).flatten(-2)
    z = y * (scale * (1 - k * y)).detach() if k else y * scale
    return scale_and_shift(z, weight, bias).to(x.dtype).reshape(x.shape)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Torch's LayerNorm over the features."""
    shape = (num_features_of(x),)
    if weight is not None and weight.dtype != x.dtype:
        wide = x.to(accumulation_dtype(x))
        normalized = torch.nn.functional.layer_norm(wide, shape, None, None, eps)
        return scale_and_shift(normalized, weight, bias).to(x.dtype)
    # Autocast on some devices returns float32.
    return torch.nn.functional.layer_norm(x, shape, weight, bias, eps).to(x.dtype)
