"""The ops of `powernorm.ops.reference` on the CPU kernels: same arguments, same results.

An output that the reference gives as an empty tensor is None here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from powernorm.ops.kernels.cpu import tasks
from powernorm.ops.kernels.cpu.calls import (
    absorb,
    backward_task,
    forward_task,
    run,
    vector,
)
from powernorm.ops.kernels.cpu.tasks import FINISH, MEASURE, State
from powernorm.ops.plain import PLAIN_TYPES
from powernorm.ops.processes import all_reduce_sum
from powernorm.ops.reference import state as state_moves
from powernorm.ops.reference.state import reduce_sums

_BOTH = MEASURE | FINISH
_CPU = torch.device("cpu")


def batch_norm(
    x: Tensor,
    residual: Tensor | None,
    padding_mask: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor,
    limits: Tensor | None,
    groups: int,
    eps: float,
    floor: bool,
    group_name: str,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
    """As `reference.batch.batch_norm`."""
    centered = running_mean is not None
    flags = centered * tasks.CENTERED | floor * tasks.FLOOR
    task, y, total, scales, acc, kept = forward_task(
        x, residual, padding_mask, weight, bias, groups, flags | _BOTH, eps
    )
    if running_mean is not None:
        task.mean = vector("running_mean", running_mean, task.features, acc, kept)
    task.var = vector("running_var", running_var, task.features, acc, kept)
    if limits is not None:
        task.limits = vector("limits", limits, 2, acc, kept)
    statistics = torch.empty((6, task.features), dtype=acc, device=_CPU)
    sums = torch.empty((4 if centered else 2, task.features), dtype=torch.float64, device=_CPU)
    task.statistics, task.sums = statistics.data_ptr(), sums.data_ptr()
    if group_name:
        task.flags = flags | MEASURE
        run(tasks.BATCH_NORM, task)
        merged = reduce_sums(sums, centered, group_name)
        task.flags, task.sums = flags | FINISH, merged.data_ptr()
    run(tasks.BATCH_NORM, task)
    return y, total, scales, statistics, sums


def batch_norm_backward(
    grad_y: Tensor,
    grad_total: Tensor | None,
    grad_statistics: Tensor | None,
    inputs: Tensor,
    padding_mask: Tensor | None,
    weight: Tensor | None,
    scales: Tensor | None,
    statistics: Tensor,
    eps: float,
    floor: bool,
    centered: bool,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.batch.batch_norm_backward`."""
    flags = centered * tasks.CENTERED | floor * tasks.FLOOR
    task, grads, acc, kept = backward_task(
        inputs, grad_y, grad_total, padding_mask, weight, scales, flags | _BOTH, eps
    )
    if grad_statistics is not None:
        task.grad_statistics = vector(
            "grad_statistics", grad_statistics, 6 * task.features, acc, kept
        )
    task.statistics = statistics.data_ptr()
    if group_name:
        sums = torch.empty((4, task.features), dtype=torch.float64, device=_CPU)
        task.flags, task.sums = flags | MEASURE, sums.data_ptr()
        run(tasks.BATCH_NORM_BACKWARD, task)
        merged = all_reduce_sum(sums, group_name)
        task.flags, task.sums = flags | FINISH, merged.data_ptr()
    run(tasks.BATCH_NORM_BACKWARD, task)
    return grads


def power_norm(
    x: Tensor,
    residual: Tensor | None,
    padding_mask: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    second_moment: Tensor,
    gradient_moment: Tensor,
    groups: int,
    eps: float,
    use_batch: bool,
    max_ratio: float,
    released: bool,
    group_name: str,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
    """As `reference.power.power_norm`."""
    flags = use_batch * tasks.USE_BATCH | released * tasks.RELEASED
    task, y, total, scales, acc, kept = forward_task(
        x, residual, padding_mask, weight, bias, groups, flags | _BOTH, eps
    )
    task.var = vector("second_moment", second_moment, task.features, acc, kept)
    task.gradient_moment = vector("gradient_moment", gradient_moment, task.features, acc, kept)
    task.max_ratio = max_ratio
    statistics = torch.empty((3, task.features), dtype=acc, device=_CPU)
    sums = torch.empty((2, task.features), dtype=torch.float64, device=_CPU)
    task.statistics, task.sums = statistics.data_ptr(), sums.data_ptr()
    if group_name and (use_batch or released or max_ratio):
        task.flags = flags | MEASURE
        run(tasks.POWER_NORM, task)
        merged = all_reduce_sum(sums, group_name)
        task.flags, task.sums = flags | FINISH, merged.data_ptr()
    run(tasks.POWER_NORM, task)
    return y, total, scales, statistics, sums


def power_norm_backward(
    grad_y: Tensor,
    grad_total: Tensor | None,
    inputs: Tensor,
    padding_mask: Tensor | None,
    weight: Tensor | None,
    scales: Tensor | None,
    statistics: Tensor,
    sums: Tensor,
    released: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `reference.power.power_norm_backward`."""
    flags = released * tasks.RELEASED | _BOTH
    task, grads, _, _kept = backward_task(
        inputs, grad_y, grad_total, padding_mask, weight, scales, flags, 0.0
    )
    carried = torch.empty((5, task.features), dtype=torch.float64, device=_CPU)
    task.statistics, task.sums = statistics.data_ptr(), sums.data_ptr()
    task.carried = carried.data_ptr()
    run(tasks.POWER_NORM_BACKWARD, task)
    return (*grads, carried)


def token_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    centered: bool,
    eps: float,
    released: bool,
    scale: float,
    k: float,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """As `reference.token.token_norm`."""
    flags = centered * tasks.CENTERED | released * tasks.RELEASED
    task, y, total, _, acc, _kept = forward_task(
        x, residual, None, weight, bias, 0, flags | _BOTH, eps
    )
    task.groups, task.scale, task.k = groups, scale, k
    statistics = torch.empty((2, task.tokens, groups), dtype=acc, device=_CPU)
    task.scales = statistics.data_ptr()
    run(tasks.TOKEN_NORM, task)
    return y, total, statistics


def token_norm_backward(
    grad_y: Tensor,
    grad_total: Tensor | None,
    inputs: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    centered: bool,
    released: bool,
    scale: float,
    k: float,
    detach_mean: bool,
    detach_std: bool,
    affine: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As `reference.token.token_norm_backward`."""
    flags = centered * tasks.CENTERED | released * tasks.RELEASED
    flags |= detach_mean * tasks.DETACH_MEAN | detach_std * tasks.DETACH_STD
    task, grads, _, _kept = backward_task(
        inputs, grad_y, grad_total, None, weight, None, flags | _BOTH, 0.0, affine
    )
    task.groups, task.scale, task.k = statistics.shape[-1], scale, k
    task.scales = statistics.data_ptr()
    run(tasks.TOKEN_NORM_BACKWARD, task)
    return grads


def static_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor,
    groups: int,
    eps: float,
    floor: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """As `reference.static.static_norm`."""
    task, y, total, scales, acc, kept = forward_task(
        x, residual, None, weight, bias, groups, floor * tasks.FLOOR | _BOTH, eps
    )
    if mean is not None:
        task.mean = vector("mean", mean, task.features, acc, kept)
    task.var = vector("var", var, task.features, acc, kept)
    statistics = torch.empty((2, task.features), dtype=acc, device=_CPU)
    task.statistics = statistics.data_ptr()
    run(tasks.STATIC_NORM, task)
    return y, total, scales, statistics


def static_norm_backward(
    grad_y: Tensor,
    grad_total: Tensor | None,
    inputs: Tensor,
    weight: Tensor | None,
    scales: Tensor | None,
    statistics: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.static.static_norm_backward`."""
    task, grads, _, _kept = backward_task(
        inputs, grad_y, grad_total, None, weight, scales, _BOTH, 0.0
    )
    task.statistics = statistics.data_ptr()
    run(tasks.STATIC_NORM_BACKWARD, task)
    return grads


def _can_move(first: Tensor, second: Tensor, counters: tuple[Tensor, Tensor], sums: Tensor) -> bool:
    """Are the buffers what the library can write: side by side, all float32 or all float64?

    They are not after a data-parallel wrapper has cast them, say. One expression, because a loop
    would take longer than the move.
    """
    tracked, nonfinite = counters
    dtype, size = second.dtype, sums.shape[-1]
    return (
        (dtype is torch.float32 or dtype is torch.float64)
        and first.dtype is dtype
        and first.numel() == size == second.numel()
        and first.is_cpu
        and second.is_cpu
        and sums.is_cpu
        and type(first) in PLAIN_TYPES
        and type(second) in PLAIN_TYPES
        and first.is_contiguous()
        and second.is_contiguous()
        and sums.is_contiguous()
        and tracked.dtype is torch.int64 is nonfinite.dtype
        and tracked.is_cpu
        and nonfinite.is_cpu
    )


def _state(
    kind: int,
    buffer: Tensor,
    counters: tuple[Tensor, Tensor],
    sums: Tensor,
    momentum: float | None,
) -> State:
    state = State()
    state.kind, state.wide = kind, buffer.dtype is torch.float64
    state.features = sums.shape[-1]
    if momentum is None:
        state.average = True
    else:
        state.momentum = momentum
    state.second, state.sums = buffer.data_ptr(), sums.data_ptr()
    state.num_batches_tracked = counters[0].data_ptr()
    state.num_nonfinite_batches = counters[1].data_ptr()
    return state


def absorb_centered(
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor,
    num_nonfinite_batches: Tensor,
    sums: Tensor,
    momentum: float | None,
    correct_bias: bool,
) -> None:
    """As `reference.state.absorb_centered`."""
    counters = (num_batches_tracked, num_nonfinite_batches)
    if not _can_move(running_mean, running_var, counters, sums):
        state_moves.absorb_centered(
            running_mean, running_var, *counters, sums, momentum, correct_bias
        )
        return
    state = _state(tasks.MEAN_AND_VAR, running_var, counters, sums, momentum)
    state.first, state.unbiased = running_mean.data_ptr(), correct_bias
    absorb(state)
    torch.autograd.graph.increment_version((running_mean, running_var, *counters))


def absorb_uncentered(
    running_second_moment: Tensor,
    num_batches_tracked: Tensor,
    num_nonfinite_batches: Tensor,
    sums: Tensor,
    momentum: float | None,
) -> None:
    """As `reference.state.absorb_uncentered`."""
    counters = (num_batches_tracked, num_nonfinite_batches)
    if not _can_move(running_second_moment, running_second_moment, counters, sums):
        state_moves.absorb_uncentered(running_second_moment, *counters, sums, momentum)
        return
    absorb(_state(tasks.SECOND_MOMENT, running_second_moment, counters, sums, momentum))
    torch.autograd.graph.increment_version((running_second_moment, *counters))


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
    """As `reference.state.absorb_power`."""
    counters = (num_batches_tracked, num_nonfinite_batches)
    if not _can_move(gradient_moment, second_moment, counters, sums):
        moments = (second_moment, gradient_moment)
        state_moves.absorb_power(
            *moments, *counters, sums, warmup, momentum, backward_momentum, floored
        )
        return
    state = _state(tasks.POWER, second_moment, counters, sums, None if warmup else momentum)
    state.first, state.floored = gradient_moment.data_ptr(), floored
    state.backward_momentum = backward_momentum
    absorb(state)
    torch.autograd.graph.increment_version((second_moment, gradient_moment, *counters))
