"""In-place updates of running statistics: one program each, as the counters need all features.

A feature whose new value is not finite stays unchanged; without a valid token all do.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load(pointer, row, features, exists, FEATURES: tl.constexpr):
    return tl.load(pointer + row * FEATURES + features, exists, other=0.0)


@triton.jit
def _most_tokens(sums_ptr, FEATURES: tl.constexpr, BLOCK_F: tl.constexpr):
    """Return the number of valid tokens, which is equal for all features."""
    most = tl.zeros((BLOCK_F,), tl.float64)
    for start in tl.range(0, FEATURES, BLOCK_F):
        features = start + tl.arange(0, BLOCK_F)
        most = tl.maximum(most, _load(sums_ptr, 0, features, features < FEATURES, FEATURES))
    return tl.max(most, 0)


@triton.jit
def _is_finite(values):
    # False for NaN as well.
    return tl.abs(values) < float("inf")


@triton.jit
def _move(buffer_ptr, value, weight, tokens, features, exists):
    """Move a buffer toward float64 values, and return where these were not finite."""
    buffer = tl.load(buffer_ptr + features, exists, other=0.0)
    weight = weight.to(buffer.dtype)
    gap = value.to(buffer.dtype) - buffer
    # From the nearer end: buffer + gap would lose a value that is small compared with the buffer.
    from_value = value.to(buffer.dtype) - (1.0 - weight) * gap
    moved = tl.where(weight < 0.5, buffer + weight * gap, from_value)
    finite = _is_finite(value) & _is_finite(moved)
    present = (tl.zeros_like(value) + tokens) > 0
    tl.store(buffer_ptr + features, moved, exists & finite & present)
    return exists & (finite == 0)


@triton.jit
def _weight(momentum, tracked, nonfinite, AVERAGE: tl.constexpr, BLOCK_F: tl.constexpr):
    """Return the weight of this batch, (BLOCK_F,) float64; AVERAGE is an average's first batch."""
    weight = tl.full((BLOCK_F,), momentum, tl.float64)
    if AVERAGE:
        # Excluded batches do not count, or the initial value would stay in the average.
        number = tl.zeros_like(weight) + (tracked + 2 - AVERAGE - nonfinite)
        weight = tl.maximum(weight, 1.0 / tl.maximum(number, 1.0))
    return weight


@triton.jit
def _count(tracked_ptr, nonfinite_ptr, tracked, nonfinite, tokens, failures):
    present = (tokens > 0).to(tl.int64)
    failed = tl.max(failures, 0).to(tl.int64)
    # The weight may depend on the counters, so all threads read them before any writes them.
    tl.debug_barrier()
    tl.store(tracked_ptr, tracked + present)
    tl.store(nonfinite_ptr, nonfinite + present * failed)


@triton.jit
def centered_kernel(
    mean_ptr,
    var_ptr,
    tracked_ptr,
    nonfinite_ptr,
    sums_ptr,
    momentum: tl.float64,
    AVERAGE: tl.constexpr,
    CORRECT_BIAS: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Update running mean and variance from n, Σx, Σ of squared deviations and Σ n μ²."""
    tracked = tl.load(tracked_ptr)
    nonfinite = tl.load(nonfinite_ptr)
    weight = _weight(momentum, tracked, nonfinite, AVERAGE, BLOCK_F)
    tokens = _most_tokens(sums_ptr, FEATURES, BLOCK_F)
    failures = tl.zeros((BLOCK_F,), tl.int32)
    for start in tl.range(0, FEATURES, BLOCK_F):
        features = start + tl.arange(0, BLOCK_F)
        exists = features < FEATURES
        count = _load(sums_ptr, 0, features, exists, FEATURES)
        size = tl.maximum(count, 1.0)
        total = _load(sums_ptr, 1, features, exists, FEATURES)
        raised = _load(sums_ptr, 3, features, exists, FEATURES)
        mean = total / size
        between = raised - mean * total
        # Variance between uses of the layer; below its rounding error it is 0, as in the reference.
        between = tl.where(between > 7.105427357601002e-15 * raised, between, 0.0)
        var = (_load(sums_ptr, 2, features, exists, FEATURES) + between) / size
        if CORRECT_BIAS:
            var *= count / tl.maximum(count - 1.0, 1.0)
        failed = _move(mean_ptr, mean, weight, tokens, features, exists)
        failed |= _move(var_ptr, var, weight, tokens, features, exists)
        failures |= failed.to(tl.int32)
    _count(tracked_ptr, nonfinite_ptr, tracked, nonfinite, tokens, failures)


@triton.jit
def uncentered_kernel(
    moment_ptr,
    tracked_ptr,
    nonfinite_ptr,
    sums_ptr,
    momentum: tl.float64,
    AVERAGE: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Update running ψ² from n, Σx²."""
    tracked = tl.load(tracked_ptr)
    nonfinite = tl.load(nonfinite_ptr)
    weight = _weight(momentum, tracked, nonfinite, AVERAGE, BLOCK_F)
    tokens = _most_tokens(sums_ptr, FEATURES, BLOCK_F)
    failures = tl.zeros((BLOCK_F,), tl.int32)
    for start in tl.range(0, FEATURES, BLOCK_F):
        features = start + tl.arange(0, BLOCK_F)
        exists = features < FEATURES
        size = tl.maximum(_load(sums_ptr, 0, features, exists, FEATURES), 1.0)
        batch = _load(sums_ptr, 1, features, exists, FEATURES) / size
        failures |= _move(moment_ptr, batch, weight, tokens, features, exists).to(tl.int32)
    _count(tracked_ptr, nonfinite_ptr, tracked, nonfinite, tokens, failures)


@triton.jit
def power_kernel(
    second_ptr,
    gradient_ptr,
    tracked_ptr,
    nonfinite_ptr,
    sums_ptr,
    momentum: tl.float64,
    backward_momentum: tl.float64,
    AVERAGE: tl.constexpr,
    FLOORED: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Update ψ² and ν from n, Σx², n of the gradient sums, Σx̂², Σ g x̂."""
    tracked = tl.load(tracked_ptr)
    nonfinite = tl.load(nonfinite_ptr)
    weight = _weight(momentum, tracked, nonfinite, AVERAGE, BLOCK_F)
    backward_momentum = tl.full((BLOCK_F,), backward_momentum, tl.float64)
    tokens = _most_tokens(sums_ptr, FEATURES, BLOCK_F)
    failures = tl.zeros((BLOCK_F,), tl.int32)
    for start in tl.range(0, FEATURES, BLOCK_F):
        features = start + tl.arange(0, BLOCK_F)
        exists = features < FEATURES
        size = tl.maximum(_load(sums_ptr, 0, features, exists, FEATURES), 1.0)
        batch = _load(sums_ptr, 1, features, exists, FEATURES) / size
        size = tl.maximum(_load(sums_ptr, 2, features, exists, FEATURES), 1.0)
        gamma = _load(sums_ptr, 3, features, exists, FEATURES) / size
        lambda_ = _load(sums_ptr, 4, features, exists, FEATURES) / size
        factor = 1.0 - backward_momentum * gamma
        if FLOORED:
            factor = tl.where(factor < 0, 0.0, factor)
        nu = tl.load(gradient_ptr + features, exists, other=0.0).to(tl.float64) * factor
        nu += backward_momentum * lambda_
        failed = _move(second_ptr, batch, weight, tokens, features, exists)
        failed |= _move(
            gradient_ptr, nu, tl.full((BLOCK_F,), 1.0, tl.float64), tokens, features, exists
        )
        failures |= failed.to(tl.int32)
    _count(tracked_ptr, nonfinite_ptr, tracked, nonfinite, tokens, failures)
