"""Facts about padding masks in the classes of other libraries.

Libraries whose models pass their mask on to the modules inside; classes that take the mask of
another module; classes that change the number of positions between their mask and their norms: by
strides and pooling, by padding to a window, by tokens in front or behind, by several tokens per
position. A rule for such a class gives the mask for an input with a number of positions, or None if
the class makes no input of that length.

This module needs only torch: `powernorm.inspection` imports it whether or not the libraries are
installed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from powernorm.errors import InputError
from powernorm.norms.masks import padding_after
from powernorm.ops.graphs import is_known, is_traced

Meaning = Literal["keep", "padding", "lengths"]
"""Positions that a mask marks with 1 or True; or `lengths`, the number of valid ones per row."""

MEANINGS: Final[Mapping[str, Meaning]] = {
    "attention_mask": "keep",
    "src_key_padding_mask": "padding",
    "tgt_key_padding_mask": "padding",
    "key_padding_mask": "padding",
    "padding_mask": "padding",
}
"""Names with the same meaning in all libraries."""

_MEANINGS_IN: Final[Mapping[str, Mapping[str, Meaning]]] = {"x_transformers": {"mask": "keep"}}
"""Further names in a library."""

_HANDS_ON: Final = frozenset({"torch", "transformers", "x_transformers", "timm", "powernorm"})
_OF_IMAGES: Final = frozenset({"timm", "torchvision"})

_LENGTH_FIRST: Final = frozenset({"XLNetModel", "FSMTEncoder"})
"""Classes that take (batch, length) and transpose it for the layers inside."""

LENDERS: Final = frozenset({"WhisperModel"})
"""Classes that take the encoder's mask and do not pass it on."""

_REDUCES: Final = "_get_feature_vector_attention_mask"
"""Method of speech models whose mask is over samples; their encoder gets one over positions."""

MaskRule = Callable[[Any, Tensor, int, object], "Tensor | None"]
"""(part, padding (batch, length), number of positions of an input, norm) to its mask. It raises an
InputError if no mask can reach the norms of the part. Rules are pickled with the hooks of models:
they are functions of this module, some with their first argument bound."""


def _library_of(module: nn.Module) -> str:
    """Return the top-level package that a module's class is from."""
    return type(module).__module__.partition(".")[0]


def is_of_known_library(module: nn.Module) -> bool:
    """Return whether a library passes masks on to the modules inside, unchanged.

    The meaning of its arguments and the layout of its vectors are known.
    """
    return _library_of(module) in _HANDS_ON


def is_called_by_forward(module: nn.Module) -> bool:
    """Return whether a library calls a module by `module.forward`, which runs no hooks.

    sentence-transformers does that with models of transformers.
    """
    return _library_of(module) == "transformers"


def is_of_images(module: nn.Module) -> bool:
    """Return whether a module is of a library for images."""
    return _library_of(module) in _OF_IMAGES


def known_meanings(module: nn.Module) -> dict[str, Meaning]:
    """Return the meanings of the masks that modules of this one's library take, by their names."""
    return {**MEANINGS, **_MEANINGS_IN.get(_library_of(module), {})}


def takes_length_first(module: nn.Module) -> bool:
    """Return whether a module's vectors are (length, batch, features), as in torch's layers."""
    attentions = (part for part in module.modules() if isinstance(part, nn.MultiheadAttention))
    return any(not part.batch_first for part in attentions)


def turns_round(module: nn.Module) -> bool:
    """Return whether a module takes (batch, length) and its norms get (length, batch, features)."""
    return any(type(part).__name__ in _LENGTH_FIRST for part in module.modules())


def hands_on(owner: nn.Module, module: nn.Module) -> bool:
    """Return whether a module inside an owner is given the owner's mask, as far as is known.

    A user-defined model may prepend a token to the input and pass a longer mask.
    """
    # A class with a rule gives the masks of all norms inside, at any depth.
    is_ruled = hasattr(module, _REDUCES) or type(owner).__name__ in _RULES
    if hasattr(owner, _REDUCES) and not is_ruled:
        return False  # the modules inside get one over positions
    return is_of_known_library(module) and _library_of(module) == _library_of(owner)


def lengthens(module: nn.Module) -> bool:
    """Return whether a module's mask is its owner's, lengthened for prepended positions.

    x-transformers' stacks get such a mask. Their attention modules take a mask too, but hold norms
    of other shapes.
    """
    return _library_of(module) == "x_transformers" and type(module).__name__ != "Attention"


def parts_with_rules(module: nn.Module) -> list[tuple[nn.Module, MaskRule]]:
    """Return the parts of a module that change the number of positions, and their rules."""
    rules = ((part, _rule(part)) for part in module.modules())
    return [(part, rule) for part, rule in rules if rule is not None]


def _rule(part: nn.Module) -> MaskRule | None:
    rule = _RULES.get(type(part).__name__)
    if rule is None and hasattr(part, _REDUCES):
        encoder = getattr(part, "feature_extractor", getattr(part, "feature_encoder", None))
        return _after_convolutions if hasattr(encoder, "conv_layers") else None
    return rule if type(part).__module__.startswith("transformers.") else None


# Number of outputs of a convolution for a number of inputs; for valid ones too, if only outputs of
# whole windows of input count.
_Step = Callable[[Any], Any]


def _after(steps: Iterable[_Step], padding: Tensor, length: int) -> Tensor | None:
    """Return the mask after the first of the steps that gives that many positions."""
    size, lengths = padding.shape[1], (~padding).sum(1)
    for step in steps:
        size, lengths = step(size), step(lengths)
        if is_known(size == length):
            return padding_after(lengths, length)
    return None


def _convolution(kernel: int, stride: int, padded: int = 0) -> _Step:
    return lambda size: (size + 2 * padded - kernel) // stride + 1


def _after_convolutions(part: Any, padding: Tensor, length: int, norm: object) -> Tensor | None:
    sizes = zip(part.config.conv_kernel, part.config.conv_stride, strict=True)
    return _after((_convolution(kernel, stride) for kernel, stride in sizes), padding, length)


def _after_halving(part: Any, padding: Tensor, length: int, norm: object) -> Tensor | None:
    return _after([_convolution(1, 2)] * part.config.num_conv_layers, padding, length)


def _after_adapter(part: Any, padding: Tensor, length: int, norm: object) -> Tensor | None:
    step = _convolution(part.kernel_size, part.stride, part.kernel_size // 2)
    return _after([step] * len(part.layers), padding, length)


def _moonshine(part: Any, padding: Tensor, length: int, norm: object) -> Tensor | None:
    sizes = [(one.kernel_size[0], one.stride[0]) for one in (part.conv1, part.conv2, part.conv3)]
    mask = _after((_convolution(kernel, stride) for kernel, stride in sizes), padding, length)
    positions = part._get_feat_extract_output_lengths(padding.shape[1])
    if mask is None or not is_known(length == positions):
        return mask
    # Its attention treats a window as valid if its first sample is.
    return padding[:, :: math.prod(stride for _, stride in sizes)][:, :length]


def _subsampled(part: Any, padding: Tensor, length: int, norm: object) -> Tensor | None:
    if is_traced():  # the part computes with tensors, whose values are unknown
        if is_known(length == padding.shape[1]):
            return None
    elif length != int(
        part._get_subsampling_output_length(torch.tensor(padding.shape[1], device="cpu"))
    ):
        return None
    keep: Tensor = part._get_output_attention_mask((~padding).long(), length)
    return keep == 0


def _every_other(part: Any, padding: Tensor, length: int, norm: object) -> Tensor | None:
    size = padding.shape[1]
    fits = is_known(length == (size + 1) // 2) and not is_known(length == size)
    return padding[:, ::2] if fits else None


def _pooled(factor: str, part: Any, padding: Tensor, length: int, norm: object) -> Tensor | None:
    """Return the mask of windows of a configured size that are valid if one position is."""
    size = getattr(part.config, factor)
    if size == 1 or not is_known(length == padding.shape[1] // size):
        return None
    windows: Tensor = padding[:, : length * size].unflatten(1, (length, size))
    return windows.all(dim=2)


def _funnel(part: Any, padding: Tensor, length: int, norm: object) -> Tensor | None:
    keep: Tensor = (~padding).float()
    for _ in part.config.block_sizes[1:]:
        keep = part.attention_structure.pool_tensor(keep, mode="min")
        if is_known(keep.shape[1] == length) and not is_known(length == padding.shape[1]):
            return keep == 0
    return None


def _padded_to(window: str, part: Any, padding: Tensor, length: int, norm: object) -> Tensor | None:
    """Return the mask of inputs that are padded to a multiple of a configured window."""
    size, configured = padding.shape[1], getattr(part.config, window)
    missing = -size % (configured if isinstance(configured, int) else max(configured))
    if is_known(length == size) or not is_known(length == size + missing):
        return None
    return functional.pad(padding, (0, missing), value=True)


def _patches_behind(part: Any, padding: Tensor, length: int, norm: object) -> Tensor | None:
    if not part.config.visual_embed:
        return None
    if norm is part.norm:  # it has only the patches, perhaps as many as tokens
        return padding.new_zeros(padding.shape[0], length)
    patches = (part.config.input_size // part.config.patch_size) ** 2 + 1
    if not is_known(length == padding.shape[1] + patches):
        return None
    return functional.pad(padding, (0, patches), value=False)


def _three_a_step(part: Any, padding: Tensor, length: int, norm: object) -> Tensor | None:
    fits = is_known(length == 3 * padding.shape[1])
    return padding.repeat_interleave(3, dim=1) if fits else None


def _streams(part: Any, padding: Tensor, length: int, norm: object) -> Tensor | None:
    count = 1 + part.config.ngram
    return padding.repeat(1, count) if is_known(length == count * padding.shape[1]) else None


def _global_tokens(part: Any, padding: Tensor, length: int, norm: object) -> Tensor | None:
    if norm is not part.global_input_layer_norm:
        return None
    make_blocks = sys.modules[type(part).__module__].__dict__["_make_global_fixed_block_ids"]
    _, used = make_blocks((~padding).float(), part.global_block_size)
    return used == 0 if is_known(used.shape[1] == length) else None


def _reversible(part: Any, padding: Tensor, length: int, norm: object) -> Tensor | None:
    if torch.compiler.is_compiling() or bool(padding.any()) or length != padding.shape[1]:
        raise InputError(
            f"{type(part).__name__} computes its layers again in the backward, where no mask "
            "reaches a norm: train it on sequences of one length, a multiple of its chunks, "
            "without padding, or leave its norms out of the swap by `where=`"
        )
    return None


_RULES: Final[Mapping[str, MaskRule]] = {
    "Speech2TextEncoder": _after_halving,
    "Wav2Vec2BertAdapter": _after_adapter,
    "MoonshineEncoder": _moonshine,
    "ParakeetEncoder": _subsampled,
    "LasrEncoder": _subsampled,
    "WhisperEncoder": _every_other,
    "SEWEncoder": partial(_pooled, "squeeze_factor"),
    "SEWDEncoder": partial(_pooled, "squeeze_factor"),
    "CanineModel": partial(_pooled, "downsampling_rate"),
    "FunnelEncoder": _funnel,
    "LongformerModel": partial(_padded_to, "attention_window"),
    "LEDEncoder": partial(_padded_to, "attention_window"),
    "BigBirdModel": partial(_padded_to, "block_size"),
    "BigBirdPegasusEncoder": partial(_padded_to, "block_size"),
    "LayoutLMv3Model": _patches_behind,
    "DecisionTransformerModel": _three_a_step,
    "ProphetNetDecoder": _streams,
    "LongT5TransientGlobalAttention": _global_tokens,
    "ReformerModel": _reversible,
}
"""Rules by the name of transformers' class."""
