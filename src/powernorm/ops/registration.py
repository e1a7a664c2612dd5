"""The ops' schemas, fakes and rules, registered when this module is imported.

Every op is served by the backend that fits its input (`powernorm.ops.dispatch`), when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from powernorm.ops import gradients, moving_average
from powernorm.ops.dispatch import functions_for
from powernorm.ops.library import (
    define,
    define_gradient,
    dense_like,
    features_like,
    raise_on_double_backward,
    scales_like,
    total_like,
)
from powernorm.ops.reference.arrays import accumulation_dtype
from powernorm.ops.reference.batch import in_backward

_INPUTS = "Tensor x, Tensor? residual, Tensor? padding_mask, Tensor? weight, Tensor? bias"
_GRADS = "Tensor grad_y, Tensor? grad_total"
_SAVED = "Tensor inputs, Tensor? padding_mask, Tensor? weight, Tensor scales, Tensor statistics"


def _filled(x: Tensor, *outputs: Tensor | None) -> tuple[Tensor, ...]:
    """Operators return tensors only: what does not exist is empty; total comes second."""
    acc = accumulation_dtype(x)
    return tuple(
        x.new_empty(0, dtype=x.dtype if index == 1 else acc) if output is None else output
        for index, output in enumerate(outputs)
    )


def _marking(setup: Callable[..., None], *indices: int) -> Callable[..., None]:
    """The setup, and outputs that have no gradient."""

    def marked(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        setup(ctx, inputs, output)
        ctx.mark_non_differentiable(*(output[index] for index in indices))

    return marked


# ---- batch statistics: BatchNorm, RegularizedBatchNorm, PowerNormV, BatchRenorm ----------------


def _batch_norm(*args: Any) -> tuple[Tensor, ...]:
    x, *rest = args
    outputs = functions_for(x).batch_norm(x, *rest[:6], *rest[7:])
    count = outputs[3][-1]
    has_tokens = count[0] > 0 if not in_backward() else torch.zeros_like(count[0], dtype=torch.bool)
    return (*_filled(x, *outputs), has_tokens)


def _batch_norm_fake(*args: Any) -> tuple[Tensor, ...]:
    x, residual, running_mean, groups = args[0], args[1], args[5], args[9]
    return (
        dense_like(x),
        total_like(x, residual),
        scales_like(x, groups),
        features_like(x, 6),
        features_like(x, 2 if running_mean is None else 4, dtype=torch.float64),
        x.new_empty((), dtype=torch.bool),
    )


def _batch_norm_backward(*args: Any) -> tuple[Tensor, ...]:
    return functions_for(args[3]).batch_norm_backward(*args)  # type: ignore[no-any-return]


def _batch_norm_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    x = args[3]
    return dense_like(x), features_like(x), features_like(x)


define(
    f"batch_norm({_INPUTS}, Tensor? running_mean, Tensor running_var, Tensor? carrier, "
    "Tensor? limits, int groups, float eps, bool floor, str group_name) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _batch_norm,
    _batch_norm_fake,
)
define(
    f"batch_norm_backward({_GRADS}, Tensor? grad_statistics, {_SAVED}, float eps, bool floor, "
    "bool centered, str group_name) -> (Tensor, Tensor, Tensor)",
    _batch_norm_backward,
    _batch_norm_backward_fake,
)
define_gradient(
    "batch_norm", gradients.batch_norm_gradient, _marking(gradients.batch_norm_setup, 2, 4, 5)
)
define_gradient("batch_norm_backward", raise_on_double_backward, None)


# ---- PowerNorm ---------------------------------------------------------------------------------


def _power_norm(*args: Any) -> tuple[Tensor, ...]:
    x, *rest = args
    return _filled(x, *functions_for(x).power_norm(x, *rest[:6], *rest[7:]))


def _power_norm_fake(*args: Any) -> tuple[Tensor, ...]:
    x, residual, groups = args[0], args[1], args[8]
    return (
        dense_like(x),
        total_like(x, residual),
        scales_like(x, groups),
        features_like(x, 3),
        features_like(x, 2, dtype=torch.float64),
    )


def _power_norm_backward(*args: Any) -> tuple[Tensor, ...]:
    return functions_for(args[2]).power_norm_backward(*args)  # type: ignore[no-any-return]


def _power_norm_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    x = args[2]
    carried = features_like(x, 5, dtype=torch.float64)
    return dense_like(x), features_like(x), features_like(x), carried


define(
    f"power_norm({_INPUTS}, Tensor second_moment, Tensor gradient_moment, Tensor? carrier, "
    "int groups, float eps, bool use_batch, float max_ratio, bool released, str group_name) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    _power_norm,
    _power_norm_fake,
)
define(
    f"power_norm_backward({_GRADS}, {_SAVED}, Tensor sums, bool released) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    _power_norm_backward,
    _power_norm_backward_fake,
)
define_gradient(
    "power_norm", gradients.power_norm_gradient, _marking(gradients.power_norm_setup, 2, 3, 4)
)
define_gradient("power_norm_backward", raise_on_double_backward, None)


# ---- per-token norms ---------------------------------------------------------------------------


def _token_norm(*args: Any) -> tuple[Tensor, ...]:
    return _filled(args[0], *functions_for(args[0]).token_norm(*args[:10]))


def _token_norm_fake(*args: Any) -> tuple[Tensor, ...]:
    x, residual, groups = args[0], args[1], args[4]
    tokens = x.numel() // x.shape[-1]
    statistics = x.new_empty((2, tokens, groups), dtype=accumulation_dtype(x))
    return dense_like(x), total_like(x, residual), statistics


def _token_norm_backward(*args: Any) -> tuple[Tensor, ...]:
    x = args[2]
    grads = functions_for(x).token_norm_backward(*args)
    return tuple(features_like(x).zero_() if grad is None else grad for grad in grads)


def _token_norm_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    x = args[2]
    return dense_like(x), features_like(x), features_like(x)


_TOKEN = "Tensor x, Tensor? residual, Tensor? weight, Tensor? bias"
define(
    f"token_norm({_TOKEN}, int groups, bool centered, float eps, bool released, float scale, "
    "float k, bool detach_mean, bool detach_std) -> (Tensor, Tensor, Tensor)",
    _token_norm,
    _token_norm_fake,
)
define(
    f"token_norm_backward({_GRADS}, Tensor inputs, Tensor? weight, Tensor statistics, "
    "bool centered, bool released, float scale, float k, bool detach_mean, bool detach_std, "
    "bool affine) -> (Tensor, Tensor, Tensor)",
    _token_norm_backward,
    _token_norm_backward_fake,
)
define_gradient(
    "token_norm", gradients.token_norm_gradient, _marking(gradients.token_norm_setup, 2)
)


# ---- given statistics --------------------------------------------------------------------------


def _static_norm(*args: Any) -> tuple[Tensor, ...]:
    return _filled(args[0], *functions_for(args[0]).static_norm(*args))


def _static_norm_fake(*args: Any) -> tuple[Tensor, ...]:
    x, residual, groups = args[0], args[1], args[6]
    return dense_like(x), total_like(x, residual), scales_like(x, groups), features_like(x, 2)


def _static_norm_backward(*args: Any) -> tuple[Tensor, ...]:
    return functions_for(args[2]).static_norm_backward(*args)  # type: ignore[no-any-return]


define(
    f"static_norm({_TOKEN}, Tensor? mean, Tensor var, int groups, float eps, bool floor) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    _static_norm,
    _static_norm_fake,
)
define(
    f"static_norm_backward({_GRADS}, Tensor inputs, Tensor? weight, Tensor scales, "
    "Tensor statistics) -> (Tensor, Tensor, Tensor)",
    _static_norm_backward,
    _token_norm_backward_fake,
)
define_gradient(
    "static_norm", gradients.static_norm_gradient, _marking(gradients.static_norm_setup, 2, 3)
)


# ---- snapshot, MABN ----------------------------------------------------------------------------

define("snapshot(Tensor buffer) -> Tensor", Tensor.clone, torch.empty_like)
moving_average.register()
