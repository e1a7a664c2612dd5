"""Moving Average Batch Normalization (Yan et al. 2020): statistics of the last K batches."""

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
    scale_and_shift,
    tokens_of,
    validity_of,
)

RATIO_LIMIT = 5.0
"""Bound on r in the released code (SPEC 7)."""


class MovingAverageOutput(NamedTuple):
    """What the forward returns; the backward reads these and no buffer."""

    y: Tensor
    rstd: Tensor
    """1/sqrt(χ + eps), (C,), with χ the quadratic mean used."""
    ratio: Tensor
    """r, (C,): constant in the backward."""
    used: Tensor
    """χ: quadratic mean used, (C,)."""
    history: Tensor
    """Sum of the window's gradient moments that stay when this step's enters, (C,)."""
    num_valid: Tensor
    """Number of valid tokens over the group, 0-d."""
    sums: Tensor
    """(2, C) float64, of this process alone: n, Σx² over valid tokens."""


def moving_average_norm(
    x: Tensor,
    padding_mask: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_second_moment: Tensor,
    window_second_moment: Tensor,
    window_gradient_moment: Tensor,
    eps: float,
    own_statistics: bool,
    use_ratio: bool,
    group_name: str,
) -> MovingAverageOutput:
    """Forward of MABN.

    Args:
        x: (..., C).
        padding_mask: bool, `x.shape[:-1]`, True = padding.
        weight: γ, (C,).
        bias: β, (C,).
        running_second_moment: slow average of ψ², (C,).
        window_second_moment: ψ_B² of the last K batches, (K, C), newest last.
        window_gradient_moment: mean(g r z) of the last K batches, (K, C), newest last.
        eps: added inside the root.
        own_statistics: use this batch's statistics alone (the first K steps and the warm-up).
        use_ratio: apply r, the ratio of the used root to the running root, clipped to [1/5, 5].
        group_name: process group of `processes.group_name_of`.
    """
    tokens, valid = tokens_of(x), validity_of(padding_mask)
    squares = keep(tokens, valid).square().sum(0).double()
    sums = torch.stack([count_of(tokens, valid).double().expand_as(squares), squares])
    counts, total = all_reduce_sum(sums, group_name).unbind()
    count = counts.amax() if counts.numel() else counts.sum()
    batch = (total / count.clamp(min=1)).to(tokens.dtype)
    running = running_second_moment.to(tokens.dtype)
    if own_statistics:
        used = batch
    else:
        window = window_second_moment.to(tokens.dtype)
        used = (window[1:].sum(0) + batch) / window.shape[0]
    used = torch.where(count > 0, used, running)
    rstd = torch.rsqrt(used + eps)
    ratio = torch.ones_like(rstd)
    if use_ratio:
        ratio = ((used + eps).sqrt() * torch.rsqrt(running + eps)).clamp(
            1 / RATIO_LIMIT, RATIO_LIMIT
        )
    y = scale_and_shift(tokens * rstd * ratio, weight, bias).to(x.dtype).reshape(x.shape)
    history = window_gradient_moment[1:].to(tokens.dtype).sum(0)
    return MovingAverageOutput(y, rstd, ratio, used, history, count.to(tokens.dtype), sums)


def moving_average_norm_backward(
    grad_y: Tensor,
    x: Tensor,
    padding_mask: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    ratio: Tensor,
    history: Tensor,
    count: Tensor,
    window: int,
    own_statistics: bool,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of (x, weight, bias) and this process's Σ g r z, (C,) float64.

    ∂L/∂x = (g r - z m)/sqrt(χ + eps), where m is the mean of mean(g r z) over the last K
    batches, or of this batch alone while the layer uses its own statistics.
    """
    tokens, valid = tokens_of(x), validity_of(padding_mask)
    z = tokens * rstd
    g, grad_weight, grad_bias = affine_gradients(tokens_of(grad_y), z * ratio, weight, valid)
    g = g * ratio
    local = products(g, z, valid).sum(0).double()
    current = (all_reduce_sum(local, group_name) / count.clamp(min=1)).to(tokens.dtype)
    moment = current if own_statistics else (history + current) / window
    moment = torch.where(count > 0, moment, 0.0)
    grad_x = (g - keep(z, valid) * moment) * rstd
    return grad_x.to(x.dtype).reshape(x.shape), grad_weight, grad_bias, local
