"""Search for the module arguments that mark padding for a norm.

The owner of a mask is the outermost module above a norm that takes one. Modules of other libraries
further inside that take their own mask are owners too. In a model with an encoder and a decoder
owners are searched within each, so that their masks do not mix.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, get_args

from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.inspection.modules import parameters_of
from powernorm.inspection.selection import Side
from powernorm.integrations.library_masks import (
    MEANINGS,
    Meaning,
    hands_on,
    is_of_images,
    is_of_known_library,
    known_meanings,
    lengthens,
)

_MORE_MEANINGS: Final[Mapping[str, Meaning | None]] = {
    **dict.fromkeys(("src_padding_mask", "src_pad_mask", "key_pad_mask", "pad_mask"), "padding"),
    **dict.fromkeys(("input_mask", "valid_mask", "valid"), "keep"),
    "lengths": "lengths",
    **dict.fromkeys(("src_mask", "tgt_mask", "key_mask", "x_mask", "mask_pad", "masks", "mask")),
}
"""Names in users' models and in further libraries; None may have either meaning."""
_LENGTHS: Final = re.compile(
    r"(?!tgt|target|label|text|out|dec|y|o|max|min|num)[a-z_]*(lengths?|lens?)"
)
"""Names of the lengths of a model's inputs, such as `x_lens`, `feat_lengths` or `ilens`."""

_SOURCE: Final = "src_key_padding_mask"
_TARGET: Final = "tgt_key_padding_mask"
_DATA: Final = (
    "input_ids", "inputs_embeds", "hidden_states", "decoder_input_ids", "input_features",
    "src", "tgt", "x", "tokens",
)  # fmt: skip
"""Names of the argument that the mask belongs to, if that is not the first one."""

_TOKENS: Final = "input_ids"
_IMAGES: Final = "pixel_values"
_OTHER_DATA: Final = {_IMAGES, "input_features", "input_values"}
"""Inputs of a tower for images or audio next to a text model, whose mask is not the tower's."""

_declared: dict[tuple[type[nn.Module] | None, str], Meaning] = {}
"""Users' declarations by class (None is any) and name."""


def declare_mask(name: str, meaning: Meaning, cls: type[nn.Module] | None = None) -> None:
    """Declare how an argument of models marks padding, if its name does not show it.

    From then on, in this process, `powernorm.swap` passes it to the norms, and diagnosis and
    monitors leave out padding. Declare before the swap.

    Args:
        name: name of an argument of the `forward` of the model, or of a module in it.
        meaning: `keep`, 1 or True is a valid position, as in Hugging Face's attention_mask;
            `padding`, True is padding, as in torch's src_key_padding_mask; `lengths`, the number of
            valid positions at the start of each sequence, (batch,).
        cls: class of the modules with such an argument, including subclasses; None means all.

    Raises:
        InputError: the name is not one of an argument, the meaning does not exist, or `cls` is not
            a class of modules.

    >>> class Encoder(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.norm = nn.LayerNorm(8)
    ...     def forward(self, x, seen):
    ...         return self.norm(x)
    >>> declare_mask("seen", "keep", Encoder)
    >>> import powernorm
    >>> powernorm.plan_swap(Encoder()).rows[0].mask
    'seen'
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise InputError(f"name is {name!r}, expected the name of an argument, as 'mask'")
    if meaning not in get_args(Meaning):
        raise InputError(f"meaning is {meaning!r}, expected one of {', '.join(get_args(Meaning))}")
    if cls is not None and not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise InputError(f"cls is {cls!r}, expected a class of torch.nn.Module")
    _declared[cls, name] = meaning


def declared_meaning(module: nn.Module, name: str) -> Meaning | None:
    """Return the meaning that a user has declared for an argument of a module, or None."""
    keys = ((cls, name) for cls in (*type(module).__mro__, None))
    return next((_declared[key] for key in keys if key in _declared), None)


@dataclass(frozen=True)
class MaskArgument:
    """An argument of a module's forward that marks padding."""

    name: str
    position: int | None
    """Index among the positional arguments; None if it is keyword-only."""
    meaning: Meaning | None
    """None until values show its meaning."""
    data_name: str = ""
    """Name of the forward's first argument, in a user's model."""

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
        """Return the argument's value in a call, None if it is left out."""
        value = kwargs.get(self.name)
        if value is None and self.position is not None and self.position < len(args):
            value = args[self.position]
        # One length for all rows shows no padding.
        return None if self.meaning == "lengths" and isinstance(value, int) else value

    def data(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return the data of a call that its mask belongs to, or None.

        These are tokens (batch, length) or vectors (batch, length, features); not a nested tensor,
        which has no padding.
        """
        names = (self.data_name, *_DATA)
        candidates = [*args[:1], *(kwargs.get(name) for name in names if name != self.name)]
        tensors = (x for x in candidates if isinstance(x, Tensor) and not x.is_nested)
        return next((x for x in tensors if x.ndim in (2, 3)), None)


NO_MASK: Final = MaskArgument("", None, "keep")
"""The argument of a module that must hide the mask of the model around it."""


def _mask_argument(module: nn.Module, side: Side | None = None) -> MaskArgument | None:
    """Return the argument by which a module takes the padding of its own input, or None.

    Args:
        module: any module.
        side: side that selects one of torch's two masks, if the module is in a decoder.
    """
    parameters = parameters_of(module)
    names = list(parameters)
    meanings = meanings_of(module, names)
    if _has_two_sides(names):
        if side is None or "decoder_attention_mask" in names:
            return None
        other = "src_" if side == "decoder" else "tgt_"
        meanings = {name: m for name, m in meanings.items() if not name.startswith(other)}
    preferred = _TARGET if side == "decoder" else _SOURCE
    name = next((name for name in (preferred, *meanings) if name in meanings), None)
    if name is None:
        return None
    positional = parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY
    position = names.index(name) if positional else None
    # The first argument of another library's submodule may be other data.
    first = "" if is_of_known_library(module) else names[0]
    return MaskArgument(name, position, meanings[name], first)


def meanings_of(module: nn.Module, names: Sequence[str]) -> dict[str, Meaning | None]:
    """Return the arguments that may be the mask, the most likely first, with their meanings."""
    known: dict[str, Meaning | None] = dict(known_meanings(module))
    if not is_of_known_library(module):
        known.update(_MORE_MEANINGS)
        known.update({name: "lengths" for name in names if _LENGTHS.fullmatch(name)})
    said = {name: declared_meaning(module, name) for name in names}
    declared = {name: meaning for name, meaning in said.items() if meaning is not None}
    return declared | {name: declared.get(name, known[name]) for name in known if name in names}


def mask_by_name(name: object) -> bool:
    """Return whether a key of a batch is one of the names of masks and lengths."""
    known = {**MEANINGS, **_MORE_MEANINGS}
    return isinstance(name, str) and (name in known or bool(_LENGTHS.fullmatch(name)))


def _has_two_sides(names: Sequence[str]) -> bool:
    pairs = (("src_mask", "tgt_mask"), (_SOURCE, _TARGET))
    return "decoder_attention_mask" in names or any(set(pair) <= set(names) for pair in pairs)


def _two_sided_argument(module: nn.Module) -> MaskArgument | None:
    """Return the first padding argument of a module that takes the masks of two sides."""
    names = list(parameters_of(module))
    name = next((name for name in ("attention_mask", _SOURCE, "src_mask") if name in names), None)
    if name is None or not _has_two_sides(names):
        return None
    return MaskArgument(name, names.index(name), None, names[0])


def named_values(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values of a call by the names of the forward's parameters."""
    return {**dict(zip(parameters_of(module), args, strict=False)), **kwargs}


def is_tower(module: nn.Module, owner: nn.Module) -> bool:
    """Return whether a module takes images or audio inside an owner of a mask for text."""
    if is_of_images(module) and not is_of_images(owner):
        return True
    inner, outer = set(parameters_of(module)), set(parameters_of(owner))
    return bool(inner & _OTHER_DATA) and _TOKENS not in inner and _TOKENS in outer


class Takers(NamedTuple):
    """The modules that take the mask of a norm."""

    found: Sequence[tuple[str, MaskArgument]]
    """Dotted names, outermost first, and the arguments that are the masks."""
    side: Side | None = None
    """Stack that the norm is in."""
    is_sure: bool = True
    """Whether the mask is meant for the norm; if not, the module can only warn."""
    handed: Sequence[tuple[str, MaskArgument, tuple[str, ...]]] = ()
    """Dotted names of the modules that these hand their masks on to, outermost first, the
    arguments, and the modules around that hand them on. A model may call one without these."""


def takers_of(
    modules: Mapping[str, nn.Module], norm_name: str, sides: Mapping[str, Side]
) -> Takers:
    """Return the owners of a norm's mask, or the module that warns if none reaches it.

    The latter is the outermost module above that takes the masks of two sides, else the model. A
    norm of images has none.

    Args:
        modules: modules of the model by dotted name, including every name of a shared one.
        norm_name: dotted name of the norm.
        sides: the stacks of an encoder-decoder by dotted name.
    """
    around = ((name, side) for name, side in sides.items() if norm_name.startswith(f"{name}."))
    stack, side = next(around, ("", None))
    above = _above(norm_name)
    owners, handed = _owners(modules, above[above.index(stack) :], side)
    if owners:
        return Takers(owners, side, handed=handed)
    for name in above:
        argument = _two_sided_argument(modules[name])
        if argument is not None:
            return Takers([(name, argument)], side, False)
    if _takes_images(modules, norm_name):
        return Takers([])
    first = next(iter(parameters_of(modules[""])), "")
    return Takers([("", replace(NO_MASK, data_name=first))], None, False)


def _above(norm_name: str) -> list[str]:
    """Return the dotted names of the modules around a norm, outermost first."""
    parts = norm_name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts))]


def _takes_images(modules: Mapping[str, nn.Module], norm_name: str) -> bool:
    """Return whether a module around a norm takes images."""
    around = [modules[name] for name in _above(norm_name)]
    return any(_IMAGES in parameters_of(one) or is_of_images(one) for one in around)


def _owners(
    modules: Mapping[str, nn.Module], names: Sequence[str], side: Side | None
) -> tuple[list[tuple[str, MaskArgument]], list[tuple[str, MaskArgument, tuple[str, ...]]]]:
    """Return `Takers.found` and `Takers.handed` of a norm inside these modules."""
    owners: list[tuple[str, MaskArgument]] = []
    handed: list[tuple[str, MaskArgument, tuple[str, ...]]] = []
    around: tuple[str, ...] = ()  # the last owner, and what it hands its mask on to
    for name in names:
        module = modules[name]
        argument = _mask_argument(module, side)
        if owners and is_tower(module, modules[owners[0][0]]):
            return [(name, argument or NO_MASK)], []
        if argument is None:
            continue
        if owners and not lengthens(module) and hands_on(modules[owners[-1][0]], module):
            handed.append((name, argument, around))
            around = *around, name
            continue
        if owners and lengthens(module):
            owners.pop()
        owners.append((name, argument))
        around = (name,)
    return owners, handed


def mask_sources(
    model: nn.Module, norm_names: Sequence[str], sides: Mapping[str, Side]
) -> dict[str, str | None]:
    """Return the module argument that gives each norm its padding mask.

    Norms of images, which have no padding, are left out.

    Args:
        model: the model.
        norm_names: dotted names of norms.
        sides: the stacks of an encoder-decoder by dotted name.

    Returns:
        `argument` of the model itself, or `module.argument`; None if no mask reaches a norm.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    sources: dict[str, str | None] = {}
    for name in norm_names:
        takers = takers_of(modules, name, sides)
        if takers.found and takers.is_sure:
            owner, argument = takers.found[-1]  # the nearest that is given and fits
            if takers.found[0][1] is not NO_MASK:
                sources[name] = f"{owner}.{argument.name}".lstrip(".")
        elif not _takes_images(modules, name):
            sources[name] = None
    return sources
