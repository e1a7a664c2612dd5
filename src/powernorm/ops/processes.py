"""Collectives over the processes of a data-parallel job.

The ops take the group's *name*, a string, because a custom operator cannot take a ProcessGroup.
The empty name means one process: nothing is exchanged.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from powernorm.errors import InputError
from powernorm.ops.torch_private import resolve_process_group


def group_name_of(group: dist.ProcessGroup | None, sync: bool) -> str:
    """Return the name by which the ops find a process group, `""` if nothing is exchanged.

    Args:
        group: a process group, or None for the default group.
        sync: False keeps statistics local.
    """
    if not sync or not dist.is_available() or not dist.is_initialized():
        return ""
    chosen = dist.group.WORLD if group is None else group
    if chosen is None or chosen.size() == 1:
        return ""
    return str(chosen.group_name)


def all_reduce_sum(tensor: Tensor, group_name: str) -> Tensor:
    """Return the sum of a tensor over all processes of a group, as a new tensor."""
    if not group_name:
        return tensor
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=_resolve(group_name))
    return total


def all_gather(tensor: Tensor, group_name: str) -> Tensor:
    """Return the tensors of all processes of a group, (processes, *shape), by rank."""
    if not group_name:
        return tensor.unsqueeze(0)
    group = _resolve(group_name)
    # The name before torch 2.13, which warns about it.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    # Flat, because gloo requires outputs with as many dimensions as the input.
    parts = tensor.new_empty(group.size() * tensor.numel())
    gather(parts, tensor.reshape(-1), group=group)
    return parts.view(-1, *tensor.shape)


def _resolve(group_name: str) -> dist.ProcessGroup:
    if resolve_process_group is not None:
        return cast(dist.ProcessGroup, resolve_process_group(group_name))
    world = dist.group.WORLD
    if world is None or str(world.group_name) != group_name:
        raise InputError(
            f"torch {torch.__version__} does not find the process group {group_name!r} by its "
            "name: construct the norm with process_group=None, for the default group"
        )
    return world
