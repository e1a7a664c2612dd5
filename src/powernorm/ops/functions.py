"""The ops as the layers call them: straight to the kernels in eager mode, else registered ops.

Graphs that leave the process have torch's own operators, where the norms are a forward alone.

Outputs that do not exist (a sum without a residual, factors without groups) are empty or None.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from powernorm.ops import eager, exported, gradients, registration  # noqa: F401 - registers the ops
from powernorm.ops.dispatch import functions_for
from powernorm.ops.plain import is_exported, is_plain, is_transformed, refuse_transforms
from powernorm.ops.reference.token import differentiable_token_norm

# With `forward(ctx, ...)` and not `setup_context`: torch binds the arguments of the latter form by
# Python's `inspect` at every call, which takes longer than a small norm. For the same reason
# `apply_plain` goes past `Function.apply`, whose work is for torch.func; `is_plain` excludes that;
# and what nobody differentiates is no output, for autograd wraps each.


class PlainFunction(torch.autograd.Function):
    """A function that is applied without what `Function.apply` does for torch.func."""

    @classmethod
    def apply_plain(cls, *args: Any) -> Any:
        """Apply it; outside transforms of torch.func."""
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


class _BatchNorm(PlainFunction):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        x, *rest, left = args
        output = functions_for(x).batch_norm(x, *rest[:6], *rest[7:])
        gradients.batch_norm_setup(ctx, args, output)
        y, total, _, statistics, sums = output
        left.extend((statistics, sums))
        # Only layers that move in the backward differentiate the statistics, for a penalty.
        return (y, total) if rest[6] is None else (y, total, statistics)

    @staticmethod
    def backward(
        ctx: Any, grad_y: Any, grad_total: Any, grad_statistics: Any = None
    ) -> tuple[Any, ...]:
        grads = gradients.batch_norm_gradient(ctx, grad_y, grad_total, None, grad_statistics)
        return *grads, None


class _PowerNorm(PlainFunction):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        x, *rest = args
        output = functions_for(x).power_norm(x, *rest[:6], *rest[7:])
        gradients.power_norm_setup(ctx, args, output)
        return output[0], output[1]

    backward = staticmethod(gradients.power_norm_gradient)


class _TokenNorm(PlainFunction):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        output = functions_for(args[0]).token_norm(*args[:10])
        gradients.token_norm_setup(ctx, args, output)
        return output[0], output[1]

    backward = staticmethod(gradients.token_norm_gradient)


class _StaticNorm(PlainFunction):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        output = functions_for(args[0]).static_norm(*args)
        gradients.static_norm_setup(ctx, args, output)
        return output[0], output[1]

    backward = staticmethod(gradients.static_norm_gradient)


def _promoted(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the type that their sum has: under autocast a branch is narrower than its stream."""
    dtype = torch.promote_types(x.dtype, residual.dtype)
    return x.to(dtype), residual.to(dtype)


class BatchNormResult(NamedTuple):
    """What the batch-statistics layers read."""

    y: Tensor
    total: Tensor | None
    statistics: Tensor
    """(6, C): mean, var, 1/σ, r, d, number of valid tokens; differentiable in the first two."""
    sums: Tensor
    has_tokens: Tensor | None
    """May running statistics move? None in eager mode: ask `in_backward` and the count."""


def batch_norm(
    x: Tensor,
    residual: Tensor | None,
    padding_mask: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor,
    carrier: Tensor | None,
    limits: Tensor | None,
    groups: int,
    eps: float,
    floor: bool,
    group_name: str,
) -> BatchNormResult:
    """Normalize by batch statistics; arguments as of `reference.batch`.

    The `carrier` is a leaf that receives the sums as its gradient, (4, C) float64.
    """
    if residual is not None and residual.dtype != x.dtype:
        x, residual = _promoted(x, residual)
    affine = (x, residual, padding_mask, weight, bias)
    args = (*affine, running_mean, running_var, carrier, limits, groups, eps, floor, group_name)
    if is_plain(x, residual, weight, bias):
        left: list[Tensor] = []
        y, total, *statistics = _BatchNorm.apply_plain(*args, left)
        return BatchNormResult(y, total, statistics[0] if statistics else left[0], left[1], None)
    refuse_transforms()
    y, total, _, statistics, sums, has_tokens = torch.ops.powernorm.batch_norm(*args)
    return BatchNormResult(y, total, statistics, sums, has_tokens)


def power_norm(
    x: Tensor,
    residual: Tensor | None,
    padding_mask: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    second_moment: Tensor,
    gradient_moment: Tensor,
    carrier: Tensor | None,
    groups: int,
    eps: float,
    use_batch: bool,
    max_ratio: float,
    released: bool,
    group_name: str,
) -> tuple[Tensor, Tensor | None]:
    """(y, sum with the residual) by running statistics; arguments as of `reference.power`.

    The `carrier` is a leaf that receives the sums as its gradient, (5, C) float64.
    """
    if residual is not None and residual.dtype != x.dtype:
        x, residual = _promoted(x, residual)
    affine = (x, residual, padding_mask, weight, bias)
    state = (second_moment, gradient_moment, carrier)
    args = (*affine, *state, groups, eps, use_batch, max_ratio, released, group_name)
    if is_plain(x, residual, weight, bias):
        y, total = _PowerNorm.apply_plain(*args)
    else:
        refuse_transforms()
        y, total, *_ = torch.ops.powernorm.power_norm(*args)
    return y, total


def token_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    groups: int = 1,
    centered: bool = True,
    eps: float,
    released: bool = False,
    scale: float = 1.0,
    k: float = 0.0,
    detach_mean: bool = False,
    detach_std: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(y, sum with the residual) by each token's own features; arguments as of `reference.token`.

    `detach_mean` and `detach_std` let no gradient through μ and σ.
    """
    if residual is not None and residual.dtype != x.dtype:
        x, residual = _promoted(x, residual)
    settings = (groups, centered, eps, released, scale, k, detach_mean, detach_std)
    args = (x, residual, weight, bias, *settings)
    if is_plain(x, residual, weight, bias):
        y, total = _TokenNorm.apply_plain(*args)
    elif is_exported():
        total = x if residual is None else x + residual
        y = exported.token_norm(total, weight, bias, *settings)
    elif is_transformed():
        total = x if residual is None else x + residual
        y = differentiable_token_norm(total, weight, bias, *settings)
    else:
        y, total, _ = torch.ops.powernorm.token_norm(*args)
    return y, total


def static_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor,
    groups: int,
    eps: float,
    floor: bool,
) -> tuple[Tensor, Tensor | None]:
    """(y, sum with the residual) by given statistics; see `reference.static.static_norm`."""
    if residual is not None and residual.dtype != x.dtype:
        x, residual = _promoted(x, residual)
    args = (x, residual, weight, bias, mean, var, groups, eps, floor)
    if is_plain(x, residual, weight, bias):
        y, total = _StaticNorm.apply_plain(*args)
    elif is_exported():
        total = x if residual is None else x + residual
        y = exported.static_norm(total, *args[2:])
    elif is_transformed():
        y, total, *_ = eager.static_norm(*args)
    else:
        y, total, *_ = torch.ops.powernorm.static_norm(*args)
    return y, total
