"""Running a model on batches: how it is called, and which batches are accepted."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.inspection.examples import mapped
from powernorm.inspection.mask_arguments import mask_by_name
from powernorm.inspection.mask_reading import is_like_a_mask
from powernorm.inspection.modules import parameters_of
from powernorm.norms.arguments import shown

Forward = Callable[[nn.Module, Any], object]
"""A function that runs a model on one batch; its return value is not used."""

Progress = Callable[[int, int], None]
"""A callback that receives (done, total) in batches or passes; total is 0 if it is unknown."""


def call_model(model: nn.Module, batch: Any) -> object:
    """Call a model on a batch.

    `model(**batch)` for a mapping, `model(*batch)` for a tuple or list, else `model(batch)`. The
    model gets copies of the tensors: some models write into their input, and a later pass needs it.

    Raises:
        InputError: labels of a batch (x, y) would become the model's mask.
    """
    if isinstance(batch, Mapping):
        return model(**{key: mapped(value, torch.clone) for key, value in batch.items()})
    if isinstance(batch, tuple | list):
        _check_pair(model, batch)
        return model(*mapped([*batch], torch.clone))
    return model(mapped(batch, torch.clone))


def _check_pair(model: nn.Module, batch: Sequence[Any]) -> None:
    """Raise an InputError if a part of a batch without names may be labels and would be a mask.

    Raises:
        InputError: says how to call the model otherwise.
    """
    names = list(parameters_of(model))
    for name, value in list(zip(names, batch, strict=False))[1:]:
        if not mask_by_name(name) or not isinstance(value, Tensor) or value.dtype == torch.bool:
            continue
        data = batch[0] if isinstance(batch[0], Tensor) and batch[0].ndim > 1 else None
        whole = 1 if value.ndim > 1 or value.is_floating_point() or data is None else data.shape[1]
        if value.is_meta or bool((value == whole).all()):
            continue  # no padding
        if not (_are_lengths(value, data) or is_like_a_mask(name, value, data)):
            raise InputError(
                f"batch[{names.index(name)}] of shape {tuple(value.shape)} would become {name} of "
                f"{type(model).__name__}, and its values do not look like a padding "
                "mask. If they are labels, give forward=lambda model, batch: model(batch[0]); "
                f"if they are a mask, give batches as dicts, {{..., {name!r}: ...}}"
            )


def _are_lengths(value: Tensor, data: Tensor | None) -> bool:
    """Return whether the values can be lengths: at least 1, and less than half of a batch padding.

    Labels usually begin at 0.
    """
    if data is None or value.shape != data.shape[:1] or value.is_floating_point():
        return False
    length = data.shape[1]
    return bool(value.min() > 0) and length / 2 < int(value.max()) <= length


def check_batches(batches: object) -> None:
    """Raise an InputError unless the argument can be iterated over batch by batch.

    Raises:
        InputError: it cannot be iterated over, or is a single batch or a path.
    """
    # Not by `iter(batches)`: that starts a DataLoader's workers and draws random numbers.
    repeats = any(hasattr(type(batches), name) for name in ("__iter__", "__getitem__"))
    if isinstance(batches, Tensor):
        raise InputError(
            f"batches is a tensor of shape {tuple(batches.shape)}, whose rows would be taken for "
            "batches: put a single batch into a list, [batch]; give list(batches) if they are"
        )
    if not repeats or isinstance(batches, str | bytes | Mapping):
        raise InputError(
            f"batches is {shown(batches)}, expected a DataLoader or a list of batches; put a "
            "single batch into a list: [batch]"
        )


def check_repeatable(batches: Iterable[Any], passes: str) -> None:
    """Raise an InputError if the batches can be iterated over only once.

    Args:
        batches: to be iterated over several times.
        passes: how many passes are needed, for the message.

    Raises:
        InputError: it is an iterator, or no iterable of batches, see `check_batches`.
    """
    check_batches(batches)
    if isinstance(batches, Iterator) and iter(batches) is batches:
        raise InputError(
            f"batches is a {type(batches).__name__}, which can be iterated over only once; "
            f"{passes} passes are needed: give a list or a DataLoader"
        )


def numbered(batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Yield the batches with their indices, from 0.

    Raises:
        InputError: there is no batch, or one has another structure than the first.
    """
    first: str | None = None
    number = -1
    for number, batch in enumerate(batches):
        structure = _structure(batch)
        first = structure if first is None else first
        if structure != first:
            raise InputError(
                f"batch {number} is {structure}, but batch 0 is {first}: give batches of one kind"
            )
        yield number, batch
    if number < 0:
        raise InputError("batches is empty; a diagnosis needs at least two batches, better dozens")


def _structure(batch: Any) -> str:
    if isinstance(batch, Tensor):
        return f"a tensor of {batch.ndim} dimensions"
    if isinstance(batch, Mapping):
        keys = ", ".join(sorted(map(str, batch)))
        return f"a {type(batch).__name__} with the keys {keys}"
    if isinstance(batch, tuple | list):
        return f"a {type(batch).__name__} of {len(batch)}"
    return f"a {type(batch).__name__}"


@contextmanager
def repeated_random_numbers() -> Iterator[None]:
    """Restore the random state of torch (CPU), Python and NumPy at the end of the block.

    A shuffling loader, or random augmentation, then yields the same batches each time. NumPy's
    state is restored only if NumPy has been imported. A generator that belongs to the data
    itself, as in `DataLoader(generator=…)`, is not restored.
    """
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
