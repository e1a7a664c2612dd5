"""Running statistics move in place by one launch, without the host reading anything."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from powernorm.ops.kernels.triton.device.running import (
    centered_kernel,
    power_kernel,
    uncentered_kernel,
)
from powernorm.ops.kernels.triton.launch import Plan, launch


def absorb_centered(
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor,
    num_nonfinite_batches: Tensor,
    sums: Tensor,
    momentum: float | None,
    correct_bias: bool,
) -> None:
    """One step of a running mean and variance, in place.

    Features whose statistics are not finite stay as they were; without a valid token all do.

    Args:
        running_mean: (C,), contiguous.
        running_var: (C,), contiguous.
        num_batches_tracked: 0-d int64; grows where there was a token.
        num_nonfinite_batches: 0-d int64; grows where, besides, some feature was not finite.
        sums: (4, C) float64: n, Σx, Σ of squared deviations, Σ n μ².
        momentum: weight of the new batch; None for the plain average of the batches so far.
        correct_bias: divide the variance by n - 1 (by 1 where n = 1).
    """
    _launch(
        centered_kernel,
        sums,
        (running_mean, running_var, num_batches_tracked, num_nonfinite_batches),
        momentum or 0.0,
        AVERAGE=momentum is None,
        CORRECT_BIAS=correct_bias,
    )


def absorb_uncentered(
    running_second_moment: Tensor,
    num_batches_tracked: Tensor,
    num_nonfinite_batches: Tensor,
    sums: Tensor,
    momentum: float | None,
) -> None:
    """One step of a running ψ², in place; see `absorb_centered`.

    Args:
        running_second_moment: (C,), contiguous.
        num_batches_tracked: 0-d int64.
        num_nonfinite_batches: 0-d int64.
        sums: (2, C) float64: n, Σx².
        momentum: weight of the new batch; None for the plain average of the batches so far.
    """
    state = (running_second_moment, num_batches_tracked, num_nonfinite_batches)
    _launch(uncentered_kernel, sums, state, momentum or 0.0, AVERAGE=momentum is None)


def absorb_power(
    second_moment: Tensor,
    gradient_moment: Tensor,
    num_batches_tracked: Tensor,
    num_nonfinite_batches: Tensor,
    sums: Tensor,
    warmup: bool,
    momentum: float,
    backward_momentum: float,
    floored: bool,
) -> None:
    """One step of PowerNorm's ψ² and ν, in place; see `absorb_centered`.

    Args:
        second_moment: ψ², (C,), contiguous.
        gradient_moment: ν, (C,), contiguous.
        num_batches_tracked: 0-d int64.
        num_nonfinite_batches: 0-d int64.
        sums: (5, C) float64: n, Σx², n of the gradient sums, Σx̂², Σ g x̂.
        warmup: ψ² is the plain average of the batches so far.
        momentum: weight of the new batch in ψ² after the warm-up.
        backward_momentum: that in ν.
        floored: keep ν's factor at 0 or above.
    """
    _launch(
        power_kernel,
        sums,
        (second_moment, gradient_moment, num_batches_tracked, num_nonfinite_batches),
        momentum,
        backward_momentum,
        AVERAGE=warmup,
        FLOORED=floored,
    )


def _launch(
    kernel: Any, sums: Tensor, state: tuple[Tensor, ...], *momenta: float, **constants: bool
) -> None:
    features = sums.shape[1]
    block = min(triton.next_power_of_2(features), 2048)
    sizes = {
        "FEATURES": features,
        "BLOCK_F": block,
        "num_warps": min(max(block // 256, 4), 8),
        "enable_fp_fusion": True,
    }
    launch(
        kernel, Plan((1, 1), sizes), sums.device, *state, sums.contiguous(), *momenta, **constants
    )
    # Written through pointers, which torch does not see: who watches the counter would read it.
    torch.autograd.graph.increment_version(state)
