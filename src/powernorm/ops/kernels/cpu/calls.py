"""Conversion of tensors to arguments of the kernel library.

The functions are long instead of many small ones: after a kernel has streamed through the caches,
each Python function has to be loaded from memory again, which costs as much as a small norm.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm.ops import running_stats
from powernorm.ops.kernels.cpu.loading import load_library
from powernorm.ops.kernels.cpu.tasks import (
    CPU,
    MEAN_AND_VAR,
    POWER,
    SECOND_MOMENT,
    TYPES,
    KernelTask,
    NativeUpdate,
)
from powernorm.ops.operators import PLAIN_TYPES, Gradients
from powernorm.ops.running_stats import (
    Average,
    CenteredUpdate,
    PowerUpdate,
    UncenteredUpdate,
    Update,
)
from powernorm.ops.torch_private import is_zero_tensor

_STATUS = {
    1: "the CPU kernels refused their arguments: please report this",
    2: "no memory for the sums of the CPU kernels",
}
_DENSE = torch.contiguous_format
_BOOL = torch.bool


def run(operation: int, task: KernelTask) -> None:
    """Run one operation.

    Raises:
        RuntimeError: the library refused the arguments.
        MemoryError: there is no memory for the sums.
    """
    status = library().powernorm_run(operation, ctypes.byref(task))
    if status:
        fail(status)


def fail(status: int) -> NoReturn:
    """Raise the error of a status; see `run`."""
    raise RuntimeError(_STATUS[1]) if status == 1 else MemoryError(_STATUS[2])


@cache
def library() -> ctypes.CDLL:
    """Load the library and return its functions."""
    functions = load_library().functions
    assert functions is not None
    return functions


def rows_of(x: Tensor) -> Tensor:
    """Return the input as (tokens, C) with contiguous features; a view if possible."""
    if x.ndim == 2 and x.stride(1) == 1:
        return x
    if x.stride(-1) == 1 or x.shape[-1] == 1:
        try:
            return x.view(-1, x.shape[-1])
        except RuntimeError:
            pass  # the tokens have no single stride
    return x.contiguous().view(-1, x.shape[-1])


def _strided(value: Tensor, kept: list[Any]) -> tuple[int, int]:
    """Return (address, stride between tokens) of an input that is not contiguous."""
    rows = rows_of(_resolved(value))
    kept.append(rows)
    return rows.data_ptr(), rows.stride(0)


def _resolved(value: Tensor) -> Tensor:
    """Return a tensor whose memory holds its values: without lazy negation or lazy zeros."""
    if is_zero_tensor(value):
        return torch.zeros(value.shape, dtype=value.dtype, device=CPU)
    return value.resolve_neg()


def _is_simple(value: Tensor) -> bool:
    """Return whether the values are contiguous in memory at `data_ptr()`."""
    return value.is_contiguous() and not value.is_neg() and not is_zero_tensor(value)


def vector(name: str, value: Tensor, size: int, dtype: torch.dtype, kept: list[Any]) -> int:
    """Return the address of a vector, contiguous and in the accumulation type.

    Raises:
        InputError: the vector has another size or is on another device.
    """
    if not value.is_cpu or value.numel() != size:
        _refuse(name, value, f"{size} values")
    if value.dtype != dtype or not _is_simple(value):
        value = _resolved(value).to(dtype).contiguous()
        kept.append(value)
    return value.data_ptr()


def saved(value: Tensor, kept: list[Any]) -> int:
    """Return the address of a saved tensor; hooks on saved tensors may return any strides."""
    if not value.is_contiguous():
        value = value.contiguous()
        kept.append(value)
    return value.data_ptr()


def _refuse(name: str, value: Tensor, expected: str) -> NoReturn:
    raise InputError(
        f"{name} has shape {tuple(value.shape)} and is on {value.device}, expected {expected} on "
        "the input's device, cpu"
    )


def forward_task(
    args: Any, padding_mask: Tensor | None, groups: int, flags: int
) -> tuple[KernelTask, Tensor, Tensor | None, Tensor | None, torch.dtype, list[Any]]:
    """Return a task with the fields that all forwards share.

    Args:
        args: the op's arguments: x, residual, weight, bias, eps.
        padding_mask: True = padding.
        groups: groups of GroupScaling.
        flags: flags of the task.

    Returns:
        The task; y; the sum with the residual, or None; GroupScaling's factors, or None; the
        accumulation type; objects that must live until the task has run.
    """
    x, residual, weight, bias = args.x, args.residual, args.weight, args.bias
    dtype, features = x.dtype, x.shape[-1]
    kept: list[Any] = []
    acc = torch.float64 if dtype is torch.float64 else torch.float32
    task = KernelTask()
    task.features, task.type, task.flags, task.groups = features, TYPES[dtype], flags, groups
    task.tokens, task.eps, task.threads = x.numel() // features, args.eps, torch.get_num_threads()
    if _is_simple(x):
        task.x, task.x_stride = x.data_ptr(), features
        y = torch.empty_like(x)
    else:
        task.x, task.x_stride = _strided(x, kept)
        y = torch.empty_like(x, memory_format=_DENSE)
    task.y = y.data_ptr()
    total = scales = None
    if residual is not None:
        total = torch.empty_like(y)
        task.total = total.data_ptr()
        if not residual.is_cpu or residual.shape != x.shape or residual.dtype != dtype:
            _refuse("residual", residual, f"shape {tuple(x.shape)}, {dtype}")
        if _is_simple(residual):
            task.residual, task.residual_stride = residual.data_ptr(), features
        else:
            task.residual, task.residual_stride = _strided(residual, kept)
    if groups:
        scales = torch.empty((task.tokens, groups), dtype=acc, device=CPU)
        task.scales = scales.data_ptr()
    if padding_mask is not None:
        _hand_over_mask(task, padding_mask, kept)
    if weight is not None:
        task.weight = vector("weight", weight, features, acc, kept)
    if bias is not None:
        task.bias = vector("bias", bias, features, acc, kept)
    return task, y, total, scales, acc, kept


def backward_task(
    args: Any,
    padding_mask: Tensor | None,
    scales: Tensor | None,
    flags: int,
    eps: float,
    affine: bool = True,
) -> tuple[KernelTask, Gradients, torch.dtype, list[Any]]:
    """Return a task with the fields that all backwards share.

    Args:
        args: the backward's arguments: inputs, grad_y, grad_total, weight.
        padding_mask: True = padding.
        scales: GroupScaling's factors.
        flags: flags of the task.
        eps: eps of the norm.
        affine: whether the gradients of γ and β are wanted.

    Returns:
        The task; the gradients; the accumulation type; objects to keep until the task has run.
    """
    inputs, grad_y = args.inputs, args.grad_y
    dtype, features = inputs.dtype, inputs.shape[-1]
    kept: list[Any] = []
    acc = torch.float64 if dtype is torch.float64 else torch.float32
    task = KernelTask()
    task.features, task.type, task.flags, task.eps = features, TYPES[dtype], flags, eps
    task.tokens, task.threads = inputs.numel() // features, torch.get_num_threads()
    if _is_simple(inputs):
        task.x, task.x_stride = inputs.data_ptr(), features
        grad_x = torch.empty_like(inputs)
    else:
        task.x, task.x_stride = _strided(inputs, kept)
        grad_x = torch.empty_like(inputs, memory_format=_DENSE)
    task.grad_x = grad_x.data_ptr()
    if _is_simple(grad_y):
        task.grad_y, task.grad_y_stride = grad_y.data_ptr(), features
    else:
        task.grad_y, task.grad_y_stride = _strided(grad_y, kept)
    if args.grad_total is not None:
        task.grad_total, task.grad_total_stride = _strided(args.grad_total, kept)
    if padding_mask is not None:
        _hand_over_mask(task, padding_mask, kept)
    if args.weight is not None:
        task.weight = vector("weight", args.weight, features, acc, kept)
    if scales is not None:
        task.groups, task.scales = scales.shape[-1], saved(scales, kept)
    if not affine:
        return task, Gradients(grad_x, None, None), acc, kept
    grad_weight = torch.empty(features, dtype=acc, device=CPU)
    grad_bias = torch.empty(features, dtype=acc, device=CPU)
    task.grad_weight, task.grad_bias = grad_weight.data_ptr(), grad_bias.data_ptr()
    return task, Gradients(grad_x, grad_weight, grad_bias), acc, kept


def backward_prototype(args: Any, flags: int, eps: float) -> KernelTask:
    """Return the fields that the tasks of all backwards of calls like this one share."""
    features = args.x.shape[-1]
    task = KernelTask()
    task.features, task.type, task.flags, task.eps = features, TYPES[args.x.dtype], flags, eps
    task.x_stride = task.grad_y_stride = features
    task.groups = args.groups
    return task


def _hand_over_mask(task: KernelTask, padding_mask: Tensor, kept: list[Any]) -> None:
    tokens = task.tokens
    if not padding_mask.is_cpu or padding_mask.numel() != tokens or padding_mask.dtype != _BOOL:
        _refuse("padding_mask", padding_mask, f"{tokens} values of torch.bool")
    if not padding_mask.is_contiguous():
        padding_mask = padding_mask.contiguous()
        kept.append(padding_mask)
    task.mask = padding_mask.data_ptr()


def native_update(update: Update, features: int) -> NativeUpdate | None:
    """Return an update in the library's form, None if the library cannot write these buffers.

    The result is kept for the `update` and its memory.
    """
    buffers = update.buffers
    memory = running_stats.memory_of(*buffers)  # a tensor's memory may be replaced
    native: NativeUpdate | None
    if update.native is not None:
        prepared_for, native = update.native
        if prepared_for == memory:
            return native
    native = _new_update(update) if _can_write(buffers, features) else None
    update.native = memory, native
    return native


def _can_write(buffers: tuple[Tensor, ...], features: int) -> bool:
    """Return whether the library can write these buffers: dense, all float32 or all float64.

    It cannot after a data-parallel wrapper has cast them, for example.
    """
    *vectors, tracked, nonfinite = buffers
    dtype = vectors[0].dtype
    return (
        dtype in (torch.float32, torch.float64)
        and all(
            buffer.dtype is dtype
            and buffer.numel() == features
            and type(buffer) in PLAIN_TYPES
            and buffer.is_contiguous()
            for buffer in vectors
        )
        and tracked.dtype is torch.int64 is nonfinite.dtype
        and all(buffer.is_cpu for buffer in buffers)
    )


def _new_update(update: Update) -> NativeUpdate:
    *vectors, tracked, nonfinite = (buffer.data_ptr() for buffer in update.buffers)
    native = NativeUpdate()
    native.features = update.buffers[0].numel()
    native.wide = update.buffers[0].dtype is torch.float64
    native.second, native.num_batches_tracked = vectors[0], tracked
    native.num_nonfinite_batches = nonfinite
    momentum = update.momentum
    if isinstance(momentum, Average):
        native.momentum, native.average = momentum
    else:
        native.momentum = momentum
    if isinstance(update, CenteredUpdate):
        native.kind, native.unbiased = MEAN_AND_VAR, update.unbiased
        native.first, native.second = vectors
    elif isinstance(update, UncenteredUpdate):
        native.kind = SECOND_MOMENT
    elif isinstance(update, PowerUpdate):
        native.kind, native.floored = POWER, update.floored
        native.second, native.first = vectors
        native.backward_momentum = update.backward_momentum
    return native


def mark_written(update: Update) -> None:
    """Increment the buffers' version counters, as torch's own writes do."""
    torch.autograd.graph.increment_version(update.buffers)


def update_running_stats(update: Update, sums: Tensor) -> None:
    """Take one step, in place; see `running_stats.update_running_stats`."""
    native = None
    if type(sums) is Tensor and sums.is_cpu and sums.is_contiguous():
        native = native_update(update, sums.shape[-1])
    if native is None:
        running_stats.update_running_stats(update, sums)
        return
    status = library().powernorm_update(ctypes.byref(native), sums.data_ptr())
    if status:
        fail(status)
    mark_written(update)
