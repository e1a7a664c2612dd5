"""Norms by given statistics, constants of the pass: evaluation and frozen statistics."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from powernorm.ops.reference.arrays import (
    add_residual,
    affine_gradients,
    apply_scales,
    finish_gradient,
    reciprocal_root,
    scale_and_shift,
    scale_groups,
    tokens_of,
)


class StaticNormOutput(NamedTuple):
    """What the forward returns."""

    y: Tensor
    total: Tensor
    """x + residual; empty without a residual."""
    scales: Tensor
    """GroupScaling's factors, (tokens, groups); empty without groups."""
    statistics: Tensor
    """(2, C): the mean (0 if uncentered) and 1/σ that were used."""


def static_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor,
    groups: int,
    eps: float,
    floor: bool,
) -> StaticNormOutput:
    """`y = γ (x - μ)/sqrt(σ² + eps) + β` by statistics that are constants.

    Args:
        x: (..., C).
        residual: added to x first, same shape.
        weight: γ, (C,).
        bias: β, (C,).
        mean: μ, (C,); None means uncentered.
        var: σ², or ψ² if uncentered, (C,).
        groups: GroupScaling in front; 0 leaves it out.
        eps: added inside the root, or its floor.
        floor: use max(var, eps) instead of var + eps.
    """
    inputs, total = add_residual(x, residual)
    tokens, scales = scale_groups(tokens_of(inputs), groups, eps)
    rstd = reciprocal_root(var.to(tokens.dtype), eps, floor)
    center = torch.zeros_like(rstd) if mean is None else mean.to(tokens.dtype)
    # Centered before it is scaled: a x + c cancels where |mean| >> std.
    normalized = tokens * rstd if mean is None else (tokens - center) * rstd
    y = scale_and_shift(normalized, weight, bias).to(x.dtype).reshape(x.shape).contiguous()
    return StaticNormOutput(y, total, scales, torch.stack([center, rstd]))


def static_norm_backward(
    grad_y: Tensor,
    grad_total: Tensor | None,
    inputs: Tensor,
    weight: Tensor | None,
    scales: Tensor,
    statistics: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (x and residual, weight, bias).

    Args:
        grad_y: as y.
        grad_total: gradient of the sum with the residual; None without.
        inputs: what was normalized: x, or the sum with the residual.
        weight: γ.
        scales: the forward's.
        statistics: the forward's.
    """
    tokens = apply_scales(tokens_of(inputs), scales)
    center, rstd = statistics.unbind()
    normalized = (tokens - center) * rstd
    g, grad_weight, grad_bias = affine_gradients(tokens_of(grad_y), normalized, weight, None)
    grad_x = finish_gradient(g * rstd, tokens, scales, grad_total, inputs)
    return grad_x, grad_weight, grad_bias
