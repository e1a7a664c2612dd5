"""Norms by given statistics: one pass forward, one pass and a finishing program backward."""

from __future__ import annotations

from torch import Tensor

from powernorm.ops.kernels.triton.device.backward import static_gradient_kernel
from powernorm.ops.kernels.triton.device.finish import affine_kernel
from powernorm.ops.kernels.triton.device.forward import static_kernel
from powernorm.ops.kernels.triton.launch import (
    accumulators,
    finishing_plan,
    launch,
    like,
    optional_rows,
    plan,
    rows_of,
    scales_for,
    vector,
)
from powernorm.ops.reference.static import StaticNormOutput


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
) -> StaticNormOutput:
    """As `powernorm.ops.reference.static.static_norm`."""
    rows, stride = rows_of(x)
    added, added_stride = optional_rows(residual)
    y = like(x)
    total = None if residual is None else like(x)
    scales = scales_for(x, rows.shape[0], groups)
    statistics = accumulators(x, 2, x.shape[-1])
    tiling = plan(x, rows.shape[0], groups, 2 if total is not None else 1, 6)
    launch(
        static_kernel, tiling, x.device,
        rows, added, vector(weight), vector(bias), vector(mean), vector(var),
        total, scales, y, statistics, rows.shape[0], stride, added_stride, eps, FLOOR=floor,
    )  # fmt: skip
    return StaticNormOutput(y, x.new_empty(0) if total is None else total, scales, statistics)


def static_norm_backward(
    grad_y: Tensor,
    grad_total: Tensor | None,
    inputs: Tensor,
    weight: Tensor | None,
    scales: Tensor,
    statistics: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `powernorm.ops.reference.static.static_norm_backward`."""
    rows, stride = rows_of(inputs)
    grad, grad_stride = rows_of(grad_y)
    added, added_stride = optional_rows(grad_total)
    grad_x = like(inputs)
    groups = groups_of(scales)
    tiling = plan(inputs, rows.shape[0], groups, 2 if added is None else 3, 3 if groups else 4)
    partials = accumulators(inputs, 2, tiling.programs, inputs.shape[-1])
    launch(
        static_gradient_kernel, tiling, inputs.device,
        grad, added, rows, vector(weight), scales, statistics, grad_x, partials,
        rows.shape[0], grad_stride, added_stride, stride,
    )  # fmt: skip
    return grad_x, *affine_gradients(partials)


def groups_of(scales: Tensor) -> int:
    """Number of GroupScaling's groups, 0 without."""
    return scales.shape[-1] if scales.dim() == 2 else 0


def affine_gradients(partials: Tensor) -> tuple[Tensor, Tensor]:
    """∂L/∂γ and ∂L/∂β from each program's part of (Σ ∂L/∂y, Σ ∂L/∂y x̂)."""
    _, programs, features = partials.shape
    grad_weight, grad_bias = partials.new_empty(features), partials.new_empty(features)
    finishing = finishing_plan(features, programs)
    launch(affine_kernel, finishing, partials.device, partials, grad_weight, grad_bias, programs)
    return grad_weight, grad_bias
