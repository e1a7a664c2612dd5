"""Running a model on batches: how it is called, and what batches have to be."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.norms.arguments import shown

Forward = Callable[[nn.Module, Any], object]
"""Runs a model on one batch; what it returns is not used."""

Progress = Callable[[int, int], None]
"""Is told how much is done and how much there is, batches or passes; 0 while it is not known."""


def call_model(model: nn.Module, batch: Any) -> object:
    """`model(**batch)` for a mapping, `model(*batch)` for a tuple or list, else `model(batch)`."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


def check_batches(batches: object) -> None:
    """Raise unless this can be gone through batch by batch.

    Raises:
        InputError: nothing that can be iterated over, or what looks like one batch or a path.
    """
    # Not by `iter(batches)`: that starts a DataLoader's workers and draws random numbers.
    repeats = any(hasattr(type(batches), name) for name in ("__iter__", "__getitem__"))
    if not repeats or isinstance(batches, str | bytes | Mapping):
        raise InputError(
            f"batches is {shown(batches)}, expected a DataLoader or a list of batches; put a "
            "single batch into a list: [batch]"
        )


def check_repeatable(batches: Iterable[Any], passes: str) -> None:
    """Raise where the batches are gone after one pass.

    Args:
        batches: to be gone through several times.
        passes: how many passes are needed, for the message.

    Raises:
        InputError: an iterator, or no batches at all, see `check_batches`.
    """
    check_batches(batches)
    if isinstance(batches, Iterator) and iter(batches) is batches:
        raise InputError(
            f"batches is a {type(batches).__name__}, which can be gone through only once; {passes} "
            "passes are needed: give a list or a DataLoader"
        )


def numbered(batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Yield the batches with their numbers, from 0.

    Raises:
        InputError: there is none, or one is made in another way than the first.
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
    """Give the generators of torch (CPU), Python and NumPy their state back afterwards.

    A shuffling loader, or data that are augmented at random, so give the same batches each time.
    NumPy is looked at only where somebody has imported it. A generator that belongs to the data
    itself, as `DataLoader(generator=…)`, goes on.
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
