"""PowerNorm: running quadratic mean forward, running gradient moment backward."""

from __future__ import annotations

from typing import NamedTuple

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
    reciprocal_root,
    scale_and_shift,
    scale_groups,
    tokens_of,
    validity_of,
)


class PowerNormOutput(NamedTuple):
    """What the forward returns; the backward reads these and no buffer."""

    y: Tensor
    total: Tensor
    """x + residual; empty without a residual."""
    scales: Tensor
    """GroupScaling's factors, (tokens, groups); empty without groups."""
    statistics: Tensor
    """(3, C): 1/ψ of the forward; 1/ψ that divides the gradient (another one in the released
    variant only); ν that the backward subtracts."""
    sums: Tensor
    """(2, C) float64, of this process alone: n, Σx² over valid tokens."""


def power_norm(
    x: Tensor,
    residual: Tensor | None,
    padding_mask: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    second_moment: Tensor,
    gradient_moment: Tensor,
    groups: int,
    eps: float,
    use_batch: bool,
    max_ratio: float,
    released: bool,
    group_name: str,
) -> PowerNormOutput:
    """Forward of PowerNorm (Shen et al. 2020, Definition 3, Algorithm 2).

    Args:
        x: (..., C).
        residual: added to x first, same shape.
        padding_mask: bool, `x.shape[:-1]`, True = padding.
        weight: γ, (C,).
        bias: β, (C,).
        second_moment: running ψ², (C,).
        gradient_moment: running ν, (C,).
        groups: GroupScaling in front; 0 leaves it out.
        eps: added inside the root.
        use_batch: normalize by ψ_B of this batch (warm-up).
        max_ratio: keep the ψ used within [ψ_B / r, r ψ_B]; 0 = unbounded.
        released: divide the gradient by the batch's ψ_B in every step.
        group_name: process group of `processes.group_name_of`.
    """
    inputs, total_out = add_residual(x, residual)
    valid = validity_of(padding_mask)
    tokens, scales = scale_groups(tokens_of(inputs), groups, eps)
    squares = keep(tokens, valid).square().sum(0).double()
    sums = torch.stack([count_of(tokens, valid).double().expand_as(squares), squares])
    running = second_moment.to(tokens.dtype)
    used = for_gradient = running
    if use_batch or released or max_ratio:
        # Only here does the forward wait for other processes.
        count, total = all_reduce_sum(sums, group_name).unbind()
        batch = torch.where(count > 0, total / count.clamp(min=1), running).to(tokens.dtype)
        if use_batch:
            used = batch
        elif max_ratio:
            used = running.clamp(batch / max_ratio**2, batch * max_ratio**2)
        for_gradient = batch if released else used
    rstd = reciprocal_root(used, eps, floor=False)
    backward_rstd = reciprocal_root(for_gradient, eps, floor=False)
    y = scale_and_shift(tokens * rstd, weight, bias).to(x.dtype).reshape(x.shape).contiguous()
    # A copy: ν moves before the backward of a second forward of the same step.
    statistics = torch.stack([rstd, backward_rstd, gradient_moment.to(tokens.dtype)])
    return PowerNormOutput(y, total_out, scales, statistics, sums)


def power_norm_backward(
    grad_y: Tensor,
    grad_total: Tensor | None,
    inputs: Tensor,
    padding_mask: Tensor | None,
    weight: Tensor | None,
    scales: Tensor,
    statistics: Tensor,
    sums: Tensor,
    released: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of (x and residual, weight, bias) and what moves the running statistics.

    ∂L/∂x = (g - ν x̂)/ψ (Shen et al. 2020, eq. 12), on purpose not the forward's derivative. The
    released variant counts padding in the sums and subtracts ν x̂ there as well.

    Args:
        grad_y: as y.
        grad_total: gradient of the sum with the residual; None without.
        inputs: what was normalized: x, or the sum with the residual.
        padding_mask: as in the forward.
        weight: γ.
        scales: the forward's.
        statistics: the forward's.
        sums: the forward's.
        released: as in the forward.

    Returns:
        The gradients and (5, C) float64 of this process: n, Σx², n, Σx̂², Σ g x̂.
    """
    tokens = apply_scales(tokens_of(inputs), scales)
    valid = validity_of(padding_mask)
    rstd, backward_rstd, nu = statistics.unbind()
    normalized = tokens * rstd
    g, grad_weight, grad_bias = affine_gradients(tokens_of(grad_y), normalized, weight, valid)
    if released:
        valid = None
    kept = keep(normalized, valid)
    gradient = (g - nu * kept) * backward_rstd
    count = count_of(tokens, valid).double().expand_as(sums[0])
    moments = [kept.square().sum(0).double(), (g * kept).sum(0).double()]
    carried = torch.stack([*sums.unbind(), count, *moments])
    grad_x = finish_gradient(gradient, tokens, scales, grad_total, inputs)
    return grad_x, grad_weight, grad_bias, carried
