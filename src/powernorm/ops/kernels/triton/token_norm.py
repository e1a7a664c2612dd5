"""Per-token norms: one pass forward, one pass and a reduction backward."""

from __future__ import annotations

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
from powernorm.ops.kernels.triton.static_norm import affine_gradients
from powernorm.ops.operators import Gradients
from powernorm.ops.token_norm import TokenNormArgs, TokenNormBackwardArgs, TokenNormOutput


def token_norm(args: TokenNormArgs) -> TokenNormOutput:
    """Normalize."""
    x = args.x
    rows, stride = rows_of(x)
    added, added_stride = optional_rows(args.residual)
    y = like(x)
    total = None if args.residual is None else like(x)
    statistics = accumulators(x, 2, rows.shape[0], args.groups)
    tiling = plan(x, rows.shape[0], args.groups, 1 if total is None else 2, 6)
    launch(
        token_kernel, tiling, x.device,
        rows, added, vector(args.weight), vector(args.bias), total, y, statistics,
        rows.shape[0], stride, added_stride, args.eps, args.scale, args.k,
        CENTERED=args.centered, RELEASED=args.released, ADAPTIVE=args.k != 0,
    )  # fmt: skip
    return TokenNormOutput(y, total, statistics)


def token_norm_backward(args: TokenNormBackwardArgs) -> Gradients:
    """Return the gradients."""
    inputs, statistics = args.inputs, args.statistics.contiguous()
    rows, stride = rows_of(inputs)
    grad, grad_stride = rows_of(args.grad_y)
    added, added_stride = optional_rows(args.grad_total)
    grad_x = like(inputs)
    tiling = plan(inputs, rows.shape[0], statistics.shape[-1], 2 if added is None else 3, 3)
    shape = (2, tiling.programs, inputs.shape[-1])
    partials = accumulators(inputs, *shape) if args.affine else None
    launch(
        token_gradient_kernel, tiling, inputs.device,
        grad, added, rows, vector(args.weight), statistics, grad_x, partials,
        rows.shape[0], grad_stride, added_stride, stride, args.scale, args.k,
        CENTERED=args.centered, RELEASED=args.released, ADAPTIVE=args.k != 0,
        THROUGH_MEAN=args.centered and not args.detach_mean, THROUGH_STD=not args.detach_std,
    )  # fmt: skip
    if partials is None:
        return Gradients(grad_x, None, None)
    return Gradients(grad_x, *affine_gradients(partials))
