"""Which argument of a module says what is padding, and how its values are read."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from powernorm.inspection.selection import Side

Meaning = Literal["keep", "padding"]
"""What a mask marks with 1 or True."""

_MEANINGS: Final[Mapping[str, Meaning]] = {
    "attention_mask": "keep",
    "src_key_padding_mask": "padding",
    "tgt_key_padding_mask": "padding",
    "key_padding_mask": "padding",
    "padding_mask": "padding",
}
_SOURCE: Final = "src_key_padding_mask"
_TARGET: Final = "tgt_key_padding_mask"
_DATA: Final = (
    "input_ids", "inputs_embeds", "hidden_states", "decoder_input_ids", "input_features",
    "src", "tgt", "x", "tokens",
)  # fmt: skip
"""Names of the argument that the mask belongs to, if that is not the first one."""

_STRIDES: Final = {"WhisperEncoder": 2, "WhisperModel": 2}
"""Number of mask positions that a convolution before the layers merges into one, by class."""

_LENGTH_FIRST: Final = frozenset({"XLNetModel", "FSMTEncoder"})
"""Classes that take (batch, length) and transpose it for the layers inside."""


@dataclass(frozen=True)
class MaskArgument:
    """An argument of a module's forward that says which positions are padding."""

    name: str
    position: int | None
    """Index among the positional arguments; None if it is keyword-only."""
    meaning: Meaning
    stride: int = 1

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
        """Return the argument's value in a call, None if it is left out."""
        value = kwargs.get(self.name)
        if value is None and self.position is not None and self.position < len(args):
            value = args[self.position]
        return value

    def read(self, value: object, batch_size: int | None) -> Tensor | None:
        """Return a value as a bool mask (batch, length), True = padding; None if it is no mask.

        Args:
            value: (batch, length), (length,) for a single sequence, or (batch or 1, heads or 1,
                queries or 1, keys) for what attention may see.
            batch_size: of the data that the mask belongs to, if known.
        """
        if not isinstance(value, Tensor):
            return None
        if value.ndim == 4 and self.meaning == "keep":
            padding = _never_seen(value)
            fixed = batch_size is None or padding.shape[0] == batch_size
            return padding if fixed else _repeated(padding, batch_size)
        if value.ndim not in (1, 2):
            return None
        return self._padding(value)[..., :: self.stride]

    def _padding(self, value: Tensor) -> Tensor:
        if self.meaning == "keep":
            return value == 0
        if value.dtype == torch.bool:
            return value
        # torch adds a float mask to the scores: -inf at padding, 0 elsewhere.
        return value < 0 if value.is_floating_point() else value != 0


NO_MASK: Final = MaskArgument("", None, "keep")
"""The argument of a module that has to hide the mask of the model around it."""


def _never_seen(allowed: Tensor) -> Tensor:
    """Return the keys that no query of any head may see, from a (batch, heads, queries, keys) mask.

    Hugging Face's layers get such masks: bool with True = may be seen, or floats that are added to
    the scores, with the type's lowest number at keys that may not be seen. A causal mask hides
    each key from some queries, padding is hidden from all.
    """
    if allowed.is_floating_point():
        allowed = allowed > torch.finfo(allowed.dtype).min / 2
    return ~(allowed != 0).flatten(1, 2).any(dim=1)


def _repeated(padding: Tensor, batch_size: int | None) -> Tensor | None:
    if batch_size is None or padding.shape[0] != 1:
        return None  # its first dimension counts windows or similar, not sequences
    return padding.expand(batch_size, -1)


def mask_argument(module: nn.Module, side: Side | None = None) -> MaskArgument | None:
    """Return the argument by which a module takes the padding of its own input, or None.

    Args:
        module: any module.
        side: which of torch's two masks is meant if the module is in a decoder.
    """
    parameters = parameters_of(module)
    names = list(parameters)
    if "decoder_attention_mask" in names or (_SOURCE in names and _TARGET in names):
        return None  # it takes the masks of two sides
    known: dict[str, Meaning] = dict(_MEANINGS)
    if library_of(module) == "x_transformers":
        known["mask"] = "keep"
    preferred = _TARGET if side == "decoder" else _SOURCE
    name = next((name for name in (preferred, *known) if name in names), None)
    if name is None:
        return None
    positional = parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY
    stride = _STRIDES.get(type(module).__name__, 1)
    return MaskArgument(name, names.index(name) if positional else None, known[name], stride)


def parameters_of(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the module's forward by name."""
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # a forward in C++, as a scripted module's
        return {}


def library_of(module: nn.Module) -> str:
    """Return the top-level package that a module's class is from."""
    return type(module).__module__.partition(".")[0]


def data_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the data of a call that its mask belongs to, or None.

    These are tokens (batch, length) or vectors (batch, length, features); a nested tensor, which
    holds no padding, is none of them.
    """
    candidates = [*args[:1], *(kwargs.get(name) for name in _DATA)]
    tensors = (x for x in candidates if isinstance(x, Tensor) and not x.is_nested)
    return next((x for x in tensors if x.ndim in (2, 3)), None)


def takes_length_first(module: nn.Module) -> bool:
    """Return whether a module's vectors are (length, batch, features), as in torch's layers."""
    return any(
        isinstance(part, nn.MultiheadAttention) and not part.batch_first
        for part in module.modules()
    )


def turns_round(module: nn.Module) -> bool:
    """Return whether a module takes (batch, length) and its norms get (length, batch, features)."""
    return any(type(part).__name__ in _LENGTH_FIRST for part in module.modules())
