"""Buffers of the norms with batch statistics: their types, and their keys in state dicts.

One of them, `OPTIONAL_BUFFER`, is in a state dict only if it is not 0. A norm's keys are then those
of torch's BatchNorm, so that each can load the other's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor

from powernorm.ops.torch_private import is_fake

if TYPE_CHECKING:
    from powernorm.norms.stateful import StatefulNorm

OPTIONAL_BUFFER: Final = "num_nonfinite_batches"

_NARROW: Final = (torch.float16, torch.bfloat16)


def settle_count(norm: StatefulNorm) -> None:
    """Give the optional buffer a value and decide whether loaders that list buffers expect it.

    Loaders that fill a model on the meta device key by key, such as Hugging Face's, leave missing
    keys on that device, or fill them with any value if they are not persistent. Others, such as
    Lightning's for FSDP2, require a key for each persistent buffer.
    """
    count, tracked = norm.num_nonfinite_batches, norm.num_batches_tracked
    if count.is_meta and not tracked.is_meta:
        norm.num_nonfinite_batches = count = torch.zeros_like(count, device=tracked.device)
    if count.is_meta:
        norm._non_persistent_buffers_set.discard(OPTIONAL_BUFFER)
    else:
        norm._non_persistent_buffers_set.add(OPTIONAL_BUFFER)


@contextmanager
def converted_buffers(norm: StatefulNorm) -> Iterator[None]:
    """Let tensors be moved or cast in the block, but keep buffers at least as wide as float32.

    An average with momentum 0.01 stalls in bfloat16.
    """
    settle_count(norm)
    wide = {
        name: buffer
        for name, buffer in norm._buffers.items()
        if buffer is not None and buffer.is_floating_point()
    }
    yield
    for name, before in wide.items():
        after = cast(Tensor, norm._buffers[name])
        if after.dtype in _NARROW:
            norm._buffers[name] = (
                torch.empty_like(before, device=after.device, dtype=torch.float32)
                if before.is_meta or after.is_meta
                else before.to(after.device, torch.float32)
            )
    settle_count(norm)


def save_count(norm: StatefulNorm, destination: Any, prefix: str, keep_vars: bool) -> None:
    """Put the optional buffer into a state dict, or remove it if it is 0."""
    key, count = prefix + OPTIONAL_BUFFER, norm.num_nonfinite_batches
    destination.pop(key, None)
    if has_value(count) and int(count) > 0:
        destination[key] = count if keep_vars else count.detach()


@contextmanager
def loaded_buffers(
    norm: StatefulNorm,
    state_dict: dict[str, Tensor],
    prefix: str,
    local_metadata: Any,
    missing_keys: list[str],
) -> Iterator[None]:
    """Let torch load a state dict in the block, then fix the optional buffer and the types.

    The arguments are those of `torch.nn.Module._load_from_state_dict`.
    """
    count = _take_count(state_dict, prefix)
    yield
    if prefix + OPTIONAL_BUFFER in missing_keys:
        missing_keys.remove(prefix + OPTIONAL_BUFFER)
    if count is not None and local_metadata.get("assign_to_params_buffers", False):
        norm.num_nonfinite_batches = count
    elif count is not None:
        with torch.no_grad():
            norm.num_nonfinite_batches.copy_(count)
    settle_count(norm)
    for name, buffer in norm._buffers.items():  # assign=True loads narrow types as they are
        if buffer is not None and buffer.dtype in _NARROW:
            norm._buffers[name] = buffer.float()


def _take_count(state_dict: dict[str, Tensor], prefix: str) -> Tensor | None:
    """Take the optional buffer out of a state dict; it is 0 for a counter without it."""
    tracked = state_dict.get(prefix + "num_batches_tracked")
    count = state_dict.pop(prefix + OPTIONAL_BUFFER, None)
    if count is None and tracked is not None:
        count = torch.zeros((), dtype=torch.long, device=tracked.device)
    return count


def is_optional_key(name: str) -> bool:
    """Return whether a key of a state dict may be missing: the optional counter, then 0."""
    return name.rpartition(".")[2] == OPTIONAL_BUFFER


def has_value(count: Tensor) -> bool:
    """Return whether a counter can be read: meta and fake tensors only have shapes."""
    return not (count.is_meta or is_fake(count))


def rename_key(
    state_dict: dict[str, Tensor], old: str, new: str, shape: tuple[int, ...], factor: float = 1.0
) -> None:
    """Move an entry to another key, shape and scale, if the old key exists."""
    if old in state_dict and state_dict[old].numel() == math.prod(shape):
        value = state_dict.pop(old)
        state_dict[new] = value.reshape(shape) * factor if factor != 1.0 else value.reshape(shape)
