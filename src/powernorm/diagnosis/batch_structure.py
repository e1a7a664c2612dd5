"""Batches that a model can be shown one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from powernorm.errors import InputError


def checked(batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """The batches with their numbers, from 0.

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
