"""Moving Average Batch Normalization (Yan et al. 2020): statistics of the last K batches.

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
    apply_scales,
    count_of,
    finish_gradient,
    keep,
    products,
    scale_and_shift,
    scale_groups,
    tokens_of,
    validity_of,
)
from powernorm.ops.operators import (
    Inputs,
    Operator,
    Saved,
    dense_like,
    existing,
    features_like,
    input_gradients,
    scales_like,
)
from powernorm.ops.processes import all_reduce_sum

RATIO_LIMIT: Final = 5.0
"""Bound on r in the released code (SPEC 7)."""


class MovingAverageNormArgs(NamedTuple):
    """Arguments of `moving_average_norm`."""

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
    """Slow average of ψ², (C,)."""
    window_second_moment: Tensor
    """ψ_B² of the last K batches, (K, C), newest last."""
    window_gradient_moment: Tensor
    """mean(g r z) of the last K batches, (K, C), newest last."""
    carrier: Tensor | None
    """A leaf that receives the sums as its gradient, (3, C) float64; see `powernorm.norms`."""
    groups: int
    """GroupScaling before the norm; 0 leaves it out."""
    eps: float
    """Added inside the root."""
    own_statistics: bool
    """Use this batch's statistics only (the first K steps and the warm-up)."""
    use_ratio: bool
    """Apply r, the ratio of the used root to the running root, clipped to [1/5, 5]."""
    group_name: str
    """Process group of `processes.group_name_of`."""


class MovingAverageNormOutput(NamedTuple):
    """Outputs of the forward; the backward reads these and no buffer."""

    y: Tensor
    total: Tensor | None
    """x + residual; None without a residual."""
    scales: Tensor | None
    """GroupScaling's factors, (tokens, groups); None without groups."""
    rstd: Tensor
    """1/sqrt(χ + eps), (C,), with χ the quadratic mean used."""
    ratio: Tensor
    """r, (C,): constant in the backward."""
    history: Tensor
    """Sum of the window's gradient moments that remain after this step's is added, (C,)."""
    num_valid: Tensor
    """Number of valid tokens over the group, 0-d."""
    sums: Tensor
    """(2, C) float64, of this process only: n, Σx² over valid tokens."""


class MovingAverageNormBackwardArgs(NamedTuple):
    """Arguments of the backward; fields without a description are as in the forward."""

    grad_y: Tensor
    """Gradient of y."""
    grad_total: Tensor | None
    """Gradient of the sum with the residual; None without a residual."""
    inputs: Tensor
    """The normalized input: x, or its sum with the residual."""
    padding_mask: Tensor | None
    weight: Tensor | None
    scales: Tensor | None
    rstd: Tensor
    ratio: Tensor
    history: Tensor
    num_valid: Tensor
    window: int
    """K."""
    own_statistics: bool
    group_name: str


class MovingAverageNormGradients(NamedTuple):
    """Outputs of the backward."""

    x: Tensor
    """Gradient of x, and of the residual."""
    weight: Tensor
    bias: Tensor
    gradient_sum: Tensor
    """Σ g r z over the valid tokens of this process, (C,) float64."""


def reference(args: MovingAverageNormArgs) -> MovingAverageNormOutput:
    """Normalize by the quadratic mean of the last K batches, this one included."""
    x = args.x
    inputs, total_out = add_residual(x, args.residual)
    tokens, scales = scale_groups(tokens_of(inputs), args.groups, args.eps)
    valid = validity_of(args.padding_mask)
    squares = keep(tokens, valid).square().sum(0).double()
    sums = torch.stack([count_of(tokens, valid).double().expand_as(squares), squares])
    counts, total = all_reduce_sum(sums, args.group_name).unbind()
    count = counts.amax() if counts.numel() else counts.sum()
    batch = (total / count.clamp(min=1)).to(tokens.dtype)
    running = args.running_second_moment.to(tokens.dtype)
    if args.own_statistics:
        used = batch
    else:
        window = args.window_second_moment.to(tokens.dtype)
        used = (window[1:].sum(0) + batch) / window.shape[0]
    used = torch.where(count > 0, used, running)
    rstd = torch.rsqrt(used + args.eps)
    ratio = torch.ones_like(rstd)
    if args.use_ratio:
        ratio = ((used + args.eps).sqrt() * torch.rsqrt(running + args.eps)).clamp(
            1 / RATIO_LIMIT, RATIO_LIMIT
        )
    y = scale_and_shift(tokens * rstd * ratio, args.weight, args.bias)
    y = y.to(x.dtype).reshape(x.shape).contiguous()
    history = args.window_gradient_moment[1:].to(tokens.dtype).sum(0)
    num_valid = count.to(tokens.dtype)
    # Detached: autograd forbids in-place changes of a view that a custom function returns.
    y = y.detach()
    return MovingAverageNormOutput(y, total_out, scales, rstd, ratio, history, num_valid, sums)


def reference_backward(args: MovingAverageNormBackwardArgs) -> MovingAverageNormGradients:
    """Return the gradients and the sums that update the window.

    ∂L/∂x = (g r - z m)/sqrt(χ + eps), where m is the mean of mean(g r z) over the last K
    batches, or of this batch only while the layer uses its own statistics.
    """
    count, valid = args.num_valid, validity_of(args.padding_mask)
    tokens = apply_scales(tokens_of(args.inputs), args.scales)
    z = tokens * args.rstd
    grad_y = tokens_of(args.grad_y)
    g, grad_weight, grad_bias = affine_gradients(grad_y, z * args.ratio, args.weight, valid)
    g = g * args.ratio
    local = products(g, z, valid).sum(0).double()
    total = all_reduce_sum(local, args.group_name)
    current = (total / count.clamp(min=1)).to(tokens.dtype)
    moment = current if args.own_statistics else (args.history + current) / args.window
    moment = torch.where(count > 0, moment, 0.0)
    gradient = (g - keep(z, valid) * moment) * args.rstd
    grad_x = finish_gradient(gradient, tokens, args.scales, args.grad_total, args.inputs)
    return MovingAverageNormGradients(grad_x, grad_weight, grad_bias, local)


class _MovingAverageNorm(Operator):
    """The registered op and its gradient."""

    name = "moving_average_norm"
    arguments = MovingAverageNormArgs
    output = MovingAverageNormOutput
    backward_arguments = MovingAverageNormBackwardArgs
    backward_output = MovingAverageNormGradients
    has_kernels = False
    has_carrier = True

    def fake(self, args: MovingAverageNormArgs) -> MovingAverageNormOutput:
        x = args.x
        return MovingAverageNormOutput(
            dense_like(x),
            None if args.residual is None else dense_like(x),
            scales_like(x, args.groups),
            features_like(x),
            features_like(x),
            features_like(x),
            x.new_empty((), dtype=accumulation_dtype(x)),
            features_like(x, 2, dtype=torch.float64),
        )

    def backward_fake(self, args: MovingAverageNormBackwardArgs) -> MovingAverageNormGradients:
        x = args.inputs
        gradient_sum = features_like(x, dtype=torch.float64)
        return MovingAverageNormGradients(
            dense_like(x), features_like(x), features_like(x), gradient_sum
        )

    def saved(
        self, inputs: Tensor, args: MovingAverageNormArgs, output: MovingAverageNormOutput
    ) -> Saved:
        window = args.window_second_moment.shape[0]
        seen = output.rstd, output.ratio, output.history, output.num_valid
        tensors = inputs, args.padding_mask, args.weight, output.scales, *seen, output.sums
        return tensors, (window, args.own_statistics, args.group_name)

    def gradients(
        self,
        ctx: Any,
        needs: Inputs,
        grad_y: Tensor | None,
        grad_total: Tensor | None,
        _: Tensor | None,
    ) -> Inputs:
        inputs, mask, weight, scales, *seen, sums = ctx.saved_tensors
        grad_y = torch.zeros_like(inputs) if grad_y is None else grad_y
        scales = existing(scales)
        found = self.backward(
            MovingAverageNormBackwardArgs(
                grad_y, grad_total, inputs, mask, weight, scales, *seen, *ctx.settings
            )
        )
        carried = torch.cat([sums, found.gradient_sum[None]]) if needs.carrier else None
        return input_gradients(found, needs, weight, ctx.bias_dtype, carried)


OPERATOR = _MovingAverageNorm()
OPERATOR.register()


def moving_average_norm(args: MovingAverageNormArgs) -> tuple[Tensor, Tensor | None]:
    """Return (y, sum with the residual) by the statistics of the last K batches.

    Raises:
        InputError: inside a transform of torch.func.
    """
    output = OPERATOR.apply(args)
    return output.y, output.total
