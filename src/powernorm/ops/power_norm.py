"""PowerNorm: running quadratic mean forward, running gradient moment backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from powernorm.ops.arrays import (
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


class PowerNormArgs(NamedTuple):
    """Arguments of `power_norm`."""

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
    second_moment: Tensor
    """Running ψ², (C,)."""
    gradient_moment: Tensor
    """Running ν, (C,)."""
    carrier: Tensor | None
    """A leaf that receives the sums as its gradient, (5, C) float64; see `powernorm.norms`."""
    groups: int
    """GroupScaling before the norm; 0 leaves it out."""
    eps: float
    """Added inside the root."""
    use_batch: bool
    """Normalize by ψ_B of this batch (warm-up)."""
    max_ratio: float
    """Keep the ψ used within [ψ_B / r, r ψ_B]; 0 = unbounded."""
    released: bool
    """Divide the gradient by the batch's ψ_B in every step."""
    group_name: str
    """Process group of `processes.group_name_of`."""


class PowerNormOutput(NamedTuple):
    """Outputs of the forward; the backward reads these and no buffer."""

    y: Tensor
    total: Tensor | None
    """x + residual; None without a residual."""
    scales: Tensor | None
    """GroupScaling's factors, (tokens, groups); None without groups."""
    statistics: Tensor
    """(3, C): 1/ψ of the forward; 1/ψ that divides the gradient (different in the released variant
    only); ν that the backward subtracts."""
    sums: Tensor
    """(2, C) float64, of this process only: n, Σx² over valid tokens."""


class PowerNormBackwardArgs(NamedTuple):
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
    statistics: Tensor
    sums: Tensor
    released: bool


class PowerNormGradients(NamedTuple):
    """Outputs of the backward."""

    x: Tensor | None
    """Gradient of x, and of the residual."""
    weight: Tensor | None
    bias: Tensor | None
    carried: Tensor
    """(5, C) float64 of this process: n, Σx², n, Σx̂², Σ g x̂."""


def reference(args: PowerNormArgs) -> PowerNormOutput:
    """Normalize by running ψ (Shen et al. 2020, Definition 3, Algorithm 2)."""
    x = args.x
    inputs, total_out = add_residual(x, args.residual)
    valid = validity_of(args.padding_mask)
    tokens, scales = scale_groups(tokens_of(inputs), args.groups, args.eps)
    squares = keep(tokens, valid).square().sum(0).double()
    sums = torch.stack([count_of(tokens, valid).double().expand_as(squares), squares])
    running = args.second_moment.to(tokens.dtype)
    used = for_gradient = running
    if args.use_batch or args.released or args.max_ratio:
        # This is the only case in which the forward waits for other processes.
        count, total = all_reduce_sum(sums, args.group_name).unbind()
        batch = torch.where(count > 0, total / count.clamp(min=1), running).to(tokens.dtype)
        if args.use_batch:
            used = batch
        elif args.max_ratio:
            used = running.clamp(batch / args.max_ratio**2, batch * args.max_ratio**2)
        for_gradient = batch if args.released else used
    rstd = reciprocal_root(used, args.eps, floor=False)
    backward_rstd = reciprocal_root(for_gradient, args.eps, floor=False)
    y = scale_and_shift(tokens * rstd, args.weight, args.bias)
    y = y.to(x.dtype).reshape(x.shape).contiguous()
    # A copy, because ν is updated before the backward of a second forward of the same step.
    statistics = torch.stack([rstd, backward_rstd, args.gradient_moment.to(tokens.dtype)])
    return PowerNormOutput(y, total_out, scales, statistics, sums)


def reference_backward(args: PowerNormBackwardArgs) -> PowerNormGradients:
    """Return the gradients and the sums that update the running statistics.

    ∂L/∂x = (g - ν x̂)/ψ (Shen et al. 2020, eq. 12), which is deliberately not the forward's
    derivative. The released variant counts padding in the sums and subtracts ν x̂ there as well.
    """
    tokens = apply_scales(tokens_of(args.inputs), args.scales)
    valid = validity_of(args.padding_mask)
    rstd, backward_rstd, nu = args.statistics.unbind()
    normalized = tokens * rstd
    grad_y = tokens_of(args.grad_y)
    g, grad_weight, grad_bias = affine_gradients(grad_y, normalized, args.weight, valid)
    if args.released:
        valid = None
    kept = keep(normalized, valid)
    gradient = (g - nu * kept) * backward_rstd
    count = count_of(tokens, valid).double().expand_as(args.sums[0])
    moments = [kept.square().sum(0).double(), (g * kept).sum(0).double()]
    carried = torch.stack([*args.sums.unbind(), count, *moments])
    grad_x = finish_gradient(gradient, tokens, args.scales, args.grad_total, args.inputs)
    return PowerNormGradients(grad_x, grad_weight, grad_bias, carried)


class _PowerNorm(Operator):
    """The registered op and its gradient."""

    name = "power_norm"
    arguments = PowerNormArgs
    output = PowerNormOutput
    has_carrier = True
    backward_arguments = PowerNormBackwardArgs
    backward_output = PowerNormGradients

    def fake(self, args: PowerNormArgs) -> PowerNormOutput:
        x = args.x
        return PowerNormOutput(
            dense_like(x),
            None if args.residual is None else dense_like(x),
            scales_like(x, args.groups),
            features_like(x, 3),
            features_like(x, 2, dtype=torch.float64),
        )

    def backward_fake(self, args: PowerNormBackwardArgs) -> PowerNormGradients:
        inputs = args.inputs
        return PowerNormGradients(
            dense_like(inputs),
            features_like(inputs),
            features_like(inputs),
            features_like(inputs, 5, dtype=torch.float64),
        )

    def saved(self, inputs: Tensor, args: PowerNormArgs, output: PowerNormOutput) -> Saved:
        mask, statistics = args.padding_mask, output.statistics
        return (inputs, mask, args.weight, output.scales, statistics, output.sums), args.released

    def gradients(
        self,
        ctx: Any,
        needs: Inputs,
        grad_y: Tensor | None,
        grad_total: Tensor | None,
        _: Tensor | None,
    ) -> Inputs:
        inputs, mask, weight, scales, statistics, sums = ctx.saved_tensors
        grad_y = torch.zeros_like(inputs) if grad_y is None else grad_y
        found = self.backward(
            PowerNormBackwardArgs(
                grad_y,
                grad_total,
                inputs,
                mask,
                weight,
                existing(scales),
                statistics,
                sums,
                ctx.settings,
            )
        )
        return input_gradients(found, needs, weight, ctx.bias_dtype, found.carried)


OPERATOR = _PowerNorm()
OPERATOR.register()


def power_norm(args: PowerNormArgs) -> tuple[Tensor, Tensor | None]:
    """Return (y, sum with the residual) by running statistics.

    Raises:
        InputError: inside a transform of torch.func.
    """
    output = OPERATOR.apply(args)
    return output.y, output.total
