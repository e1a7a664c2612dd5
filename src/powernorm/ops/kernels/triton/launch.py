"""How tensors are cut into tiles and programs: all sizes are chosen here, none is tuned."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from powernorm.ops.arrays import accumulation_dtype

COLUMNS = 128
"""Features of a program that need not own whole rows: 256 bytes of bfloat16."""

TILE = 2048
"""Elements of a tile: 16 for each of 128 threads."""

PIPELINE_BYTES = 65536
"""Shared memory for tiles on their way in, per program of four warps."""


class Rows(NamedTuple):
    """A tensor as (tokens, C), features next to each other."""

    data: Tensor
    stride: int


class Plan(NamedTuple):
    """The grid of programs, and what they are compiled for."""

    grid: tuple[int, int]
    constants: dict[str, Any]
    """Sizes that every program over tiles takes, with the launch options."""

    @property
    def programs(self) -> int:
        """How many parts a sum over all rows has."""
        return self.grid[0]


def rows_of(x: Tensor) -> Rows:
    """The tensor as rows; copied only where no stride can say it."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1 and rows.shape[1] > 1:
        rows = rows.contiguous()
    return Rows(rows, rows.stride(0))


def optional_rows(x: Tensor | None) -> Rows | tuple[None, int]:
    """The same of a tensor that may be absent."""
    return (None, 0) if x is None else rows_of(x)


def vector(x: Tensor | None) -> Tensor | None:
    """A per-feature array as the programs read it."""
    return None if x is None else x.contiguous()


def mask_rows(padding_mask: Tensor | None) -> Tensor | None:
    """The mask as one contiguous row of tokens."""
    return None if padding_mask is None else padding_mask.reshape(-1).contiguous()


def like(x: Tensor) -> Tensor:
    """An uninitialized contiguous tensor of the same shape and type."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def accumulators(x: Tensor, *shape: int) -> Tensor:
    """An uninitialized tensor in the accumulation type."""
    return torch.empty(shape, dtype=accumulation_dtype(x), device=x.device)


def scales_for(x: Tensor, tokens: int, groups: int) -> Tensor | None:
    """Return room for GroupScaling's factors, None without groups."""
    return accumulators(x, tokens, groups) if groups else None


@lru_cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; one under the interpreter."""
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def plan(x: Tensor, tokens: int, groups: int, streams: int, per_processor: int) -> Plan:
    """Cut (tokens, C) into tiles of `TILE` elements and share them among a fixed set of programs.

    A program of 128 threads holds 16 elements per thread and fetches the next two tiles meanwhile;
    rows wider than a tile take more threads, up to 1024. As many programs as fit at once walk over
    all tiles side by side, so that each leaves one part of every sum. Without groups a program owns
    `COLUMNS` features, which keeps those parts few; with groups whole rows.

    Args:
        x: what is cut; gives C, type and device.
        tokens: number of rows.
        groups: groups of features that a program must own whole; 0 for none.
        streams: tensors read in a tile.
        per_processor: programs of 128 threads that fit one multiprocessor.
    """
    features = x.shape[-1]
    interpreted = x.device.type == "cpu"
    size = features // max(groups, 1)
    block_g = triton.next_power_of_2(max(groups, 1))
    block_s = triton.next_power_of_2(size)
    if not groups:
        block_s = min(block_s, COLUMNS)
    width = block_g * block_s
    # The interpreter's cost is per tile, not per element: few rows only to have several tiles.
    block_r = 8 if interpreted else max(TILE // width, 1)
    warps = min(max(block_r * width // 512, 4), 32)
    columns = triton.cdiv(size, block_s)
    tiles = triton.cdiv(tokens, block_r)
    most = max(processors(x.device) * per_processor * 4 // (warps * columns), 1)
    # Programs with equally many tiles: none walks alone at the end.
    programs = triton.cdiv(tiles, triton.cdiv(tiles, most)) if tiles else 1
    return Plan(
        (programs, columns),
        {
            "GROUPS": groups,
            "FEATURES": features,
            "SIZE": size,
            "ACC": tl.float64 if x.dtype == torch.float64 else tl.float32,
            "BLOCK_R": block_r,
            "BLOCK_G": block_g,
            "BLOCK_S": block_s,
            "STAGES": _stages(block_r * width * x.element_size() * streams, warps),
            "num_warps": warps,
            "enable_fp_fusion": True,
        },
    )


def _stages(tile_bytes: int, warps: int) -> int:
    """Depth of the pipeline: tiles that are fetched ahead, and the one in use."""
    room = min(PIPELINE_BYTES * warps // 4, 3 * PIPELINE_BYTES)
    return min(1 + room // tile_bytes, 3)


def finishing_plan(features: int, programs: int) -> Plan:
    """Programs that add the parts of a sum: 8 features (a sector) each, all parts at once."""
    block_f = 8
    block_p = triton.next_power_of_2(programs)
    constants = {
        "FEATURES": features,
        "BLOCK_P": block_p,
        "BLOCK_F": block_f,
        "num_warps": min(max(block_p * block_f // 512, 4), 16),
        "enable_fp_fusion": True,
    }
    return Plan((triton.cdiv(features, block_f), 1), constants)


def launch(kernel: Any, plan: Plan, device: torch.device, *args: Any, **constants: Any) -> None:
    """Start a kernel on the tensors' device, which need not be the current one."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[plan.grid](*args, **constants, **plan.constants)
    else:
        kernel[plan.grid](*args, **constants, **plan.constants)
