"""Backward over tiles: sums, then gradients (batch statistics), or both at once."""

from __future__ import annotations

import triton
import triton.language as tl

from powernorm.ops.kernels.triton.device.tiles import (
    load_affine,
    load_scales,
    load_tile,
    load_valid,
    load_vector,
    own_features,
    selected,
    store_gradient,
    store_partial,
    tile_rows,
)


@triton.jit(do_not_specialize=["tokens"])
def batch_sums_kernel(
    grad_y_ptr,
    inputs_ptr,
    mask_ptr,
    scales_ptr,
    statistics_ptr,
    partials_ptr,
    tokens,
    grad_stride,
    inputs_stride,
    GROUPS: tl.constexpr,
    FEATURES: tl.constexpr,
    SIZE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute each program's part of Σ ∂L/∂y and Σ ∂L/∂y x̂, padding included."""
    features, exists = own_features(FEATURES, SIZE, BLOCK_G, BLOCK_S)
    mean = load_vector(statistics_ptr, 0, features, exists, FEATURES, ACC)
    rstd = load_vector(statistics_ptr, 2, features, exists, FEATURES, ACC)
    sum_grad = tl.zeros((BLOCK_R, BLOCK_G, BLOCK_S), ACC)
    sum_product = tl.zeros((BLOCK_R, BLOCK_G, BLOCK_S), ACC)
    tiles = tl.cdiv(tokens, BLOCK_R)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        rows = tile_rows(tile, BLOCK_R)
        inside = (rows < tokens) & exists
        valid = load_valid(mask_ptr, rows, tokens)
        grad = load_tile(grad_y_ptr, rows, grad_stride, features, inside, ACC)
        values = load_tile(inputs_ptr, rows, inputs_stride, features, inside, ACC)
        values *= load_scales(scales_ptr, rows, tokens, GROUPS, BLOCK_G, ACC)
        sum_grad += grad
        products = grad * ((values - mean) * rstd)
        sum_product += selected(products, grad, valid, mask_ptr is not None)
    store_partial(partials_ptr, 0, sum_grad, features, exists, FEATURES)
    store_partial(partials_ptr, 1, sum_product, features, exists, FEATURES)


@triton.jit(do_not_specialize=["tokens"])
def batch_gradient_kernel(
    grad_y_ptr,
    grad_total_ptr,
    inputs_ptr,
    mask_ptr,
    scales_ptr,
    statistics_ptr,
    coefficients_ptr,
    grad_x_ptr,
    tokens,
    grad_stride,
    total_stride,
    inputs_stride,
    GROUPS: tl.constexpr,
    FEATURES: tl.constexpr,
    SIZE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute `a ∂L/∂y + v (b (x - μ) + c)` per feature from the coefficients' rows a, b, c."""
    features, exists = own_features(FEATURES, SIZE, BLOCK_G, BLOCK_S)
    mean = load_vector(statistics_ptr, 0, features, exists, FEATURES, ACC)
    direct = load_vector(coefficients_ptr, 0, features, exists, FEATURES, ACC)
    slope = load_vector(coefficients_ptr, 1, features, exists, FEATURES, ACC)
    level = load_vector(coefficients_ptr, 2, features, exists, FEATURES, ACC)
    tiles = tl.cdiv(tokens, BLOCK_R)
    for turn in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        # In reverse order: the tiles that the summing pass read last may still be in the cache.
        rows = tile_rows(tiles - 1 - turn, BLOCK_R)
        inside = (rows < tokens) & exists
        valid = load_valid(mask_ptr, rows, tokens)
        grad = load_tile(grad_y_ptr, rows, grad_stride, features, inside, ACC)
        values = load_tile(inputs_ptr, rows, inputs_stride, features, inside, ACC)
        scales = load_scales(scales_ptr, rows, tokens, GROUPS, BLOCK_G, ACC)
        values *= scales
        through = (values - mean) * slope + level
        if mask_ptr is not None:
            through = tl.where(valid, through, 0.0)
        store_gradient(
            grad * direct + through, values, scales, grad_total_ptr, grad_x_ptr, rows,
            total_stride, features, inside, mask_ptr is not None, GROUPS, SIZE, FEATURES, ACC,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def power_gradient_kernel(
    grad_y_ptr,
    grad_total_ptr,
    inputs_ptr,
    mask_ptr,
    weight_ptr,
    scales_ptr,
    statistics_ptr,
    grad_x_ptr,
    partials_ptr,
    tokens,
    grad_stride,
    total_stride,
    inputs_stride,
    RELEASED: tl.constexpr,
    GROUPS: tl.constexpr,
    FEATURES: tl.constexpr,
    SIZE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute `(γ ∂L/∂y - ν x̂)/ψ` and each program's part of Σ ∂L/∂y, Σ ∂L/∂y x̂.

    With a mask also Σ ∂L/∂y x̂ over the positions that update ν, and (released) Σ x̂² over all
    positions; without one both follow from the other sums.
    """
    features, exists = own_features(FEATURES, SIZE, BLOCK_G, BLOCK_S)
    rstd = load_vector(statistics_ptr, 0, features, exists, FEATURES, ACC)
    backward_rstd = load_vector(statistics_ptr, 1, features, exists, FEATURES, ACC)
    nu = load_vector(statistics_ptr, 2, features, exists, FEATURES, ACC)
    weight = load_affine(weight_ptr, 1.0, features, exists, ACC)
    sum_grad = tl.zeros((BLOCK_R, BLOCK_G, BLOCK_S), ACC)
    sum_product = tl.zeros((BLOCK_R, BLOCK_G, BLOCK_S), ACC)
    if mask_ptr is not None:
        sum_moment = tl.zeros((BLOCK_R, BLOCK_G, BLOCK_S), ACC)
        if RELEASED:
            sum_square = tl.zeros((BLOCK_R, BLOCK_G, BLOCK_S), ACC)
    tiles = tl.cdiv(tokens, BLOCK_R)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        rows = tile_rows(tile, BLOCK_R)
        inside = (rows < tokens) & exists
        grad = load_tile(grad_y_ptr, rows, grad_stride, features, inside, ACC)
        values = load_tile(inputs_ptr, rows, inputs_stride, features, inside, ACC)
        scales = load_scales(scales_ptr, rows, tokens, GROUPS, BLOCK_G, ACC)
        values *= scales
        kept = values * rstd
        sum_grad += grad
        if mask_ptr is None:
            sum_product += grad * kept
        else:
            valid = load_valid(mask_ptr, rows, tokens)
            sum_product += selected(grad * kept, grad, valid, True)
            if RELEASED:
                sum_square += kept * kept
            else:
                kept = tl.where(valid, kept, 0.0)
            sum_moment += grad * kept
        store_gradient(
            (grad * weight - nu * kept) * backward_rstd, values, scales, grad_total_ptr,
            grad_x_ptr, rows, total_stride, features, inside, mask_ptr is not None, GROUPS, SIZE,
            FEATURES, ACC,
        )  # fmt: skip
    store_partial(partials_ptr, 0, sum_grad, features, exists, FEATURES)
    store_partial(partials_ptr, 1, sum_product, features, exists, FEATURES)
    if mask_ptr is not None:
        store_partial(partials_ptr, 2, sum_moment, features, exists, FEATURES)
        if RELEASED:
            store_partial(partials_ptr, 3, sum_square, features, exists, FEATURES)


@triton.jit(do_not_specialize=["tokens"])
def static_gradient_kernel(
    grad_y_ptr,
    grad_total_ptr,
    inputs_ptr,
    weight_ptr,
    scales_ptr,
    statistics_ptr,
    grad_x_ptr,
    partials_ptr,
    tokens,
    grad_stride,
    total_stride,
    inputs_stride,
    GROUPS: tl.constexpr,
    FEATURES: tl.constexpr,
    SIZE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute `γ ∂L/∂y / σ` and each program's part of Σ ∂L/∂y, Σ ∂L/∂y x̂."""
    features, exists = own_features(FEATURES, SIZE, BLOCK_G, BLOCK_S)
    center = load_vector(statistics_ptr, 0, features, exists, FEATURES, ACC)
    rstd = load_vector(statistics_ptr, 1, features, exists, FEATURES, ACC)
    direct = load_affine(weight_ptr, 1.0, features, exists, ACC) * rstd
    sum_grad = tl.zeros((BLOCK_R, BLOCK_G, BLOCK_S), ACC)
    sum_product = tl.zeros((BLOCK_R, BLOCK_G, BLOCK_S), ACC)
    tiles = tl.cdiv(tokens, BLOCK_R)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        rows = tile_rows(tile, BLOCK_R)
        inside = (rows < tokens) & exists
        grad = load_tile(grad_y_ptr, rows, grad_stride, features, inside, ACC)
        values = load_tile(inputs_ptr, rows, inputs_stride, features, inside, ACC)
        scales = load_scales(scales_ptr, rows, tokens, GROUPS, BLOCK_G, ACC)
        values *= scales
        sum_grad += grad
        # A zero gradient stays zero, even where the padding holds NaN.
        sum_product += tl.where(grad != 0, grad * ((values - center) * rstd), 0.0)
        store_gradient(
            grad * direct, values, scales, grad_total_ptr, grad_x_ptr, rows, total_stride,
            features, inside, True, GROUPS, SIZE, FEATURES, ACC,
        )  # fmt: skip
    store_partial(partials_ptr, 0, sum_grad, features, exists, FEATURES)
    store_partial(partials_ptr, 1, sum_product, features, exists, FEATURES)
