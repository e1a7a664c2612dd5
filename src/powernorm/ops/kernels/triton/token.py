"""Norms of one token: one pass forward, one pass and a finishing program backward."""

from __future__ import annotations

from torch import Tensor

from powernorm.ops.kernels.triton.device.token import token_gradient_kernel, token_kernel
from powernorm.ops.kernels.triton.launch import (
    accumulators,
    launch,
    like,
    optional_rows,
    plan,
    rows_of,
    vector,
)
from powernorm.ops.kernels.triton.static import affine_gradients
from powernorm.ops.reference.token import TokenNormOutput


def token_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    centered: bool,
    eps: float,
    released: bool,
    scale: float,
    k: float,
) -> TokenNormOutput:
    """As `powernorm.ops.reference.token.token_norm`."""
    rows, stride = rows_of(x)
    added, added_stride = optional_rows(residual)
    y = like(x)
    total = None if residual is None else like(x)
    statistics = accumulators(x, 2, rows.shape[0], groups)
    tiling = plan(x, rows.shape[0], groups, 1 if total is None else 2, 6)
    launch(
        token_kernel, tiling, x.device,
        rows, added, vector(weight), vector(bias), total, y, statistics,
        rows.shape[0], stride, added_stride, eps, scale, k,
        CENTERED=centered, RELEASED=released, ADAPTIVE=k != 0,
    )  # fmt: skip
    return TokenNormOutput(y, x.new_empty(0) if total is None else total, statistics)


def token_norm_backward(
    grad_y: Tensor,
    grad_total: Tensor | None,
    inputs: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    centered: bool,
    released: bool,
    scale: float,
    k: float,
    detach_mean: bool,
    detach_std: bool,
    affine: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As `powernorm.ops.reference.token.token_norm_backward`."""
    rows, stride = rows_of(inputs)
    grad, grad_stride = rows_of(grad_y)
    added, added_stride = optional_rows(grad_total)
    grad_x = like(inputs)
    groups = statistics.shape[-1]
    tiling = plan(inputs, rows.shape[0], groups, 2 if added is None else 3, 3)
    partials = accumulators(inputs, 2, tiling.programs, inputs.shape[-1]) if affine else None
    launch(
        token_gradient_kernel, tiling, inputs.device,
        grad, added, rows, vector(weight), statistics, grad_x, partials,
        rows.shape[0], grad_stride, added_stride, stride, scale, k,
        CENTERED=centered, RELEASED=released, ADAPTIVE=k != 0,
        THROUGH_MEAN=centered and not detach_mean, THROUGH_STD=not detach_std,
    )  # fmt: skip
    if partials is None:
        return grad_x, None, None
    return grad_x, *affine_gradients(partials)
