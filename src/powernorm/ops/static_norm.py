"""Norms by given statistics, which are constants: evaluation and frozen statistics."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from powernorm.ops.arrays import (
    accumulation_dtype,
    add_residual,
    affine_gradients,
    apply_scales,
    converted,
    finish_gradient,
    reciprocal_root,
    scale_and_shift,
    scale_groups,
    standardized,
    tokens_of,
    where_arriving,
)
from powernorm.ops.graphs import is_exported, is_transformed
from powernorm.ops.higher_order import differentiate, starting_points, without_lost
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


class StaticNormArgs(NamedTuple):
    """Arguments of `static_norm`."""

    x: Tensor
    """(..., C)."""
    residual: Tensor | None
    """Added to x first, same shape."""
    weight: Tensor | None
    """γ, (C,)."""
    bias: Tensor | None
    """β, (C,)."""
    mean: Tensor | None
    """μ, (C,); None means uncentered."""
    var: Tensor
    """σ², or ψ² if uncentered, (C,)."""
    groups: int
    """GroupScaling before the norm; 0 leaves it out."""
    eps: float
    """Added inside the root, or its floor."""
    floor: bool
    """Use max(var, eps) instead of var + eps."""


class StaticNormOutput(NamedTuple):
    """Outputs of the forward."""

    y: Tensor
    total: Tensor | None
    """x + residual; None without a residual."""
    scales: Tensor | None
    """GroupScaling's factors, (tokens, groups); None without groups."""
    statistics: Tensor | None
    """(2, C): the mean (0 if uncentered) and 1/σ that were used; None in an exported graph."""


class StaticNormBackwardArgs(NamedTuple):
    """Arguments of the backward."""

    grad_y: Tensor
    """Gradient of y."""
    grad_total: Tensor | None
    """Gradient of the sum with the residual; None without a residual."""
    inputs: Tensor
    """The normalized input: x, or its sum with the residual."""
    weight: Tensor | None
    scales: Tensor | None
    """The forward's statistics."""
    statistics: Tensor


def reference(args: StaticNormArgs) -> StaticNormOutput:
    """Return `y = γ (x - μ)/sqrt(σ² + eps) + β` by statistics that are constants."""
    x = args.x
    inputs, total = add_residual(x, args.residual)
    tokens, scales = scale_groups(tokens_of(inputs), args.groups, args.eps)
    rstd = reciprocal_root(args.var.to(tokens.dtype), args.eps, args.floor)
    center = torch.zeros_like(rstd) if args.mean is None else args.mean.to(tokens.dtype)
    # Centered before it is scaled: a x + c cancels where |mean| >> std.
    normalized = tokens * rstd if args.mean is None else (tokens - center) * rstd
    y = scale_and_shift(normalized, args.weight, args.bias)
    y = y.to(x.dtype).reshape(x.shape).contiguous()
    return StaticNormOutput(y, total, scales, torch.stack([center, rstd]))


def reference_backward(args: StaticNormBackwardArgs) -> Gradients:
    """Return the gradients; a zero gradient stays zero, whatever the token holds."""
    tokens = apply_scales(tokens_of(args.inputs), args.scales)
    center, rstd = args.statistics.unbind()
    normalized = (tokens - center) * rstd
    grad_y = tokens_of(args.grad_y)
    g, _, grad_bias = affine_gradients(grad_y, normalized, args.weight, None)
    grad_weight = where_arriving(grad_y, grad_y * normalized).sum(0)
    grad_x = finish_gradient(g * rstd, tokens, args.scales, args.grad_total, args.inputs)
    return Gradients(grad_x, grad_weight, grad_bias)


def exported(total: Tensor, args: StaticNormArgs) -> Tensor:
    """Return y in torch's own operators, for a graph that runs without this library.

    The expression is short: exporters fold operators on constants.

    Args:
        total: the sum with the residual.
        args: the other arguments.
    """
    dtype = accumulation_dtype(total)
    y = converted(total, dtype)
    if args.groups:
        y = standardized(y, args.groups, False, args.eps)
    if args.mean is not None:
        # Before the factor: a x + c cancels where |mean| >> std.
        y = y - converted(args.mean, dtype)
    factor = reciprocal_root(converted(args.var, dtype), args.eps, args.floor)
    if args.weight is not None:
        factor = factor * converted(args.weight, dtype)
    y = y * factor
    if args.bias is not None:
        y = y + converted(args.bias, dtype)
    return converted(y, total.dtype)


class _StaticNorm(Operator):
    """The registered op and its gradient."""

    name = "static_norm"
    arguments = StaticNormArgs
    output = StaticNormOutput
    backward_arguments = StaticNormBackwardArgs

    def fake(self, args: StaticNormArgs) -> StaticNormOutput:
        total = None if args.residual is None else dense_like(args.x)
        scales = scales_like(args.x, args.groups)
        return StaticNormOutput(dense_like(args.x), total, scales, features_like(args.x, 2))

    def backward_fake(self, args: StaticNormBackwardArgs) -> Gradients:
        inputs = args.inputs
        return Gradients(dense_like(inputs), features_like(inputs), features_like(inputs))

    def saved(self, inputs: Tensor, args: StaticNormArgs, output: StaticNormOutput) -> Saved:
        tensors = inputs, args.weight, args.bias, output.scales, output.statistics
        return tensors, (args.groups, args.eps)

    def gradients(
        self,
        ctx: Any,
        needs: Inputs,
        grad_y: Tensor | None,
        grad_total: Tensor | None,
        _: Tensor | None,
    ) -> Inputs:
        inputs, weight, bias, scales, statistics = ctx.saved_tensors
        grad_y = torch.zeros_like(inputs) if grad_y is None else grad_y
        if torch.is_grad_enabled():
            groups, eps = ctx.settings
            sources = starting_points(inputs, weight, bias)
            tokens, _ = scale_groups(tokens_of(without_lost(sources[0], grad_y)), groups, eps)
            y = scale_and_shift((tokens - statistics[0]) * statistics[1], *sources[1:])
            y = y.to(inputs.dtype).reshape(inputs.shape)
            found = differentiate(y, sources, grad_y, grad_total)
        else:
            found = self.backward(
                StaticNormBackwardArgs(
                    grad_y, grad_total, inputs, weight, existing(scales), statistics
                )
            )
        return input_gradients(found, needs, weight, ctx.bias_dtype)

    def call(self, args: StaticNormArgs) -> Any:
        """Return the outputs, by torch's own operators if the registered one cannot be used."""
        if is_exported():
            total = args.x if args.residual is None else args.x + args.residual
            return StaticNormOutput(exported(total, args), total, None, None)
        return reference(args) if is_transformed() else super().call(args)


OPERATOR = _StaticNorm()
OPERATOR.register()


def static_norm(args: StaticNormArgs) -> tuple[Tensor, Tensor | None]:
    """Return (y, sum with the residual) by given statistics."""
    output = OPERATOR.apply(args)
    return output.y, output.total
