"""MABN's op, eager on every device: the forward and backward of `reference.moving_average`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from powernorm.ops.library import (
    define,
    define_gradient,
    dense_like,
    features_like,
    raise_on_double_backward,
)
from powernorm.ops.reference import moving_average
from powernorm.ops.reference.arrays import accumulation_dtype


def _wanted(
    ctx: Any, grads: tuple[Tensor, Tensor, Tensor], weight: Tensor | None
) -> tuple[Tensor | None, ...]:
    """(∂x, None for the mask, ∂weight, ∂bias) as far as they are asked for, in their types."""
    needs = ctx.needs_input_grad
    grad_x, grad_weight, grad_bias = grads
    return (
        grad_x if needs[0] else None,
        None,
        grad_weight.to(weight.dtype) if weight is not None and needs[2] else None,
        grad_bias.to(ctx.bias_dtype) if needs[3] else None,
    )


def _moving_average_norm(*args: Any) -> tuple[Tensor, ...]:
    x, mask, weight, bias, running, second, gradient, _carrier, *settings = args
    out = moving_average.moving_average_norm(
        x, mask, weight, bias, running, second, gradient, *settings
    )
    return (out.y.contiguous(), *out[1:])


def _moving_average_norm_fake(*args: Any) -> tuple[Tensor, ...]:
    x = args[0]
    features = tuple(features_like(x) for _ in range(4))
    count = x.new_empty((), dtype=accumulation_dtype(x))
    return dense_like(x), *features, count, features_like(x, 2, dtype=torch.float64)


def _moving_average_norm_setup(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]
) -> None:
    x, mask, weight = inputs[:3]
    window = inputs[5].shape[0]
    own_statistics, group = inputs[9], inputs[11]
    _y, rstd, ratio, used, history, count, sums = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rstd, ratio, used, history, count, sums)
    ctx.save_for_backward(x, mask, weight, rstd, ratio, history, count, sums)
    ctx.bias_dtype = None if inputs[3] is None else inputs[3].dtype
    ctx.settings = (window, own_statistics, group)


def _moving_average_norm_autograd(
    ctx: Any, grad_y: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    x, mask, weight, rstd, ratio, history, count, sums = ctx.saved_tensors
    if grad_y is None:
        return (None,) * 12
    *grads, gradient_sum = torch.ops.powernorm.moving_average_norm_backward(
        grad_y, x, mask, weight, rstd, ratio, history, count, *ctx.settings
    )
    carried = torch.cat([sums, gradient_sum[None]]) if ctx.needs_input_grad[7] else None
    return (*_wanted(ctx, tuple(grads), weight), *[None] * 3, carried, *[None] * 4)


def _moving_average_norm_backward(*args: Any) -> tuple[Tensor, ...]:
    grad_x, *rest = moving_average.moving_average_norm_backward(*args)
    return (grad_x.contiguous(), *rest)


def _moving_average_norm_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    x = args[1]
    return dense_like(x), features_like(x), features_like(x), features_like(x, dtype=torch.float64)


def register() -> None:
    """Register the op; called once."""
    define(
        "moving_average_norm(Tensor x, Tensor? padding_mask, Tensor? weight, Tensor? bias, "
        "Tensor running_second_moment, Tensor window_second_moment, "
        "Tensor window_gradient_moment, Tensor? carrier, float eps, bool own_statistics, "
        "bool use_ratio, str group_name) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        _moving_average_norm,
        _moving_average_norm_fake,
    )
    define(
        "moving_average_norm_backward(Tensor grad_y, Tensor x, Tensor? padding_mask, "
        "Tensor? weight, Tensor rstd, Tensor ratio, Tensor history, Tensor count, int window, "
        "bool own_statistics, str group_name) -> (Tensor, Tensor, Tensor, Tensor)",
        _moving_average_norm_backward,
        _moving_average_norm_backward_fake,
    )
    define_gradient(
        "moving_average_norm", _moving_average_norm_autograd, _moving_average_norm_setup
    )
    define_gradient("moving_average_norm_backward", raise_on_double_backward, None)
