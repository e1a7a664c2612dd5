"""Reductions after the tiles: add the programs' parts in float64 and derive statistics."""

from __future__ import annotations

import triton
import triton.language as tl

from powernorm.ops.kernels.triton.device.tiles import maximum, minimum, reciprocal_root


@triton.jit
def own_block(FEATURES: tl.constexpr, BLOCK_F: tl.constexpr):
    features = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    return features, features < FEATURES


@triton.jit
def load_parts(
    partials_ptr, quantity, programs, features, FEATURES: tl.constexpr, BLOCK_P: tl.constexpr
):
    """Load each program's part of a quantity, (BLOCK_P, BLOCK_F) float64."""
    program = tl.arange(0, BLOCK_P)[:, None]
    place = (quantity * programs + program).to(tl.int64) * FEATURES + features[None, :]
    inside = (program < programs) & (features < FEATURES)[None, :]
    return tl.load(partials_ptr + place, inside, other=0.0).to(tl.float64)


@triton.jit
def add_parts(
    partials_ptr, quantity, programs, features, FEATURES: tl.constexpr, BLOCK_P: tl.constexpr
):
    return tl.sum(load_parts(partials_ptr, quantity, programs, features, FEATURES, BLOCK_P), 0)


@triton.jit
def load_counts(partials_ptr, quantities, programs, FEATURES: tl.constexpr, BLOCK_P: tl.constexpr):
    """Load each program's number of valid tokens, (BLOCK_P, 1) float64."""
    program = tl.arange(0, BLOCK_P)[:, None]
    first = (quantities * programs).to(tl.int64) * FEATURES
    return tl.load(partials_ptr + first + program, program < programs, other=0.0).to(tl.float64)


@triton.jit
def load_row(pointer, row, features, exists, FEATURES: tl.constexpr, TYPE: tl.constexpr):
    return tl.load(pointer + row * FEATURES + features, exists, other=0.0).to(TYPE)


@triton.jit
def store_row(pointer, row, values, features, exists, FEATURES: tl.constexpr):
    values = values.to(pointer.dtype.element_ty)
    tl.store(pointer + row * FEATURES + features, values, exists)


@triton.jit(do_not_specialize=["programs"])
def affine_kernel(
    partials_ptr,
    grad_weight_ptr,
    grad_bias_ptr,
    programs,
    FEATURES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Compute ∂L/∂β and ∂L/∂γ."""
    features, exists = own_block(FEATURES, BLOCK_F)
    sum_grad = add_parts(partials_ptr, 0, programs, features, FEATURES, BLOCK_P)
    sum_product = add_parts(partials_ptr, 1, programs, features, FEATURES, BLOCK_P)
    store_row(grad_bias_ptr, 0, sum_grad, features, exists, FEATURES)
    store_row(grad_weight_ptr, 0, sum_product, features, exists, FEATURES)


@triton.jit
def _measured(
    partials_ptr,
    sums_ptr,
    programs,
    features,
    exists,
    CENTERED: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Return this process's (n, mean, biased variance) by Chan's formula, and write its sums."""
    counts = load_counts(partials_ptr, 3 if CENTERED else 1, programs, FEATURES, BLOCK_P)
    # The values are equal for all features, kept as vectors.
    count = tl.sum(counts, 0) + tl.zeros_like(features).to(tl.float64)
    size = tl.maximum(count, 1.0)
    if CENTERED:
        means = load_parts(partials_ptr, 0, programs, features, FEATURES, BLOCK_P)
        means += load_parts(partials_ptr, 1, programs, features, FEATURES, BLOCK_P)
        squares = load_parts(partials_ptr, 2, programs, features, FEATURES, BLOCK_P)
        mean = tl.sum(counts * means, 0) / size
        gaps = means - mean[None, :]
        within = tl.sum(squares + counts * gaps * gaps, 0)
        store_row(sums_ptr, 1, mean * size, features, exists, FEATURES)
        store_row(sums_ptr, 2, within, features, exists, FEATURES)
        store_row(sums_ptr, 3, mean * (mean * size), features, exists, FEATURES)
    else:
        mean = tl.zeros_like(count)
        within = add_parts(partials_ptr, 0, programs, features, FEATURES, BLOCK_P)
        store_row(sums_ptr, 1, within, features, exists, FEATURES)
    store_row(sums_ptr, 0, count, features, exists, FEATURES)
    return count, mean, within / size


@triton.jit
def _renormalization(mean, var, running_mean, running_var, limits_ptr, eps):
    """Return BatchRenorm's r and d."""
    max_r = tl.load(limits_ptr).to(tl.float64)
    max_d = tl.load(limits_ptr + 1).to(tl.float64)
    running_std = tl.sqrt(running_var + eps)
    r = minimum(maximum(tl.sqrt(var + eps) / running_std, 1.0 / max_r), max_r)
    d = minimum(maximum((mean - running_mean) / running_std, -max_d), max_d)
    return r, d


@triton.jit(do_not_specialize=["programs"])
def batch_statistics_kernel(
    partials_ptr,
    merged_ptr,
    running_mean_ptr,
    running_var_ptr,
    limits_ptr,
    sums_ptr,
    statistics_ptr,
    programs,
    eps: tl.float64,
    FLOOR: tl.constexpr,
    CENTERED: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Compute BatchNorm's sums from the programs' parts, and statistics from them or `merged_ptr`.

    Without `merged_ptr` the sums are written; without `statistics_ptr` only the sums are.
    """
    features, exists = own_block(FEATURES, BLOCK_F)
    if merged_ptr is None:
        count, mean, var = _measured(
            partials_ptr, sums_ptr, programs, features, exists, CENTERED, FEATURES, BLOCK_P
        )
    else:
        count = load_row(merged_ptr, 0, features, exists, FEATURES, tl.float64)
        size = tl.maximum(count, 1.0)
        mean = tl.zeros_like(count)
        if CENTERED:
            mean = load_row(merged_ptr, 1, features, exists, FEATURES, tl.float64) / size
        squares = load_row(merged_ptr, 2 if CENTERED else 1, features, exists, FEATURES, tl.float64)
        var = squares / size
    if statistics_ptr is not None:
        eps = tl.full((BLOCK_F,), eps, tl.float64)
        running_var = load_row(running_var_ptr, 0, features, exists, FEATURES, tl.float64)
        var = tl.where(count > 0, var, running_var)
        r = tl.full((BLOCK_F,), 1.0, tl.float64)
        d = tl.zeros((BLOCK_F,), tl.float64)
        if CENTERED:
            running_mean = load_row(running_mean_ptr, 0, features, exists, FEATURES, tl.float64)
            mean = tl.where(count > 0, mean, running_mean)
            if limits_ptr is not None:
                r, d = _renormalization(mean, var, running_mean, running_var, limits_ptr, eps)
        store_row(statistics_ptr, 0, mean, features, exists, FEATURES)
        store_row(statistics_ptr, 1, var, features, exists, FEATURES)
        rstd = reciprocal_root(var, eps, FLOOR)
        store_row(statistics_ptr, 2, rstd, features, exists, FEATURES)
        store_row(statistics_ptr, 3, r, features, exists, FEATURES)
        store_row(statistics_ptr, 4, d, features, exists, FEATURES)
        store_row(statistics_ptr, 5, count, features, exists, FEATURES)
