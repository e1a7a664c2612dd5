"""Passing a model's own mask argument to the norms inside it.

Hooks on the mask's owners open and close the scope of `powernorm.padding_mask` around their
forward. An owner is the outermost module above a norm that takes a mask. Modules of other
libraries further in that take a mask of their own are owners too. In a model with an encoder and a
decoder owners are searched within each, so that their masks do not mix. Swaps share the owners of
a model.

The hooks are bound methods of plain objects that refer to modules: they are copied and pickled with
the model, and a copy's hooks ask the copy's norms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from powernorm.inspection.mask_arguments import (
    NO_MASK,
    MaskArgument,
    data_of,
    library_of,
    mask_argument,
    parameters_of,
    takes_length_first,
    turns_round,
)
from powernorm.inspection.mask_checks import MaskChecks, Taker
from powernorm.inspection.selection import Side
from powernorm.norms import Norm
from powernorm.norms.masks import ScopedMask, close_scope, innermost_scope, open_scope
from powernorm.ops.operators import in_backward

_LENDERS: Final = ("WhisperModel",)
"""Classes that take the encoder's mask and do not pass it on."""

_REDUCES: Final = "_get_feature_vector_attention_mask"
"""Method of speech models whose mask is over samples; their encoder gets one over positions."""

_TOKENS: Final = "input_ids"
_OTHER_DATA: Final = {"pixel_values", "input_features", "input_values"}
"""Inputs of a tower for images or audio beside a text model, whose mask is not the tower's."""

_HANDS_ON: Final = frozenset({"torch", "transformers", "x_transformers", "timm", "powernorm"})
"""Libraries whose models pass their mask on to the modules inside, unchanged."""


@dataclass(frozen=True, eq=False)
class MaskUse:
    """One swap or observer that needs an owner; the owner stays as long as it has uses."""

    owner: MaskOwner
    side: Side | None
    """Stack that the norms are in."""
    parents: tuple[nn.Module, ...]
    """Modules that hold the norms; the norms may change."""
    observed: bool = False
    """Whether this is an observer, which needs the mask in evaluation and for any norm."""

    def release(self) -> None:
        """Stop needing the owner, for example after an undo."""
        self.owner.uses = [use for use in self.owner.uses if use is not self]
        if not self.owner.uses:
            self.owner.remove()


class MaskOwner:
    """Hooks that open the scope of a module's own mask around each of its calls.

    Args:
        module: the module that takes the mask and gets the hooks.
        argument: the argument by which it takes the mask.
        checks: checks of the first masks.
        reach: the part of the module whose norms the mask is for; None means all of it.
    """

    def __init__(
        self,
        module: nn.Module,
        argument: MaskArgument,
        checks: MaskChecks,
        reach: nn.Module | None = None,
    ) -> None:
        self.module = module
        self.argument = argument
        self.checks = checks
        self.reach = module if reach is None else reach
        self.uses: list[MaskUse] = []
        self.length_first = takes_length_first(module)
        self.turns_round = turns_round(module)
        # Pickled handles, unlike their numbers, keep later hooks of another process from
        # replacing these.
        self.handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self.open, with_kwargs=True),
            module.register_forward_hook(self.close, always_call=True),
        ]

    @property
    def label(self) -> str:
        """Description of the argument for messages."""
        return f"{self.argument.name} of {type(self.module).__name__}"

    def name_of(self, norm: object) -> str:
        """Return a norm's dotted name below the module, and its class."""
        named = self.module.named_modules()
        name = next((name for name, module in named if module is norm), "a norm")
        return f"{name} ({type(norm).__name__}) in {type(self.module).__name__}"

    @property
    def side(self) -> Side | None:
        """Stack of an encoder-decoder that the module is, if a use says so."""
        return next((use.side for use in self.uses if use.side is not None), None)

    def open(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Offer the mask to the norms; runs before the forward."""
        del module
        given, mask, data = None, None, None
        if self.is_read():
            given, data = self.argument.given(args, kwargs), data_of(args, kwargs)
            mask = self._read(given, data)
        outer = self._outer(given is not None and mask is None)
        if not torch.compiler.is_compiling():
            self._check(given, mask, data, outer)
        if mask is not None:
            # A user's scope is for a model that is called without a mask.
            outer = tuple(one for one in outer if one.source is not None)
            outer = (self._laid_out(mask), *outer)
        open_scope(outer, self, observed=self.is_only_observed)

    def close(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """Close the scope; runs after the forward, also if that failed."""
        del module, args, output
        close_scope(self)

    def is_read(self) -> bool:
        """Return whether some norm below uses the mask now.

        In evaluation most norms ignore masks, and in generation with a cache the mask is longer
        than the input.
        """
        return self.is_observed or any(norm.wants_mask for norm in batch_norms(self.reach))

    @property
    def is_only_observed(self) -> bool:
        """Whether only observers need the owner: then the norms below must not see the mask."""
        return all(use.observed for use in self.uses)

    @property
    def is_observed(self) -> bool:
        """Whether the norms below are observed."""
        return any(use.observed for use in self.uses)

    def _read(self, given: object, data: Tensor | None) -> Tensor | None:
        batch_dim = 1 if data is not None and self._transposed(data) else 0
        mask = self.argument.read(given, None if data is None else data.shape[batch_dim])
        if mask is None or mask.ndim == 1 or data is None or self.argument.stride > 1:
            return mask
        # With a cache the mask also covers the positions before the input.
        length = data.shape[1 - batch_dim]
        return mask[:, -length:] if mask.shape[1] > length else mask

    def _transposed(self, data: Tensor) -> bool:
        return self.length_first and data.ndim == 3

    def _laid_out(self, mask: Tensor) -> ScopedMask:
        """Return the mask in the layout of the norms' inputs."""
        if mask.ndim == 2 and (self.length_first or self.turns_round):
            return ScopedMask(mask.transpose(0, 1), self, 1)
        return ScopedMask(mask, self)

    def _outer(self, unreadable: bool) -> tuple[ScopedMask, ...]:
        """Return the masks of the surrounding scope that are meant for the norms in here."""
        scope = innermost_scope(observing=self.is_only_observed)
        if scope is None:
            return ()
        masks, opener = scope
        if opener is None:
            return masks
        if not masks or not isinstance(opener, MaskOwner) or not self.argument.name:
            return ()
        # The scope of a surrounding model is for other data, unless it was opened for norms in
        # here too, or this module was given a mask and is a part of that model.
        inside = set(self.reach.modules())
        meant = any(parent in inside for use in opener.uses for parent in use.parents)
        if not meant and unreadable:
            meant = any(part is self.module for part in opener.reach.modules())
        return masks if meant else ()

    def _check(
        self,
        given: object,
        mask: Tensor | None,
        data: Tensor | None,
        outer: tuple[ScopedMask, ...],
    ) -> None:
        # Autograd may run a checkpointed part again, without the scopes around it.
        trains = any(norm.training for norm in batch_norms(self.reach))
        if in_backward() or not (trains or self.is_observed):
            return
        taker = Taker(self.module, self.argument.name, self.side)
        if mask is None and (outer or not self.argument.name):
            return
        if mask is None and given is not None:
            self.checks.unreadable(taker, given)
        elif data is not None and self.argument.stride == 1:
            if mask is not None and mask.ndim == 1:
                data, mask = data[None], mask[None]
            elif self._transposed(data):
                data = data.transpose(0, 1)
            self.checks.look(taker, data, mask)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()


def batch_norms(module: nn.Module) -> Iterable[Norm]:
    """Return the norms in a module that need masks."""
    return (part for part in module.modules() if isinstance(part, Norm) and part.reads_mask)


def retire_owners(model: nn.Module) -> Callable[[], None]:
    """Remove the hooks of owners that no longer have a norm to pass masks to.

    Returns:
        A function that restores the hooks.
    """
    kept: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for module in list(model.modules()):
        idle = {owner for owner in _owners_on(module) if not any(batch_norms(owner.reach))}
        if not idle:
            continue
        kept.extend((hooks, dict(hooks)) for hooks in _hook_tables(module))
        keys = [
            key
            for hooks in (module._forward_pre_hooks, module._forward_hooks)
            for key, hook in hooks.items()
            if getattr(hook, "__self__", None) in idle
        ]
        for hooks in _hook_tables(module):
            for key in keys:
                hooks.pop(key, None)

    def put_back() -> None:
        for hooks, before in kept:
            hooks.clear()
            hooks.update(before)

    return put_back


def masked_norms(model: nn.Module) -> tuple[str, ...]:
    """Return the dotted names of the norms that a swap passes the model's own mask to."""
    parents = {
        parent
        for module in model.modules()
        for owner in _owners_on(module)
        for use in owner.uses
        if not use.observed
        for parent in use.parents
    }
    return tuple(
        f"{name}.{attribute}" if name else attribute
        for name, module in model.named_modules(remove_duplicate=False)
        if module in parents
        for attribute, part in module._modules.items()
        if isinstance(part, Norm) and part.reads_mask
    )


def _owners_on(module: nn.Module) -> list[MaskOwner]:
    hooks = module._forward_pre_hooks.values()
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return [owner for owner in owners if isinstance(owner, MaskOwner)]


def _hook_tables(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return (
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_always_called,
    )


@dataclass
class _Need:
    """The need for a module to be an owner."""

    argument: MaskArgument
    side: Side | None
    norms: list[str]


def attach_mask_owners(
    model: nn.Module,
    norm_names: Sequence[str],
    sides: Mapping[str, Side],
    *,
    observed: bool = False,
) -> tuple[MaskUse, ...]:
    """Put hooks on the owners of the masks that these norms need.

    Args:
        model: with the norms in place.
        norm_names: dotted names, every name of a shared one.
        sides: the stacks of an encoder-decoder by dotted name.
        observed: offer the mask to observers also where no norm trains.

    Returns:
        The caller's uses of the owners, to be released when the norms are removed.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    needs: dict[str, _Need] = {}
    for norm_name in norm_names:
        owners, side = _owners_of(modules, norm_name, sides)
        for name, argument in owners:
            needs.setdefault(name, _Need(argument, side, [])).norms.append(norm_name)
    checks = MaskChecks.of(model)
    uses: list[MaskUse] = []
    for name, need in needs.items():
        parents = tuple({modules[norm.rpartition(".")[0]]: None for norm in need.norms})
        for module, argument, reach in (
            *_lenders(modules, name, need),
            (name, need.argument, name),
        ):
            owner = _owner(modules[module], argument, modules[reach], checks)
            uses.append(MaskUse(owner, need.side, parents, observed))
            owner.uses.append(uses[-1])
    return tuple(uses)


def _owner(
    module: nn.Module, argument: MaskArgument, reach: nn.Module, checks: MaskChecks
) -> MaskOwner:
    """Return the owner on a module: an existing one, or a new one."""
    for owner in _owners_on(module):
        if owner.argument == argument and owner.reach is reach:
            return owner
    return MaskOwner(module, argument, checks, reach)


def _lenders(
    modules: Mapping[str, nn.Module], name: str, need: _Need
) -> list[tuple[str, MaskArgument, str]]:
    """Return module and argument of a mask that is meant for a stack further in, and that stack."""
    outer = name.rpartition(".")[0]
    module = modules[outer]
    if need.side != "encoder" or type(module).__name__ not in _LENDERS:
        return []
    position = list(parameters_of(module)).index(need.argument.name)
    return [(outer, replace(need.argument, position=position), name)]


def mask_sources(
    model: nn.Module, norm_names: Sequence[str], sides: Mapping[str, Side]
) -> dict[str, str]:
    """Return which argument of which module gives each norm its padding mask.

    Norms without such an argument are left out.

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
        owners, _ = _owners_of(modules, name, sides)
        if owners and owners[0][1] is not NO_MASK:
            owner, argument = owners[0]
            sources[name] = f"{owner}.{argument.name}" if owner else argument.name
    return sources


_Owner = tuple[str, MaskArgument]
"""Name of a module and the argument by which it takes the mask."""


def _owners_of(
    modules: Mapping[str, nn.Module], norm_name: str, sides: Mapping[str, Side]
) -> tuple[list[_Owner], Side | None]:
    """Return the owners above a norm, outermost first, and the norm's side."""
    stack = next((name for name in sides if norm_name.startswith(f"{name}.")), None)
    side = None if stack is None else sides[stack]
    return _on_the_way(
        modules, norm_name, 0 if stack is None else len(stack.split(".")), side
    ), side


def _on_the_way(
    modules: Mapping[str, nn.Module], norm_name: str, start: int, side: Side | None
) -> list[_Owner]:
    parts = norm_name.split(".")
    owners: list[_Owner] = []
    for length in range(start, len(parts)):
        name = ".".join(parts[:length])
        module = modules[name]
        argument = None if hasattr(module, _REDUCES) else mask_argument(module, side)
        if owners and _is_tower(module, modules[owners[0][0]]):
            return [(name, argument or NO_MASK)]
        if argument is None:
            continue
        if owners and _lengthens(module):
            owners[-1] = name, argument
        elif not owners or not _is_handed_on(modules[owners[-1][0]], module):
            owners.append((name, argument))
    return owners


def _is_handed_on(owner: nn.Module, module: nn.Module) -> bool:
    """Return whether a module inside an owner is given the owner's mask, as far as can be known.

    A user's own model may prepend a token to the input and pass a longer mask.
    """
    library = library_of(module)
    return library in _HANDS_ON and library == library_of(owner)


def _is_tower(module: nn.Module, owner: nn.Module) -> bool:
    """Return whether a module takes images or audio inside an owner of a mask for text."""
    inner, outer = set(parameters_of(module)), set(parameters_of(owner))
    return bool(inner & _OTHER_DATA) and _TOKENS not in inner and _TOKENS in outer


def _lengthens(module: nn.Module) -> bool:
    """Return whether a module's mask is its owner's, lengthened by what is prepended to the input.

    x-transformers' stacks get such a mask. Their attention modules take a mask too, but hold norms
    of other shapes.
    """
    cls = type(module)
    return cls.__module__.startswith("x_transformers") and cls.__name__ != "Attention"
