"""Reductions of a backward with batch statistics or PowerNorm's running ones."""

from __future__ import annotations

import triton
import triton.language as tl

from powernorm.ops.kernels.triton.device.finish import (
    add_parts,
    load_counts,
    load_row,
    own_block,
    store_row,
)
from powernorm.ops.kernels.triton.device.tiles import maximum, minimum, reciprocal_root


@triton.jit
def _load_or(pointer, absent, row, features, exists, FEATURES: tl.constexpr):
    """Load a row of an array in float64, or fill it with `absent` if there is no array."""
    if pointer is None:
        values = tl.full(features.shape, absent, tl.float64)
    else:
        values = load_row(pointer, row, features, exists, FEATURES, tl.float64)
    return values


@triton.jit(do_not_specialize=["programs"])
def batch_gradients_kernel(
    partials_ptr,
    merged_ptr,
    weight_ptr,
    statistics_ptr,
    grad_statistics_ptr,
    grad_weight_ptr,
    grad_bias_ptr,
    sums_ptr,
    coefficients_ptr,
    programs,
    eps: tl.float64,
    FLOOR: tl.constexpr,
    CENTERED: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Compute BatchNorm's ∂L/∂γ, ∂L/∂β, and the coefficients of the gradient of x.

    With `sums_ptr` it writes the sums for the other processes, (4, C), instead of the coefficients;
    `merged_ptr` has the sums of all processes, from which the coefficients follow.
    """
    features, exists = own_block(FEATURES, BLOCK_F)
    rstd = load_row(statistics_ptr, 2, features, exists, FEATURES, tl.float64)
    factor = load_row(statistics_ptr, 3, features, exists, FEATURES, tl.float64)
    weighted = factor * _load_or(weight_ptr, 1.0, 0, features, exists, FEATURES)
    if merged_ptr is None:
        sum_grad = add_parts(partials_ptr, 0, programs, features, FEATURES, BLOCK_P)
        sum_product = add_parts(partials_ptr, 1, programs, features, FEATURES, BLOCK_P)
        shift = load_row(statistics_ptr, 4, features, exists, FEATURES, tl.float64)
        grad_weight = factor * sum_product + shift * sum_grad
        store_row(grad_weight_ptr, 0, grad_weight, features, exists, FEATURES)
        store_row(grad_bias_ptr, 0, sum_grad, features, exists, FEATURES)
        sum_grad *= weighted
        sum_product *= weighted
        grad_mean = _load_or(grad_statistics_ptr, 0.0, 0, features, exists, FEATURES)
        grad_var = _load_or(grad_statistics_ptr, 0.0, 1, features, exists, FEATURES)
    else:
        sum_grad = load_row(merged_ptr, 0, features, exists, FEATURES, tl.float64)
        sum_product = load_row(merged_ptr, 1, features, exists, FEATURES, tl.float64)
        grad_mean = load_row(merged_ptr, 2, features, exists, FEATURES, tl.float64)
        grad_var = load_row(merged_ptr, 3, features, exists, FEATURES, tl.float64)
    if sums_ptr is not None:
        store_row(sums_ptr, 0, sum_grad, features, exists, FEATURES)
        store_row(sums_ptr, 1, sum_product, features, exists, FEATURES)
        store_row(sums_ptr, 2, grad_mean, features, exists, FEATURES)
        store_row(sums_ptr, 3, grad_var, features, exists, FEATURES)
    if coefficients_ptr is not None:
        count = load_row(statistics_ptr, 5, features, exists, FEATURES, tl.float64)
        size = tl.maximum(count, 1.0)
        through_root = rstd * rstd * sum_product
        if FLOOR:
            var = load_row(statistics_ptr, 1, features, exists, FEATURES, tl.float64)
            floor = tl.full((BLOCK_F,), eps, tl.float64)
            through_root = tl.where(var >= floor, through_root, 0.0)
        slope = (2.0 * grad_var - through_root) / size
        level = tl.zeros((BLOCK_F,), tl.float64)
        if CENTERED:
            level = (grad_mean - rstd * sum_grad) / size
        # Without a valid token the running statistics were used: only the direct path is left.
        store_row(coefficients_ptr, 0, weighted * rstd, features, exists, FEATURES)
        store_row(coefficients_ptr, 1, tl.where(count > 0, slope, 0.0), features, exists, FEATURES)
        store_row(coefficients_ptr, 2, tl.where(count > 0, level, 0.0), features, exists, FEATURES)


@triton.jit(do_not_specialize=["programs"])
def power_statistics_kernel(
    partials_ptr,
    merged_ptr,
    second_moment_ptr,
    gradient_moment_ptr,
    sums_ptr,
    statistics_ptr,
    programs,
    eps: tl.float64,
    square_ratio: tl.float64,
    USE_BATCH: tl.constexpr,
    BOUNDED: tl.constexpr,
    RELEASED: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Compute PowerNorm's sums from the programs' parts, and the divisors of both directions.

    `merged_ptr` and the absent outputs are as in `batch_statistics_kernel`.
    """
    features, exists = own_block(FEATURES, BLOCK_F)
    if merged_ptr is None:
        counts = load_counts(partials_ptr, 1, programs, FEATURES, BLOCK_P)
        count = tl.sum(counts, 0) + tl.zeros_like(features).to(tl.float64)
        squares = add_parts(partials_ptr, 0, programs, features, FEATURES, BLOCK_P)
        store_row(sums_ptr, 0, count, features, exists, FEATURES)
        store_row(sums_ptr, 1, squares, features, exists, FEATURES)
    else:
        count = load_row(merged_ptr, 0, features, exists, FEATURES, tl.float64)
        squares = load_row(merged_ptr, 1, features, exists, FEATURES, tl.float64)
    if statistics_ptr is not None:
        running = load_row(second_moment_ptr, 0, features, exists, FEATURES, tl.float64)
        batch = tl.where(count > 0, squares / tl.maximum(count, 1.0), running)
        used = running
        if USE_BATCH:
            used = batch
        elif BOUNDED:
            square_ratio = tl.full((BLOCK_F,), square_ratio, tl.float64)
            used = minimum(maximum(running, batch / square_ratio), batch * square_ratio)
        for_gradient = used
        if RELEASED:
            for_gradient = batch
        nu = load_row(gradient_moment_ptr, 0, features, exists, FEATURES, tl.float64)
        eps = tl.full((BLOCK_F,), eps, tl.float64)
        rstd = reciprocal_root(used, eps, False)
        backward_rstd = reciprocal_root(for_gradient, eps, False)
        store_row(statistics_ptr, 0, rstd, features, exists, FEATURES)
        store_row(statistics_ptr, 1, backward_rstd, features, exists, FEATURES)
        store_row(statistics_ptr, 2, nu, features, exists, FEATURES)


@triton.jit(do_not_specialize=["programs", "tokens"])
def power_gradients_kernel(
    partials_ptr,
    weight_ptr,
    statistics_ptr,
    sums_ptr,
    grad_weight_ptr,
    grad_bias_ptr,
    carried_ptr,
    programs,
    tokens,
    MASKED: tl.constexpr,
    RELEASED: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Compute PowerNorm's ∂L/∂γ, ∂L/∂β and the sums that update ψ² and ν."""
    features, exists = own_block(FEATURES, BLOCK_F)
    sum_grad = add_parts(partials_ptr, 0, programs, features, FEATURES, BLOCK_P)
    sum_product = add_parts(partials_ptr, 1, programs, features, FEATURES, BLOCK_P)
    store_row(grad_bias_ptr, 0, sum_grad, features, exists, FEATURES)
    store_row(grad_weight_ptr, 0, sum_product, features, exists, FEATURES)
    if MASKED:
        sum_product = add_parts(partials_ptr, 2, programs, features, FEATURES, BLOCK_P)
    weight = _load_or(weight_ptr, 1.0, 0, features, exists, FEATURES)
    count = load_row(sums_ptr, 0, features, exists, FEATURES, tl.float64)
    squares = load_row(sums_ptr, 1, features, exists, FEATURES, tl.float64)
    store_row(carried_ptr, 0, count, features, exists, FEATURES)
    store_row(carried_ptr, 1, squares, features, exists, FEATURES)
    if MASKED and RELEASED:
        squares = add_parts(partials_ptr, 3, programs, features, FEATURES, BLOCK_P)
        count = tl.zeros_like(count) + tokens
    else:
        rstd = load_row(statistics_ptr, 0, features, exists, FEATURES, tl.float64)
        squares *= rstd * rstd
    store_row(carried_ptr, 2, count, features, exists, FEATURES)
    store_row(carried_ptr, 3, squares, features, exists, FEATURES)
    store_row(carried_ptr, 4, weight * sum_product, features, exists, FEATURES)
