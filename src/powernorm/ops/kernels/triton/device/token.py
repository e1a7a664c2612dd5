"""Per-token norms: whole rows in a program, statistics in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from powernorm.ops.kernels.triton.device.tiles import (
    group_mean,
    load_affine,
    load_inputs,
    load_tile,
    own_features,
    store_partial,
    tile_rows,
    where_arriving,
)


@triton.jit
def _deviations(values, mean, in_group, FEATURES: tl.constexpr):
    """Return values minus their group's mean, still 0 in a tile's positions outside the data."""
    values -= mean
    if values.shape[1] * values.shape[2] != FEATURES:
        values = tl.where(in_group, values, 0.0)
    return values


@triton.jit
def _reciprocal_deviation(deviations, eps, SIZE: tl.constexpr, RELEASED: tl.constexpr):
    """Return 1/σ of each group; released: 1/(s + eps) with the unbiased s."""
    if RELEASED:
        squares = tl.sum(deviations * deviations, 2, keep_dims=True)
        # A group of one feature has deviation 0, whatever the divisor.
        rstd = 1.0 / (tl.sqrt(squares / max(SIZE - 1, 1)) + eps)
    else:
        rstd = tl.rsqrt(group_mean(deviations * deviations, SIZE) + eps)
    return rstd


@triton.jit
def _through_statistics(
    grad,
    deviations,
    y,
    rstd,
    THROUGH_MEAN: tl.constexpr,
    THROUGH_STD: tl.constexpr,
    RELEASED: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Return the gradient of x from that of y, with the terms of the mean and the deviation."""
    gradient = where_arriving(grad, grad * rstd)
    if THROUGH_MEAN:
        mean = group_mean(grad, SIZE)
        gradient -= where_arriving(mean, mean * rstd)
    if THROUGH_STD:
        products = tl.sum(where_arriving(grad, grad * y), 2, keep_dims=True)
        along = where_arriving(products, products * rstd)
        if RELEASED:
            root = tl.sqrt(tl.sum(deviations * deviations, 2, keep_dims=True) * (SIZE - 1))
            # If all features are equal, the term is 0.
            share = deviations * (along / tl.where(root > 0, root, 1.0))
        else:
            share = y * (along / SIZE)
        gradient -= tl.where(along != 0, share, 0.0)
    return gradient


@triton.jit(do_not_specialize=["tokens"])
def token_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    total_ptr,
    y_ptr,
    statistics_ptr,
    tokens,
    x_stride,
    residual_stride,
    eps: tl.float64,
    scale: tl.float64,
    k: tl.float64,
    CENTERED: tl.constexpr,
    RELEASED: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    GROUPS: tl.constexpr,
    FEATURES: tl.constexpr,
    SIZE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute `y = γ s (1 - k x̂) x̂ + β` by each group's own statistics, which are written."""
    features, exists = own_features(FEATURES, SIZE, BLOCK_G, BLOCK_S)
    group = tl.arange(0, BLOCK_G)[None, :, None]
    eps = tl.full((1, 1, 1), eps, ACC)
    scale = tl.full((1, 1, 1), scale, ACC)
    k = tl.full((1, 1, 1), k, ACC)
    weight = load_affine(weight_ptr, 1.0, features, exists, ACC) * scale
    bias = load_affine(bias_ptr, 0.0, features, exists, ACC)
    tiles = tl.cdiv(tokens, BLOCK_R)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        rows = tile_rows(tile, BLOCK_R)
        inside = (rows < tokens) & exists
        values = load_inputs(
            x_ptr, residual_ptr, total_ptr, rows, x_stride, residual_stride, features, inside,
            FEATURES, ACC,
        )  # fmt: skip
        mean = tl.zeros((BLOCK_R, BLOCK_G, 1), ACC)
        if CENTERED:
            mean = group_mean(values, SIZE)
            values = _deviations(values, mean, exists, FEATURES)
        rstd = _reciprocal_deviation(values, eps, SIZE, RELEASED)
        values *= rstd
        if ADAPTIVE:
            values *= 1.0 - k * values
        y = (values * weight + bias).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + rows * FEATURES + features, y, inside)
        place = rows * GROUPS + group
        in_row = (rows < tokens) & (group < GROUPS)
        tl.store(statistics_ptr + place, mean, in_row)
        rstd_ptr = statistics_ptr + tokens.to(tl.int64) * GROUPS
        tl.store(rstd_ptr + place, rstd, in_row)


@triton.jit(do_not_specialize=["tokens"])
def token_gradient_kernel(
    grad_y_ptr,
    grad_total_ptr,
    inputs_ptr,
    weight_ptr,
    statistics_ptr,
    grad_x_ptr,
    partials_ptr,
    tokens,
    grad_stride,
    total_stride,
    inputs_stride,
    scale: tl.float64,
    k: tl.float64,
    CENTERED: tl.constexpr,
    RELEASED: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    THROUGH_MEAN: tl.constexpr,
    THROUGH_STD: tl.constexpr,
    GROUPS: tl.constexpr,
    FEATURES: tl.constexpr,
    SIZE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute each token's gradient, and each program's part of those of β and γ if wanted."""
    features, exists = own_features(FEATURES, SIZE, BLOCK_G, BLOCK_S)
    group = tl.arange(0, BLOCK_G)[None, :, None]
    scale = tl.full((1, 1, 1), scale, ACC)
    k = tl.full((1, 1, 1), k, ACC)
    weight = load_affine(weight_ptr, 1.0, features, exists, ACC)
    rstd_ptr = statistics_ptr + tokens.to(tl.int64) * GROUPS
    if partials_ptr is not None:
        sum_grad = tl.zeros((BLOCK_R, BLOCK_G, BLOCK_S), ACC)
        sum_product = tl.zeros((BLOCK_R, BLOCK_G, BLOCK_S), ACC)
    tiles = tl.cdiv(tokens, BLOCK_R)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        rows = tile_rows(tile, BLOCK_R)
        inside = (rows < tokens) & exists
        place = rows * GROUPS + group
        in_row = (rows < tokens) & (group < GROUPS)
        grad = load_tile(grad_y_ptr, rows, grad_stride, features, inside, ACC)
        values = load_tile(inputs_ptr, rows, inputs_stride, features, inside, ACC)
        rstd = tl.load(rstd_ptr + place, in_row, other=0.0).to(ACC)
        if CENTERED:
            mean = tl.load(statistics_ptr + place, in_row, other=0.0).to(ACC)
            values = _deviations(values, mean, exists, FEATURES)
        y = values * rstd
        if partials_ptr is not None:
            sum_grad += grad
        if ADAPTIVE:
            grad = where_arriving(grad, grad * (scale * (1.0 - k * y)))
        else:
            grad *= scale
        if partials_ptr is not None:
            sum_product += where_arriving(grad, grad * y)
        grad *= weight
        gradient = _through_statistics(
            grad, values, y, rstd, THROUGH_MEAN, THROUGH_STD, RELEASED, SIZE
        )
        if grad_total_ptr is not None:
            gradient += load_tile(grad_total_ptr, rows, total_stride, features, inside, ACC)
        rounded = gradient.to(grad_x_ptr.dtype.element_ty)
        tl.store(grad_x_ptr + rows * FEATURES + features, rounded, inside)
    if partials_ptr is not None:
        store_partial(partials_ptr, 0, sum_grad, features, exists, FEATURES)
        store_partial(partials_ptr, 1, sum_product, features, exists, FEATURES)
