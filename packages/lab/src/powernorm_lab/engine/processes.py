"""The processes of a training: which one this is, and what they tell each other.

Processes are started from outside (`torchrun`, or `powernorm compare --devices N`, which calls it);
every one runs the same comparison, and the first one writes the files.
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
"""So long the others wait while one prepares the data; lost ones are the launcher's business."""

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
    """Join the processes that `torchrun` started; without it, or where they are joined, nothing.

    Args:
        device_type: `cuda` for NCCL (and gloo beside it), `cpu` for gloo.
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
    """End all processes by what all of them have found; the first one says it.

    Raises:
        InputError: always.
    """
    raise InputError(message) if is_main() else RepeatedInputError(message)


def replicated(module: nn.Module) -> nn.Module:
    """Return a module whose backward gives every process the mean of the gradients of all.

    The module itself where the process is alone.
    """
    if num_processes() == 1:
        return module
    with warnings.catch_warnings():
        # The successor of `broadcast_buffers` copies the first process's buffers at the beginning.
        # Statistics that processes share are equal in all; those of one alone stay its own.
        warnings.filterwarnings("ignore", message=r".*`broadcast_buffers` is deprecated.*")
        return DistributedDataParallel(module, broadcast_buffers=False)


def _barrier() -> None:
    """Wait until all processes are here."""
    if num_processes() > 1:
        gather(None)


def gather(value: _T) -> list[_T]:
    """Return what every process has, by rank."""
    if num_processes() == 1:
        return [value]
    values: list[Any] = [None] * num_processes()
    dist.all_gather_object(values, value)
    return values


def on_main(function: Callable[[], _T]) -> _T:
    """Call a function in the first process only and return in all what it gave.

    Raises:
        InputError: in all processes, where it raised one there.
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
    """Call a function in all processes, in one of each machine first: the others find its cache."""
    if num_processes() == 1:
        return function()
    is_first = local_rank() == 0
    result = function() if is_first else None
    _barrier()
    return result if is_first else function()  # type: ignore[return-value]


def own_device(device: torch.device) -> torch.device:
    """Return the GPU of this process where several train together, else the device that is given.

    A grid chooses its device before the processes have found each other.
    """
    if device.type != "cuda" or num_processes() == 1:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def any_process(*flags: bool) -> list[bool]:
    """Return of each flag whether it is set in any of the processes, all of which call this."""
    if num_processes() == 1:
        return list(flags)
    raised = torch.tensor([int(flag) for flag in flags], device=_device())
    dist.all_reduce(raised, dist.ReduceOp.MAX)
    return [bool(flag) for flag in raised.tolist()]


def _device() -> torch.device:
    """Return the device of what processes exchange: with NCCL alone the GPU."""
    has_cpu = "gloo" in str(dist.get_backend_config()) or dist.get_backend() == "mpi"
    return torch.device("cpu" if has_cpu else "cuda")


def summed(values: Sequence[float]) -> list[float]:
    """Return sums over all processes, in float64."""
    if num_processes() == 1:
        return list(values)
    return [sum(column) for column in zip(*gather(list(values)), strict=True)]
