"""Split of tensors into tiles and programs: all sizes are chosen here, none is autotuned.

Limits are queried from the device, never inferred from its name or generation.

Small norms are bound by the host. Plans and the programs that Triton has compiled are therefore
cached: Triton's own launch works out at every call which program to use, which takes four times as
long as the start itself.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from powernorm.ops.arrays import accumulation_dtype
from powernorm.ops.kernels.errors import KernelError

COLUMNS = 128
"""Features of a program that does not own whole rows: 256 bytes of bfloat16."""

TILE = 2048
"""Elements of a tile: 16 for each of 128 threads."""

THREADS = 128
"""Number of threads of the smallest program."""

BYTES = 64
"""Bytes of a tile per thread: 16 registers, which leaves room for more tiles, sums and vectors."""

MOST_BYTES = 128
"""The same for rows that need more: half of the 64 registers that each of 1,024 threads has."""

SCRATCH = 32
"""Largest observed shared memory per thread in which the compiler rearranges a tile, in bytes."""


@dataclass(frozen=True)
class DeviceLimits:
    """Resources of a device that one program may use."""

    processors: int
    """Number of multiprocessors (compute units), which work in parallel."""
    shared_memory: int
    """Shared memory of one program in bytes; a multiprocessor has hardly more."""
    warp_size: int
    """Number of threads in lockstep: 32, on many AMD GPUs 64."""
    max_threads: int
    """Largest number of threads in a program."""
    fetches_ahead: bool
    """Whether tiles can be copied to shared memory asynchronously during computation."""


_KEYS: Final[dict[tuple[tuple[str, Any], ...], int]] = {}


def make_plan(grid: tuple[int, int], constants: dict[str, Any]) -> Plan:
    """Return the plan of a grid of programs with these constants."""
    key = _KEYS.setdefault(tuple(constants.items()), len(_KEYS))
    return Plan((*grid, 1), constants, key)


class TokenRows(NamedTuple):
    """A tensor as (tokens, C), features next to each other."""

    data: Tensor
    stride: int


class Plan(NamedTuple):
    """Grid of programs and the constants that they are compiled for."""

    grid: tuple[int, int, int]
    constants: dict[str, Any]
    """Sizes that every program over tiles takes, and the launch options."""
    key: int
    """A number that is equal for equal constants, which take longer to compare."""

    @property
    def programs(self) -> int:
        """Number of parts that a sum over all rows has."""
        return self.grid[0]


def rows_of(x: Tensor) -> TokenRows:
    """Return the tensor as rows; copy it only if no stride can express them."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1 and rows.shape[1] > 1:
        rows = rows.contiguous()
    return TokenRows(rows, rows.stride(0))


def optional_rows(x: Tensor | None) -> TokenRows | tuple[None, int]:
    """Return `rows_of` of a tensor, or (None, 0) if there is none."""
    return (None, 0) if x is None else rows_of(x)


def vector(x: Tensor | None) -> Tensor | None:
    """Return a per-feature array or a saved tensor as the programs read it: contiguous."""
    return None if x is None else x.contiguous()


def mask_rows(padding_mask: Tensor | None) -> Tensor | None:
    """Return the mask as one contiguous row of tokens."""
    return None if padding_mask is None else padding_mask.reshape(-1).contiguous()


def like(x: Tensor) -> Tensor:
    """Return an uninitialized contiguous tensor of the same shape and type."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def accumulators(x: Tensor, *shape: int) -> Tensor:
    """Return an uninitialized tensor in the accumulation type."""
    return torch.empty(shape, dtype=accumulation_dtype(x), device=x.device)


def scales_for(x: Tensor, tokens: int, groups: int) -> Tensor | None:
    """Return uninitialized memory for GroupScaling's factors, None without groups."""
    return accumulators(x, tokens, groups) if groups else None


@lru_cache
def limits(device: torch.device) -> DeviceLimits:
    """Query the device's limits; the interpreter has none, so any numbers will do."""
    if device.type == "cpu":
        return DeviceLimits(1, 2**17, 32, 1024, True)
    properties = torch.cuda.get_device_properties(device)
    is_amd = torch.version.hip is not None
    return DeviceLimits(
        processors=properties.multi_processor_count,
        # NVIDIA allows more than the default of 48 KB on request, as Triton does. torch for ROCm
        # has no such number: all shared memory is available there anyway.
        shared_memory=getattr(
            properties, "shared_memory_per_block_optin", properties.shared_memory_per_block
        ),
        warp_size=properties.warp_size,
        max_threads=getattr(properties, "max_threads_per_block", 1024),
        # From compute capability 8.0. Elsewhere Triton keeps early tiles in registers, if at all.
        fetches_ahead=not is_amd and properties.major >= 8,
    )


def plan(x: Tensor, tokens: int, groups: int, streams: int, per_processor: int) -> Plan:
    """Split (tokens, C) into tiles of `TILE` elements for a fixed set of programs.

    A thread holds `BYTES` of a tile, and the program fetches up to two tiles meanwhile; rows wider
    than a tile take more threads, up to the device's limit. As many programs as fit at once loop
    over all tiles in parallel, so that each leaves one part of every sum. Without groups a program
    owns `COLUMNS` features, which keeps those parts few; with groups it owns whole rows.

    Args:
        x: the tensor to split; gives C, type and device.
        tokens: number of rows.
        groups: groups of features that a program must own whole; 0 for none.
        streams: tensors read in a tile.
        per_processor: programs of 128 threads per multiprocessor that their registers allow.

    Raises:
        KernelError: no program on this device can hold a row.
    """
    features, dtype = x.shape[-1], x.dtype
    is_interpreted = x.device.type == "cpu"
    return _plan(
        limits(x.device), is_interpreted, dtype, features, tokens, groups, streams, per_processor
    )


@lru_cache(4096)
def _plan(
    device: DeviceLimits,
    is_interpreted: bool,
    dtype: torch.dtype,
    features: int,
    tokens: int,
    groups: int,
    streams: int,
    per_processor: int,
) -> Plan:
    size = features // max(groups, 1)
    block_g = _power_of_2(max(groups, 1))
    block_s = _power_of_2(size)
    if not groups:
        block_s = min(block_s, COLUMNS)
    width = block_g * block_s
    held_bytes = 8 if dtype == torch.float64 else 4
    if width * held_bytes > MOST_BYTES * device.max_threads:
        raise KernelError(_too_wide(dtype, features, groups, device), is_general=False)
    # The interpreter's cost is per tile, not per element: use few rows only to get several tiles.
    block_r = 8 if is_interpreted else max(TILE // width, 1)
    elements = block_r * width
    threads = min(max(elements * held_bytes // BYTES, THREADS), device.max_threads)
    fitting = max(per_processor * THREADS / threads, 1)
    stages, fitting = _stages(device, elements * dtype.itemsize * streams, threads, fitting)
    columns = _ceil_divide(size, block_s)
    tiles = _ceil_divide(tokens, block_r)
    most = max(int(device.processors * fitting) // columns, 1)
    # Programs with equally many tiles: none runs alone at the end.
    programs = _ceil_divide(tiles, _ceil_divide(tiles, most)) if tiles else 1
    return make_plan(
        (programs, columns),
        {
            "GROUPS": groups,
            "FEATURES": features,
            "SIZE": size,
            "ACC": tl.float64 if dtype == torch.float64 else tl.float32,
            "BLOCK_R": block_r,
            "BLOCK_G": block_g,
            "BLOCK_S": block_s,
            "STAGES": stages,
            "num_warps": max(threads // device.warp_size, 1),
            "enable_fp_fusion": True,
        },
    )


def _power_of_2(number: int) -> int:
    """Return the smallest power of 2 that is at least a number."""
    return 1 << max(number - 1, 0).bit_length()


def _ceil_divide(a: int, b: int) -> int:
    return -(-a // b)


def _too_wide(dtype: torch.dtype, features: int, groups: int, device: DeviceLimits) -> str:
    most = MOST_BYTES * device.max_threads // (8 if dtype == torch.float64 else 4)
    parts = "1 group" if groups == 1 else f"{groups} groups"
    return (
        f"a row of {features} features in {parts} is more than the registers of one program "
        f"hold on this device (at most {most}, group size and number rounded up to powers of 2, "
        f"of {str(dtype).removeprefix('torch.')}), so use narrower rows"
    )


def _stages(
    device: DeviceLimits, tile_bytes: int, threads: int, fitting: float
) -> tuple[int, float]:
    """Return the pipeline's depth (prefetched tiles plus one) and the programs that then fit.

    One prefetched tile helps more than another program; a second one does not.

    Args:
        device: its limits.
        tile_bytes: bytes of all tensors read in a tile.
        threads: threads of a program.
        fitting: programs per multiprocessor that their registers allow.
    """
    if not device.fetches_ahead:
        return 1, fitting
    scratch = SCRATCH * threads + 1024
    for stages in (3, 2):
        if ((stages - 1) * tile_bytes + scratch) * math.ceil(fitting) <= device.shared_memory:
            return stages, fitting
    ahead = device.shared_memory // (tile_bytes + scratch)
    return (2, min(fitting, ahead)) if ahead else (1, fitting)


@lru_cache(4096)
def finishing_plan(features: int, programs: int) -> Plan:
    """Plan the programs that add the parts of a sum: all parts of 8 features (a sector) each."""
    block_f = 8
    block_p = _power_of_2(programs)
    constants = {
        "FEATURES": features,
        "BLOCK_P": block_p,
        "BLOCK_F": block_f,
        "num_warps": min(max(block_p * block_f // 512, 4), 16),
        "enable_fp_fusion": True,
    }
    return make_plan((_ceil_divide(features, block_f), 1), constants)


@lru_cache
def vector_plan(features: int) -> Plan:
    """Plan one program over the features of a few vectors."""
    block = min(_power_of_2(features), 2048)
    constants = {
        "FEATURES": features,
        "BLOCK_F": block,
        "num_warps": min(max(block // 256, 4), 8),
        "enable_fp_fusion": True,
    }
    return make_plan((1, 1), constants)


_compiled: Final[dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]]] = {}
"""(program, values of its constants in order) by everything that Triton specializes on."""


def launch(kernel: Any, plan: Plan, device: torch.device, *args: Any, **constants: Any) -> None:
    """Start a kernel on the tensors' device, which need not be the current one.

    Args:
        kernel: takes the arguments, then constants.
        plan: gives the grid, constants and options.
        device: device of the tensors.
        args: tensors, numbers and None.
        constants: further ones.

    Raises:
        KernelError: the kernel could not be compiled or started.
        RuntimeError: the device is out of memory.
    """
    try:
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                _start(kernel, plan, device, args, constants)
        else:
            _start(kernel, plan, device, args, constants)
    except Exception as error:
        if "out of memory" in str(error):
            raise  # eager torch would need even more
        # Triton compiles at the first launch and raises its tools' errors, from CalledProcessError
        # to AssertionError.
        reason = _reason(kernel, error)
        raise KernelError(reason, not isinstance(error, OutOfResources)) from error


def _start(
    kernel: Any, plan: Plan, device: torch.device, args: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    key = (id(kernel), device.index, plan.key, *constants.values(), *map(_specialization, args))
    found = _compiled.get(key)
    if found is not None:
        program, values = found
        program[plan.grid](*args, *values)
        return
    # The interpreter returns None, because it compiles nothing.
    program = kernel[plan.grid](*args, **constants, **plan.constants)
    if program is not None:
        given = {**constants, **plan.constants}
        names = list(inspect.signature(kernel.fn).parameters)[len(args) :]
        _compiled[key] = program, tuple(given[name] for name in names)


def _specialization(value: Any) -> Any:
    """Return the properties of an argument that Triton specializes on, or more."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16
    if isinstance(value, int):
        return value == 1, value % 16, value >> 31
    return float


def _reason(kernel: Any, error: Exception) -> str:
    """Return one line with the cause of the failure and a fix."""
    if isinstance(error, OutOfResources):
        return (
            f"Triton's {kernel.__name__} takes {error.required} of {error.name} for this type and "
            f"width and this device has {error.limit}, so use narrower rows"
        )
    if "Failed to find C compiler" in str(error):
        return "Triton finds no C compiler, so install gcc or clang, or name one in CC"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # The last line of Triton's own errors has the cause, after the source.
    said = f"{type(error).__name__}: {lines[-1][:160]}" if lines else type(error).__name__
    return (
        f"Triton cannot run {kernel.__name__} on this machine ({said}), so check that its "
        "version, the driver and the C compiler fit together"
    )
