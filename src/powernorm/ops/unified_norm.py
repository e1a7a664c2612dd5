"""Unified Normalization (Yang et al. 2022): windows of statistics, forward and backward.

The op is eager on every device.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from powernorm.ops.arrays import (
    accumulation_dtype,
    add_residual,
    affine_gradients,
    count_of,
    finish_gradient,
    keep,
    products,
    scale_and_shift,
    tokens_of,
    validity_of,
)
from powernorm.ops.operators import (
    Inputs,
    Operator,
    Saved,
    dense_like,
    features_like,
    input_gradients,
)
from powernorm.ops.processes import all_reduce_sum

RATIO_LIMIT: Final = 5.0
"""Bound on r in the released code (SPEC 13.1)."""


class UnifiedNormArgs(NamedTuple):
    """Arguments of `unified_norm`."""

    x: Tensor
    """(..., C)."""
    residual: Tensor | None
    """Added to x first, same shape."""
    padding_mask: Tensor | None
    """Bool, `x.shape[:-1]`, True = padding."""
    weight: Tensor | None
    """γ, (C,)."""
    bias: Tensor | None
    """β, (C,)."""
    running_second_moment: Tensor
    """ψ² after the last step, (C,)."""
    running_gradient_moment: Tensor
    """ν after the last step, (C,)."""
    window_second_moment: Tensor
    """ψ_B² of the last M_f batches, (M_f, C), newest last."""
    window_gradient_moment: Tensor
    """Λ of the last M_b batches, (M_b, C), newest last."""
    carrier: Tensor | None
    """A leaf that receives the sums as its gradient, (4, C) float64; see `powernorm.norms`."""
    eps: float
    """Added inside the root."""
    backward_momentum: float
    """Weight of the new Λ in ν."""
    own_forward: bool
    """Use this batch's ψ_B² only."""
    own_backward: bool
    """Move ν toward this batch's Λ only."""
    use_ratio: bool
    """Apply r, the ratio of the used root to the running root, clipped to [1/5, 5]."""
    filter_outliers: bool
    """Exclude a batch from the windows if its ψ_B² is an outlier."""
    counts_padding: bool
    """Average Λ over all positions (released), not only over the valid tokens."""
    group_name: str
    """Process group of `processes.group_name_of`."""


class UnifiedNormOutput(NamedTuple):
    """Outputs of the forward; the backward reads these and no buffer."""

    y: Tensor
    total: Tensor | None
    """x + residual; None without a residual."""
    statistics: Tensor
    """(4, C): 1/sqrt(σ² + eps); r; the sum of the window's Λ that remain after this step's is
    added; ν after the last step."""
    decided: Tensor
    """(2,): number of valid tokens over the group; 1 if the batch is excluded, else 0."""
    sums: Tensor
    """(3, C) float64, of this process only: n, Σx² over valid tokens, the number of tokens over
    which Λ is averaged."""


class UnifiedNormBackwardArgs(NamedTuple):
    """Arguments of the backward; fields without a description are as in the forward."""

    grad_y: Tensor
    """Gradient of y."""
    grad_total: Tensor | None
    """Gradient of the sum with the residual; None without a residual."""
    inputs: Tensor
    """The normalized input: x, or its sum with the residual."""
    padding_mask: Tensor | None
    weight: Tensor | None
    statistics: Tensor
    decided: Tensor
    sums: Tensor
    window: int
    """M_b."""
    backward_momentum: float
    own_backward: bool
    counts_padding: bool
    group_name: str


class UnifiedNormGradients(NamedTuple):
    """Outputs of the backward."""

    x: Tensor
    """Gradient of x, and of the residual."""
    weight: Tensor
    bias: Tensor
    gradient_sum: Tensor
    """Σ u z of this process, (C,) float64."""


def is_left_out(window: Tensor, batch: Tensor, filter_outliers: bool) -> Tensor:
    """Return whether a batch is excluded from the windows, 0-d bool.

    With A and G the arithmetic and geometric mean of the window including the batch, it is excluded
    if `A - G > M_f V` in any feature, V the variance of the roots of the *whole* window before, one
    number for all features (the released rule: with the variance of the same window and feature, as
    in the paper, that cannot happen). A window of one batch always excludes it.

    Args:
        window: ψ_B² of the last batches, (M_f, C), newest last.
        batch: this batch's, (C,). Features that are not finite do not count.
        filter_outliers: whether outliers are excluded.
    """
    if window.shape[0] == 1:
        return torch.ones((), dtype=torch.bool, device=window.device)
    if not filter_outliers:
        return torch.zeros((), dtype=torch.bool, device=window.device)
    window = window.double()
    with_batch = torch.cat([window[1:], batch.double()[None]])
    gap = with_batch.mean(0) - geometric_mean(with_batch)
    limit = window.shape[0] * window.sqrt().var()
    return ((gap > limit) & torch.isfinite(gap)).any()


def geometric_mean(window: Tensor) -> Tensor:
    """Return the geometric mean over the batches of a window, (C,)."""
    return window.log().mean(0).exp()


def reference(args: UnifiedNormArgs) -> UnifiedNormOutput:
    """Normalize by the geometric mean of the last batches' ψ_B², this one included."""
    x = args.x
    inputs, total_out = add_residual(x, args.residual)
    tokens = tokens_of(inputs)
    dtype = tokens.dtype
    valid = validity_of(args.padding_mask)
    squares = keep(tokens, valid).square().sum(0).double()
    number = count_of(tokens, valid).double().expand_as(squares)
    averaged = torch.full_like(number, tokens.shape[0]) if args.counts_padding else number
    sums = torch.stack([number, squares, averaged])
    counts, total = all_reduce_sum(sums[:2], args.group_name).unbind()
    count = counts.amax() if counts.numel() else counts.sum()
    batch = total / count.clamp(min=1)
    skip = is_left_out(args.window_second_moment, batch, args.filter_outliers)
    used = batch
    if not args.own_forward:
        window = torch.cat([args.window_second_moment[1:].double(), batch[None]])
        used = torch.where(skip, batch, geometric_mean(window))
    running = args.running_second_moment.to(dtype)
    used = torch.where(count > 0, used.to(dtype), running)
    rstd = torch.rsqrt(used + args.eps)
    ratio = torch.ones_like(rstd)
    if args.use_ratio:
        ratio = (used + args.eps).sqrt() * torch.rsqrt(running + args.eps)
        ratio = torch.where(skip, 1.0, ratio.clamp(1 / RATIO_LIMIT, RATIO_LIMIT))
    y = scale_and_shift(tokens * rstd, args.weight, args.bias)
    y = y.to(x.dtype).reshape(x.shape).contiguous()
    history = args.window_gradient_moment[1:].to(dtype).sum(0)
    # Copies, because windows and ν are updated before a second forward's backward in a step.
    statistics = torch.stack([rstd, ratio, history, args.running_gradient_moment.to(dtype)])
    decided = torch.stack([count, skip.double()]).to(dtype)
    # Detached: autograd forbids in-place changes of a view that a custom function returns.
    return UnifiedNormOutput(y.detach(), total_out, statistics, decided, sums)


def reference_backward(args: UnifiedNormBackwardArgs) -> UnifiedNormGradients:
    """Return the gradients and the sums that update the windows.

    With `u = γ r ∂L/∂y` and Λ the mean of u z, ν moves toward the mean of the last Λ and
    `∂L/∂x = (u - z ν)/sqrt(σ² + eps)` has the ν *after* that move. An excluded batch uses its own Λ
    in place of both.
    """
    valid = validity_of(args.padding_mask)
    tokens = tokens_of(args.inputs)
    rstd, ratio, history, nu = args.statistics.unbind()
    count, skip = args.decided[0], args.decided[1] > 0
    z = tokens * rstd
    grad_y = tokens_of(args.grad_y)
    u, grad_weight, grad_bias = affine_gradients(grad_y, z * ratio, args.weight, valid)
    u = u * ratio
    local = products(u, z, valid).sum(0).double()
    averaged = args.sums[2]
    if args.group_name:
        together = all_reduce_sum(torch.stack([local, averaged]), args.group_name)
    else:
        together = torch.stack([local, averaged])
    current = (together[0] / together[1].clamp(min=1)).to(tokens.dtype)
    moment = current if args.own_backward else (history + current) / args.window
    moment = torch.where(skip, current, moment)
    moved = (1 - args.backward_momentum) * nu + args.backward_momentum * moment
    moment = torch.where(count > 0, torch.where(skip, moment, moved), 0.0)
    if args.counts_padding:
        # Padding counts, unless it is not finite.
        kept = z if valid is None else torch.where(valid | z.isfinite(), z, 0.0)
    else:
        kept = keep(z, valid)
    gradient = (u - kept * moment) * rstd
    grad_x = finish_gradient(gradient, tokens, None, args.grad_total, args.inputs)
    return UnifiedNormGradients(grad_x, grad_weight, grad_bias, local)


class _UnifiedNorm(Operator):
    """The registered op and its gradient."""

    name = "unified_norm"
    arguments = UnifiedNormArgs
    output = UnifiedNormOutput
    backward_arguments = UnifiedNormBackwardArgs
    backward_output = UnifiedNormGradients
    has_kernels = False
    has_carrier = True

    def fake(self, args: UnifiedNormArgs) -> UnifiedNormOutput:
        x = args.x
        return UnifiedNormOutput(
            dense_like(x),
            None if args.residual is None else dense_like(x),
            features_like(x, 4),
            x.new_empty(2, dtype=accumulation_dtype(x)),
            features_like(x, 3, dtype=torch.float64),
        )

    def backward_fake(self, args: UnifiedNormBackwardArgs) -> UnifiedNormGradients:
        x = args.inputs
        gradient_sum = features_like(x, dtype=torch.float64)
        return UnifiedNormGradients(dense_like(x), features_like(x), features_like(x), gradient_sum)

    def saved(self, inputs: Tensor, args: UnifiedNormArgs, output: UnifiedNormOutput) -> Saved:
        tensors = inputs, args.padding_mask, args.weight
        settings = (
            args.window_gradient_moment.shape[0],
            args.backward_momentum,
            args.own_backward,
            args.counts_padding,
            args.group_name,
        )
        return (*tensors, output.statistics, output.decided, output.sums), settings

    def gradients(
        self,
        ctx: Any,
        needs: Inputs,
        grad_y: Tensor | None,
        grad_total: Tensor | None,
        _: Tensor | None,
    ) -> Inputs:
        inputs, mask, weight, statistics, decided, sums = ctx.saved_tensors
        grad_y = torch.zeros_like(inputs) if grad_y is None else grad_y
        found = self.backward(
            UnifiedNormBackwardArgs(
                grad_y,
                grad_total,
                inputs,
                mask,
                weight,
                statistics,
                decided,
                sums,
                *ctx.settings,
            )
        )
        carried = torch.cat([sums, found.gradient_sum[None]]) if needs.carrier else None
        return input_gradients(found, needs, weight, ctx.bias_dtype, carried)


OPERATOR = _UnifiedNorm()
OPERATOR.register()


def unified_norm(args: UnifiedNormArgs) -> tuple[Tensor, Tensor | None]:
    """Return (y, sum with the residual) by the statistics of the last batches.

    Raises:
        InputError: inside a transform of torch.func.
    """
    output = OPERATOR.apply(args)
    return output.y, output.total
