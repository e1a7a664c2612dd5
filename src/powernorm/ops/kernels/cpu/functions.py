"""The ops of `powernorm.ops.reference` on the CPU kernels: same arguments, same results.

An output that the reference gives as an empty tensor is None here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from powernorm.ops.kernels.cpu import tasks
from powernorm.ops.kernels.cpu.calls import Call, absorb, run
from powernorm.ops.kernels.cpu.tasks import FINISH, MEASURE, State
from powernorm.ops.processes import all_reduce_sum

_BOTH = MEASURE | FINISH


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype)


def _forward(
    call: Call, x: Tensor, residual: Tensor | None, groups: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(y, total, scales), allocated and handed over."""
    task = call.task
    y = _like(x)
    task.y = y.data_ptr()
    total = scales = None
    if residual is not None:
        total = _like(x)
        task.total = total.data_ptr()
        call.matrix("residual", residual)
    if groups:
        scales = call.empty(task.tokens, groups)
        task.scales = scales.data_ptr()
    return y, total, scales


def _backward(
    call: Call,
    inputs: Tensor,
    grad_y: Tensor,
    grad_total: Tensor | None,
    affine: bool = True,
) -> tuple[Tensor, Any, Any]:
    """(grad_x, grad_weight, grad_bias), allocated and handed over."""
    task = call.task
    call.matrix("grad_y", grad_y)
    call.matrix("grad_total", grad_total)
    grad_x = _like(inputs)
    task.grad_x = grad_x.data_ptr()
    if not affine:
        return grad_x, None, None
    grad_weight, grad_bias = call.empty(task.features), call.empty(task.features)
    task.grad_weight, task.grad_bias = grad_weight.data_ptr(), grad_bias.data_ptr()
    return grad_x, grad_weight, grad_bias


def _scaled(call: Call, scales: Tensor | None) -> None:
    """Hand over GroupScaling's factors of the forward."""
    if scales is not None and scales.numel():
        call.task.groups = scales.shape[-1]
        call.task.scales = scales.data_ptr()


def _wide(rows: int, features: int) -> Tensor:
    return torch.empty((rows, features), dtype=torch.float64)


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
    call = Call(x, flags | _BOTH, eps, groups)
    task = call.task
    y, total, scales = _forward(call, x, residual, groups)
    call.mask(padding_mask)
    call.vectors(weight, bias)
    call.statistic("mean", running_mean)
    call.statistic("var", running_var)
    call.statistic("limits", limits)
    statistics, sums = call.empty(6, task.features), _wide(3, task.features)
    task.statistics, task.sums = statistics.data_ptr(), sums.data_ptr()
    if group_name:
        task.flags = flags | MEASURE
        run(tasks.BATCH_NORM, task)
        merged = all_reduce_sum(sums, group_name)
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
    call = Call(inputs, flags | _BOTH, eps, 0)
    task = call.task
    grads = _backward(call, inputs, grad_y, grad_total)
    call.mask(padding_mask)
    call.vectors(weight, None)
    _scaled(call, scales)
    call.statistic("grad_statistics", grad_statistics)
    task.statistics = statistics.data_ptr()
    if group_name:
        sums = _wide(4, task.features)
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
    call = Call(x, flags | _BOTH, eps, groups)
    task = call.task
    y, total, scales = _forward(call, x, residual, groups)
    call.mask(padding_mask)
    call.vectors(weight, bias)
    call.statistic("var", second_moment)
    call.statistic("gradient_moment", gradient_moment)
    task.max_ratio = max_ratio
    statistics, sums = call.empty(3, task.features), _wide(2, task.features)
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
    call = Call(inputs, released * tasks.RELEASED | _BOTH, 0.0, 0)
    task = call.task
    grads = _backward(call, inputs, grad_y, grad_total)
    call.mask(padding_mask)
    call.vectors(weight, None)
    _scaled(call, scales)
    carried = _wide(5, task.features)
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
    call = Call(x, flags | _BOTH, eps, groups)
    task = call.task
    y, total, _ = _forward(call, x, residual, 0)
    call.vectors(weight, bias)
    task.scale, task.k = scale, k
    statistics = call.empty(2, task.tokens, groups)
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
    call = Call(inputs, flags | _BOTH, 0.0, statistics.shape[-1])
    task = call.task
    grads = _backward(call, inputs, grad_y, grad_total, affine)
    call.vectors(weight, None)
    task.scale, task.k = scale, k
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
    call = Call(x, floor * tasks.FLOOR | _BOTH, eps, groups)
    task = call.task
    y, total, scales = _forward(call, x, residual, groups)
    call.vectors(weight, bias)
    call.statistic("mean", mean)
    call.statistic("var", var)
    statistics = call.empty(2, task.features)
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
    call = Call(inputs, _BOTH, 0.0, 0)
    task = call.task
    grads = _backward(call, inputs, grad_y, grad_total)
    call.vectors(weight, None)
    _scaled(call, scales)
    task.statistics = statistics.data_ptr()
    run(tasks.STATIC_NORM_BACKWARD, task)
    return grads


def _state(
    kind: int, buffer: Tensor, tracked: Tensor, nonfinite: Tensor, sums: Tensor, momentum: float
) -> State:
    state = State()
    state.kind, state.wide = kind, buffer.dtype == torch.float64
    state.features, state.momentum = buffer.shape[-1], momentum
    state.second, state.sums = buffer.data_ptr(), sums.data_ptr()
    state.num_batches_tracked = tracked.data_ptr()
    state.num_nonfinite_batches = nonfinite.data_ptr()
    return state


def absorb_centered(
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor,
    num_nonfinite_batches: Tensor,
    sums: Tensor,
    momentum: float,
    correct_bias: bool,
) -> None:
    """As `reference.state.absorb_centered`."""
    counters = (num_batches_tracked, num_nonfinite_batches)
    state = _state(tasks.MEAN_AND_VAR, running_var, *counters, sums, momentum)
    state.first, state.unbiased = running_mean.data_ptr(), correct_bias
    absorb(state)
    torch.autograd.graph.increment_version((running_mean, running_var, *counters))


def absorb_uncentered(
    running_second_moment: Tensor,
    num_batches_tracked: Tensor,
    num_nonfinite_batches: Tensor,
    sums: Tensor,
    momentum: float,
) -> None:
    """As `reference.state.absorb_uncentered`."""
    counters = (num_batches_tracked, num_nonfinite_batches)
    absorb(_state(tasks.SECOND_MOMENT, running_second_moment, *counters, sums, momentum))
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
    state = _state(tasks.POWER, second_moment, *counters, sums, momentum)
    state.first, state.warmup, state.floored = gradient_moment.data_ptr(), warmup, floored
    state.backward_momentum = backward_momentum
    absorb(state)
    torch.autograd.graph.increment_version((second_moment, gradient_moment, *counters))
