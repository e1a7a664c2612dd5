"""Maps of single values, with the gradient's rule of the norms: where none arrives none leaves.

Autograd multiplies a zero that arrives by what the value is, which is NaN where padding holds NaN.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from powernorm.ops import arrays
from powernorm.ops.arrays import accumulation_dtype, where_arriving
from powernorm.ops.graphs import is_transformed
from powernorm.ops.operators import PlainFunction, is_batched, is_plain


class _ScaleAndShift(PlainFunction):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(values, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return arrays.scale_and_shift(values, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad_values = grad * weight.to(grad.dtype) if needs[0] else None
        grad_weight = grad_bias = None
        if needs[1]:
            products = grad * _heard(values, grad)
            grad_weight = products.sum_to_size(weight.shape)
            if not _is_known_finite(grad_weight):
                grad_weight = where_arriving(grad, products).sum_to_size(weight.shape)
            grad_weight = grad_weight.to(weight.dtype)
        if needs[2]:
            grad_bias = grad.sum_to_size(weight.shape).to(ctx.bias_dtype)
        return grad_values, grad_weight, grad_bias


class _ScaledTanh(PlainFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor) -> Tensor:
        y = torch.tanh(alpha * x)
        ctx.save_for_backward(x, alpha, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, alpha, y = ctx.saved_tensors
        x = _heard(x, grad)
        inner = torch.ops.aten.tanh_backward(grad, _heard(y, grad))
        products = inner * x
        grad_alpha = products.sum()
        if not _is_known_finite(grad_alpha):
            inner = where_arriving(grad, inner)
            grad_alpha = where_arriving(inner, products).sum()
        return inner * alpha, grad_alpha


def _is_known_finite(sums: Tensor) -> bool:
    """Whether sums over all that arrived show that nothing has to be left out of them.

    They are read on the CPU alone, where that waits for nothing; elsewhere the answer is no.
    """
    readable = sums.is_cpu and is_plain(sums) and not is_batched(sums)
    readable = readable and not torch.is_grad_enabled()
    return readable and math.isfinite(sums.sum().item())


def _heard(values: Tensor, grad: Tensor) -> Tensor:
    """The values, for derivatives of the derivative without those that would give NaN for 0."""
    if not torch.is_grad_enabled():
        return values
    return torch.where((grad == 0) & ~values.isfinite(), 0.0, values)


def scale_and_shift(values: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """γ ⊙ values + β in the type of the values, which is that of accumulation."""
    if weight is None or not _is_recorded(values, weight, bias):
        return arrays.scale_and_shift(values, weight, bias)
    direct = is_plain(values, weight, bias)
    apply = _ScaleAndShift.apply_plain if direct else _ScaleAndShift.apply
    return cast(Tensor, apply(values, weight, bias))


def dynamic_tanh(x: Tensor, alpha: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """`γ tanh(α x) + β` (Zhu et al. 2025) in the type of x."""
    wide, alpha = x.to(accumulation_dtype(x)), alpha.to(accumulation_dtype(x))
    if _is_recorded(x, alpha):
        apply = _ScaledTanh.apply_plain if is_plain(x, alpha) else _ScaledTanh.apply
        y = cast(Tensor, apply(wide, alpha))
    else:
        y = torch.tanh(alpha * wide)
    return scale_and_shift(y, weight, bias).to(x.dtype)


def _is_recorded(*tensors: Tensor | None) -> bool:
    """Whether autograd records these, with nothing that needs the rules of torch's own functions.

    A transform of torch.func, an export and a trace do.
    """
    return (
        torch.is_grad_enabled()
        and any(tensor is not None and tensor.requires_grad for tensor in tensors)
        and not torch.compiler.is_exporting()
        and torch._C._get_tracing_state() is None
        and not is_transformed()
    )
