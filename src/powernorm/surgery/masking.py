"""Handing a foreign model's own mask argument to the norms inside it.

Hooks on the mask's owners open and close the scope of `powernorm.padding_mask` around their
forward. An owner is the outermost module above a norm that takes a mask; in a model with an encoder
and a decoder it is looked for within each, so that their masks do not mix.

The hooks are bound methods of plain objects that refer to modules: they are copied and pickled with
the model, and a copy's hooks ask the copy's norms.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from powernorm.norms import BatchStatisticsNorm
from powernorm.norms.masks import close_scope, current_padding_mask, open_scope, scope_opener
from powernorm.surgery.mask_checks import MaskChecks, Taker
from powernorm.surgery.selection import Side

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
"""Names of the argument that the mask goes with, where it is not the first one."""

_STRIDES: Final = {"WhisperEncoder": 2, "WhisperModel": 2}
"""So many positions of the mask become one inside, by a convolution in front of the layers."""

_LENDERS: Final = ("WhisperModel",)
"""Classes that take the encoder's mask and do not hand it on."""

_REDUCES: Final = "_get_feature_vector_attention_mask"
"""A method of speech models whose mask is over samples; their encoder gets one over positions."""

_TOKENS: Final = "input_ids"
_OTHER_DATA: Final = {"pixel_values", "input_features", "input_values"}
"""What a tower of a model of texts and something else takes; the texts' mask is not its own."""


@dataclass(frozen=True)
class MaskArgument:
    """An argument of a module's forward that says which positions are padding."""

    name: str
    position: int | None
    """Its place among the positional arguments, None where it is by keyword only."""
    meaning: Meaning
    stride: int = 1

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Its value as a bool mask (batch, length), True = padding; None if it is no such mask."""
        value = kwargs.get(self.name)
        if value is None and self.position is not None and self.position < len(args):
            value = args[self.position]
        if not isinstance(value, Tensor) or value.ndim != 2:
            return None
        return self._padding(value)[:, :: self.stride]

    def _padding(self, value: Tensor) -> Tensor:
        if self.meaning == "keep":
            return value == 0
        if value.dtype == torch.bool:
            return value
        # torch adds a float mask to the scores: -inf at padding, 0 elsewhere.
        return value < 0 if value.is_floating_point() else value != 0


def mask_argument(module: nn.Module, side: Side | None = None) -> MaskArgument | None:
    """The argument by which a module takes the padding of its own input, or None.

    Args:
        module: any module.
        side: which of torch's two masks is meant where the module stands in a decoder.
    """
    parameters = _parameters(module)
    names = list(parameters)
    if "decoder_attention_mask" in names or (_SOURCE in names and _TARGET in names):
        return None  # it takes the masks of two sides
    known: dict[str, Meaning] = dict(_MEANINGS)
    if type(module).__module__.partition(".")[0] == "x_transformers":
        known["mask"] = "keep"
    preferred = _TARGET if side == "decoder" else _SOURCE
    name = next((name for name in (preferred, *known) if name in names), None)
    if name is None:
        return None
    positional = parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY
    stride = _STRIDES.get(type(module).__name__, 1)
    return MaskArgument(name, names.index(name) if positional else None, known[name], stride)


_NO_MASK: Final = MaskArgument("", None, "keep")
"""Of a module that has to hide the mask of the model around it."""


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # a forward in C++, as a scripted module's
        return {}


class MaskOwner:
    """Opens the scope of a module's own mask around each of its calls.

    Args:
        module: takes the mask; gets the hooks.
        argument: by which it takes it.
        norms: the swapped norms below it.
        checks: look at the first masks, one for all owners of a swap.
        side: which stack it is.
        lender: an owner further out whose mask is the module's where it gets none itself.
    """

    def __init__(
        self,
        module: nn.Module,
        argument: MaskArgument,
        norms: Sequence[BatchStatisticsNorm],
        checks: MaskChecks,
        side: Side | None = None,
        lender: MaskOwner | None = None,
    ) -> None:
        self.argument = argument
        self.norms = list(norms)
        self.checks = checks
        self.side = side
        self.lender = lender
        self.length_first = any(
            isinstance(part, nn.MultiheadAttention) and not part.batch_first
            for part in module.modules()
        )
        # Unlike their numbers, pickled handles keep later hooks of another process from taking
        # the places of these.
        self.handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self.open, with_kwargs=True),
            module.register_forward_hook(self.close, always_call=True),
        ]

    def open(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the forward: make its mask the current one."""
        mask = None
        if self.is_read():
            mask = self.argument.of(args, kwargs)
            data = self._data(args, kwargs)
            if mask is not None and data is not None and self.argument.stride == 1:
                mask = _last(mask, data.shape[0 if self._transposed(data) else 1])
            if not torch.compiler.is_compiling():
                self._check(module, mask, data)
            if mask is not None and self.length_first:
                mask = mask.transpose(0, 1)
        if mask is None:
            mask = self._inherited()
        open_scope(mask, self)

    def close(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """After the forward, also one that failed."""
        del module, args, output
        close_scope(self)

    def is_read(self) -> bool:
        """Whether some norm below looks at the mask now.

        In evaluation masks do not matter to most norms, and those of a generation with a cache are
        longer than its input.
        """
        return any(norm.training or norm.variant == "released" for norm in self.norms)

    def _inherited(self) -> Tensor | None:
        # A scope that the user opened holds for a model called without a mask. One that another
        # owner opened is the mask of another model or of another side.
        opener = scope_opener()
        return current_padding_mask() if opener is None or opener is self.lender else None

    def _data(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        candidates = [*args[:1], *(kwargs.get(name) for name in _DATA)]
        return next((x for x in candidates if isinstance(x, Tensor) and x.ndim in (2, 3)), None)

    def _transposed(self, data: Tensor) -> bool:
        return self.length_first and data.ndim == 3

    def _check(self, module: nn.Module, mask: Tensor | None, data: Tensor | None) -> None:
        if data is None or not any(norm.training for norm in self.norms):
            return
        inherited = mask is None and self._inherited() is not None
        if not inherited and self.argument.stride == 1:
            batch = data.transpose(0, 1) if self._transposed(data) else data
            self.checks.look(Taker(module, self.argument.name, self.side), batch, mask)

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self.handles:
            handle.remove()


def retire_owners(model: nn.Module) -> Callable[[], None]:
    """Take away the hooks of owners none of whose norms is in the model any more.

    Returns:
        What puts them back.
    """
    present = set(model.modules())
    kept: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for module in present:
        idle = [
            key
            for key, hook in module._forward_pre_hooks.items()
            if isinstance(owner := getattr(hook, "__self__", None), MaskOwner)
            and present.isdisjoint(owner.norms)
        ]
        owners = {getattr(module._forward_pre_hooks[key], "__self__", None) for key in idle}
        idle += [
            key
            for key, hook in module._forward_hooks.items()
            if getattr(hook, "__self__", None) in owners
        ]
        for hooks in _hook_tables(module) if idle else ():
            kept.append((hooks, dict(hooks)))
            for key in idle:
                hooks.pop(key, None)

    def put_back() -> None:
        for hooks, before in kept:
            hooks.clear()
            hooks.update(before)

    return put_back


def _hook_tables(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return (
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_always_called,
    )


def _last(mask: Tensor, length: int) -> Tensor:
    # With a cache the mask also covers the positions before the input.
    return mask[:, -length:] if mask.shape[1] > length else mask


def own_masks(
    model: nn.Module, norms: Mapping[str, BatchStatisticsNorm], sides: Mapping[str, Side]
) -> tuple[MaskOwner, ...]:
    """Put hooks on the owners of the masks that these norms need.

    Args:
        model: with the norms in place.
        norms: by dotted name, every name of a shared one.
        sides: the stacks of an encoder-decoder by dotted name.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    below: dict[str, list[BatchStatisticsNorm]] = {}
    found: dict[str, tuple[MaskArgument, Side | None]] = {}
    for norm_name, norm in norms.items():
        owner, side = _owner_of(modules, norm_name, sides)
        if owner is not None:
            below.setdefault(owner[0], []).append(norm)
            found[owner[0]] = (owner[1], side)
    checks = MaskChecks.of(model)
    lenders = _lend(modules, below, found, checks)
    return (
        *lenders.values(),
        *(
            MaskOwner(modules[name], argument, below[name], checks, side, lenders.get(name))
            for name, (argument, side) in found.items()
        ),
    )


def mask_sources(
    model: nn.Module, norm_names: Sequence[str], sides: Mapping[str, Side]
) -> dict[str, str]:
    """Which argument of which module tells each norm about padding; none where it is left out.

    Args:
        model: the model.
        norm_names: dotted names of norms.
        sides: the stacks of an encoder-decoder by dotted name.

    Returns:
        `argument` of the model itself, or `module.argument`.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    sources: dict[str, str] = {}
    for name in norm_names:
        owner, _ = _owner_of(modules, name, sides)
        if owner is not None and owner[1] is not _NO_MASK:
            sources[name] = f"{owner[0]}.{owner[1].name}" if owner[0] else owner[1].name
    return sources


_Owner = tuple[str, MaskArgument]
"""Name of a module and the argument by which it takes the mask."""


def _owner_of(
    modules: Mapping[str, nn.Module], norm_name: str, sides: Mapping[str, Side]
) -> tuple[_Owner | None, Side | None]:
    """The outermost owner above a norm, and the side that it stands on."""
    stack = next((name for name in sides if norm_name.startswith(f"{name}.")), None)
    side = None if stack is None else sides[stack]
    return _outermost(modules, norm_name, 0 if stack is None else len(stack.split(".")), side), side


def _outermost(
    modules: Mapping[str, nn.Module], norm_name: str, start: int, side: Side | None
) -> _Owner | None:
    parts = norm_name.split(".")
    chosen: _Owner | None = None
    for length in range(start, len(parts)):
        name = ".".join(parts[:length])
        module = modules[name]
        argument = None if hasattr(module, _REDUCES) else mask_argument(module, side)
        if chosen is None:
            chosen = None if argument is None else (name, argument)
        elif _is_tower(module, modules[chosen[0]]):
            return name, argument or _NO_MASK
        elif argument is not None and _lengthens(module):
            chosen = name, argument
    return chosen


def _is_tower(module: nn.Module, owner: nn.Module) -> bool:
    """Whether a module takes images or sounds inside an owner of a mask for texts."""
    inner, outer = set(_parameters(module)), set(_parameters(owner))
    return bool(inner & _OTHER_DATA) and _TOKENS not in inner and _TOKENS in outer


def _lengthens(module: nn.Module) -> bool:
    """Whether a module's mask is that of its owner, lengthened by what was put before the input.

    x-transformers' stacks get it so; their attentions, which take a mask too, hold norms of other
    shapes.
    """
    cls = type(module)
    return cls.__module__.startswith("x_transformers") and cls.__name__ != "Attention"


def _lend(
    modules: Mapping[str, nn.Module],
    below: Mapping[str, list[BatchStatisticsNorm]],
    found: Mapping[str, tuple[MaskArgument, Side | None]],
    checks: MaskChecks,
) -> dict[str, MaskOwner]:
    """Owners of masks that are meant for a stack further in, by the name of that stack."""
    lenders: dict[str, MaskOwner] = {}
    for name, (argument, side) in found.items():
        outer = name.rpartition(".")[0]
        module = modules[outer]
        if side != "encoder" or type(module).__name__ not in _LENDERS:
            continue
        names = list(_parameters(module))
        lent = MaskArgument(
            argument.name, names.index(argument.name), argument.meaning, argument.stride
        )
        lenders[name] = MaskOwner(module, lent, below[name], checks, side)
    return lenders
