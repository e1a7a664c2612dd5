"""Forward over tiles: measure (normalizing by known statistics), or normalize by measured ones."""

from __future__ import annotations

import triton
import triton.language as tl

from powernorm.ops.kernels.triton.device.tiles import (
    load_affine,
    load_inputs,
    load_scales,
    load_tile,
    load_valid,
    load_vector,
    own_features,
    reciprocal_root,
    scale_groups,
    store_partial,
    tile_rows,
)


@triton.jit
def _add_shifted(values, valid, counts, pivots, sums, squares):
    """Add a row to each position of a tile: Σ (x - p) and its square, p the position's first value.

    Data close to p lose no digits to its size, as they would to that of a moving mean.
    """
    # Padding is replaced, not multiplied by 0, because it may hold infinities and NaN.
    kept = tl.where(valid, values, pivots)
    pivots = tl.where(counts == 0, kept, pivots)
    deviations = kept - pivots
    return (
        counts + valid.to(counts.dtype),
        pivots,
        sums + deviations,
        squares + deviations * deviations,
    )


@triton.jit
def _merge(counts, pivots, sums, squares):
    """Merge a tile's rows by Chan's formula into one: (base, mean - base, centered squares)."""
    filled = (counts > 0).to(counts.dtype)
    base = tl.sum(pivots / tl.maximum(tl.sum(filled, 0, keep_dims=True), 1.0), 0, keep_dims=True)
    size = tl.maximum(counts, 1.0)
    means = tl.where(counts > 0, pivots - base, 0.0) + sums / size
    mean = tl.sum(counts * means, 0, keep_dims=True)
    mean /= tl.maximum(tl.sum(counts, 0, keep_dims=True), 1.0)
    gaps = means - mean
    # Keep an overflow infinite.
    within = tl.where(squares < float("inf"), squares - sums * (sums / size), squares)
    return base, mean, tl.sum(tl.maximum(within, 0.0) + counts * gaps * gaps, 0, keep_dims=True)


@triton.jit(do_not_specialize=["tokens"])
def measure_kernel(
    x_ptr,
    residual_ptr,
    mask_ptr,
    weight_ptr,
    bias_ptr,
    moment_ptr,
    total_ptr,
    scales_ptr,
    y_ptr,
    partials_ptr,
    tokens,
    x_stride,
    residual_stride,
    eps: tl.float64,
    CENTERED: tl.constexpr,
    GROUPS: tl.constexpr,
    FEATURES: tl.constexpr,
    SIZE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute each program's part of the statistics, as `_merge` or Σ x², then its token count.

    With `y_ptr` also normalize by the running second moment in `moment_ptr` (PowerNorm).
    """
    features, exists = own_features(FEATURES, SIZE, BLOCK_G, BLOCK_S)
    eps = tl.full((1, 1, 1), eps, ACC)
    if y_ptr is not None:
        rstd = reciprocal_root(load_vector(moment_ptr, 0, features, exists, FEATURES, ACC), eps, 0)
        weight = load_affine(weight_ptr, 1.0, features, exists, ACC) * rstd
        bias = load_affine(bias_ptr, 0.0, features, exists, ACC)
    counts = tl.zeros((BLOCK_R, 1, 1), ACC)
    squares = tl.zeros((BLOCK_R, BLOCK_G, BLOCK_S), ACC)
    if CENTERED:
        pivots = tl.zeros((BLOCK_R, BLOCK_G, BLOCK_S), ACC)
        sums = tl.zeros((BLOCK_R, BLOCK_G, BLOCK_S), ACC)
    tiles = tl.cdiv(tokens, BLOCK_R)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        rows = tile_rows(tile, BLOCK_R)
        inside = (rows < tokens) & exists
        valid = load_valid(mask_ptr, rows, tokens)
        values = load_inputs(
            x_ptr, residual_ptr, total_ptr, rows, x_stride, residual_stride, features, inside,
            FEATURES, ACC,
        )  # fmt: skip
        values = scale_groups(values, scales_ptr, rows, tokens, eps, GROUPS, SIZE)
        if CENTERED:
            counts, pivots, sums, squares = _add_shifted(
                values, valid, counts, pivots, sums, squares
            )
        else:
            counts += valid.to(ACC)
            kept = values
            if mask_ptr is not None:
                kept = tl.where(valid, values, 0.0)
            squares += kept * kept
        if y_ptr is not None:
            y = (values * weight + bias).to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + rows * FEATURES + features, y, inside)
    quantities = 1
    if CENTERED:
        base, mean, squares = _merge(counts, pivots, sums, squares)
        store_partial(partials_ptr, 0, base, features, exists, FEATURES)
        store_partial(partials_ptr, 1, mean, features, exists, FEATURES)
        quantities = 3
    store_partial(partials_ptr, quantities - 1, squares, features, exists, FEATURES)
    if tl.program_id(1) == 0:
        counts_ptr = partials_ptr + quantities * tl.num_programs(0).to(tl.int64) * FEATURES
        tl.store(counts_ptr + tl.program_id(0), tl.sum(counts))


@triton.jit(do_not_specialize=["tokens"])
def normalize_kernel(
    inputs_ptr,
    weight_ptr,
    bias_ptr,
    scales_ptr,
    statistics_ptr,
    y_ptr,
    tokens,
    inputs_stride,
    CENTERED: tl.constexpr,
    RENORM: tl.constexpr,
    ROOT_ROW: tl.constexpr,
    GROUPS: tl.constexpr,
    FEATURES: tl.constexpr,
    SIZE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute `y = γ ((x - μ)/σ r + d) + β` from rows 0, ROOT_ROW, 3 and 4 of the statistics."""
    features, exists = own_features(FEATURES, SIZE, BLOCK_G, BLOCK_S)
    factor = load_affine(weight_ptr, 1.0, features, exists, ACC)
    shift = load_affine(bias_ptr, 0.0, features, exists, ACC)
    mean = tl.zeros((1, 1, 1), ACC)
    if CENTERED:
        mean = load_vector(statistics_ptr, 0, features, exists, FEATURES, ACC)
    if RENORM:
        shift += factor * load_vector(statistics_ptr, 4, features, exists, FEATURES, ACC)
        factor *= load_vector(statistics_ptr, 3, features, exists, FEATURES, ACC)
    factor *= load_vector(statistics_ptr, ROOT_ROW, features, exists, FEATURES, ACC)
    tiles = tl.cdiv(tokens, BLOCK_R)
    for turn in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        # In reverse order: the tiles that the measuring pass read last may still be in the cache.
        rows = tile_rows(tiles - 1 - turn, BLOCK_R)
        inside = (rows < tokens) & exists
        values = load_tile(inputs_ptr, rows, inputs_stride, features, inside, ACC)
        values *= load_scales(scales_ptr, rows, tokens, GROUPS, BLOCK_G, ACC)
        y = ((values - mean) * factor + shift).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + rows * FEATURES + features, y, inside)


@triton.jit(do_not_specialize=["tokens"])
def static_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    var_ptr,
    total_ptr,
    scales_ptr,
    y_ptr,
    statistics_ptr,
    tokens,
    x_stride,
    residual_stride,
    eps: tl.float64,
    FLOOR: tl.constexpr,
    GROUPS: tl.constexpr,
    FEATURES: tl.constexpr,
    SIZE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute `y = γ (x - μ)/σ + β` by given statistics; the first programs write those used."""
    features, exists = own_features(FEATURES, SIZE, BLOCK_G, BLOCK_S)
    eps = tl.full((1, 1, 1), eps, ACC)
    center = tl.zeros((1, BLOCK_G, BLOCK_S), ACC)
    if mean_ptr is not None:
        center += load_vector(mean_ptr, 0, features, exists, FEATURES, ACC)
    rstd = reciprocal_root(load_vector(var_ptr, 0, features, exists, FEATURES, ACC), eps, FLOOR)
    if tl.program_id(0) == 0:
        tl.store(statistics_ptr + features, center, exists)
        tl.store(statistics_ptr + FEATURES + features, rstd, exists)
    factor = load_affine(weight_ptr, 1.0, features, exists, ACC) * rstd
    shift = load_affine(bias_ptr, 0.0, features, exists, ACC)
    tiles = tl.cdiv(tokens, BLOCK_R)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        rows = tile_rows(tile, BLOCK_R)
        inside = (rows < tokens) & exists
        values = load_inputs(
            x_ptr, residual_ptr, total_ptr, rows, x_stride, residual_stride, features, inside,
            FEATURES, ACC,
        )  # fmt: skip
        values = scale_groups(values, scales_ptr, rows, tokens, eps, GROUPS, SIZE)
        y = ((values - center) * factor + shift).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + rows * FEATURES + features, y, inside)
