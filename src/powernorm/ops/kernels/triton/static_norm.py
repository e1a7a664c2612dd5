"""Norms by given statistics: one pass forward, one pass and a reduction backward."""

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
from powernorm.ops.operators import Gradients
from powernorm.ops.static_norm import StaticNormArgs, StaticNormBackwardArgs, StaticNormOutput


def static_norm(args: StaticNormArgs) -> StaticNormOutput:
    """Normalize."""
    x = args.x
    rows, stride = rows_of(x)
    added, added_stride = optional_rows(args.residual)
    y = like(x)
    total = None if args.residual is None else like(x)
    scales = scales_for(x, rows.shape[0], args.groups)
    statistics = accumulators(x, 2, x.shape[-1])
    tiling = plan(x, rows.shape[0], args.groups, 2 if total is not None else 1, 6)
    launch(
        static_kernel, tiling, x.device,
        rows, added, vector(args.weight), vector(args.bias), vector(args.mean), vector(args.var),
        total, scales, y, statistics, rows.shape[0], stride, added_stride, args.eps,
        FLOOR=args.floor,
    )  # fmt: skip
    return StaticNormOutput(y, total, scales, statistics)


def static_norm_backward(args: StaticNormBackwardArgs) -> Gradients:
    """Return the gradients."""
    inputs, scales = args.inputs, vector(args.scales)
    rows, stride = rows_of(inputs)
    grad, grad_stride = rows_of(args.grad_y)
    added, added_stride = optional_rows(args.grad_total)
    grad_x = like(inputs)
    groups = groups_of(scales)
    tiling = plan(inputs, rows.shape[0], groups, 2 if added is None else 3, 3 if groups else 4)
    partials = accumulators(inputs, 2, tiling.programs, inputs.shape[-1])
    launch(
        static_gradient_kernel, tiling, inputs.device,
        grad, added, rows, vector(args.weight), scales, vector(args.statistics), grad_x, partials,
        rows.shape[0], grad_stride, added_stride, stride,
    )  # fmt: skip
    return Gradients(grad_x, *affine_gradients(partials))


def groups_of(scales: Tensor | None) -> int:
    """Return the number of GroupScaling's groups, 0 without GroupScaling."""
    return 0 if scales is None else scales.shape[-1]


def affine_gradients(partials: Tensor) -> tuple[Tensor, Tensor]:
    """Return ∂L/∂γ and ∂L/∂β from each program's part of (Σ ∂L/∂y, Σ ∂L/∂y x̂)."""
    _, programs, features = partials.shape
    grad_weight, grad_bias = partials.new_empty(features), partials.new_empty(features)
    finishing = finishing_plan(features, programs)
    launch(affine_kernel, finishing, partials.device, partials, grad_weight, grad_bias, programs)
    return grad_weight, grad_bias
