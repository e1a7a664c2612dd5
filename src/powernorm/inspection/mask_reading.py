"""Reading of masks: their form from the values, their meaning from the name and from batches.

The form shows in each value: bool, 1 and 0, numbers that are added to scores, lengths. The meaning,
whether 1 marks padding or valid positions, does not. In known libraries the name shows it;
elsewhere a name is a guess that the first batches have to confirm. Without a meaningful name a
batch has to show it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.inspection.mask_arguments import (
    MaskArgument,
    declared_meaning,
    mask_by_name,
)
from powernorm.inspection.mask_checks import LOOKS, MaskChecks
from powernorm.inspection.selection import Side
from powernorm.integrations.library_masks import Meaning, is_of_known_library
from powernorm.norms.masks import padding_after
from powernorm.ops.graphs import is_traced, same_sizes, shape_of

_HIDES: Final = -1e3
"""A score of at most this, when added, hides a position: it is 0 after any softmax."""

_READINGS: Final[tuple[Meaning, ...]] = ("keep", "padding")

_NO_MASKS: Final = frozenset({"token_type_ids", "segment_ids", "labels", "targets", "y"})
"""Names of arguments that may look like masks and are none."""

_Shape = Literal["mask", "attention", "other"]
"""Kind of a value by its shape: a mask of the data, perhaps one of position pairs, or neither."""


class UndecidedError(InputError):
    """A mask whose values do not show what is padding; an error for norms that need it."""


def padding_of(value: Tensor, meaning: Meaning, batch_size: Any = None) -> Tensor | None:
    """Return a mask's padding, (batch, length) or (length,) bool; None if the shape does not fit.

    Args:
        value: bool, 1 and 0 of any dtype, or floats that are added to scores: at most -1000 at
            padding, whatever the meaning. (length,), (batch, length), (batch, 1, length),
            (batch, length, 1), (batch, 1, 1, length); or (batch or 1, heads or 1, queries, keys)
            as an attention mask, in which a key is padding if no query may attend to it.
        meaning: `keep` or `padding`.
        batch_size: number of sequences, to which one mask for all is repeated.
    """
    value = _without_heads(value)
    if value.ndim not in (1, 2, 4):
        return None
    padding = value == 0 if meaning == "keep" else value != 0
    if value.is_floating_point():
        added = value <= _HIDES
        if meaning == "keep":  # without a 1, zeros are scores that hide nothing
            padding = torch.where((value > 0).any(), padding, added)
        else:
            padding = added | (value > 0)
    if padding.ndim != 4:
        return padding
    padding = padding.flatten(1, 2).all(dim=1)
    if batch_size is None or same_sizes(shape_of(padding)[:1], (batch_size,)) is not False:
        return padding
    # If the first dimension is not 1, it counts windows or similar, not sequences.
    return padding.expand(batch_size, -1) if same_sizes(shape_of(padding)[:1], (1,)) else None


def _without_heads(value: Tensor) -> Tensor:
    """Return (batch, length) for (batch, 1, length), (batch, 1, 1, length), (batch, length, 1)."""
    sizes = shape_of(value)
    if value.ndim == 4 and same_sizes(sizes[1:3], (1, 1)):
        return value[:, 0, 0]
    if value.ndim == 3 and same_sizes(sizes[1:2], (1,)):
        return value[:, 0]
    return value[..., 0] if value.ndim == 3 and same_sizes(sizes[2:], (1,)) else value


class MaskCall(NamedTuple):
    """A value of a mask's argument in a call, with its context."""

    value: Any
    data: Tensor | None
    """Tokens (batch, length), or vectors whose first two dimensions are these in either order."""
    batch_dim: int
    """Dimension of the data that counts the sequences."""
    around: Sequence[Tensor]
    """Masks of the outer model."""
    side: Side | None
    """Side of the module in an encoder-decoder."""

    def padding(self, meaning: Meaning) -> Tensor | None:
        """Return the padded positions if the mask has that meaning."""
        sequences = None if self.data is None else shape_of(self.data)[self.batch_dim]
        return padding_of(self.value, meaning, sequences)


class MaskReader:
    """Reader of one argument of a module, with the evidence of the first batches.

    Args:
        module: the module that takes the argument.
        argument: the argument that marks padding.
        checks: gives the warnings, and knows the padding token.
    """

    def __init__(self, module: nn.Module, argument: MaskArgument, checks: MaskChecks) -> None:
        self.module = module
        self.argument = argument
        self.checks = checks
        self.meaning = argument.meaning
        """Meaning of 1 and True; None until a batch has shown it."""
        self.misfit = ""
        """Why lengths were found to count something other than positions."""
        self.is_attention = False
        """Whether the last value may be an attention mask, if it is no padding mask."""
        self.label = f"{argument.name} of {type(module).__name__}"
        """Description of the argument for messages."""
        self.is_own = not is_of_known_library(module)
        """Whether the module is a user's, which may transpose its vectors anywhere."""
        self._is_mask = False  # whether a value had the shape of the data and no other
        self._looks = 0
        self._is_borne_out = False

    def read(self, call: MaskCall) -> Tensor | None:
        """Return the value of a call as a mask (batch, length), True = padding.

        Returns:
            None if the value is no mask, or no padding has shown its meaning.

        Raises:
            InputError: the batch contradicts the name or earlier batches.
            UndecidedError: the values are no mask's, or do not show which positions are padding.
        """
        if self.argument.meaning == "lengths":
            return self._of_lengths(call)
        shape: _Shape = "other"
        if isinstance(call.value, Tensor):
            value = _without_heads(call.value)
            shape = self._shape(value, call.data) if self.is_own else "mask"
        if not is_traced():
            self.is_attention = shape != "other" and self.is_own
        if shape != "mask":
            return None
        if is_traced():
            if self.meaning is None:
                raise UndecidedError(
                    f"{self.label} may mark padding or valid positions, and compiled code cannot "
                    f"check which: {self._declare}, or train on a batch with padding before "
                    "torch.compile or an export"
                )
        else:
            self.meaning = self._said or self.meaning
            if self._may_look(value):
                self._check_values(value)
                self._looks += 1
                self._settle(call)
        return None if self.meaning is None else call.padding(self.meaning)

    def __str__(self) -> str:
        """Return how the argument is read, and how that is known."""
        meaning = self._said or self.meaning
        if meaning == "lengths":
            return "the number of valid positions of each row, or its share of the longest"
        if meaning is None:
            return "its meaning has to be shown by the first batches"
        how = "by its name, which the first batches have to confirm"
        if self._is_trusted:
            how = "as its library or a declaration says"
        elif self._is_borne_out or self.argument.meaning is None:
            how = "as the batches showed"
        return f"1 or True is {'padding' if meaning == 'padding' else 'valid'}, {how}"

    def _shape(self, value: Tensor, data: Tensor | None) -> _Shape:
        """Return and remember the kind of a value by its shape."""
        if self.argument.meaning is not None:
            return _shape_by_name(value, data)
        if value.ndim == 4:  # one batch does not show the meaning of pairs of bools
            return "mask" if value.is_floating_point() else "other"
        if data is None or value.ndim != 2:
            return "other"
        shape, sizes = shape_of(value), shape_of(data)[:2]
        may_fit = same_sizes(shape, sizes) is not False
        if not same_sizes(sizes[:1], sizes[1:]):
            if _is_of_pairs(value, sizes):
                return "attention"
            may_fit |= data.ndim == 3 and same_sizes(shape, sizes[::-1]) is not False
            self._is_mask |= may_fit and not is_traced()
            return "mask" if may_fit else "other"
        if not may_fit:
            return "other"
        if self._is_mask or self.meaning is not None:
            return "mask"
        triangles = (torch.tril, torch.triu)
        if not is_traced() and not any(torch.equal(one(value), value) for one in triangles):
            self.checks.warn(
                f"square {self.argument.name}",
                f"{self.label} has as many rows as columns and may be a padding mask or an "
                f"attention mask: no norm was given it. C{self._declare[1:]}, or begin "
                "with a batch of another length",
            )
        return "attention"

    def _check_values(self, value: Tensor) -> None:
        """Refuse a value with numbers that are not a mask's."""
        if value.dtype == torch.bool:
            return
        if not self.is_own and (value.ndim == 4 or not value.is_floating_point()):
            return  # biases may accompany masked scores; segments are numbered from 1
        marks = (value == 0) | (value == 1)
        is_mask = marks.all()
        if value.is_floating_point():
            is_mask |= ((value == 0) | (value <= _HIDES)).all()
        if not bool(is_mask):
            others = [f"{other:g}" for other in value[~marks].detach().flatten()[:50].tolist()]
            raise UndecidedError(
                f"{self.label} holds {', '.join([*dict.fromkeys(others)][:3])}: a mask is "
                "bool, or 1 and 0, or floats that are added to scores, 0 and at most -1000. Pass "
                "such a mask; if this is something else, such as labels of a batch (x, y), call "
                "the model without it (see `forward=` of the function that takes batches)"
            )

    def _settle(self, call: MaskCall) -> None:
        """Find the meaning from this call if necessary, or compare it with this call's evidence."""
        if self._is_borne_out:
            return
        with torch.no_grad():
            found = self._found(call)
        if found is None:
            return
        if self.meaning is not None and found != self.meaning:
            meant, shown = _marked(self.meaning), _marked(found)
            if self._said is None and self.argument.meaning is None:
                raise InputError(
                    f"{self.label} marked {meant} in earlier batches and {shown} in this one: "
                    f"{self._declare}"
                )
            how = "by its name" if self._said is None else "as declared"
            raise InputError(
                f"{self.label} is inverted: 1 or True of the mask {tuple(call.value.shape)} marks "
                f"{meant} {how}, but {shown} according to the batch. Invert it, or, if the model "
                f"means it so, {self._declare}"
            )
        self.meaning = found
        self._is_borne_out = self.argument.meaning is not None

    def _found(self, call: MaskCall) -> Meaning | None:
        """Return the meaning that this call shows, or None."""
        read = [call.padding(meaning) for meaning in _READINGS]
        hidden = [one[None] if one.ndim == 1 else one for one in read if one is not None]
        if len(hidden) < 2 or torch.equal(*hidden):
            return self.meaning or ("padding" if bool((call.value < 0).any()) else None)
        if any(bool(one.all()) for one in hidden):
            return None  # without padding, or nothing else
        shown = self._by_data(hidden, call)
        if shown is not None or self._is_trusted:
            return shown
        for mask in call.around:
            if mask.shape == hidden[0].shape and bool(mask.any()):
                same = _that_alone(torch.equal(mask, one) for one in hidden)
                if same is not None:
                    return same
        # The longest sequence has no padding: with the wrong meaning it would be padding only.
        found = _that_alone(not bool(one.all(dim=1).any()) for one in hidden)
        return self._by_place(hidden) if found is None and self.argument.meaning is None else found

    def _by_data(self, hidden: Sequence[Tensor], call: MaskCall) -> Meaning | None:
        """Return the meaning by which padding holds padding tokens, zeros, or always the same."""
        data, sizes = call.data, hidden[0].shape
        if data is not None and data.ndim > 1 and (call.batch_dim or data.shape[:2] != sizes):
            data = data.transpose(0, 1)
        if data is None or data.shape[:2] != sizes:
            return None
        pads = self.checks.padding_in(data, call.side)
        if pads is not None:
            shares = [float((pads & one).sum() / one.sum()) for one in hidden]
            if max(shares) > 0.5 and shares[0] != shares[1]:
                return _READINGS[shares[1] > shares[0]]
        if self._is_trusted:
            return None
        # Padding is one token, repeated.
        tokens = [data[one] for one in hidden]
        return _that_alone(len(one) > 1 and bool((one == one[0]).all()) for one in tokens)

    def _by_place(self, hidden: Sequence[Tensor]) -> Meaning | None:
        """Return the meaning by which all padding is on one side."""
        found = _that_alone(map(_is_on_one_side, hidden))
        if found is not None or self.meaning is not None:
            return found
        if _is_on_one_side(hidden[0]):  # with both meanings
            raise UndecidedError(
                f"{self.label} may mark padding or valid positions, and this batch does not show "
                f"which: {self._declare}"
            )
        self.checks.warn(
            f"scattered {self.argument.name}",
            f"{self.label} marks positions in the middle of sequences and is not read as padding: "
            f"if it marks padding, {self._declare}",
        )
        return None

    def _may_look(self, value: Tensor) -> bool:
        return self._looks < LOOKS and not is_traced() and not value.is_meta

    @property
    def _said(self) -> Meaning | None:
        return declared_meaning(self.module, self.argument.name)

    @property
    def _is_trusted(self) -> bool:
        """Whether the meaning is known or declared: only padding tokens can contradict it."""
        return not self.is_own or self._said is not None

    def _of_lengths(self, call: MaskCall) -> Tensor | None:
        """Return the mask of lengths, or of fractions of the longest, (batch,)."""
        value, data = call.value, call.data
        if isinstance(value, (list, tuple)) and all(type(one) is int for one in value):
            value = torch.tensor(value, device="cpu")
        if not isinstance(value, Tensor) or data is None or value.ndim != 1:
            return None
        count, length = shape_of(data)[call.batch_dim], shape_of(data)[1 - call.batch_dim]
        if value.dtype == torch.bool or same_sizes(shape_of(value), (count,)) is False:
            return None
        if self._may_look(value) and value.numel():
            self._looks += 1
            low, high = float(value.min()), float(value.max())
            if value.is_floating_point() and not 0 < low <= high <= 1:
                raise UndecidedError(
                    f"{self.label} holds the floats {low:g} to {high:g}: pass whole numbers as "
                    "integers, or fractions of the longest sequence in (0, 1]"
                )
            if low < 0:
                self.misfit = f"one of them is {low:g}"
            elif high > length:  # counts samples, for example, for an input of frames
                self.misfit = f"they go up to {high:g}, and the input has {length} positions"
        if self.misfit:
            return None
        if value.is_floating_point():
            value = (value * length).round()
        return padding_after(value.to(data.device), length)

    @property
    def _declare(self) -> str:
        name, cls = self.argument.name, type(self.module).__name__
        return f'call powernorm.declare_mask("{name}", "keep" or "padding", {cls})'


def _that_alone(holds: Iterable[bool]) -> Meaning | None:
    """Return the only meaning for which something holds, None if there is not exactly one."""
    found = [meaning for meaning, one in zip(_READINGS, holds, strict=True) if one]
    return found[0] if len(found) == 1 else None


def _marked(meaning: Meaning | None) -> str:
    return "padding" if meaning == "padding" else "valid positions"


def _shape_by_name(value: Tensor, data: Tensor | None) -> _Shape:
    """Return the kind of a padding argument's value by its shape."""
    if value.ndim in (1, 4) or data is None:
        return "mask"
    if value.ndim != 2:
        return "other"
    # A length other than that of the data is an error of the norm that gets it.
    sizes = shape_of(data)[:2]
    is_clear = same_sizes(sizes[:1], sizes[1:]) is not True
    return "attention" if is_clear and _is_of_pairs(value, sizes[1:]) else "mask"


def _is_of_pairs(value: Tensor, sizes: Sequence[Any]) -> bool:
    """Return whether a value has as many rows as columns, and as many as the data's length."""
    shape = shape_of(value)
    is_square = bool(same_sizes(shape[:1], shape[1:]))
    return is_square and any(same_sizes(shape[:1], (size,)) is not False for size in sizes)


def like_a_mask(values: Mapping[str, object], data: Tensor | None) -> str:
    """Return the name of a value that looks like a padding mask, or "".

    Args:
        values: values of a call's arguments, by name.
        data: data of the call, (batch, length, …).
    """
    for name, value in values.items():
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if isinstance(inner, Tensor) and (mask_by_name(key) or _is_mask_in(key, inner)):
                    return f'{name}["{key}"]'
        elif is_like_a_mask(name, value, data):
            return name
    return ""


def _is_mask_in(key: object, value: Tensor) -> bool:
    """Return whether a value of a dict is called a mask, and holds one."""
    rows = _without_heads(value)
    return "mask" in str(key).lower() and rows.ndim == 2 and is_like_a_mask(str(key), rows, rows)


def is_like_a_mask(name: str, value: object, data: Tensor | None) -> bool:
    """Return whether a value of a call looks like a padding mask."""
    if not isinstance(value, Tensor) or value.is_meta or data is None or name in _NO_MASKS:
        return False
    batch, length = data.shape[:2]
    if value.shape == (batch,) and value.dtype != torch.bool and bool((value != value[0]).any()):
        longest = 1 if value.is_floating_point() else length
        return bool((value > 0).all()) and float(value.max()) == longest
    value = _without_heads(value)
    of_pairs = value.ndim == 4 and value.shape[-1] == length
    if not of_pairs and value.shape not in ((batch, length), (length, batch)):
        return False
    hides = value <= _HIDES
    if not bool(((value == 0) | (value == 1) | hides).all()):
        return of_pairs and bool(hides.any())  # a mask that was added to biases, or none
    if of_pairs:
        return True
    hidden = (padding_of(value, meaning) for meaning in _READINGS)
    return any(bool(one.any()) and _is_on_one_side(one) for one in hidden if one is not None)


def _is_on_one_side(padding: Tensor) -> bool:
    """Return whether all padding is at the end of rows, or all at the start; no row is padding."""
    if bool(padding.all(dim=1).any()):
        return False
    falls = (padding[:, :-1] & ~padding[:, 1:]).any()  # padding that ends within a row
    rises = (~padding[:, :-1] & padding[:, 1:]).any()
    return not (bool(falls) and bool(rises))
