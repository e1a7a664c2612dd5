"""Which way round a mask is, from its values: for arguments whose name does not say it.

Padding is at the end of each sequence or at the start of each, and no sequence is nothing else. In
most batches that fits one reading only: the longest sequence has no padding, and read the wrong way
round it would be padding alone. Padding tokens, rows of zeros, or the mask of the model around
decide before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.inspection.mask_arguments import (
    MaskArgument,
    Meaning,
    declared_meaning,
    padding_after,
    without_heads,
)
from powernorm.inspection.mask_checks import MaskChecks
from powernorm.ops.graphs import is_traced, same_sizes, shape_of

_LOOKS: Final = 20
"""Number of batches in which a meaning that was found is compared with what they show."""

_Shape = Literal["mask", "attention", "either", "other"]
"""What a value's shape shows: a mask of the data, of pairs of positions, one of these, neither."""


class UndecidedError(InputError):
    """A mask with padding that may be either way round."""


class MaskReader:
    """Reader of an argument whose meaning its values show, with what they have shown so far.

    Args:
        module: the module that takes the argument.
        argument: one with the meaning `lengths`, or with an unknown one.
        checks: gives the warnings.
    """

    def __init__(self, module: nn.Module, argument: MaskArgument, checks: MaskChecks) -> None:
        self.module = module
        self.argument = argument
        self.checks = checks
        self.meaning = argument.meaning
        self._is_mask = False  # whether a value had the shape of the data and no other
        self._looks = 0
        self.misfit = ""
        """Why lengths were found to count something else than positions."""

    def read(
        self, value: object, data: Tensor | None, batch_dim: int, around: Sequence[Tensor]
    ) -> Tensor | None:
        """Return a value as a mask (batch, length), True = padding.

        Args:
            value: of the argument in a call.
            data: tokens (batch, length), or vectors whose first two dimensions are these in either
                order.
            batch_dim: the dimension of the data that counts the sequences.
            around: masks of the model around.

        Returns:
            None if the value is no mask, or no padding has shown which way round it is.

        Raises:
            InputError: the values contradict earlier ones.
            UndecidedError: they show padding, but not whether it is marked by 1 or by 0.
        """
        if not isinstance(value, Tensor) or data is None:
            return None
        if self.argument.meaning == "lengths":
            return self._of_lengths(value, data, batch_dim)
        value = without_heads(value)
        shape = self._shape(value, data)
        if shape == "either":
            self._warn_of_square()
        if shape != "mask":
            return None
        return self._read_as(self._settled(value, data, around), value)

    def _of_lengths(self, value: Tensor, data: Tensor, batch_dim: int) -> Tensor | None:
        mask = _of_lengths(value, data, batch_dim)
        if mask is None or is_traced() or mask.is_meta:
            return mask
        if self._looks < _LOOKS and value.numel():
            self._looks += 1
            longest = int(value.max())
            if longest > mask.shape[1]:
                # Of samples, say, where the input is of frames.
                self.misfit = (
                    f"they go up to {longest}, and the input has {mask.shape[1]} positions"
                )
        return None if self.misfit else mask

    def is_attention(self, value: object, data: Tensor | None) -> bool:
        """Return whether a value says which positions see which, and not which are padding."""
        if self.argument.meaning == "lengths" or not isinstance(value, Tensor) or data is None:
            return False
        return self._shape(without_heads(value), data) != "other"

    def _shape(self, value: Tensor, data: Tensor) -> _Shape:
        """Return what a value's shape shows, and remember it."""
        if value.ndim != 2:
            return "other"
        shape, sizes = shape_of(value), shape_of(data)[:2]
        may_fit = same_sizes(shape, sizes) is not False
        if not same_sizes(sizes[:1], sizes[1:]):
            if same_sizes(shape[:1], shape[1:]):
                side = shape[:1]
                is_of_data = any(same_sizes(side, (size,)) is not False for size in sizes)
                return "attention" if is_of_data else "other"
            may_fit |= data.ndim == 3 and same_sizes(shape, sizes[::-1]) is not False
            self._is_mask |= may_fit and not is_traced()
            return "mask" if may_fit else "other"
        if not may_fit:
            return "other"
        if self._is_mask or self.meaning is not None:
            return "mask"
        if is_traced():
            return "either"
        triangles = (torch.tril, torch.triu)
        if any(torch.equal(triangle(value), value) for triangle in triangles):
            return "attention"
        return "either"

    def _settled(self, value: Tensor, data: Tensor, around: Sequence[Tensor]) -> Meaning | None:
        """Return the meaning, found from this call if need be."""
        if is_traced():
            if self.meaning is None:
                raise UndecidedError(
                    f"which way round {self._label} is has not been seen, and compiled code "
                    f"cannot look: {self._declare}, or train on a batch with padding before "
                    "torch.compile or an export"
                )
            return self.meaning
        said = declared_meaning(self.module, self.argument.name)
        if said is not None:
            self.meaning = said
        if said is None and self._looks < _LOOKS and not value.is_meta:
            found = self._found(value, data, around)
            if found is not None and self.meaning is not None and found != self.meaning:
                raise InputError(
                    f"{self._label} marked {_marked(self.meaning)} in earlier batches and "
                    f"{_marked(found)} in this one: {self._declare}"
                )
            self._looks += found is not None
            self.meaning = self.meaning or found
        return self.meaning

    @torch.no_grad()
    def _found(self, value: Tensor, data: Tensor, around: Sequence[Tensor]) -> Meaning | None:
        if value.is_floating_point() and bool((value < 0).any()):
            return "padding"  # added to the scores
        marks = value != 0
        if bool(marks.all()) or not bool(marks.any()):
            return None
        for mask in around:
            if mask.shape == marks.shape and bool(mask.any()):
                if torch.equal(mask, marks):
                    return "padding"
                if torch.equal(mask, ~marks):
                    return "keep"
        pads = self.checks.padding_in(data, None)
        if pads is not None and pads.shape == marks.shape[::-1]:
            pads = pads.T if pads.shape != marks.shape else pads
        if pads is not None and pads.shape == marks.shape:
            shares = [float((pads & one).sum() / one.sum()) for one in (marks, ~marks)]
            if max(shares) > 0.5 and shares[0] != shares[1]:
                return "padding" if shares[0] > shares[1] else "keep"
        return self._by_place(marks)

    def _by_place(self, marks: Tensor) -> Meaning | None:
        """Return the reading by which all padding is on one side, and not all is padding."""
        readings: dict[Meaning, Tensor] = {"keep": ~marks, "padding": marks}
        fits = [meaning for meaning, padding in readings.items() if _is_on_one_side(padding)]
        if len(fits) == 1 or self.meaning is not None:
            return fits[0] if len(fits) == 1 else None
        if len(fits) == 2:
            raise UndecidedError(
                f"{self._label} may mark padding or what is no padding, this batch does not show "
                f"which: {self._declare}"
            )
        self.checks.warn(
            f"scattered {self.argument.name}",
            f"{self._label} marks positions in the middle of sequences and is not read as padding: "
            f"if it says what is padding, {self._declare}",
        )
        return None

    def _read_as(self, meaning: Meaning | None, value: Tensor) -> Tensor | None:
        if meaning is None:
            return None
        known = MaskArgument(self.argument.name, None, meaning)
        return known.read(value, None)

    def _warn_of_square(self) -> None:
        if not is_traced():
            self.checks.warn(
                f"square {self.argument.name}",
                f"{self._label} has as many rows as columns and may say what is padding or what "
                f"attention may see: no norm was given it. {self._declare[0].upper()}"
                f"{self._declare[1:]}, or begin with a batch of another length",
            )

    @property
    def _label(self) -> str:
        return f"{self.argument.name} of {type(self.module).__name__}"

    @property
    def _declare(self) -> str:
        name, cls = self.argument.name, type(self.module).__name__
        return f'call powernorm.declare_mask("{name}", "keep" or "padding", {cls})'


def _marked(meaning: Meaning) -> str:
    return "padding" if meaning == "padding" else "valid positions"


def _is_on_one_side(padding: Tensor) -> bool:
    """Return whether all padding is at the end of rows, or all at the start; no row is padding."""
    if bool(padding.all(dim=1).any()):
        return False
    falls = (padding[:, :-1] & ~padding[:, 1:]).any()  # padding that ends within a row
    rises = (~padding[:, :-1] & padding[:, 1:]).any()
    return not (bool(falls) and bool(rises))


def _of_lengths(lengths: Tensor, data: Tensor, batch_dim: int) -> Tensor | None:
    if lengths.ndim != 1 or lengths.is_floating_point() or lengths.dtype == torch.bool:
        return None
    if same_sizes(shape_of(lengths), (shape_of(data)[batch_dim],)) is False:
        return None
    return padding_after(lengths.to(data.device), data.shape[1 - batch_dim])
