"""Tiles of (rows, groups, features of a group), shared by all programs.

A program owns some features and loops over tiles of rows. If the features are scaled in groups, it
owns whole rows, else one block of columns (one group as wide as the row, split by the grid's second
axis), so that the same addressing works for both. Positions outside the data are loaded as 0.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def own_features(
    FEATURES: tl.constexpr, SIZE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Return the indices of this program's features, and which exist, (1, BLOCK_G, BLOCK_S)."""
    first = tl.arange(0, BLOCK_G)[None, :, None] * SIZE
    within = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)[None, None, :]
    return first + within, (within < SIZE) & (first < FEATURES)


@triton.jit
def tile_rows(tile, BLOCK_R: tl.constexpr):
    """Return a tile's row indices, (BLOCK_R, 1, 1), 64 bits: tokens x features may pass 2^31."""
    return tile * BLOCK_R + tl.arange(0, BLOCK_R)[:, None, None].to(tl.int64)


@triton.jit
def load_vector(pointer, row, features, exists, FEATURES: tl.constexpr, ACC: tl.constexpr):
    """Load row `row` of a contiguous (rows, C) array at the program's features."""
    return tl.load(pointer + row * FEATURES + features, exists, other=0.0).to(ACC)


@triton.jit
def load_affine(pointer, absent, features, exists, ACC: tl.constexpr):
    """Load γ or β; fill with `absent` if there is none."""
    if pointer is None:
        vector = tl.full((1, 1, 1), absent, ACC)
    else:
        vector = tl.load(pointer + features, exists, other=0.0).to(ACC)
    return vector


@triton.jit
def load_tile(pointer, rows, stride, features, inside, ACC: tl.constexpr):
    """Load a tile in the accumulation type."""
    return tl.load(pointer + rows * stride + features, inside, other=0.0).to(ACC)


@triton.jit
def load_inputs(
    x_ptr,
    residual_ptr,
    total_ptr,
    rows,
    x_stride,
    residual_stride,
    features,
    inside,
    FEATURES: tl.constexpr,
    ACC: tl.constexpr,
):
    """Load the normalized input: x, or its sum with the residual, rounded and written."""
    values = load_tile(x_ptr, rows, x_stride, features, inside, ACC)
    if residual_ptr is not None:
        values += load_tile(residual_ptr, rows, residual_stride, features, inside, ACC)
        rounded = values.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + rows * FEATURES + features, rounded, inside)
        values = rounded.to(ACC)
    return values


@triton.jit
def load_valid(mask_ptr, rows, tokens):
    """Return which of a tile's rows are tokens outside the padding, (BLOCK_R, 1, 1)."""
    valid = rows < tokens
    if mask_ptr is not None:
        valid = tl.load(mask_ptr + rows, valid, other=1) == 0
    return valid


@triton.jit
def group_mean(values, SIZE: tl.constexpr):
    """Return the mean over the features of each group; positions outside a group must be 0."""
    return tl.sum(values, 2, keep_dims=True) / SIZE


@triton.jit
def scale_groups(values, scales_ptr, rows, tokens, eps, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """Apply GroupScaling and write its factors; return the values unchanged without groups."""
    if GROUPS > 0:
        scales = tl.rsqrt(group_mean(values * values, SIZE) + eps)
        group = tl.arange(0, values.shape[1])[None, :, None]
        tl.store(scales_ptr + rows * GROUPS + group, scales, (rows < tokens) & (group < GROUPS))
        values = values * scales
    return values


@triton.jit
def load_scales(
    scales_ptr, rows, tokens, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, ACC: tl.constexpr
):
    """Load GroupScaling's factors of the forward, (BLOCK_R, BLOCK_G, 1); 1 without groups."""
    if GROUPS > 0:
        group = tl.arange(0, BLOCK_G)[None, :, None]
        inside = (rows < tokens) & (group < GROUPS)
        scales = tl.load(scales_ptr + rows * GROUPS + group, inside, other=0.0).to(ACC)
    else:
        scales = tl.full((1, 1, 1), 1.0, ACC)
    return scales


@triton.jit
def store_gradient(
    gradient,
    scaled,
    scales,
    grad_total_ptr,
    grad_x_ptr,
    rows,
    total_stride,
    features,
    inside,
    CAREFUL: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    FEATURES: tl.constexpr,
    ACC: tl.constexpr,
):
    """Go back through GroupScaling, add the residual's gradient, round and write.

    `CAREFUL`: keep zero gradients zero, even where padding holds NaN. Without a mask such data are
    in the statistics too, and the check would save nothing.
    """
    if GROUPS > 0:
        products = gradient * scaled
        if CAREFUL:
            products = tl.where(gradient != 0, products, 0.0)
        mean = group_mean(products, SIZE)
        along = scaled * mean
        if CAREFUL:
            along = tl.where(mean != 0, along, 0.0)
        rest = gradient - along
        gradient = rest * scales
        if CAREFUL:
            gradient = tl.where(rest != 0, gradient, 0.0)
    if grad_total_ptr is not None:
        gradient += load_tile(grad_total_ptr, rows, total_stride, features, inside, ACC)
    rounded = gradient.to(grad_x_ptr.dtype.element_ty)
    tl.store(grad_x_ptr + rows * FEATURES + features, rounded, inside)


@triton.jit
def where_arriving(grad, values):
    """Return the values, with 0 wherever the gradient that multiplies them is 0 (may be NaN)."""
    return tl.where(grad != 0, values, 0.0)


@triton.jit
def selected(products, grad, valid, MASKED: tl.constexpr):
    """Return products with the gradient, 0 at padding that the loss does not read (may be NaN)."""
    if MASKED:
        products = tl.where(valid | (grad != 0), products, 0.0)
    return products


@triton.jit
def store_partial(partials_ptr, quantity, values, features, exists, FEATURES: tl.constexpr):
    """Add a tile's rows and write them as this program's part of a sum over all rows."""
    place = (quantity * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * FEATURES
    tl.store(partials_ptr + place + features, tl.sum(values, 0, keep_dims=True), exists)


@triton.jit
def maximum(a, b):
    """Return the larger one, NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):
    """Return the smaller one, NaN if either is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def reciprocal_root(second_moment, eps, FLOOR: tl.constexpr):
    """Return 1/sqrt(m + eps), or 1/sqrt(max(m, eps)) if eps is a floor."""
    return tl.rsqrt(maximum(second_moment, eps) if FLOOR else second_moment + eps)
