"""The stateful norms' ops, registered with `torch.library`.

Each op is a pure function of tensors that returns its output *and* the statistics that it used;
its backward reads saved outputs only, never a buffer. That is what keeps gradients right under
`torch.compile`, where a buffer that the graph overwrites would be read too late. The optional
`carrier` is a leaf tensor that takes no part in the result: the backward returns the sums that
move the running statistics as its "gradient" (see `powernorm.norms.carrier`).

Kernels will be registered for their device behind the same schemas; today every device is served
by `powernorm.ops.reference`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from powernorm.ops.reference import batch, moving_average, power
from powernorm.ops.reference.arrays import accumulation_dtype

_LIBRARY = torch.library.Library("powernorm", "DEF")


def _define(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"powernorm::{name}", fake, lib=_LIBRARY)


def _autograd(name: str, backward: Callable[..., Any], setup: Callable[..., Any] | None) -> None:
    torch.library.register_autograd(
        f"powernorm::{name}", backward, setup_context=setup, lib=_LIBRARY
    )


def _raise_on_double_backward(*_: object) -> NoReturn:
    raise RuntimeError(
        "double backward through a powernorm batch-statistics norm is not available: drop "
        "create_graph=True, or use a per-token norm (ln, ln-simple, rms, gn) in this model"
    )


def _features(x: Tensor, *leading: int, dtype: torch.dtype | None = None) -> Tensor:
    return x.new_empty((*leading, x.shape[-1]), dtype=dtype or accumulation_dtype(x))


def _dense(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# ---- batch statistics: BatchNorm, RegularizedBatchNorm, PowerNormV, BatchRenorm ----------------


def _batch_norm(*args: Any) -> tuple[Tensor, ...]:
    x, mask, weight, bias, mean, var, _carrier, limits, eps, floor, group = args
    out = batch.batch_norm(x, mask, weight, bias, mean, var, limits, eps, floor, group)
    return (out.y.contiguous(), *out[1:])


def _batch_norm_fake(*args: Any) -> tuple[Tensor, ...]:
    x, limits = args[0], args[7]
    renorm = (lambda: _features(x)) if limits is not None else (lambda: x.new_empty(0))
    acc = accumulation_dtype(x)
    return (
        _dense(x),
        _features(x),
        _features(x),
        x.new_empty((), dtype=acc),
        _features(x),
        renorm().to(acc),
        renorm().to(acc),
        x.new_empty((), dtype=torch.bool),
        _features(x, 3, dtype=torch.float64),
    )


def _batch_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, mask, weight, bias, running_mean, _var, _carrier, _limits, eps, floor, group = inputs
    _y, mean, var, count, rstd, r, d, fresh, sums = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(count, rstd, r, d, fresh, sums)
    ctx.save_for_backward(x, mask, weight, mean, var, count, rstd, r, d, sums)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.settings = (eps, floor, running_mean is not None, group)


def _batch_norm_autograd(
    ctx: Any, grad_y: Tensor | None, grad_mean: Tensor | None, grad_var: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    x, mask, weight, mean, var, count, rstd, r, d, sums = ctx.saved_tensors
    grads = torch.ops.powernorm.batch_norm_backward(
        torch.zeros_like(x) if grad_y is None else grad_y,
        grad_mean,
        grad_var,
        x,
        mask,
        weight,
        mean,
        var,
        count,
        rstd,
        r,
        d,
        *ctx.settings,
    )
    return (*_wanted(ctx, grads, weight), None, None, _carried(ctx, 6, sums), *[None] * 4)


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


def _carried(ctx: Any, index: int, sums: Tensor) -> Tensor | None:
    return sums if ctx.needs_input_grad[index] else None


def _batch_norm_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, grad_weight, grad_bias = batch.batch_norm_backward(*args)
    return grad_x.contiguous(), grad_weight, grad_bias


def _batch_norm_backward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = args[3]
    return _dense(x), _features(x), _features(x)


_STATE = "Tensor x, Tensor? padding_mask, Tensor? weight, Tensor? bias"

_define(
    f"batch_norm({_STATE}, Tensor? running_mean, Tensor running_var, Tensor? carrier, "
    "Tensor? limits, float eps, bool floor, str group_name) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _batch_norm,
    _batch_norm_fake,
)
_define(
    "batch_norm_backward(Tensor grad_y, Tensor? grad_mean, Tensor? grad_var, Tensor x, "
    "Tensor? padding_mask, Tensor? weight, Tensor mean, Tensor var, Tensor count, Tensor rstd, "
    "Tensor r, Tensor d, float eps, bool floor, bool centered, str group_name) -> "
    "(Tensor, Tensor, Tensor)",
    _batch_norm_backward,
    _batch_norm_backward_fake,
)
_autograd("batch_norm", _batch_norm_autograd, _batch_norm_setup)
_autograd("batch_norm_backward", _raise_on_double_backward, None)


# ---- PowerNorm ---------------------------------------------------------------------------------


def _power_norm(*args: Any) -> tuple[Tensor, ...]:
    x, mask, weight, bias, second, gradient, _carrier, *settings = args
    out = power.power_norm(x, mask, weight, bias, second, gradient, *settings)
    return (out.y.contiguous(), *out[1:])


def _power_norm_fake(*args: Any) -> tuple[Tensor, ...]:
    x = args[0]
    sums = _features(x, 2, dtype=torch.float64)
    return _dense(x), _features(x), _features(x), _features(x), sums


def _power_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, mask, weight = inputs[:3]
    _y, rstd, backward_rstd, nu, sums = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rstd, backward_rstd, nu, sums)
    ctx.save_for_backward(x, mask, weight, rstd, backward_rstd, nu, sums)
    ctx.bias_dtype = None if inputs[3] is None else inputs[3].dtype
    ctx.released = inputs[10]


def _power_norm_autograd(ctx: Any, grad_y: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    x, mask, weight, rstd, backward_rstd, nu, sums = ctx.saved_tensors
    if grad_y is None:
        return (None,) * 12
    *grads, gradient_sums = torch.ops.powernorm.power_norm_backward(
        grad_y, x, mask, weight, rstd, backward_rstd, nu, ctx.released
    )
    carried = torch.cat([sums, gradient_sums]) if ctx.needs_input_grad[6] else None
    return (*_wanted(ctx, tuple(grads), weight), None, None, carried, *[None] * 5)


def _power_norm_backward(*args: Any) -> tuple[Tensor, ...]:
    grad_x, *rest = power.power_norm_backward(*args)
    return (grad_x.contiguous(), *rest)


def _power_norm_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    x = args[1]
    return _dense(x), _features(x), _features(x), _features(x, 3, dtype=torch.float64)


_define(
    f"power_norm({_STATE}, Tensor second_moment, Tensor gradient_moment, Tensor? carrier, "
    "float eps, bool use_batch, float max_ratio, bool released, str group_name) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    _power_norm,
    _power_norm_fake,
)
_define(
    "power_norm_backward(Tensor grad_y, Tensor x, Tensor? padding_mask, Tensor? weight, "
    "Tensor rstd, Tensor backward_rstd, Tensor nu, bool released) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    _power_norm_backward,
    _power_norm_backward_fake,
)
_autograd("power_norm", _power_norm_autograd, _power_norm_setup)
_autograd("power_norm_backward", _raise_on_double_backward, None)


# ---- MABN --------------------------------------------------------------------------------------


def _moving_average_norm(*args: Any) -> tuple[Tensor, ...]:
    x, mask, weight, bias, running, second, gradient, _carrier, *settings = args
    out = moving_average.moving_average_norm(
        x, mask, weight, bias, running, second, gradient, *settings
    )
    return (out.y.contiguous(), *out[1:])


def _moving_average_norm_fake(*args: Any) -> tuple[Tensor, ...]:
    x = args[0]
    features = tuple(_features(x) for _ in range(4))
    count = x.new_empty((), dtype=accumulation_dtype(x))
    return _dense(x), *features, count, _features(x, 2, dtype=torch.float64)


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
    return _dense(x), _features(x), _features(x), _features(x, dtype=torch.float64)


_define(
    f"moving_average_norm({_STATE}, Tensor running_second_moment, Tensor window_second_moment, "
    "Tensor window_gradient_moment, Tensor? carrier, float eps, bool own_statistics, "
    "bool use_ratio, str group_name) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _moving_average_norm,
    _moving_average_norm_fake,
)
_define(
    "moving_average_norm_backward(Tensor grad_y, Tensor x, Tensor? padding_mask, Tensor? weight, "
    "Tensor rstd, Tensor ratio, Tensor history, Tensor count, int window, bool own_statistics, "
    "str group_name) -> (Tensor, Tensor, Tensor, Tensor)",
    _moving_average_norm_backward,
    _moving_average_norm_backward_fake,
)
_autograd("moving_average_norm", _moving_average_norm_autograd, _moving_average_norm_setup)
_autograd("moving_average_norm_backward", _raise_on_double_backward, None)


# ---- snapshot ----------------------------------------------------------------------------------

_define("snapshot(Tensor buffer) -> Tensor", Tensor.clone, torch.empty_like)
