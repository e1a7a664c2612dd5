"""PowerNorm: running quadratic mean forward, running gradient moment backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from powernorm.ops.processes import all_reduce_sum
from powernorm.ops.reference.arrays import (
    affine_gradients,
    count_of,
    keep,
    reciprocal_root,
    scale_and_shift,
    tokens_of,
    validity_of,
)


class PowerNormOutput(NamedTuple):
    """What the forward returns; the backward reads these and no buffer."""

    y: Tensor
    rstd: Tensor
    """1/ψ of the forward, (C,)."""
    backward_rstd: Tensor
    """1/ψ that divides the gradient, (C,): differs in the released variant only."""
    nu: Tensor
    """ν that the backward subtracts, (C,)."""
    sums: Tensor
    """(2, C) float64, of this process alone: n, Σx² over valid tokens."""


def power_norm(
    x: Tensor,
    padding_mask: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    second_moment: Tensor,
    gradient_moment: Tensor,
    eps: float,
    use_batch: bool,
    max_ratio: float,
    released: bool,
    group_name: str,
) -> PowerNormOutput:
    """Forward of PowerNorm (Shen et al. 2020, Definition 3, Algorithm 2).

    Args:
        x: (..., C), after GroupScaling.
        padding_mask: bool, `x.shape[:-1]`, True = padding.
        weight: γ, (C,).
        bias: β, (C,).
        second_moment: running ψ², (C,).
        gradient_moment: running ν, (C,).
        eps: added inside the root.
        use_batch: normalise by ψ_B of this batch (warm-up).
        max_ratio: keep the ψ used within [ψ_B / r, r ψ_B]; 0 = unbounded.
        released: divide the gradient by the batch's ψ_B in every step.
        group_name: process group of `processes.group_name_of`.
    """
    tokens, valid = tokens_of(x), validity_of(padding_mask)
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
    y = scale_and_shift(tokens * rstd, weight, bias).to(x.dtype).reshape(x.shape)
    # A copy: ν moves before the backward of a second forward of the same step.
    nu = gradient_moment.to(tokens.dtype, copy=True)
    return PowerNormOutput(y, rstd, backward_rstd, nu, sums)


def power_norm_backward(
    grad_y: Tensor,
    x: Tensor,
    padding_mask: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    backward_rstd: Tensor,
    nu: Tensor,
    released: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of (x, weight, bias) and (3, C) float64 sums n, Σx̂², Σg x̂ of this process.

    ∂L/∂x = (g - ν x̂)/ψ (Shen et al. 2020, eq. 12), on purpose not the forward's derivative. The
    released variant counts padding in the sums and subtracts ν x̂ there as well.
    """
    tokens = tokens_of(x)
    valid = validity_of(padding_mask)
    normalized = tokens * rstd
    g, grad_weight, grad_bias = affine_gradients(tokens_of(grad_y), normalized, weight, valid)
    if released:
        valid = None
    kept = keep(normalized, valid)
    grad_x = (g - nu * kept) * backward_rstd
    squares = kept.square().sum(0).double()
    sums = torch.stack(
        [
            count_of(tokens, valid).double().expand_as(squares),
            squares,
            (g * kept).sum(0).double(),
        ]
    )
    return grad_x.to(x.dtype).reshape(x.shape), grad_weight, grad_bias, sums
