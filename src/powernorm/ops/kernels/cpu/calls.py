"""How tensors become the library's arguments."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from powernorm.ops.kernels.cpu.loading import load_library
from powernorm.ops.kernels.cpu.tasks import TYPES, State, Task

_STATUS = {
    1: "the CPU kernels refused their arguments: please report this",
    2: "no memory for the sums of the CPU kernels",
}


def run(operation: int, task: Task) -> None:
    """Run one operation.

    Raises:
        RuntimeError: refused arguments.
        MemoryError: no memory for the sums.
    """
    functions = load_library().functions
    assert functions is not None
    _check(functions.powernorm_run(operation, ctypes.byref(task)))


def absorb(state: State) -> None:
    """Move running statistics; errors as `run`."""
    functions = load_library().functions
    assert functions is not None
    _check(functions.powernorm_absorb(ctypes.byref(state)))


def _check(status: int) -> None:
    if status == 1:
        raise RuntimeError(_STATUS[1])
    if status:
        raise MemoryError(_STATUS[2])


def accumulation_of(x: Tensor) -> torch.dtype:
    """float64 for float64 input, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rows_of(x: Tensor) -> Tensor:
    """The input as (tokens, C) with neighbouring features; a view wherever that is possible."""
    if x.ndim == 2 and x.stride(1) == 1:
        return x
    if x.is_contiguous():
        return x.view(-1, x.shape[-1])
    if x.stride(-1) == 1 or x.shape[-1] == 1:
        try:
            return x.view(-1, x.shape[-1])
        except RuntimeError:
            pass  # no single stride from token to token
    return x.contiguous().view(-1, x.shape[-1])


def vector(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A (C,) tensor in the accumulation type, side by side in memory."""
    if value is None or (value.dtype == dtype and value.is_contiguous()):
        return value
    return value.to(dtype).contiguous()


def pointer(tensor: Tensor | None) -> int | None:
    """Its address, or null."""
    return None if tensor is None else tensor.data_ptr()


class Call:
    """A task under way; keeps the tensors alive that the library sees as addresses.

    Args:
        x: what is normalised, (..., C).
        flags: of `tasks`.
        eps: of the norm.
        groups: of GroupScaling, 0 for none.
    """

    def __init__(self, x: Tensor, flags: int, eps: float, groups: int) -> None:
        rows = rows_of(x)
        self.kept: list[Tensor | None] = [rows]
        self.dtype = accumulation_of(x)
        self.rows = rows
        task = self.task = Task()
        task.type = TYPES[x.dtype]
        task.flags = flags
        task.tokens, task.features = rows.shape
        task.x_stride = rows.stride(0)
        task.x = rows.data_ptr()
        task.groups = groups
        task.threads = torch.get_num_threads()
        task.eps = eps

    def matrix(self, name: str, value: Tensor | None) -> None:
        """Hand over an input of the shape of x."""
        if value is not None:
            rows = rows_of(value)
            self.kept.append(rows)
            setattr(self.task, name, rows.data_ptr())
            setattr(self.task, f"{name}_stride", rows.stride(0))

    def mask(self, padding_mask: Tensor | None) -> None:
        """Hand over the mask."""
        if padding_mask is not None:
            dense = padding_mask.contiguous()
            self.kept.append(dense)
            self.task.mask = dense.data_ptr()

    def vectors(self, weight: Tensor | None, bias: Tensor | None) -> None:
        """Hand over γ and β."""
        task, dtype = self.task, self.dtype
        if weight is not None:
            weight = vector(weight, dtype)
            self.kept.append(weight)
            task.weight = pointer(weight)
        if bias is not None:
            bias = vector(bias, dtype)
            self.kept.append(bias)
            task.bias = pointer(bias)

    def statistic(self, name: str, value: Tensor | None) -> None:
        """Hand over a (C,) statistic."""
        if value is not None:
            value = vector(value, self.dtype)
            self.kept.append(value)
            setattr(self.task, name, pointer(value))

    def empty(self, *shape: int) -> Tensor:
        """An output in the accumulation type."""
        return torch.empty(shape, dtype=self.dtype)
