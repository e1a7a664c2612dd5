"""A model and its batches on another device, one batch at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from powernorm.errors import InputError

Device = str | torch.device
"""Name of a device as torch writes it, or `auto`: a GPU if there is one, else the CPU."""


def checked_device(device: Device) -> torch.device:
    """Return a device that exists.

    Raises:
        InputError: this machine has no such device, or the name is unknown.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"device is {device!r}, expected auto, cpu, cuda or cuda:1, or another that torch knows"
        ) from error
    if not _is_there(found):
        number = torch.cuda.device_count()
        raise InputError(
            f"device is {str(found)!r}, which this machine does not have (torch finds "
            f"{number or 'no'} CUDA {'device' if number == 1 else 'devices'}): use auto or cpu"
        )
    return found


def _is_there(device: torch.device) -> bool:
    if device.type == "cuda":  # checked without a call, as a failed call may break the process
        return torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
    try:
        torch.ones(1, device=device).tolist()
    except Exception:  # each backend raises its own errors
        return False
    return True


@lru_cache
def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64, which MPS does not."""
    try:
        torch.ones(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


@contextmanager
def placed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put a model on a device in the block, and move it back afterwards, also after an exception.

    Raises:
        InputError: the model is spread over several devices.
    """
    before = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(before) > 1:
        raise InputError(
            f"{type(model).__name__} is on {' and '.join(sorted(map(str, before)))}: leave out "
            "device, so that it stays there"
        )
    try:
        model.to(device)
        yield
    finally:
        for place in before:
            model.to(place)


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch on a device: objects with a `to`, also in mappings, tuples and lists."""
    if hasattr(batch, "to"):
        # A copy: `to` of Hugging Face's batches changes the batch itself.
        return (batch if isinstance(batch, Tensor) else copy(batch)).to(device)
    if isinstance(batch, Mapping):
        return {name: moved(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [moved(value, device) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


class MovedBatches:
    """Batches that are moved to a device when they are used.

    Args:
        batches: if they can be iterated over several times, so can these.
        device: the device.
    """

    def __init__(self, batches: Iterable[Any], device: torch.device) -> None:
        self._batches = batches
        self._device = device

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches, each moved."""
        for batch in self._batches:
            yield moved(batch, self._device)
