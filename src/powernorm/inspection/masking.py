"""Which modules of a model own the masks that its norms need, and the hooks on them.

An owner is the outermost module above a norm that takes a mask. Modules of other libraries further
in that take a mask of their own are owners too. In a model with an encoder and a decoder owners are
searched within each, so that their masks do not mix. Swaps share the owners of a model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import nn

from powernorm.inspection.mask_arguments import (
    HANDS_ON,
    IMAGE_LIBRARIES,
    IMAGES,
    NO_MASK,
    MaskArgument,
    is_tower,
    library_of,
    mask_argument,
    meanings_of,
    parameters_of,
    two_sided_argument,
)
from powernorm.inspection.mask_checks import MaskChecks
from powernorm.inspection.mask_hooks import Lookout, MaskOwner, MaskUse
from powernorm.inspection.mask_reading import MaskReader
from powernorm.inspection.mask_rules import REDUCES, gives_all_masks
from powernorm.inspection.selection import Side
from powernorm.norms import Norm

_LENDERS: Final = ("WhisperModel",)
"""Classes that take the encoder's mask and do not pass it on."""

_Owner = tuple[str, MaskArgument]
"""Name of a module and the argument by which it takes the mask."""


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


def _owners_on(module: nn.Module) -> list[MaskOwner | Lookout]:
    hooks = module._forward_pre_hooks.values()
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return [owner for owner in owners if isinstance(owner, MaskOwner | Lookout)]


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
    has_unmasked = False
    for norm_name in norm_names:
        owners, side = _owners_of(modules, norm_name, sides)
        takers = owners or _two_sided_owners(modules, norm_name)
        for name, argument in takers:
            need = needs.setdefault(name, _Need(argument, side, [], not owners))
            need.norms.append(norm_name)
        has_unmasked |= not takers and not _takes_images(modules, norm_name)
    checks = MaskChecks.of(model)
    uses: list[MaskUse] = []
    if has_unmasked:
        lookout = _lookout(model, checks)
        uses.append(MaskUse(lookout, None, (), observed, evaluated, model))
        lookout.uses.append(uses[-1])
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
        if isinstance(owner, Lookout):
            continue
        if owner.argument == argument and owner.reach is reach:
            return owner
    return MaskOwner(module, argument, checks, reach, only_warns)


def _lookout(model: nn.Module, checks: MaskChecks) -> Lookout:
    """Return the lookout on a model: an existing one, or a new one."""
    found = next((one for one in _owners_on(model) if isinstance(one, Lookout)), None)
    return found or Lookout(model, checks)


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
            owner, argument = owners[-1]  # the nearest that is given and fits
            sources[name] = f"{owner}.{argument.name}" if owner else argument.name
    return sources


def how_read(model: nn.Module, source: str) -> str:
    """Return how the argument that a `mask_sources` names is read, for people."""
    path, _, name = source.rpartition(".")
    module = model.get_submodule(path)
    for owner in _owners_on(module):
        if isinstance(owner, MaskOwner) and owner.argument.name == name:
            return str(owner.reader)
    argument = MaskArgument(name, None, meanings_of(module, [name])[name])
    return str(MaskReader(module, argument, MaskChecks(None)))


def _takes_images(modules: Mapping[str, nn.Module], norm_name: str) -> bool:
    """Return whether a module around a norm takes images."""
    parts = norm_name.split(".")
    around = (modules[".".join(parts[:length])] for length in range(len(parts)))
    return any(
        IMAGES in parameters_of(module) or library_of(module) in IMAGE_LIBRARIES
        for module in around
    )


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
        if owners and is_tower(module, modules[owners[0][0]]):
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


def _lengthens(module: nn.Module) -> bool:
    """Return whether a module's mask is its owner's, lengthened by what is prepended to the input.

    x-transformers' stacks get such a mask. Their attention modules take a mask too, but hold norms
    of other shapes.
    """
    cls = type(module)
    return cls.__module__.startswith("x_transformers") and cls.__name__ != "Attention"
