"""BatchNorm, PowerNormV and BatchRenorm over tokens: batch statistics with their gradient.

With μ = 0 and the quadratic mean in place of the variance, the same code computes PowerNormV; with
r = 1 and d = 0, BatchNorm.
"""

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
    products,
    reciprocal_root,
    scale_and_shift,
    scale_groups,
    tokens_of,
    validity_of,
)
from powernorm.ops.operators import (
    Gradients,
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
from powernorm.ops.running_stats import Update, centered_sums, reduce_sums
from powernorm.ops.torch_private import in_backward


class BatchNormArgs(NamedTuple):
    """Arguments of `batch_norm`."""

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
    running_mean: Tensor | None
    """(C,); None means uncentered (PowerNormV)."""
    running_var: Tensor
    """(C,): running variance, or running ψ² if uncentered."""
    carrier: Tensor | None
    """A leaf that receives the sums as its gradient, (4, C) float64; see `powernorm.norms`."""
    limits: Tensor | None
    """(r_max, d_max) of BatchRenorm, shape (2,)."""
    groups: int
    """GroupScaling before the statistics; 0 leaves it out."""
    eps: float
    """Added inside the root, or its floor."""
    floor: bool
    """Use max(var, eps) instead of var + eps."""
    group_name: str
    """Process group of `processes.group_name_of`."""


class BatchNormOutput(NamedTuple):
    """Outputs of the forward."""

    y: Tensor
    total: Tensor | None
    """x + residual; None without a residual."""
    scales: Tensor | None
    """GroupScaling's factors, (tokens, groups); None without groups."""
    statistics: Tensor
    """(6, C): mean (running without valid tokens, 0 if uncentered), biased variance or quadratic
    mean, 1/sqrt(var + eps), BatchRenorm's r and d (1 and 0 without), number of valid tokens; over
    all processes of the group. Differentiable in the first two rows."""
    sums: Tensor | None
    """Float64, over the valid tokens of this process only: (4, C) of `centered_sums`, or (2, C),
    n and Σx², if uncentered. None if the op itself has updated the running statistics."""
    has_tokens: Tensor | None = None
    """Whether running statistics may be updated, 0-d bool: there is a valid token, and this call is
    not a repetition in a backward. Only the registered op returns it."""


class BatchNormBackwardArgs(NamedTuple):
    """Arguments of the backward; fields without a description are as in the forward."""

    grad_y: Tensor
    """Gradient of y."""
    grad_total: Tensor | None
    """Gradient of the sum with the residual; None without a residual."""
    grad_statistics: Tensor | None
    """(6, C), of which only the first two rows are used; None for zeros."""
    inputs: Tensor
    """The normalized input: x, or its sum with the residual."""
    padding_mask: Tensor | None
    weight: Tensor | None
    scales: Tensor | None
    statistics: Tensor
    eps: float
    floor: bool
    centered: bool
    """Whether the mean was subtracted."""
    group_name: str


def reference(args: BatchNormArgs) -> BatchNormOutput:
    """Normalize by the batch's statistics (Shen et al. 2020, Algorithm 1; Ioffe 2017)."""
    x = args.x
    inputs, total = add_residual(x, args.residual)
    valid = validity_of(args.padding_mask)
    tokens, scales = scale_groups(tokens_of(inputs), args.groups, args.eps)
    centered = args.running_mean is not None
    measured, sums = _measure(tokens, valid, centered, args.group_name)
    statistics = _complete(measured, args)
    mean, _, rstd, r, d, _ = statistics.unbind()
    normalized = (tokens - mean) * rstd if centered else tokens * rstd
    if args.limits is not None:
        normalized = normalized * r + d
    y = scale_and_shift(normalized, args.weight, args.bias)
    y = y.to(x.dtype).reshape(x.shape).contiguous()
    # Detached: autograd forbids in-place changes of a view that a custom function returns.
    return BatchNormOutput(y.detach(), total, scales, statistics, sums)


def _measure(
    tokens: Tensor, valid: Tensor | None, centered: bool, group_name: str
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return (mean, biased variance or ψ², count) over the group, and this process's sums."""
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


def _complete(measured: tuple[Tensor, Tensor, Tensor], args: BatchNormArgs) -> Tensor:
    """Return the (6, C) statistics of `BatchNormOutput`."""
    mean, var, counts = measured
    present = counts > 0
    if args.running_mean is not None:
        mean = torch.where(present, mean, args.running_mean.to(mean.dtype))
    var = torch.where(present, var, args.running_var.to(var.dtype))
    rstd = reciprocal_root(var, args.eps, args.floor)
    r, d = torch.ones_like(mean), torch.zeros_like(mean)
    if args.limits is not None:
        r, d = _renormalization(mean, var, args, args.limits)
    return torch.stack([mean, var, rstd, r, d, counts])


def _renormalization(
    mean: Tensor, var: Tensor, args: BatchNormArgs, limits: Tensor
) -> tuple[Tensor, Tensor]:
    """Return BatchRenorm's clipped r and d (Ioffe 2017, Algorithm 1), constants of the backward."""
    assert args.running_mean is not None
    max_r, max_d = limits.to(mean.dtype).unbind()
    running_std = (args.running_var.to(mean.dtype) + args.eps).sqrt()
    r = ((var + args.eps).sqrt() / running_std).clamp(1 / max_r, max_r)
    d = ((mean - args.running_mean.to(mean.dtype)) / running_std).clamp(-max_d, max_d)
    return r, d


def reference_backward(args: BatchNormBackwardArgs) -> Gradients:
    """Return the gradients; Shen et al. 2020, eq. 3, exact at padding too.

    ∂L/∂x_i = s g_i + (v_i/M) [∂L/∂μ - s Σ_j g_j + (x_i - μ)(2 ∂L/∂σ² - s² Σ_j g_j x̂_j)], where
    the sums run over *all* positions (the loss may look at padded outputs) and v_i is 1 at valid
    tokens, 0 at padding.
    """
    tokens = apply_scales(tokens_of(args.inputs), args.scales)
    valid = validity_of(args.padding_mask)
    mean, var, rstd, r, d, count = args.statistics.unbind()
    deviations = tokens - mean if args.centered else tokens
    normalized = deviations * rstd
    g, grad_weight, grad_bias = affine_gradients(
        tokens_of(args.grad_y), normalized * r + d, args.weight, valid
    )
    g = g * r
    given = args.grad_statistics
    zero = torch.zeros_like(rstd)
    grad_mean, grad_var = (zero, zero) if given is None else given[:2].unbind()
    local = [g.sum(0), products(g, normalized, valid).sum(0), grad_mean, grad_var]
    sums = all_reduce_sum(torch.stack(local), args.group_name)
    sum_g, sum_gx, grad_mean, grad_var = sums.unbind()
    through_root = rstd.square() * sum_gx
    if args.floor:
        through_root = torch.where(var >= args.eps, through_root, 0.0)
    size = count.clamp(min=1)
    through_statistics = deviations * ((2 * grad_var - through_root) / size)
    if args.centered:
        through_statistics = through_statistics + (grad_mean - rstd * sum_g) / size
    through_statistics = keep(through_statistics, valid)
    # Without a valid token anywhere the running statistics were used: only the direct path is left.
    gradient = g * rstd + torch.where(count > 0, through_statistics, 0.0)
    grad_x = finish_gradient(gradient, tokens, args.scales, args.grad_total, args.inputs)
    return Gradients(grad_x, grad_weight, grad_bias)


class _BatchNorm(Operator):
    """The registered op and its gradient."""

    name = "batch_norm"
    arguments = BatchNormArgs
    output = BatchNormOutput
    has_carrier = True
    backward_arguments = BatchNormBackwardArgs
    differentiable = ("y", "total", "statistics")

    def compute(self, args: BatchNormArgs) -> BatchNormOutput:
        """Return the outputs, and whether running statistics may be updated."""
        output: BatchNormOutput = super().compute(args)
        count = output.statistics[-1, 0]
        has_tokens = count > 0
        return output._replace(
            has_tokens=torch.zeros_like(has_tokens) if in_backward() else has_tokens
        )

    def fake(self, args: BatchNormArgs) -> BatchNormOutput:
        x = args.x
        return BatchNormOutput(
            dense_like(x),
            None if args.residual is None else dense_like(x),
            scales_like(x, args.groups),
            features_like(x, 6),
            features_like(x, 2 if args.running_mean is None else 4, dtype=torch.float64),
            x.new_empty((), dtype=torch.bool),
        )

    def backward_fake(self, args: BatchNormBackwardArgs) -> Gradients:
        inputs = args.inputs
        return Gradients(dense_like(inputs), features_like(inputs), features_like(inputs))

    def saved(self, inputs: Tensor, args: BatchNormArgs, output: BatchNormOutput) -> Saved:
        # A repeated forward has to save as many tensors as the first, but may have no sums.
        sums = None if args.carrier is None else output.sums
        mask, centered = args.padding_mask, args.running_mean is not None
        tensors = inputs, mask, args.weight, output.scales, output.statistics, sums
        return tensors, (args.eps, args.floor, centered, args.group_name)

    def gradients(
        self,
        ctx: Any,
        needs: Inputs,
        grad_y: Tensor | None,
        grad_total: Tensor | None,
        grad_statistics: Tensor | None,
    ) -> Inputs:
        inputs, mask, weight, scales, statistics, sums = ctx.saved_tensors
        grad_y = torch.zeros_like(inputs) if grad_y is None else grad_y
        found = self.backward(
            BatchNormBackwardArgs(
                grad_y,
                grad_total,
                grad_statistics,
                inputs,
                mask,
                weight,
                existing(scales),
                statistics,
                *ctx.settings,
            )
        )
        return input_gradients(found, needs, weight, ctx.bias_dtype, sums)


OPERATOR = _BatchNorm()
OPERATOR.register()


def batch_norm(args: BatchNormArgs, update: Update | None = None) -> BatchNormOutput:
    """Normalize by batch statistics.

    Args:
        args: the arguments.
        update: an update of running statistics by the sums of this process, made in the same
            call; in eager mode only.

    Raises:
        InputError: inside a transform of torch.func.
    """
    return OPERATOR.apply(args, update)  # type: ignore[no-any-return]
