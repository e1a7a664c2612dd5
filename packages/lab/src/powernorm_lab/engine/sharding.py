"""Batches divided among several processes, and a check that the processes' weights are equal."""

import copy
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data.distributed import DistributedSampler

from powernorm.errors import InputError
from powernorm_lab.engine.processes import gather, num_processes, rank, refuse

_Batch = TypeVar("_Batch")
_FIX: Final = (
    "give tensors with one row for each example, or use run.steps(…, shard=False) with separate "
    "batches in each process"
)


def is_sharded(batches: Any) -> bool:
    """Return whether a loader already gives each process different batches."""
    sampler = getattr(batches, "sampler", None)
    inner = getattr(getattr(batches, "batch_sampler", None), "sampler", None)
    return isinstance(sampler, DistributedSampler) or isinstance(inner, DistributedSampler)


def shards(batches: Iterator[_Batch]) -> Iterator[_Batch]:
    """Yield this process's rows of every batch; all processes iterate the same batches.

    Raises:
        InputError: a batch cannot be divided, or the processes have different ones.
    """
    for number, batch in enumerate(batches):
        if number == 0:
            # If the batches differed between processes, dividing them would lose rows.
            found = gather([_summary(tensor) for tensor in _tensors(batch)])
            if any(one != found[0] for one in found):
                refuse(
                    "the processes have different batches, so run.steps would skip rows: give all "
                    "processes the same batches, or use run.steps(…, shard=False)"
                )
        try:
            yield shard(batch, rank(), num_processes())
        except InputError as error:
            refuse(str(error))


def shard(batch: Any, index: int, size: int) -> Any:
    """Return one part of a batch; parts differ by at most one row.

    Args:
        batch: a tensor of rows, or a mapping, list or tuple of such tensors, possibly nested.
        index: number of the part, from 0.
        size: number of parts.

    Raises:
        InputError: the batch holds other objects, tensors of different lengths, or too few rows.

    >>> shard({"x": torch.arange(5), "y": (torch.arange(5), None)}, 1, 2)
    {'x': tensor([3, 4]), 'y': (tensor([3, 4]), None)}
    """
    if isinstance(batch, Tensor) and batch.ndim:
        if len(batch) < size:
            raise InputError(
                f"a batch of {len(batch)} rows cannot be divided among {size} processes: give "
                "larger ones, or a DataLoader with drop_last=True"
            )
        return batch.tensor_split(size)[index]
    if not isinstance(batch, MutableMapping | list | tuple):
        what = "a tensor without rows" if isinstance(batch, Tensor) else f"{batch!r:.40}"
        raise InputError(f"run.steps cannot divide {what} among {size} processes: {_FIX}")
    values = list(batch.values() if isinstance(batch, MutableMapping) else batch)
    lengths = {len(value) for value in values if isinstance(value, Tensor) and value.ndim}
    if len(lengths) > 1:
        raise InputError(
            f"run.steps cannot divide a batch with tensors of {sorted(lengths)} rows among {size} "
            f"processes: {_FIX}"
        )
    parts = [None if value is None else shard(value, index, size) for value in values]
    if isinstance(batch, MutableMapping):
        divided = copy.copy(batch)
        divided.update(zip(batch, parts, strict=True))
        return divided
    kind: Any = type(batch)
    return kind(*parts) if hasattr(batch, "_fields") else kind(parts)


def check_equal_weights(modules: Iterable[nn.Module]) -> None:
    """Check that all processes have equal weights.

    Args:
        modules: modules in training; sharded weights are skipped.

    Raises:
        InputError: parameters differ, in all processes.
    """
    from torch.distributed.tensor import DTensor  # a second, which a single process saves

    named = {
        id(parameter): (name, parameter)
        for module in modules
        for name, parameter in module.named_parameters()
        if not isinstance(parameter, DTensor)
    }
    found = gather([(name, _summary(parameter)) for name, parameter in named.values()])
    differing = [
        ours[0] for ours, *others in zip(*found, strict=True) if others != [ours] * len(others)
    ]
    if differing:
        refuse(
            f"{differing[0]} differs between the {len(found)} processes, because their gradients "
            "are not averaged: call run.wrap(model) in the training instead of the model"
        )


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, MutableMapping | list | tuple):
        for value in batch.values() if isinstance(batch, MutableMapping) else batch:
            yield from _tensors(value)


def _summary(tensor: Tensor) -> tuple[Sequence[int], str]:
    """Return the shape and two sums of a tensor as a cheap hash."""
    values = tensor.detach().to(torch.float64)
    # As text, because NaN does not equal itself.
    return tuple(tensor.shape), str([values.sum().item(), values.square().sum().item()])
