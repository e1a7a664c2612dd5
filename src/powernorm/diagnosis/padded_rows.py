"""Rows of a padded batch: their lengths, and batches that consist of a single row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.inspection.examples import Examples
from powernorm.inspection.mask_arguments import meanings_of, named_values
from powernorm.inspection.mask_reading import padding_of
from powernorm.integrations.library_masks import Meaning

MOST_ROWS: Final = 8
"""Maximum number of rows of a batch that run alone: the shortest, the longest and some between."""


@dataclass(frozen=True)
class BatchRows:
    """The lengths of the rows of a batch.

    Args:
        lengths: valid positions of each row.
        longest: positions of the batch.
        on_left: whether padding comes first.
    """

    lengths: tuple[int, ...]
    longest: int
    on_left: bool

    @classmethod
    def of(cls, model: nn.Module, call: Examples, lengths: Any) -> BatchRows:
        """Return the rows of a batch; see `padding_check`.

        Args:
            model: model that takes the batch.
            call: the batch.
            lengths: lengths of the rows; None reads them from the batch.

        Raises:
            InputError: they cannot be read, do not fit, or leave no padding.
        """
        values = named_values(model, call.args, call.kwargs)
        if lengths is None:
            found = cls._read(model, values)
        else:
            given = [int(one) for one in lengths]
            found = cls(tuple(given), _longest(values, given), on_left=False)
        if min(found.lengths) < 1 or max(found.lengths) > found.longest:
            raise InputError(
                f"the rows have the lengths {list(found.lengths)} in a batch of {found.longest} "
                f"positions: each has to be from 1 to {found.longest}"
            )
        if min(found.lengths) == found.longest:
            raise InputError(
                f"all {len(found.lengths)} rows have {found.longest} positions, so there is "
                "no padding to check: give a batch of sequences of different lengths"
            )
        return found

    @classmethod
    def _read(cls, model: nn.Module, values: Mapping[str, Any]) -> BatchRows:
        for name, meaning in meanings_of(model, list(values)).items():
            value = values[name]
            if meaning == "lengths" and isinstance(value, Tensor | list | tuple):
                given = torch.as_tensor(value)
                if given.ndim == 1 and given.is_floating_point():  # shares of the longest
                    given = (given * _longest(values, [2] * len(given))).round()
                if given.ndim == 1:
                    counts = [int(one) for one in given]
                    return cls(tuple(counts), _longest(values, counts), on_left=False)
            elif isinstance(value, Tensor):
                padding = _padding(value, meaning)
                if padding is not None:
                    return cls._of_mask(padding, name)
        raise InputError(
            "nothing in the batch marks padding: give lengths=, the valid positions of each row, "
            "or a batch with the model's mask. If its name shows no meaning, declare it first, for "
            f"example powernorm.declare_mask('mask', 'keep'); the batch has {', '.join(values)}"
        )

    @classmethod
    def _of_mask(cls, padding: Tensor, name: str) -> BatchRows:
        lengths, size = (~padding).sum(1), padding.shape[1]
        places = torch.arange(size, device=padding.device)
        if torch.equal(padding, places >= lengths[:, None]):
            return cls(tuple(lengths.tolist()), size, on_left=False)
        if torch.equal(padding, places < size - lengths[:, None]):
            return cls(tuple(lengths.tolist()), size, on_left=True)
        raise InputError(
            f"{name} marks positions in the middle of rows, so no sequence can be cut out: "
            "give a batch with padding at one end"
        )

    def padded(self) -> list[int]:
        """Return the rows that have padding, at most `MOST_ROWS`."""
        by_length = sorted(range(len(self.lengths)), key=lambda row: self.lengths[row])
        rows = [row for row in by_length if self.lengths[row] < self.longest]
        if len(rows) > MOST_ROWS:
            rows = [rows[i * (len(rows) - 1) // (MOST_ROWS - 1)] for i in range(MOST_ROWS)]
        return rows

    def alone(self, call: Examples, row: int) -> Examples:
        """Return the same call with one row, without its padding."""
        return call.changed(lambda one: self._alone(one, row))

    def _alone(self, value: Tensor, row: int) -> Tensor:
        number, length = len(self.lengths), self.lengths[row]
        batch_dim = next((dim for dim in (0, 1) if value.shape[dim : dim + 1] == (number,)), None)
        if batch_dim is None:
            return value
        if value.ndim == 1:
            # In fractions of the longest, a single row has 1.
            shares = value.is_floating_point() and float(value.max()) <= 1.0
            return torch.ones_like(value[:1]) if shares else value[row : row + 1]
        value = value.narrow(batch_dim, row, 1)
        dims = [
            dim
            for dim in range(value.ndim)
            if dim != batch_dim and value.shape[dim] == self.longest
        ]
        # A mask of pairs has two such dimensions; features may have the same number.
        is_of_pairs = value.ndim == 4 or not value.is_floating_point()
        for dim in dims if is_of_pairs else dims[:1]:
            value = value.narrow(dim, self.longest - length if self.on_left else 0, length)
        return value


def _padding(value: Tensor, meaning: Meaning | None) -> Tensor | None:
    """Return a mask's padding, (batch, length).

    If the name does not show the mask's meaning, a row without padding does.
    """
    readings: tuple[Meaning, ...] = ("keep", "padding") if meaning is None else (meaning,)
    read = [padding_of(value, one) for one in readings]
    found = [one for one in read if one is not None and one.ndim == 2 and not one.all(1).any()]
    if meaning is None:
        found = [one for one in found if not bool(one.any(1).all())]
    return found[0] if len(found) == 1 else None


def _longest(values: Mapping[str, Any], lengths: Sequence[int]) -> int:
    """Return the number of positions of a batch with rows of these lengths."""
    tensors = (value for value in values.values() if isinstance(value, Tensor) and value.ndim > 1)
    data = next(tensors, None)
    if data is None:
        raise InputError("the batch has no tensor of at least two dimensions: (batch, length, …)")
    sizes = [size for dim, size in enumerate(data.shape) if dim or size != len(lengths)]
    if max(lengths) in sizes:
        return max(lengths)
    long_enough = [size for size in sizes if size >= max(lengths)]
    if not long_enough:
        raise InputError(
            f"lengths go up to {max(lengths)}, and the batch has the shape {tuple(data.shape)}: "
            "give the lengths in positions of the batch"
        )
    return long_enough[0]
