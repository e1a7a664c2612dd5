"""BatchNorm, PowerNormV and BatchRenorm over tokens: batch statistics with their gradient.

With μ = 0 and the quadratic mean in place of the variance the same lines are PowerNormV, with
r = 1 and d = 0 they are BatchNorm.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from powernorm.ops.processes import all_reduce_sum
from powernorm.ops.reference.arrays import (
    add_residual,
    affine_gradients,
    apply_scales,
    count_of,
    finish_gradient,
    keep,
    products,
    reciprocal_root,
    scale_and_shift,
    scale_groups,
    tokens_of,
    validity_of,
)
from powernorm.ops.reference.state import centered_sums, reduce_sums


class BatchNormOutput(NamedTuple):
    """What the forward returns."""

    y: Tensor
    total: Tensor
    """x + residual; empty without a residual."""
    scales: Tensor
    """GroupScaling's factors, (tokens, groups); empty without groups."""
    statistics: Tensor
    """(6, C): mean (running without valid tokens, 0 if uncentered), biased variance or quadratic
    mean, 1/sqrt(var + eps), BatchRenorm's r and d (1 and 0 without), number of valid tokens; over
    all processes of the group."""
    sums: Tensor
    """Float64, over the valid tokens of this process alone: (4, C) of `state.centered_sums`, or
    (2, C), n and Σx², if uncentered."""


def batch_norm(
    x: Tensor,
    residual: Tensor | None,
    padding_mask: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor,
    limits: Tensor | None,
    groups: int,
    eps: float,
    floor: bool,
    group_name: str,
) -> BatchNormOutput:
    """Normalize by the batch's statistics (Shen et al. 2020, Algorithm 1; Ioffe 2017).

    Args:
        x: (..., C).
        residual: added to x first, same shape.
        padding_mask: bool, `x.shape[:-1]`, True = padding.
        weight: γ, (C,).
        bias: β, (C,).
        running_mean: (C,); None means uncentered (PowerNormV).
        running_var: (C,): running variance, or running ψ² if uncentered.
        limits: (r_max, d_max) of BatchRenorm, shape (2,).
        groups: GroupScaling before the statistics; 0 leaves it out.
        eps: added inside the root, or its floor.
        floor: use max(var, eps) instead of var + eps.
        group_name: process group of `processes.group_name_of`.
    """
    inputs, total = add_residual(x, residual)
    valid = validity_of(padding_mask)
    tokens, scales = scale_groups(tokens_of(inputs), groups, eps)
    measured, sums = _measure(tokens, valid, running_mean is not None, group_name)
    statistics = _complete(measured, running_mean, running_var, limits, eps, floor)
    mean, _, rstd, r, d, _ = statistics.unbind()
    normalized = (tokens - mean) * rstd if running_mean is not None else tokens * rstd
    if limits is not None:
        normalized = normalized * r + d
    y = scale_and_shift(normalized, weight, bias).to(x.dtype).reshape(x.shape).contiguous()
    # Detached: autograd forbids to change a view in place that one of its functions gives.
    return BatchNormOutput(y.detach(), total, scales, statistics, sums)


NO_BACKWARD: Final = -1


def in_backward() -> bool:
    """Does autograd recompute a checkpointed forward right now?"""
    return current_backward() != NO_BACKWARD


def current_backward() -> int:
    """Return torch's number of the backward that runs in this thread, or `NO_BACKWARD`."""
    return int(torch._C._current_graph_task_id())


def _measure(
    tokens: Tensor, valid: Tensor | None, centered: bool, group_name: str
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """(mean, biased variance or ψ², count) over the group, and this process's sums."""
    count = count_of(tokens, valid)
    size = count.clamp(min=1)
    kept = keep(tokens, valid)
    if centered:
        mean = kept.sum(0) / size
        # Two passes: a one-pass sum of squares loses the variance where |mean| >> std.
        squares = keep(tokens - mean, valid).square().sum(0)
        sums = centered_sums(count, mean, squares)
    else:
        squares = kept.square().sum(0)
        mean = torch.zeros_like(squares)
        sums = torch.stack([count.double().expand_as(mean), squares.double()])
    if group_name:
        merged = reduce_sums(sums, centered, group_name)
        size = merged[0].clamp(min=1)
        if centered:
            mean = (merged[1] / size).to(mean.dtype)
        squares, count = merged[2 if centered else 1], merged[0]
    var, counts = (squares / size).to(mean.dtype), count.to(mean.dtype).expand_as(mean)
    return (mean, var, counts), sums


def _complete(
    measured: tuple[Tensor, Tensor, Tensor],
    running_mean: Tensor | None,
    running_var: Tensor,
    limits: Tensor | None,
    eps: float,
    floor: bool,
) -> Tensor:
    """The (6, C) statistics of `BatchNormOutput`."""
    mean, var, counts = measured
    present = counts > 0
    if running_mean is not None:
        mean = torch.where(present, mean, running_mean.to(mean.dtype))
    var = torch.where(present, var, running_var.to(var.dtype))
    rstd = reciprocal_root(var, eps, floor)
    r, d = torch.ones_like(mean), torch.zeros_like(mean)
    if limits is not None:
        assert running_mean is not None
        r, d = _renormalization(mean, var, running_mean, running_var, limits, eps)
    return torch.stack([mean, var, rstd, r, d, counts])


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
    grad_total: Tensor | None,
    grad_statistics: Tensor | None,
    inputs: Tensor,
    padding_mask: Tensor | None,
    weight: Tensor | None,
    scales: Tensor,
    statistics: Tensor,
    eps: float,
    floor: bool,
    centered: bool,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (x and residual, weight, bias); Shen et al. 2020, eq. 3, exact at padding too.

    ∂L/∂x_i = s g_i + (v_i/M) [∂L/∂μ - s Σ_j g_j + (x_i - μ)(2 ∂L/∂σ² - s² Σ_j g_j x̂_j)], where
    the sums run over *all* positions (the loss may look at padded outputs) and v_i is 1 at valid
    tokens, 0 at padding.

    Args:
        grad_y: as y.
        grad_total: gradient of the sum with the residual; None without.
        grad_statistics: (6, C), of which the first two rows count; None for zeros.
        inputs: what was normalized: x, or the sum with the residual.
        padding_mask: as in the forward.
        weight: γ.
        scales: the forward's.
        statistics: the forward's.
        eps: as in the forward.
        floor: as in the forward.
        centered: was there a mean?
        group_name: as in the forward.
    """
    tokens = apply_scales(tokens_of(inputs), scales)
    valid = validity_of(padding_mask)
    mean, var, rstd, r, d, count = statistics.unbind()
    deviations = tokens - mean if centered else tokens
    normalized = deviations * rstd
    g, grad_weight, grad_bias = affine_gradients(
        tokens_of(grad_y), normalized * r + d, weight, valid
    )
    g = g * r
    zero = torch.zeros_like(rstd)
    grad_mean, grad_var = (zero, zero) if grad_statistics is None else grad_statistics[:2].unbind()
    local = [g.sum(0), products(g, normalized, valid).sum(0), grad_mean, grad_var]
    sums = all_reduce_sum(torch.stack(local), group_name)
    sum_g, sum_gx, grad_mean, grad_var = sums.unbind()
    through_root = rstd.square() * sum_gx
    if floor:
        through_root = torch.where(var >= eps, through_root, 0.0)
    size = count.clamp(min=1)
    through_statistics = deviations * ((2 * grad_var - through_root) / size)
    if centered:
        through_statistics = through_statistics + (grad_mean - rstd * sum_g) / size
    through_statistics = keep(through_statistics, valid)
    # Without a valid token anywhere the running statistics were used: the direct path is all.
    gradient = g * rstd + torch.where(count > 0, through_statistics, 0.0)
    grad_x = finish_gradient(gradient, tokens, scales, grad_total, inputs)
    return grad_x, grad_weight, grad_bias
