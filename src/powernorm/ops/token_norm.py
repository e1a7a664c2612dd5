"""Per-token norms, by the token's own features: no state, the same in training and evaluation.

Statistics in float32 (float64 for float64 input), the result in the input's type.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from powernorm.ops.arrays import (
    accumulation_dtype,
    add_residual,
    converted,
    scale_and_shift,
    standardized,
    tokens_of,
    where_arriving,
)
from powernorm.ops.graphs import is_exported, is_transformed, num_features_of
from powernorm.ops.higher_order import differentiate, starting_points, without_lost
from powernorm.ops.operators import (
    Gradients,
    Inputs,
    Operator,
    Saved,
    dense_like,
    features_like,
    input_gradients,
)


class TokenNormArgs(NamedTuple):
    """Arguments of `token_norm`.

    With s = 1 and k = 0 the norm is LayerNorm's for one group (Xu et al. 2019, eq. 1) and
    GroupNorm's for several; without a mean RMSNorm and GroupScaling (Shen et al. 2020, App. A);
    with k = 0.1 AdaNorm (Xu et al. 2019, eq. 9).
    """

    x: Tensor
    """(..., C)."""
    residual: Tensor | None
    """Added to x first, same shape."""
    weight: Tensor | None
    """γ, (C,)."""
    bias: Tensor | None
    """β, (C,)."""
    groups: int = 1
    """Number of equal groups of features, ≥ 1."""
    centered: bool = True
    """Subtract the mean."""
    eps: float = 1e-5
    """Added inside the root; released: added to the standard deviation."""
    released: bool = False
    """Divide the variance by one less than the group's size, eps outside the root."""
    scale: float = 1.0
    """s, AdaNorm's C."""
    k: float = 0.0
    """AdaNorm's k; its factor is a constant in the backward."""
    detach_mean: bool = False
    """Let no gradient through μ."""
    detach_std: bool = False
    """Let no gradient through σ (the standard deviation, not the variance)."""


class TokenNormOutput(NamedTuple):
    """Outputs of the forward."""

    y: Tensor
    total: Tensor | None
    """x + residual; None without a residual."""
    statistics: Tensor | None
    """(2, tokens, groups): mean (0 if uncentered) and 1/σ; None from torch's own operators."""


class TokenNormBackwardArgs(NamedTuple):
    """Arguments of the backward; fields without a description are as in the forward."""

    grad_y: Tensor
    """Gradient of y."""
    grad_total: Tensor | None
    """Gradient of the sum with the residual; None without a residual."""
    inputs: Tensor
    """The normalized input: x, or its sum with the residual."""
    weight: Tensor | None
    statistics: Tensor
    centered: bool
    released: bool
    scale: float
    k: float
    detach_mean: bool
    detach_std: bool
    affine: bool = True
    """Whether the gradients of γ and β are wanted; else they are None."""


def reference(args: TokenNormArgs) -> TokenNormOutput:
    """Return `z = s (1 - k y) ⊙ y` with `y = (x - μ)/σ` per token and group, then γ z + β."""
    x = args.x
    inputs, total = add_residual(x, args.residual)
    parts = tokens_of(inputs).unflatten(-1, (args.groups, x.shape[-1] // args.groups))
    mean = parts.mean(-1) if args.centered else torch.zeros_like(parts[..., 0])
    deviations = parts - mean.unsqueeze(-1) if args.centered else parts
    rstd = 1 / _standard_deviation(deviations, args.eps, args.released)
    y = (deviations * rstd.unsqueeze(-1)).flatten(-2)
    z = y * args.scale * (1 - args.k * y)
    out = scale_and_shift(z, args.weight, args.bias).to(x.dtype).reshape(x.shape).contiguous()
    return TokenNormOutput(out, total, torch.stack([mean, rstd]))


def reference_backward(args: TokenNormBackwardArgs) -> Gradients:
    """Return the gradients; Xu et al. 2019, Theorem 1.

    `∂L/∂x = (g - mean g)/σ - (x - μ) Σ g (x - μ) / (σ² N σ₀)`, over the N features of a group, with
    σ₀ = σ (released: σ without eps, N one less); detached statistics drop their term. A zero
    gradient stays zero, whatever the token holds: padding may be NaN.
    """
    mean, rstd = (part.unsqueeze(-1) for part in args.statistics.unbind())
    groups = mean.shape[-2]
    tokens, grad = tokens_of(args.inputs), tokens_of(args.grad_y)
    deviations = tokens.unflatten(-1, (groups, tokens.shape[-1] // groups)) - mean
    y = (deviations * rstd).flatten(-2)
    factor = args.scale * (1 - args.k * y)
    grad_weight, grad_bias = where_arriving(grad, grad * factor * y).sum(0), grad.sum(0)
    g = grad * factor if args.weight is None else grad * args.weight.to(grad.dtype) * factor
    g = where_arriving(grad, g).unflatten(-1, deviations.shape[-2:])
    grad_x = where_arriving(g, g * rstd)
    if args.centered and not args.detach_mean:
        mean_g = g.mean(-1, keepdim=True)
        grad_x = grad_x - where_arriving(mean_g, mean_g * rstd)
    if not args.detach_std:
        along = where_arriving(g, g * deviations).sum(-1, keepdim=True)
        along = where_arriving(along, along * rstd.square())
        share = deviations * along / _root_of(deviations, rstd, args.released)
        grad_x = grad_x - where_arriving(along, share)
    grad_x = grad_x.flatten(-2)
    if args.grad_total is not None:
        grad_x = grad_x + tokens_of(args.grad_total)
    grad_x = grad_x.to(args.inputs.dtype).reshape(args.inputs.shape).contiguous()
    return (
        Gradients(grad_x, grad_weight, grad_bias) if args.affine else Gradients(grad_x, None, None)
    )


def _standard_deviation(deviations: Tensor, eps: float, released: bool) -> Tensor:
    if not released:
        return (deviations.square().mean(-1) + eps).sqrt()
    var = deviations.square().sum(-1) / (deviations.shape[-1] - 1)
    # The root has an infinite gradient at 0; the gradient of a token with equal features is 0.
    varies = var != 0  # NaN too, which stays NaN
    return torch.where(varies, torch.where(varies, var, 1.0).sqrt(), 0.0) + eps


def _root_of(deviations: Tensor, rstd: Tensor, released: bool) -> Tensor:
    """Return N σ₀ of the backward; 1 for a token with equal features, whose term is 0."""
    size = deviations.shape[-1]
    if not released:
        return size / rstd
    # From the data, because 1/rstd - eps would cancel if eps is the larger part.
    root = (deviations.square().sum(-1, keepdim=True) * (size - 1)).sqrt()
    return torch.where(root > 0, root, 1.0)


def differentiable(x: Tensor, args: TokenNormArgs) -> Tensor:
    """Return y in differentiable torch, for second derivatives.

    Args:
        x: the normalized input: x, or its sum with the residual.
        args: the other arguments.
    """
    parts = tokens_of(x).unflatten(-1, (args.groups, num_features_of(x) // args.groups))
    deviations = parts
    constant = parts
    if args.centered:
        mean = parts.mean(-1, keepdim=True)
        deviations = parts - mean
        constant = parts - mean.detach() if args.detach_mean else deviations
    std = _standard_deviation(deviations, args.eps, args.released).unsqueeze(-1)
    y = (constant / (std.detach() if args.detach_std else std)).flatten(-2)
    z = y * (args.scale * (1 - args.k * y)).detach() if args.k else y * args.scale
    return scale_and_shift(z, args.weight, args.bias).to(x.dtype).reshape(x.shape)


def exported(x: Tensor, args: TokenNormArgs) -> Tensor:
    """Return y in torch's own operators, for a graph that runs without this library.

    The expression is short. Gradients are those of the layers, as an exported graph may be trained.

    Args:
        x: the normalized input: x, or its sum with the residual.
        args: the other arguments.
    """
    if args.released or args.detach_mean or args.detach_std:
        return differentiable(x, args)
    if args.centered and args.groups == 1 and args.scale == 1 and not args.k:
        return layer_norm(x, args.weight, args.bias, args.eps)
    y = standardized(converted(x, accumulation_dtype(x)), args.groups, args.centered, args.eps)
    if args.k:
        y = y * (args.scale - args.scale * args.k * y).detach()
    elif args.scale != 1:
        y = y * args.scale
    if args.weight is not None:
        y = y * converted(args.weight, y.dtype)
    if args.bias is not None:
        y = y + converted(args.bias, y.dtype)
    return converted(y, x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Apply torch's LayerNorm over the features."""
    shape = (num_features_of(x),)
    if weight is not None and weight.dtype != x.dtype:
        wide = x.to(accumulation_dtype(x))
        normalized = torch.nn.functional.layer_norm(wide, shape, None, None, eps)
        return scale_and_shift(normalized, weight, bias).to(x.dtype)
    # Autocast returns float32 on some devices.
    return torch.nn.functional.layer_norm(x, shape, weight, bias, eps).to(x.dtype)


class _TokenNorm(Operator):
    """The registered op and its gradient."""

    name = "token_norm"
    arguments = TokenNormArgs
    output = TokenNormOutput
    backward_arguments = TokenNormBackwardArgs

    def fake(self, args: TokenNormArgs) -> TokenNormOutput:
        x = args.x
        total = None if args.residual is None else dense_like(x)
        shape = (2, x.numel() // x.shape[-1], args.groups)
        statistics = x.new_empty(shape, dtype=accumulation_dtype(x))
        return TokenNormOutput(dense_like(x), total, statistics)

    def backward_fake(self, args: TokenNormBackwardArgs) -> Gradients:
        inputs = args.inputs
        if not args.affine:
            return Gradients(dense_like(inputs), None, None)
        return Gradients(dense_like(inputs), features_like(inputs), features_like(inputs))

    def saved(self, inputs: Tensor, args: TokenNormArgs, output: TokenNormOutput) -> Saved:
        # Without the tensors, because the saved ones above may be offloaded or recomputed.
        settings = args._replace(x=None, residual=None, weight=None, bias=None)  # type: ignore[arg-type]
        return (inputs, args.weight, args.bias, output.statistics), settings

    def gradients(
        self,
        ctx: Any,
        needs: Inputs,
        grad_y: Tensor | None,
        grad_total: Tensor | None,
        _: Tensor | None,
    ) -> Inputs:
        inputs, weight, bias, statistics = ctx.saved_tensors
        settings: TokenNormArgs = ctx.settings
        grad_y = torch.zeros_like(inputs) if grad_y is None else grad_y
        if torch.is_grad_enabled():
            sources = starting_points(inputs, weight, bias)
            again = settings._replace(weight=sources[1], bias=sources[2])
            y = differentiable(without_lost(sources[0], grad_y), again)
            found = differentiate(y, sources, grad_y, grad_total)
        else:
            found = self.backward(
                TokenNormBackwardArgs(
                    grad_y,
                    grad_total,
                    inputs,
                    weight,
                    statistics,
                    settings.centered,
                    settings.released,
                    settings.scale,
                    settings.k,
                    settings.detach_mean,
                    settings.detach_std,
                    # Without γ and β their gradients need no sums.
                    affine=weight is not None or bias is not None,
                )
            )
        return input_gradients(found, needs, weight, ctx.bias_dtype)

    def call(self, args: TokenNormArgs) -> Any:
        """Return the outputs, by torch's own operators if the registered one cannot be used."""
        if not (is_exported() or is_transformed()):
            return super().call(args)
        total = args.x if args.residual is None else args.x + args.residual
        y = (exported if is_exported() else differentiable)(total, args)
        return TokenNormOutput(y, total, None)


OPERATOR = _TokenNorm()
OPERATOR.register()


def token_norm(args: TokenNormArgs) -> tuple[Tensor, Tensor | None]:
    """Return (y, sum with the residual) by each token's own features."""
    output = OPERATOR.apply(args)
    return output.y, output.total
