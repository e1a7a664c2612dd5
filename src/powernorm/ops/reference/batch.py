"""BatchNorm, PowerNormV and BatchRenorm over tokens: batch statistics with their gradient.

With μ = 0 and the quadratic mean in place of the variance the same lines are PowerNormV, with
r = 1 and d = 0 they are BatchNorm.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from powernorm.ops.processes import all_reduce_sum
from powernorm.ops.reference.arrays import (
    affine_gradients,
    count_of,
    keep,
    products,
    reciprocal_root,
    scale_and_shift,
    tokens_of,
    validity_of,
)


class BatchNormOutput(NamedTuple):
    """What the forward returns; statistics are over all processes of the group."""

    y: Tensor
    mean: Tensor
    """Mean used, (C,): the batch's, the running one without valid tokens, 0 if uncentred."""
    var: Tensor
    """Biased variance (centred) or quadratic mean (uncentred) used, (C,)."""
    num_valid: Tensor
    """Number of valid tokens, 0-d."""
    rstd: Tensor
    """1/sqrt(var + eps), (C,)."""
    r: Tensor
    """BatchRenorm's scale, (C,); empty without limits."""
    d: Tensor
    """BatchRenorm's shift, (C,); empty without limits."""
    fresh: Tensor
    """0-d bool: may running statistics move? False in recomputation and without tokens."""
    sums: Tensor
    """(3, C) float64, of this process alone: n, Σx, Σx² over valid tokens."""


def batch_norm(
    x: Tensor,
    padding_mask: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor,
    limits: Tensor | None,
    eps: float,
    floor: bool,
    group_name: str,
) -> BatchNormOutput:
    """Normalise by the batch's statistics (Shen et al. 2020, Algorithm 1; Ioffe 2017).

    Args:
        x: (..., C).
        padding_mask: bool, `x.shape[:-1]`, True = padding.
        weight: γ, (C,).
        bias: β, (C,).
        running_mean: (C,); None means uncentred (PowerNormV).
        running_var: (C,): running variance, or running ψ² if uncentred.
        limits: (r_max, d_max) of BatchRenorm, shape (2,).
        eps: added inside the root, or its floor.
        floor: use max(var, eps) instead of var + eps.
        group_name: process group of `processes.group_name_of`.
    """
    tokens, valid = tokens_of(x), validity_of(padding_mask)
    mean, var, count, sums = _statistics(tokens, valid, running_mean is not None, group_name)
    present = count > 0
    if running_mean is not None:
        mean = torch.where(present, mean, running_mean.to(mean.dtype))
    var = torch.where(present, var, running_var.to(var.dtype))
    rstd = reciprocal_root(var, eps, floor)
    normalized = (tokens - mean) * rstd if running_mean is not None else tokens * rstd
    r, d = tokens.new_empty(0), tokens.new_empty(0)
    if limits is not None:
        assert running_mean is not None
        r, d = _renormalization(mean, var, running_mean, running_var, limits, eps)
        normalized = normalized * r + d
    y = scale_and_shift(normalized, weight, bias).to(x.dtype).reshape(x.shape)
    fresh = torch.zeros_like(present) if in_backward() else present
    return BatchNormOutput(y, mean, var, count, rstd, r, d, fresh, sums)


def in_backward() -> bool:
    """Does autograd recompute a checkpointed forward right now?"""
    return bool(torch._C._current_graph_task_id() != -1)


def _statistics(
    tokens: Tensor, valid: Tensor | None, centered: bool, group_name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(mean, biased variance or ψ², count) over the group, and this process's sums."""
    count = count_of(tokens, valid)
    size = count.clamp(min=1)
    kept = keep(tokens, valid)
    if centered:
        mean = kept.sum(0) / size
        # Two passes: a one-pass sum of squares loses the variance where |mean| >> std.
        var = keep(tokens - mean, valid).square().sum(0) / size
    else:
        var = kept.square().sum(0) / size
        mean = torch.zeros_like(var)
    total = mean.double() * size
    total_squares = var.double() * size + mean.double().square() * size
    sums = torch.stack([count.double().expand_as(total), total, total_squares])
    if group_name:
        merged = all_reduce_sum(sums, group_name)
        size = merged[0].clamp(min=1)
        wide_mean = merged[1] / size
        wide_var = (merged[2] / size - wide_mean.square()).clamp(min=0)
        count = merged[0, 0].to(count.dtype) if merged.shape[1] else count
        mean, var = wide_mean.to(mean.dtype), wide_var.to(var.dtype)
    return mean, var, count, sums


def _renormalization(
    mean: Tensor,
    var: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    limits: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """BatchRenorm's r and d (Ioffe 2017, Algorithm 1), clipped; constants in the backward."""
    max_r, max_d = limits.to(mean.dtype).unbind()
    running_std = (running_var.to(mean.dtype) + eps).sqrt()
    r = ((var + eps).sqrt() / running_std).clamp(1 / max_r, max_r)
    d = ((mean - running_mean.to(mean.dtype)) / running_std).clamp(-max_d, max_d)
    return r, d


def batch_norm_backward(
    grad_y: Tensor,
    grad_mean: Tensor | None,
    grad_var: Tensor | None,
    x: Tensor,
    padding_mask: Tensor | None,
    weight: Tensor | None,
    mean: Tensor,
    var: Tensor,
    count: Tensor,
    rstd: Tensor,
    r: Tensor,
    d: Tensor,
    eps: float,
    floor: bool,
    centered: bool,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (x, weight, bias); Shen et al. 2020, eq. 3, exact at padding too.

    ∂L/∂x_i = s g_i + (v_i/M) [∂L/∂μ - s Σ_j g_j + (x_i - μ)(2 ∂L/∂σ² - s² Σ_j g_j x̂_j)], where
    the sums run over *all* positions (the loss may look at padded outputs) and v_i is 1 at valid
    tokens, 0 at padding.
    """
    tokens, valid = tokens_of(x), validity_of(padding_mask)
    normalized = (tokens - mean) * rstd
    renormalized = normalized * r + d if r.numel() else normalized
    g, grad_weight, grad_bias = affine_gradients(tokens_of(grad_y), renormalized, weight, valid)
    if r.numel():
        g = g * r
    zero = torch.zeros_like(rstd)
    sums = torch.stack(
        [
            g.sum(0),
            products(g, normalized, valid).sum(0),
            zero if grad_mean is None else grad_mean,
            zero if grad_var is None else grad_var,
        ]
    )
    sum_g, sum_gx, grad_mean, grad_var = all_reduce_sum(sums, group_name).unbind()
    through_root = rstd.square() * sum_gx
    if floor:
        through_root = torch.where(var >= eps, through_root, 0.0)
    size = count.clamp(min=1)
    slope = (2 * grad_var - through_root) / size
    through_statistics = (tokens - mean) * slope
    if centered:
        through_statistics = through_statistics + (grad_mean - rstd * sum_g) / size
    through_statistics = keep(through_statistics, valid)
    # Without a valid token anywhere the running statistics were used: the direct path is all.
    grad_x = g * rstd + torch.where(count > 0, through_statistics, 0.0)
    return grad_x.to(x.dtype).reshape(x.shape), grad_weight, grad_bias
