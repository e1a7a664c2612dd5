"""In-place updates of running statistics, in one launch without a host sync."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from powernorm.ops import running_stats
from powernorm.ops.kernels.triton.device.running import (
    centered_kernel,
    power_kernel,
    uncentered_kernel,
)
from powernorm.ops.kernels.triton.launch import launch, vector_plan
from powernorm.ops.running_stats import Average, CenteredUpdate, PowerUpdate, Update


def update_running_stats(update: Update, sums: Tensor) -> None:
    """Make one update in place; see `powernorm.ops.running_stats.update_running_stats`."""
    if not all(buffer.is_contiguous() for buffer in update.buffers):
        running_stats.update_running_stats(update, sums)
        return
    momentum, average = update.momentum, 0
    if isinstance(momentum, Average):
        momentum, average = momentum
    if isinstance(update, CenteredUpdate):
        constants = {"AVERAGE": average, "CORRECT_BIAS": update.unbiased}
        _launch(centered_kernel, sums, update.buffers, momentum, **constants)
    elif isinstance(update, PowerUpdate):
        constants = {"AVERAGE": average, "FLOORED": update.floored}
        momenta = momentum, update.backward_momentum
        _launch(power_kernel, sums, update.buffers, *momenta, **constants)
    else:
        _launch(uncentered_kernel, sums, update.buffers, momentum, AVERAGE=average)
    # torch counts its own writes; the counters' readers see these writes without a host sync.
    torch.autograd.graph.increment_version(update.buffers)


def _launch(
    kernel: Any, sums: Tensor, state: tuple[Tensor, ...], *momenta: float, **constants: int
) -> None:
    plan = vector_plan(sums.shape[1])
    launch(kernel, plan, sums.device, *state, sums.contiguous(), *momenta, **constants)
