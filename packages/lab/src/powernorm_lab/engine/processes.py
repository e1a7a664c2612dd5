"""The processes of a distributed training: ranks and collective operations.

Processes are started by `torchrun`, which `powernorm compare --devices N` calls. All of them run
the same comparison, and the first one writes the files.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from powernorm.errors import InputError, RepeatedInputError

TIMEOUT: Final = timedelta(hours=2)
"""Timeout of collective operations, which wait for data; the launcher detects lost processes."""

_T = TypeVar("_T")


def rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_processes() -> int:
    """Return the number of processes over all machines."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Return whether this process writes the files."""
    return rank() == 0


def is_first_process() -> bool:
    """Return whether this is the first of the processes that `torchrun` started or will join."""
    return is_main() if dist.is_initialized() else os.environ.get("RANK", "0") == "0"


def are_several() -> bool:
    """Return whether `torchrun` started several processes, joined already or not."""
    return dist.is_torchelastic_launched() and int(os.environ.get("WORLD_SIZE", "1")) > 1


def local_rank() -> int:
    """Return the number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", rank()))


@contextmanager
def process_group(device_type: str) -> Iterator[None]:
    """Join the processes that `torchrun` started; do nothing without it or if they are joined.

    Args:
        device_type: `cuda` for NCCL with gloo for CPU tensors, `cpu` for gloo alone.
    """
    if dist.is_initialized() or not dist.is_torchelastic_launched():
        yield
        return
    if device_type == "cuda":
        torch.cuda.set_device(local_rank())
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def refuse(message: str) -> NoReturn:
    """Raise an error that all processes have found; only the first one prints the message.

    Raises:
        InputError: always.
    """
    raise InputError(message) if is_main() else RepeatedInputError(message)


def replicated(module: nn.Module) -> nn.Module:
    """Return a module whose backward averages the gradients over the processes.

    It is the module itself in a single process.
    """
    if num_processes() == 1:
        return module
    with warnings.catch_warnings():
        # The successor of `broadcast_buffers` copies the first process's buffers at construction.
        # Synchronized statistics are equal in all processes; local ones stay local.
        warnings.filterwarnings("ignore", message=r".*`broadcast_buffers` is deprecated.*")
        return DistributedDataParallel(module, broadcast_buffers=False)


def _barrier() -> None:
    """Wait until all processes are here."""
    if num_processes() > 1:
        gather(None)


def gather(value: _T) -> list[_T]:
    """Return the values of all processes, by rank."""
    if num_processes() == 1:
        return [value]
    values: list[Any] = [None] * num_processes()
    dist.all_gather_object(values, value)
    return values


def on_main(function: Callable[[], _T]) -> _T:
    """Call a function in the first process only, and return its result in all processes.

    Raises:
        InputError: in all processes, if the function raised one.
    """
    if num_processes() == 1:
        return function()
    outcome: list[Any] = [None, None]
    if is_main():
        try:
            outcome = [function(), None]
        except InputError as error:
            outcome = [None, str(error)]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        refuse(outcome[1])
    result: _T = outcome[0]
    return result


def locally_first(function: Callable[[], _T]) -> _T:
    """Call a function in all processes, first in one of each machine, which fills the cache."""
    if num_processes() == 1:
        return function()
    is_first = local_rank() == 0
    result = function() if is_first else None
    _barrier()
    return result if is_first else function()  # type: ignore[return-value]


def own_device(device: torch.device) -> torch.device:
    """Return the GPU of this process if several train together, else the given device.

    A grid chooses its device before the process group exists.
    """
    if device.type != "cuda" or num_processes() == 1:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def any_process(*flags: bool) -> list[bool]:
    """Return for each flag whether it is set in any process; all processes must call this."""
    if num_processes() == 1:
        return list(flags)
    raised = torch.tensor([int(flag) for flag in flags], device=_device())
    dist.all_reduce(raised, dist.ReduceOp.MAX)
    return [bool(flag) for flag in raised.tolist()]


def _device() -> torch.device:
    """Return the device of exchanged tensors: the GPU if NCCL is the only backend."""
    has_cpu = "gloo" in str(dist.get_backend_config()) or dist.get_backend() == "mpi"
    return torch.device("cpu" if has_cpu else "cuda")


def summed(values: Sequence[float]) -> list[float]:
    """Return sums over all processes, in float64."""
    if num_processes() == 1:
        return list(values)
    return [sum(column) for column in zip(*gather(list(values)), strict=True)]
