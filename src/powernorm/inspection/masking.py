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

from powernorm.errors import InputError
from powernorm.inspection.mask_arguments import (
    HANDS_ON,
    NO_MASK,
    MaskArgument,
    library_of,
    mask_argument,
    parameters_of,
    takes_length_first,
    turns_round,
    two_sided_argument,
)
from powernorm.inspection.mask_checks import MaskChecks, Taker
from powernorm.inspection.mask_meanings import MaskReader, UndecidedError
from powernorm.inspection.mask_rules import (
    REDUCES,
    gives_all_masks,
    mask_after,
    parts_with_rules,
)
from powernorm.inspection.selection import Side
from powernorm.norms import Norm
from powernorm.norms.masks import MaskSource, ScopedMask, close_scope, innermost_scope, open_scope
from powernorm.ops.operators import in_backward

_LENDERS: Final = ("WhisperModel",)
"""Classes that take the encoder's mask and do not pass it on."""

_TOKENS: Final = "input_ids"
_IMAGES: Final = "pixel_values"
_IMAGE_LIBRARIES: Final = {"timm", "torchvision"}
_OTHER_DATA: Final = {_IMAGES, "input_features", "input_values"}
"""Inputs of a tower for images or audio beside a text model, whose mask is not the tower's."""


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
    evaluated: bool = False
    """Whether the mask is needed in evaluation too, by others than observers."""
    root: nn.Module | None = None
    """Model in which the owner was searched."""

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
        only_warns: whether it is not known which norms below the mask is for.
    """

    def __init__(
        self,
        module: nn.Module,
        argument: MaskArgument,
        checks: MaskChecks,
        reach: nn.Module | None = None,
        only_warns: bool = False,
    ) -> None:
        self.module = module
        self.argument = argument
        self.checks = checks
        self.only_warns = only_warns
        self.reach = module if reach is None else reach
        self.uses: list[MaskUse] = []
        self.length_first = takes_length_first(module)
        self.turns_round = turns_round(module)
        # A model of one's own may turn its vectors round anywhere.
        self.is_own = library_of(module) not in HANDS_ON
        self.parts = parts_with_rules(self.reach)
        self.is_exact = not (self.is_own or self.parts)
        is_open = bool(argument.name) and argument.meaning in (None, "lengths")
        self.reader = MaskReader(module, argument, checks) if is_open else None
        self.undecided = ""  # the error of a norm that would need this call's mask
        # Norms whose inputs were seen to be (length, batch, features), or not.
        self._length_first_at: dict[object, bool] = {}
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
            given, data = self.argument.given(args, kwargs), self.argument.data(args, kwargs)
            mask = self._read(given, data)
        outer, around = self._outer(given is not None and mask is None)
        warns = given is not None and (self.only_warns or self.undecided)
        if not torch.compiler.is_compiling() and not warns:
            self._check(given, mask, data, outer)
        if mask is not None:
            # A user's scope is for a model that is called without a mask.
            outer = tuple(one for one in outer if one.source is not None)
            outer = (self._laid_out(mask, data), *outer)
        elif warns:
            around = self
        open_scope(outer, self, observed=self.is_only_observed, given=around)

    def close(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """Close the scope; runs after the forward, also if that failed."""
        del module, args, output
        close_scope(self)

    def is_read(self) -> bool:
        """Return whether some norm below uses the mask now.

        In evaluation most norms ignore masks, and in generation with a cache the mask is longer
        than the input.
        """
        if any(use.observed or use.evaluated for use in self.uses):
            return True
        return any(norm.wants_mask for norm in batch_norms(self.reach))

    @property
    def is_needed(self) -> bool:
        """Whether there is a norm to pass masks to, or something that needs them besides."""
        return any(batch_norms(self.reach)) or any(use.evaluated for use in self.uses)

    @property
    def is_only_observed(self) -> bool:
        """Whether only observers need the owner: then the norms below must not see the mask."""
        return all(use.observed for use in self.uses)

    @property
    def is_observed(self) -> bool:
        """Whether the norms below are observed."""
        return any(use.observed for use in self.uses)

    def _read(self, given: object, data: Tensor | None) -> Tensor | None:
        self.undecided = ""
        if self.only_warns or given is None:
            return None
        if self.reader is not None:
            around, _ = self._outer(True)
            try:
                return self.reader.read(given, data, [one.mask for one in around])
            except UndecidedError as error:
                # The modules inside may be given masks that say it.
                self.undecided = str(error)
                return None
        batch_dim = 1 if data is not None and self._transposed(data) else 0
        mask = self.argument.read(given, None if data is None else data.shape[batch_dim])
        if mask is None or mask.ndim == 1 or data is None or self.parts:
            return mask
        # With a cache the mask also covers the positions before the input.
        length = data.shape[1 - batch_dim]
        if self.is_own and tuple(mask.shape) == (data.shape[1], data.shape[0]):
            return mask
        return mask[:, -length:] if mask.shape[1] > length else mask

    def _transposed(self, data: Tensor) -> bool:
        return self.length_first and data.ndim == 3

    def _laid_out(self, mask: Tensor, data: Tensor | None) -> ScopedMask:
        """Return the mask in the layout of the norms' inputs, as far as that is known."""
        first = self.length_first or self.turns_round
        if data is not None and mask.ndim == 2:
            first = self.turns_round or self._is_length_first(data, mask) if self.is_own else first
        if mask.ndim == 2 and first:
            return ScopedMask(mask.transpose(0, 1), self, 1)
        return ScopedMask(mask, self)

    def fit(
        self, mask: Tensor, batch_dim: int, shape: torch.Size, norm: object, strict: bool
    ) -> Tensor | None:
        """Return the mask for an input of that shape (without the features), or None."""
        fits = mask.shape == shape
        if fits and norm in self._length_first_at and not self.parts and shape[0] != shape[-1]:
            return mask
        if mask.ndim != 2 or len(shape) != 2:
            return mask if fits else None
        for part in self.parts:
            plain = mask.transpose(0, 1) if batch_dim else mask
            if shape[batch_dim] != plain.shape[0]:
                break
            try:
                derived = mask_after(part, plain, shape[1 - batch_dim], norm)
            except InputError:
                if strict:
                    raise
                return None
            if derived is not None:
                return derived.transpose(0, 1) if batch_dim else derived
        if not self.is_own:
            return mask if fits else None
        return self._turned(mask, batch_dim, shape, norm)

    def _turned(
        self, mask: Tensor, batch_dim: int, shape: torch.Size, norm: object
    ) -> Tensor | None:
        """Return the mask in the order of an input's dimensions, in a model of one's own."""
        if tuple(shape) not in (tuple(mask.shape), tuple(mask.shape[::-1])):
            return None
        compiled = torch.compiler.is_compiling()
        if shape[0] != shape[1]:
            turned = mask.shape != shape
            if norm is not None and not compiled:
                self._length_first_at[norm] = turned != bool(batch_dim)
            return mask.transpose(0, 1) if turned else mask
        if norm is None:
            return mask
        if norm not in self._length_first_at and not compiled:
            self.checks.warn(
                f"square {self.name_of(norm)}",
                f"{self.name_of(norm)} got as many positions as sequences, {shape[0]}, and has not "
                f"been seen with other numbers: its input was taken as "
                f"{'(length, batch, …)' if batch_dim else '(batch, length, …)'} for the mask from "
                f"{self.label}; begin with a batch of another length",
            )
        length_first = self._length_first_at.get(norm, bool(batch_dim))
        return mask.transpose(0, 1) if length_first != bool(batch_dim) else mask

    def warn_unmasked(self, norm: object) -> None:
        """Warn of a norm that no mask reaches although one was given around it."""
        if self.undecided:
            raise InputError(self.undecided)
        if torch.compiler.is_compiling():
            return
        name = self.name_of(norm)
        self.checks.warn(
            f"unmasked {name}",
            f"{name} got no padding mask, although {self.label} was given: padding counts in its "
            "statistics, unless it is given a mask by hand, by its argument padding_mask or by "
            "`with powernorm.padding_mask(mask):`, or left out of the swap by `where=`",
        )

    def _outer(self, unreadable: bool) -> tuple[tuple[ScopedMask, ...], MaskSource | None]:
        """Return the masks of the surrounding scope that are meant for the norms in here.

        Returns:
            Masks; and the model around that was given one if none of its masks is meant.
        """
        scope = innermost_scope(observing=self.is_only_observed)
        if scope is None:
            return (), None
        masks, opener, around = scope
        if opener is None:
            return masks, None
        if not isinstance(opener, MaskOwner) or not self.argument.name:
            return (), None
        source = masks[0].source if masks else around
        if not isinstance(source, MaskOwner) or self._is_apart_from(source):
            source = None
        # The scope of a surrounding model is for other data, unless it was opened for norms in
        # here too, or this module was given a mask and is a part of that model.
        inside = set(self.reach.modules())
        meant = any(parent in inside for use in opener.uses for parent in use.parents)
        if not meant and unreadable:
            meant = any(part is self.module for part in opener.reach.modules())
        return (masks, None if masks else source) if meant else ((), source)

    def _is_apart_from(self, owner: MaskOwner) -> bool:
        """Return whether this module has data of its own beside those of a module around."""
        return self.side is not None or _is_tower(self.module, owner.module)

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
            reader = self.reader
            if reader is None or (data is not None and not reader.is_attention(given, data)):
                self.checks.unreadable(taker, given)
        # Vectors of another length than the mask may have it in another place.
        elif data is not None and not (self.parts and data.ndim == 3):
            if mask is not None and mask.ndim == 1:
                data, mask = data[None], mask[None]
            elif self._is_length_first(data, mask):
                data = data.transpose(0, 1)
            self.checks.look(taker, data, mask)

    def _is_length_first(self, data: Tensor, mask: Tensor | None) -> bool:
        if self.is_own and mask is not None and data.ndim == 3 and mask.shape[0] != mask.shape[1]:
            return tuple(data.shape[:2]) == tuple(mask.shape[::-1])
        return self._transposed(data)

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
        idle = {owner for owner in _owners_on(module) if not owner.is_needed}
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


def masked_norms(model: nn.Module) -> dict[str, list[str]]:
    """Return the norms that a swap passes the model's own mask to.

    Returns:
        Their dotted names by that of the module that was swapped: owners of masks were searched
        in there alone. It is "" for the model, and for one around it.
    """
    names = {module: name for name, module in model.named_modules()}
    roots: dict[nn.Module, str] = {}
    for module in names:
        for use in (use for owner in _owners_on(module) for use in owner.uses if not use.observed):
            root = names.get(use.root, "") if use.root is not None else ""
            roots |= dict.fromkeys(use.parents, root)
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for attribute, part in module._modules.items() if module in roots else ():
            if isinstance(part, Norm) and part.reads_mask:
                masked = f"{name}.{attribute}" if name else attribute
                found.setdefault(roots[module], []).append(masked)
    return found


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
    only_warns: bool = False


def attach_mask_owners(
    model: nn.Module,
    norm_names: Sequence[str],
    sides: Mapping[str, Side],
    *,
    observed: bool = False,
    evaluated: bool = False,
) -> tuple[MaskUse, ...]:
    """Put hooks on the owners of the masks that these norms need.

    Args:
        model: with the norms in place.
        norm_names: dotted names, every name of a shared one.
        sides: the stacks of an encoder-decoder by dotted name.
        observed: offer the mask to observers also where no norm trains.
        evaluated: offer the mask in evaluation too.

    Returns:
        The caller's uses of the owners, to be released when the norms are removed.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    needs: dict[str, _Need] = {}
    for norm_name in norm_names:
        owners, side = _owners_of(modules, norm_name, sides)
        for name, argument in owners or _two_sided_owners(modules, norm_name):
            need = needs.setdefault(name, _Need(argument, side, [], not owners))
            need.norms.append(norm_name)
    checks = MaskChecks.of(model)
    uses: list[MaskUse] = []
    for name, need in needs.items():
        parents = tuple({modules[norm.rpartition(".")[0]]: None for norm in need.norms})
        for module, argument, reach in (
            *_lenders(modules, name, need),
            (name, need.argument, name),
        ):
            owner = _owner(modules[module], argument, modules[reach], checks, need.only_warns)
            uses.append(MaskUse(owner, need.side, parents, observed, evaluated, model))
            owner.uses.append(uses[-1])
    return tuple(uses)


def _owner(
    module: nn.Module,
    argument: MaskArgument,
    reach: nn.Module,
    checks: MaskChecks,
    only_warns: bool,
) -> MaskOwner:
    """Return the owner on a module: an existing one, or a new one."""
    for owner in _owners_on(module):
        if owner.argument == argument and owner.reach is reach:
            return owner
    return MaskOwner(module, argument, checks, reach, only_warns)


def _two_sided_owners(modules: Mapping[str, nn.Module], norm_name: str) -> list[_Owner]:
    """Return the outermost module above a norm that takes the masks of two sides, if any."""
    parts = norm_name.split(".")
    for length in range(len(parts)):
        name = ".".join(parts[:length])
        argument = two_sided_argument(modules[name])
        if argument is not None:
            return [(name, argument)]
    return []


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
) -> dict[str, str | None]:
    """Return which argument of which module gives each norm its padding mask.

    Norms of images, which have no padding, are left out.

    Args:
        model: the model.
        norm_names: dotted names of norms.
        sides: the stacks of an encoder-decoder by dotted name.

    Returns:
        `argument` of the model itself, or `module.argument`; None where no mask reaches a norm.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    sources: dict[str, str | None] = {}
    for name in norm_names:
        owners, _ = _owners_of(modules, name, sides)
        if not owners:
            if not _takes_images(modules, name):
                sources[name] = None
        elif owners[0][1] is not NO_MASK:
            owner, argument = owners[0]
            sources[name] = f"{owner}.{argument.name}" if owner else argument.name
    return sources


def _takes_images(modules: Mapping[str, nn.Module], norm_name: str) -> bool:
    """Return whether a module around a norm takes images."""
    parts = norm_name.split(".")
    around = (modules[".".join(parts[:length])] for length in range(len(parts)))
    return any(
        _IMAGES in parameters_of(module) or library_of(module) in _IMAGE_LIBRARIES
        for module in around
    )


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
        argument = mask_argument(module, side)
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
    if hasattr(owner, REDUCES) and not (hasattr(module, REDUCES) or gives_all_masks(owner)):
        return False  # the modules inside get one over positions
    return library in HANDS_ON and library == library_of(owner)


def _is_tower(module: nn.Module, owner: nn.Module) -> bool:
    """Return whether a module takes images or audio inside an owner of a mask for text."""
    if library_of(module) in _IMAGE_LIBRARIES and library_of(owner) not in _IMAGE_LIBRARIES:
        return True
    inner, outer = set(parameters_of(module)), set(parameters_of(owner))
    return bool(inner & _OTHER_DATA) and _TOKENS not in inner and _TOKENS in outer


def _lengthens(module: nn.Module) -> bool:
    """Return whether a module's mask is its owner's, lengthened by what is prepended to the input.

    x-transformers' stacks get such a mask. Their attention modules take a mask too, but hold norms
    of other shapes.
    """
    cls = type(module)
    return cls.__module__.startswith("x_transformers") and cls.__name__ != "Attention"
