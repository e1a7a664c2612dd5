"""Elementwise maps in plain torch whose gradients keep zeros: a zero gradient stays zero.

Autograd multiplies an incoming zero by the local derivative, which is NaN where padding holds NaN.
Most maps act on single values; the last four use the features of a token.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from powernorm.ops import arrays
from powernorm.ops.arrays import accumulation_dtype, where_arriving
from powernorm.ops.graphs import is_transformed, num_features_of
from powernorm.ops.operators import PlainFunction, is_plain
from powernorm.ops.torch_private import is_batched, is_exporting, is_tracing


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
            products = grad * _mask_for_double_backward(values, grad)
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
        x = _mask_for_double_backward(x, grad)
        inner = torch.ops.aten.tanh_backward(grad, _mask_for_double_backward(y, grad))
        products = inner * x
        grad_alpha = products.sum()
        if not _is_known_finite(grad_alpha):
            inner = where_arriving(grad, inner)
            grad_alpha = where_arriving(inner, products).sum()
        return inner * alpha, grad_alpha.reshape(alpha.shape)


class _ScaledErf(PlainFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor, shift: Tensor) -> Tensor:
        ctx.save_for_backward(x, alpha, shift)
        return torch.erf(alpha * x + shift)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, alpha, shift = ctx.saved_tensors
        x = _mask_for_double_backward(x, grad)
        slope = (2 / math.sqrt(math.pi)) * torch.exp(-(alpha * x + shift).square())
        inner = where_arriving(grad, grad * slope)
        grad_alpha = where_arriving(inner, inner * x).sum().reshape(alpha.shape)
        return inner * alpha, grad_alpha, inner.sum().reshape(shift.shape)


class _InverseRoot(PlainFunction):
    """x/sqrt(B + x²) by hypot, which is finite wherever x and the result are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spread: Tensor) -> Tensor:
        ctx.save_for_backward(x, spread)
        return x / torch.hypot(x, spread.sqrt())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, spread = ctx.saved_tensors
        x = _mask_for_double_backward(x, grad)
        root = torch.hypot(x, spread.sqrt())
        inner = where_arriving(grad, grad / root)
        # In this order: the cube of the root overflows long before the root does.
        inner = where_arriving(inner, inner / root / root)
        grad_spread = -0.5 * where_arriving(inner, inner * x).sum()
        return inner * spread, grad_spread.reshape(spread.shape)


class _DynamicScale(PlainFunction):
    """(γ + α tanh⟨x, b⟩) ⊙ z, with the product and its tanh per head's slice of the features."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, z: Tensor, weight: Tensor, alpha: Tensor, beta: Tensor, heads: int
    ) -> Tensor:
        ctx.save_for_backward(x, z, weight, alpha, beta)
        ctx.heads = heads
        return (weight + alpha * _spread_out(_attention(x, beta, heads), x)) * z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, z, weight, alpha, beta = ctx.saved_tensors
        x, z = _mask_for_double_backward(x, grad), _mask_for_double_backward(z, grad)
        # Recomputed, because it depends on x, which second derivatives need.
        attention = _attention(x, beta, ctx.heads)
        spread_out = _spread_out(attention, x)
        grad_z = where_arriving(grad, grad * (weight + alpha * spread_out))
        grad_factor = where_arriving(grad, grad * z)
        grad_alpha = where_arriving(grad_factor, grad_factor * spread_out)
        inner = _by_head(grad_factor * alpha, ctx.heads).sum(-1)
        inner = _spread_out(where_arriving(inner, inner * (1 - attention.square())), x)
        grad_beta = where_arriving(inner, inner * x)
        vectors = (part.sum_to_size(weight.shape) for part in (grad_factor, grad_alpha, grad_beta))
        return inner * beta, grad_z, *vectors, None


class _UnitLength(PlainFunction):
    """g x/max(‖x‖, eps), with the length of each token over its features."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.eps = eps
        return scale * (x / _length(x).clamp(min=eps))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, scale = ctx.saved_tensors
        x = _mask_for_double_backward(x, grad)
        length = _length(x)
        root = length.clamp(min=ctx.eps)
        unit = x / root
        products = where_arriving(grad, grad * unit)
        # A token below the floor is divided by a constant.
        along = torch.where(length >= ctx.eps, products.sum(-1, keepdim=True), 0.0)
        through = scale * (grad - where_arriving(along, unit * along)) / root
        grad_x = torch.where(_is_arriving(grad), through, 0.0)
        return grad_x, products.sum().reshape(scale.shape), None


class _CenteredScale(PlainFunction):
    """s x/sqrt(mean (x - b)² + eps), with the mean over the features of a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, center: Tensor, scale: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, center, scale)
        ctx.eps = eps
        return scale * (x * _inverse_rms(x - center, eps))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, center, scale = ctx.saved_tensors
        arriving = _is_arriving(grad)
        x = torch.where(arriving, x, 0.0)
        distance = x - center
        inverse = _inverse_rms(distance, ctx.eps)
        along = where_arriving(grad, grad * x).sum(-1, keepdim=True) * inverse
        # Derivative of the root, for x and with opposite sign for b.
        through = torch.where(
            arriving, scale * along * inverse.square() * distance / num_features_of(x), 0.0
        )
        grad_center = through.sum_to_size(center.shape)
        return scale * inverse * grad - through, grad_center, along.sum().reshape(scale.shape), None


class _LowRankGate(PlainFunction):
    """z ⊙ σ(U silu(D z)), for each token."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, down: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(z, down, up)
        return _gated(z, down, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z, down, up = ctx.saved_tensors
        z = torch.where(_is_arriving(grad), z, 0.0)
        hidden = z @ down.transpose(-2, -1)
        slope = torch.sigmoid(hidden)
        inner = hidden * slope
        gate = torch.sigmoid(inner @ up.transpose(-2, -1))
        grad_up = grad * z * gate * (1 - gate)
        grad_down = (grad_up @ up) * (slope + inner * (1 - slope))
        return (
            grad * gate + grad_down @ down,
            _outer(grad_down, z),
            _outer(grad_up, inner),
        )


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _gated(z: Tensor, down: Tensor, up: Tensor) -> Tensor:
    hidden = z @ down.transpose(-2, -1)
    return z * torch.sigmoid((hidden * torch.sigmoid(hidden)) @ up.transpose(-2, -1))


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of the outer products of all tokens."""
    return a.reshape(-1, a.shape[-1]).transpose(0, 1) @ b.reshape(-1, b.shape[-1])


def _length(x: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length


def _is_arriving(grad: Tensor) -> Tensor:
    """Return whether any feature of a token has a nonzero gradient, (…, 1)."""
    return (grad != 0).any(-1, keepdim=True)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """Return (…, heads, C/heads)."""
    parts: Tensor = x.unflatten(-1, (heads, x.shape[-1] // heads))
    return parts


def _attention(x: Tensor, beta: Tensor, heads: int) -> Tensor:
    """Return tanh⟨x, b⟩ of each head, (…, heads)."""
    return torch.tanh(_by_head(x * beta, heads).sum(-1))


def _spread_out(of_heads: Tensor, x: Tensor) -> Tensor:
    """Repeat each head's value over its features, (…, C)."""
    if of_heads.shape[-1] == 1:
        return of_heads.expand_as(x)
    # Not repeat_interleave: the tracing exporter makes a graph of it that fails.
    wide = of_heads.unsqueeze(-1).expand(*of_heads.shape, x.shape[-1] // of_heads.shape[-1])
    return wide.flatten(-2)


def _is_known_finite(sums: Tensor) -> bool:
    """Return whether sums over all positions show that no value has to be left out.

    They are read on the CPU only, where no sync is needed; elsewhere the answer is no.
    """
    readable = sums.is_cpu and is_plain(sums) and not is_batched(sums)
    readable = readable and not torch.is_grad_enabled()
    return readable and math.isfinite(sums.sum().item())


def _mask_for_double_backward(values: Tensor, grad: Tensor) -> Tensor:
    """Return the values; for second derivatives with 0 where 0 · value would give NaN."""
    if not torch.is_grad_enabled():
        return values
    return torch.where((grad == 0) & ~values.isfinite(), 0.0, values)


def scale_and_shift(values: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return γ ⊙ values + β in the type of the values, the accumulation type."""
    if weight is None or not _is_recorded(values, weight, bias):
        return arrays.scale_and_shift(values, weight, bias)
    return _applied(_ScaleAndShift, values, weight, bias)


def add_scaled(y: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """Return `y + η x` in the type of x; η is one number."""
    wide = x.to(accumulation_dtype(x))
    return (y.to(wide.dtype) + scale_and_shift(wide, scale, None)).to(x.dtype)


def dynamic_tanh(x: Tensor, alpha: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return `γ tanh(α x) + β` (Zhu et al. 2025) in the type of x."""
    wide, alpha = x.to(accumulation_dtype(x)), alpha.to(accumulation_dtype(x))
    recorded = _is_recorded(x, alpha)
    y = _applied(_ScaledTanh, wide, alpha) if recorded else torch.tanh(alpha * wide)
    return scale_and_shift(y, weight, bias).to(x.dtype)


def dynamic_erf(
    x: Tensor, alpha: Tensor, shift: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Return `γ erf(α x + s) + β` in the type of x."""
    dtype = accumulation_dtype(x)
    wide = [tensor.to(dtype) for tensor in (x, alpha, shift)]
    if _is_recorded(x, alpha, shift):
        y = _applied(_ScaledErf, *wide)
    else:
        y = torch.erf(wide[1] * wide[0] + wide[2])
    return scale_and_shift(y, weight, bias).to(x.dtype)


def inverse_root_unit(
    x: Tensor, spread: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Return `γ √C x/sqrt(B + x²) + β` in the type of x."""
    wide, spread = x.to(accumulation_dtype(x)), spread.to(accumulation_dtype(x))
    if _is_recorded(x, spread):
        y = _applied(_InverseRoot, wide, spread)
    else:
        # Exporters do not support hypot.
        y = wide * torch.rsqrt(spread + wide.square())
    return scale_and_shift(y * math.sqrt(num_features_of(x)), weight, bias).to(x.dtype)


def dynamic_scale(
    x: Tensor, z: Tensor, weight: Tensor, alpha: Tensor, beta: Tensor, heads: int
) -> Tensor:
    """Return `(γ + α tanh⟨x, b⟩) ⊙ z` in the type of z, the accumulation type."""
    x, weight, alpha, beta = (tensor.to(z.dtype) for tensor in (x, weight, alpha, beta))
    if _is_recorded(x, z, weight, alpha, beta):
        return _applied(_DynamicScale, x, z, weight, alpha, beta, heads)
    return (weight + alpha * _spread_out(_attention(x, beta, heads), x)) * z


def unit_length(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Return `g x/max(‖x‖, eps)` in the type of x."""
    wide, scale = x.to(accumulation_dtype(x)), scale.to(accumulation_dtype(x))
    if _is_recorded(x, scale):
        y = _applied(_UnitLength, wide, scale, eps)
    else:
        y = scale * (wide / _length(wide).clamp(min=eps))
    return y.to(x.dtype)


def centered_scale(x: Tensor, center: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Return `s x/sqrt(mean (x - b)² + eps)` in the type of x."""
    dtype = accumulation_dtype(x)
    wide, center, scale = (tensor.to(dtype) for tensor in (x, center, scale))
    if _is_recorded(x, center, scale):
        y = _applied(_CenteredScale, wide, center, scale, eps)
    else:
        y = scale * (wide * _inverse_rms(wide - center, eps))
    return y.to(x.dtype)


def low_rank_gate(z: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Return `z ⊙ σ(U silu(D z))` in the type of z; D (R, C), U (C, R)."""
    down, up = down.to(z.dtype), up.to(z.dtype)
    return _applied(_LowRankGate, z, down, up) if _is_recorded(z, down, up) else _gated(z, down, up)


def _applied(function: type[PlainFunction], *args: Any) -> Tensor:
    """Apply a function, without torch's rules for torch.func if nothing needs them."""
    tensors = (arg for arg in args if isinstance(arg, Tensor))
    apply = function.apply_plain if is_plain(*tensors) else function.apply
    return cast(Tensor, apply(*args))


def _is_recorded(*tensors: Tensor | None) -> bool:
    """Return whether autograd records these and no transform, export or trace does."""
    return (
        torch.is_grad_enabled()
        and any(tensor is not None and tensor.requires_grad for tensor in tensors)
        and not is_exporting()
        and not is_tracing()
        and not is_transformed()
    )
