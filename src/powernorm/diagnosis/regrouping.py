"""Regrouping of the same tokens into batches of other sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import index
from typing import SupportsIndex

from torch import Tensor

from powernorm.errors import InputError


class Regrouping:
    """Splits a stream of tokens into batches of several sizes and passes on their sums.

    Tokens keep their order, so a small batch is a few neighboring sequences, as it would be in
    training, and no token is in two batches of one size. Tokens left over at the end form no batch.
    Memory is one row of sums per size.

    Args:
        sizes: tokens in a batch, multiples of the smallest.
        receive: called with (size, sums over the tokens of a batch).

    Raises:
        InputError: no size, one below 2, or one that is not a multiple of the smallest.
    """

    def __init__(self, sizes: Sequence[int], receive: Callable[[int, Tensor], None]) -> None:
        self.sizes = check_sizes(sizes)
        self._unit = self.sizes[0]
        self._receive = receive
        self._gathered: dict[int, Tensor] = {}
        self._num_units = dict.fromkeys(self.sizes, 0)
        self._part: Tensor | None = None
        self._num_in_part = 0

    def add(self, terms: Tensor) -> None:
        """Add the next tokens by their terms of the sums, (tokens, …)."""
        start = self._fill_part(terms)
        whole = (terms.shape[0] - start) // self._unit * self._unit
        if whole:
            parts = terms[start : start + whole].unflatten(0, (-1, self._unit)).sum(1)
            for part in parts:
                self._finish(part)
        rest = terms[start + whole :]
        if rest.shape[0]:
            self._part, self._num_in_part = rest.sum(0), rest.shape[0]

    def _fill_part(self, terms: Tensor) -> int:
        """Complete the unit that an earlier call began; return the number of tokens used."""
        if self._part is None:
            return 0
        taken = min(self._unit - self._num_in_part, terms.shape[0])
        self._part = self._part + terms[:taken].sum(0)
        self._num_in_part += taken
        if self._num_in_part == self._unit:
            part, self._part, self._num_in_part = self._part, None, 0
            self._finish(part)
        return taken

    def _finish(self, unit: Tensor) -> None:
        for size in self.sizes:
            gathered = self._gathered.get(size)
            self._gathered[size] = unit if gathered is None else gathered + unit
            self._num_units[size] += 1
            if self._num_units[size] * self._unit == size:
                self._receive(size, self._gathered.pop(size))
                self._num_units[size] = 0


def check_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return sizes of batches that can be made from one unit, in order, each once.

    Raises:
        InputError: as in `Regrouping`.
    """
    given: object = sizes
    if not isinstance(given, Iterable) or isinstance(given, str | bytes):
        raise InputError(
            f"batch_sizes is {sizes!r}, expected numbers of tokens, such as (512, 1024)"
        )
    checked = tuple(sorted({_size(size) for size in sizes}))
    if not checked:
        raise InputError("batch_sizes is empty: give numbers of tokens, such as (512, 1024)")
    for size in checked:
        if size % checked[0]:
            raise InputError(
                f"batch_sizes has {size}, which is not a multiple of the smallest, {checked[0]}"
            )
    return checked


def _size(size: object) -> int:
    number = 0
    if not isinstance(size, bool) and isinstance(size, SupportsIndex):
        number = index(size)
    if number < 2:
        raise InputError(f"batch_sizes has {size!r}, expected numbers of tokens of at least 2")
    return number
