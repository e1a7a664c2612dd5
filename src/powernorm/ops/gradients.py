"""Autograd rules of the ops, for `torch.library` and for eager `autograd.Function`s alike.

A rule is a pair (setup, backward) in the form that both take. In eager mode a backward goes to its
kernel directly; where a graph is being recorded it goes through the registered op.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from powernorm.ops.dispatch import functions_for
from powernorm.ops.plain import is_plain
from powernorm.ops.reference.arrays import scale_and_shift, scale_groups, tokens_of
from powernorm.ops.reference.token import differentiable_token_norm


def _run(name: str, reference: Tensor, *args: Any) -> tuple[Any, ...]:
    """A backward: the kernel itself, or the op where something records."""
    if not torch.is_grad_enabled() and is_plain(reference):
        result = getattr(functions_for(reference), name)(*args)
    else:
        result = getattr(torch.ops.powernorm, name)(*args)
    return result  # type: ignore[no-any-return]


def _input_of(x: Tensor, total: Tensor | None) -> Tensor:
    return x if total is None or total.shape != x.shape else total


def _arriving(grad: Tensor | None) -> Tensor | None:
    """None for the gradient of an output that does not exist: empty, in a compiled graph."""
    return None if grad is None or not grad.numel() else grad


def _inputs_gradients(
    ctx: Any, grads: tuple[Tensor, ...], weight: Tensor | None, bias_at: int
) -> list[Tensor | None]:
    """[∂x, ∂residual, …, ∂weight, ∂bias] as far as they are asked for, in their types."""
    needs = ctx.needs_input_grad
    grad_x, grad_weight, grad_bias = grads[:3]
    wanted: list[Tensor | None] = [None] * (bias_at + 1)
    wanted[0] = grad_x if needs[0] else None
    wanted[1] = grad_x if needs[1] else None
    if weight is not None and needs[bias_at - 1]:
        narrow = grad_weight.dtype != weight.dtype
        wanted[bias_at - 1] = grad_weight.to(weight.dtype) if narrow else grad_weight
    if needs[bias_at]:
        narrow = grad_bias.dtype != ctx.bias_dtype
        wanted[bias_at] = grad_bias.to(ctx.bias_dtype) if narrow else grad_bias
    return wanted


def _type_of(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


# ---- batch_norm: x, residual, mask, weight, bias, mean, var, carrier, limits, groups, eps, floor,
# ---- group_name -> y, total, scales, statistics, sums (and has_tokens, of the registered op)


def batch_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """Keep what the backward reads: outputs, never buffers."""
    x, _residual, mask, weight, bias, running_mean = inputs[:6]
    _y, total, scales, statistics, sums, *_ = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(_input_of(x, total), mask, weight, scales, statistics, sums)
    ctx.bias_dtype = _type_of(bias)
    ctx.settings = (inputs[10], inputs[11], running_mean is not None, inputs[12])


def batch_norm_gradient(
    ctx: Any,
    grad_y: Tensor | None,
    grad_total: Tensor | None,
    _scales: None,
    grad_statistics: Tensor | None,
    *_: None,
) -> tuple[Tensor | None, ...]:
    """Gradients of `batch_norm`'s inputs; the carrier's are the sums."""
    grad_total = _arriving(grad_total)
    inputs, mask, weight, scales, statistics, sums = ctx.saved_tensors
    if grad_y is None and grad_total is None and grad_statistics is None:
        return (None,) * 13
    if grad_y is None:
        grad_y = torch.zeros_like(inputs)
    tensors = (grad_y, grad_total, grad_statistics, inputs, mask, weight, scales, statistics)
    grads = _run("batch_norm_backward", grad_y, *tensors, *ctx.settings)
    carried = sums if ctx.needs_input_grad[7] else None
    return (*_inputs_gradients(ctx, grads, weight, 4), None, None, carried, *[None] * 5)


# ---- power_norm: x, residual, mask, weight, bias, second, gradient, carrier, groups, eps,
# ---- use_batch, max_ratio, released, group_name -> y, total, scales, statistics, sums


def power_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """Keep what the backward reads: outputs, never buffers."""
    x, _residual, mask, weight, bias = inputs[:5]
    _y, total, scales, statistics, sums = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(_input_of(x, total), mask, weight, scales, statistics, sums)
    ctx.bias_dtype = _type_of(bias)
    ctx.released = inputs[12]


def power_norm_gradient(
    ctx: Any, grad_y: Tensor | None, grad_total: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    """Gradients of `power_norm`'s inputs; the carrier's are the sums that move ψ² and ν."""
    grad_total = _arriving(grad_total)
    inputs, mask, weight, scales, statistics, sums = ctx.saved_tensors
    if grad_y is None and grad_total is None:
        return (None,) * 14
    if grad_y is None:
        grad_y = torch.zeros_like(inputs)
    tensors = (grad_y, grad_total, inputs, mask, weight, scales, statistics, sums)
    *grads, carried = _run("power_norm_backward", grad_y, *tensors, ctx.released)
    carried = carried if ctx.needs_input_grad[7] else None
    return (*_inputs_gradients(ctx, tuple(grads), weight, 4), None, None, carried, *[None] * 6)


# ---- token_norm: x, residual, weight, bias, groups, centered, eps, released, scale, k,
# ---- detach_mean, detach_std -> y, total, statistics


def token_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """Keep what the backward reads."""
    x, _residual, weight, bias = inputs[:4]
    _y, total, statistics = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(_input_of(x, total), weight, bias, statistics)
    ctx.bias_dtype = _type_of(bias)
    ctx.settings = inputs[4:]


def token_norm_gradient(
    ctx: Any, grad_y: Tensor | None, grad_total: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    """Gradients of `token_norm`'s inputs; differentiable where that is asked for."""
    grad_total = _arriving(grad_total)
    inputs, weight, bias, statistics = ctx.saved_tensors
    if grad_y is None and grad_total is None:
        return (None,) * 12
    if grad_y is None:
        grad_y = torch.zeros_like(inputs)
    if torch.is_grad_enabled():
        sources = _aliases(inputs, weight, bias)
        y = differentiable_token_norm(_heard(sources[0], grad_y), *sources[1:], *ctx.settings)
        grads = _differentiate(y, sources, grad_y, grad_total)
    else:
        _groups, centered, _eps, *settings = ctx.settings
        tensors = (grad_y, grad_total, inputs, weight, statistics)
        # Without γ and β their gradients need not be summed.
        affine = weight is not None or bias is not None
        grads = _run("token_norm_backward", grad_y, *tensors, centered, *settings, affine)
    return (*_inputs_gradients(ctx, grads, weight, 3), *[None] * 8)


# ---- static_norm: x, residual, weight, bias, mean, var, groups, eps, floor
# ---- -> y, total, scales, statistics


def static_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """Keep what the backward reads: outputs, never buffers."""
    x, _residual, weight, bias = inputs[:4]
    _y, total, scales, statistics = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(_input_of(x, total), weight, bias, scales, statistics)
    ctx.bias_dtype = _type_of(bias)
    ctx.settings = inputs[6:8]


def static_norm_gradient(
    ctx: Any, grad_y: Tensor | None, grad_total: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    """Gradients of `static_norm`'s inputs; differentiable where that is asked for."""
    grad_total = _arriving(grad_total)
    inputs, weight, bias, scales, statistics = ctx.saved_tensors
    if grad_y is None and grad_total is None:
        return (None,) * 9
    if grad_y is None:
        grad_y = torch.zeros_like(inputs)
    if torch.is_grad_enabled():
        groups, eps = ctx.settings
        sources = _aliases(inputs, weight, bias)
        tokens = scale_groups(tokens_of(sources[0]), groups, eps)[0]
        y = scale_and_shift((tokens - statistics[0]) * statistics[1], *sources[1:])
        y = y.to(inputs.dtype).reshape(inputs.shape)
        grads = _differentiate(y, sources, grad_y, grad_total)
    else:
        tensors = (grad_y, grad_total, inputs, weight, scales, statistics)
        grads = _run("static_norm_backward", grad_y, *tensors)
    return (*_inputs_gradients(ctx, grads, weight, 3), *[None] * 5)


def _heard(inputs: Tensor, grad_y: Tensor) -> Tensor:
    """The inputs, but 0 in tokens that are not finite and that no gradient arrives at.

    Autograd would multiply them by that 0, and give NaN.
    """
    lost = ~inputs.isfinite().all(-1, keepdim=True) & (grad_y == 0).all(-1, keepdim=True)
    return torch.where(lost, 0.0, inputs)


def _aliases(
    inputs: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The same tensors as starting points of their own.

    With respect to the tensors themselves a gradient would also run through what came before, such
    as an earlier use of the same γ, and with a residual through this very node without an end.
    """
    return (
        inputs.view_as(inputs),
        None if weight is None else weight.view_as(weight),
        None if bias is None else bias.view_as(bias),
    )


def _differentiate(
    y: Tensor, sources: tuple[Tensor | None, ...], grad_y: Tensor, grad_total: Tensor | None
) -> tuple[Any, ...]:
    """The gradients with a graph of their own, for derivatives of the derivative."""
    wanted = [s for s in sources if s is not None and s.requires_grad]
    found = iter(torch.autograd.grad(y, wanted, grad_y, create_graph=True, allow_unused=True))
    grads: list[Tensor | None] = [
        next(found) if s is not None and s.requires_grad else None for s in sources
    ]
    if grad_total is not None:
        grads[0] = grad_total if grads[0] is None else grads[0] + grad_total
    return tuple(grads)
