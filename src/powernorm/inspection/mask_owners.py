"""Hooks that pass a model's own mask argument to the norms inside it.

They open and close the scope of `powernorm.padding_mask` around the forward of a mask's owner, the
module that takes it (found by `mask_arguments.py`). Swaps share the owners of a model.

The hooks are bound methods of plain objects that refer to modules: they are copied and pickled with
the model, and a copy's hooks refer to the copy's norms.
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
    NO_MASK,
    MaskArgument,
    Takers,
    is_tower,
    meanings_of,
    named_values,
    takers_of,
)
from powernorm.inspection.mask_checks import MaskChecks, OrderWatch
from powernorm.inspection.mask_reading import MaskCall, MaskReader, UndecidedError, like_a_mask
from powernorm.inspection.modules import ReplacedForward, parameters_of
from powernorm.inspection.selection import Side
from powernorm.integrations.library_masks import (
    LENDERS,
    is_called_by_forward,
    is_of_known_library,
    parts_with_rules,
    takes_length_first,
    turns_round,
)
from powernorm.norms import Norm
from powernorm.norms.masks import MaskSource, ScopedMask, close_scope, innermost_scope, open_scope
from powernorm.ops.graphs import is_known, is_traced, same_sizes, shape_of
from powernorm.ops.torch_private import in_backward

_WATCHED: Final = 2
"""Number of calls with padding in which functions of torch are watched."""


@dataclass(frozen=True, eq=False)
class MaskUse:
    """One swap or observer that needs an owner; the owner stays as long as it has uses."""

    owner: MaskOwner
    side: Side | None
    """Side that the norms are in."""
    parents: tuple[nn.Module, ...]
    """Modules that hold the norms; the norms may change."""
    observed: bool = False
    """Whether this is an observer, which needs the mask in evaluation and for any norm."""
    evaluated: bool = False
    """Whether the mask is needed in evaluation for other reasons than observers."""
    root: nn.Module | None = None
    """Model in which the owner was searched."""

    def __post_init__(self) -> None:
        self.owner.uses.append(self)

    def release(self) -> None:
        """Release the owner, for example after an undo."""
        self.owner.uses = [use for use in self.owner.uses if use is not self]
        if not self.owner.uses:
            self.owner.remove()


class MaskOwner(MaskReader):
    """Hooks that open the scope of a module's own mask around each of its calls.

    Args:
        module: the module, which gets the hooks.
        argument: the argument by which it takes the mask. If that has no name and `only_warns` is
            set, there is none, and the hook warns of inputs that look padded.
        checks: as for a `MaskReader`.
        reach: the module, or the part of it whose norms the mask is for.
        only_warns: whether it is unknown for which norms the mask is meant.
        defers: whether the hook leaves its warning to the modules inside that take a mask, and
            give it if they get none.
    """

    def __init__(
        self,
        module: nn.Module,
        argument: MaskArgument,
        checks: MaskChecks,
        reach: nn.Module,
        only_warns: bool,
        defers: bool = False,
    ) -> None:
        super().__init__(module, argument, checks)
        self.only_warns = only_warns
        self.defers = defers
        self.unclaimed = ""
        """Name of an argument of the running call that looks like a mask; see `defers`."""
        self.reach = reach
        self.uses: list[MaskUse] = []
        self.around: tuple[nn.Module, ...] = ()
        """Modules that hand their mask on to this one: it reads its own if none of them runs, as
        in a loop over the layers of an encoder."""
        self.length_first = takes_length_first(module)
        self.turns_round = turns_round(module)
        self.parts = parts_with_rules(reach)
        self.is_exact = not (self.is_own or self.parts)
        self.takes_none = only_warns and not argument.name
        self._class = type(module).__name__
        self._watches: list[OrderWatch] = []
        self._num_watched = 0
        self.undecided = ""  # the error of a norm that would need this call's mask
        self.unreadable: tuple[str, str] | None = None  # the warning of one, by its kind
        # The order of dimensions of the data, and of the norms' inputs, as eager calls have shown
        # it, for calls whose sizes do not show it.
        self._length_first_at: dict[object, bool] = {}
        self.forward: _CalledForward | None = None
        # Pickled handles, unlike their numbers, keep later hooks of another process from
        # replacing these.
        self.handles: list[RemovableHandle] = []
        if self.takes_none:
            self.handles.append(module.register_forward_pre_hook(self.look, with_kwargs=True))
        else:
            self.handles.append(module.register_forward_pre_hook(self.open, with_kwargs=True))
            self.handles.append(module.register_forward_hook(self.close, always_call=True))

    def name_of(self, norm: object) -> str:
        """Return a norm's dotted name below the module, and its class; or that of a function."""
        if isinstance(norm, str):
            return f"{norm} in {self._class}"
        named = self.module.named_modules()
        name = next((name for name, module in named if module is norm), "a norm")
        return f"{name} ({type(norm).__name__}) in {self._class}"

    @property
    def side(self) -> Side | None:
        """Side of the module in an encoder-decoder, if a use has one."""
        return next((use.side for use in self.uses if use.side is not None), None)

    def look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Warn of inputs that look padded if no mask is taken; runs before the forward."""
        del module
        # In an outer scope the user or a larger model has given the mask.
        scope = innermost_scope(observing=self.is_observed)
        if is_traced() or in_backward() or scope is not None or not self.is_read():
            return
        data = self.argument.data(args, kwargs)
        if self.defers:
            self.unclaimed = self._like_a_mask(args, kwargs, data)
        elif not self._look_for_masks(args, kwargs, data) and data is not None:
            what = f"{self._class} takes no argument that is known to say what is padding"
            self.checks.look_for_padding(what, data)

    def open(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Offer the mask to the norms; runs before the forward."""
        del module
        if self.around and self._is_handed_on():
            return
        given, mask, data = None, None, None
        self.unreadable = None
        is_read = self.is_read()
        if is_read:
            given, data = self.argument.given(args, kwargs), self.argument.data(args, kwargs)
            mask = self._read(given, data)
        outer, around = self._outer(given is not None and mask is None)
        if mask is not None and getattr(given, "ndim", 0) == 4 and outer and outer[0].source:
            # A mask for attention need not hide all padding; the model's mask does.
            mask = None if same_sizes(shape_of(outer[0].mask), shape_of(mask)) else mask
        warns = given is not None and (self.only_warns or self.undecided)
        # Autograd may repeat a checkpointed part without the outer scopes.
        if is_read and not (is_traced() or warns or in_backward()):
            self._check(given, mask, data, outer)
            if given is None and not outer and not self._look_for_masks(args, kwargs, data):
                self._warn_of_unclaimed()
        if given is not None:
            for owner in self._deferring():
                owner.unclaimed = ""
        if mask is not None:
            # A user's scope is for a model that is called without a mask.
            outer = tuple(one for one in outer if one.source is not None)
            outer = (self._laid_out(mask, data), *outer)
            self._watch_order(mask)
        elif warns or self.unreadable:
            around = self
        open_scope(outer, self, observed=self.is_only_observed, given=around)

    def _is_handed_on(self) -> bool:
        """Return whether a module around gives the norms this module's mask, or a user does."""
        if not is_traced() and in_backward():
            return True  # autograd repeats a checkpointed part, without the scopes around
        scope = innermost_scope(observing=True)
        if scope is None or not isinstance(scope.opener, MaskOwner):
            return scope is not None
        opener = scope.opener.module
        return any(one is opener for one in self.around)

    def close(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """Close the scope; runs after the forward, also if that failed."""
        del module, args, output
        close_scope(self)
        if self._watches:
            self._watches.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _watch_order(self, mask: Tensor) -> None:
        """Watch the first calls with padding for changes of the positions' order."""
        if mask.ndim != 2 or not self.is_own or is_traced() or mask.is_meta:
            return
        if self._num_watched >= _WATCHED or not self.checks.may_look(f"order {self.label}"):
            return
        if not bool(mask.any()):
            return
        self._num_watched += 1
        warning = (
            f"{self._class} {{}}, and the mask from {self.label} does not follow: give the norms "
            "after that masks of their inputs by `with powernorm.padding_mask(mask):` inside the "
            "model"
        )
        kind = f"order {self.label}"
        watch = OrderWatch(mask, lambda what: self.checks.warn(kind, warning.format(what)))
        watch.__enter__()  # type: ignore[no-untyped-call]
        self._watches.append(watch)

    def is_read(self) -> bool:
        """Return whether some norm below uses the mask now.

        In evaluation most norms ignore masks, and in generation with a cache the mask is longer
        than the input.
        """
        if any(use.observed or use.evaluated for use in self.uses):
            return True
        return any(norm.wants_mask for norm in self._norms())

    @property
    def is_needed(self) -> bool:
        """Whether some norm or other use needs masks."""
        return any(self._norms()) or any(use.evaluated for use in self.uses)

    @property
    def is_only_observed(self) -> bool:
        """Whether only observers need the owner: then the norms must not see the mask."""
        return all(use.observed for use in self.uses)

    @property
    def is_observed(self) -> bool:
        """Whether the norms are observed."""
        return any(use.observed for use in self.uses)

    def _norms(self) -> Iterable[Norm]:
        """Return the inner norms that need masks."""
        return (part for part in self.reach.modules() if isinstance(part, Norm) and part.reads_mask)

    def _trains(self) -> bool:
        return any(norm.training for norm in self._norms())

    def _read(self, given: object, data: Tensor | None) -> Tensor | None:
        self.undecided = ""
        if self.only_warns or given is None:
            return None
        around, _ = self._outer(True)
        batch_dim = int(data is not None and self._is_length_first(data, given))
        call = MaskCall(given, data, batch_dim, [one.mask for one in around], self.side)
        try:
            mask = self.read(call)
        except UndecidedError as error:
            # The modules inside may be given masks that show it.
            self.undecided = error.args[0]  # code compiled by torch 2.11 supports this, but not str
            return None
        if mask is None or mask.ndim == 1 or data is None or self.parts:
            return mask
        # With a cache the mask also covers positions before the input; training uses no cache.
        sizes, shape = shape_of(mask), shape_of(data)
        if self.is_own and (same_sizes(sizes, shape[1::-1]) or self._trains()):
            return mask
        longer = is_known(sizes[1] > shape[1 - batch_dim])
        return mask[:, -data.shape[1 - batch_dim] :] if longer else mask

    def _laid_out(self, mask: Tensor, data: Tensor | None) -> ScopedMask:
        """Return the mask in the layout of the norms' inputs, as far as it is known."""
        first = self.length_first
        if data is not None and mask.ndim == 2 and self.is_own:
            first = self._is_length_first(data, mask)
        return ScopedMask(mask, self, int(mask.ndim == 2 and (first or self.turns_round)))

    def fit(
        self, mask: Tensor, batch_dim: int, shape: torch.Size, norm: object, strict: bool
    ) -> Tensor | None:
        """Return the mask for an input of that shape (without the features), or None."""
        wanted = shape[::-1] if batch_dim else shape
        fits = same_sizes(shape_of(mask), wanted)
        # If a tracer leaves the sizes open, the graph will hold for the sizes that fit.
        may_fit = fits if self.parts else fits is not False
        if mask.ndim == 2 and len(shape) == 2:
            is_other = same_sizes(wanted[:1], shape_of(mask)[:1]) is False
            for part, rule in () if is_other else self.parts:
                try:
                    derived = rule(part, mask, wanted[1], norm)
                except InputError:
                    if strict:
                        raise
                    return None
                if derived is not None:
                    return derived.transpose(0, 1) if batch_dim else derived
            if self.is_own:
                may_fit = fits is not False or same_sizes(shape_of(mask), wanted[::-1]) is not False
                batch_dim = self._batch_dim(mask, batch_dim, shape, norm) if may_fit else batch_dim
        if not may_fit:
            return None
        return mask.transpose(0, 1) if batch_dim else mask

    def _batch_dim(self, mask: Tensor, batch_dim: int, shape: torch.Size, norm: object) -> int:
        """Return the dimension of an input in a user's model that counts the sequences."""
        turned = _is_turned(shape_of(mask), shape)
        if norm is None or (turned is not None and is_traced()):
            return batch_dim if turned is None else int(turned)
        if turned is not None:
            self._length_first_at[norm] = turned
        elif norm not in self._length_first_at and not is_traced():
            name = self.name_of(norm)
            layout = "(length, batch, …)" if batch_dim else "(batch, length, …)"
            self.checks.warn(
                f"square {name}",
                f"{name} got as many positions as sequences, {shape[0]}, and has not been seen "
                f"with other numbers: its input was taken as {layout} for the mask from "
                f"{self.label}; begin with a batch of another length",
            )
        return int(self._length_first_at.get(norm, bool(batch_dim)))

    def _is_length_first(self, data: Tensor, value: object) -> bool:
        """Return whether data are (length, batch, …), by their lengths (batch,) or mask."""
        known = self.length_first and data.ndim == 3
        if not isinstance(value, Tensor) or value.ndim not in ((1, 2) if self.is_own else (1,)):
            return known
        turned = _is_turned(shape_of(value), shape_of(data)[:2])
        if turned is None:
            return self._length_first_at.get("data", known)
        if not is_traced():
            self._length_first_at["data"] = turned
        return turned

    def warn_unmasked(self, norm: object) -> None:
        """Warn of a norm that no mask reaches although an outer module was given one."""
        if self.undecided:
            raise InputError(self.undecided)
        if torch.compiler.is_compiling():
            return
        if self.unreadable:
            self.checks.warn(*self.unreadable)
            return
        name = self.name_of(norm)
        self.checks.warn(
            f"unmasked {name}",
            f"{name} got no padding mask, although {self.label} was given: padding counts in its "
            "statistics, unless you pass it a mask, by its argument padding_mask or by "
            "`with powernorm.padding_mask(mask):`, or leave it out of the swap with `where=`",
        )

    def _outer(self, unreadable: bool) -> tuple[tuple[ScopedMask, ...], MaskSource | None]:
        """Return the masks of the surrounding scope that are meant for the inner norms.

        Returns:
            Masks; and the outer model that was given one if none of its masks is meant.
        """
        scope = innermost_scope(observing=self.is_only_observed)
        if scope is not None and scope.opener is None:
            return scope.masks, None
        if scope is None or not isinstance(scope.opener, MaskOwner) or not self.argument.name:
            return (), None
        masks, opener = scope.masks, scope.opener
        source = masks[0].source if masks else scope.given
        # A side, like a tower, has data that an outer module does not have.
        if not isinstance(source, MaskOwner) or self.side or is_tower(self.module, source.module):
            source = None
        # The scope of an outer model is for other data, unless it was opened for inner norms too,
        # or this module was given a mask and is a part of that model.
        inside = set(self.reach.modules())
        meant = any(parent in inside for use in opener.uses for parent in use.parents)
        if not meant and unreadable:
            meant = any(part is self.module for part in opener.reach.modules())
        return (masks, None if masks else source) if meant else ((), source)

    def _check(
        self, given: object, mask: Tensor | None, data: Tensor | None, outer: Sequence[ScopedMask]
    ) -> None:
        name = self.argument.name
        if not (self.is_observed or self._trains()) or (mask is None and (outer or not name)):
            return
        if mask is None and given is not None:
            what = f"{self._class} was given {name}"
            if data is not None and self.is_attention:
                self.checks.look_for_padding(f"{what} for its attention alone", data)
            elif data is not None or self.argument.meaning is not None:
                shape = f" of shape {tuple(given.shape)}" if isinstance(given, Tensor) else ""
                because = f", for {self.misfit}" if self.misfit else ""
                self.unreadable = (
                    f"unreadable {what}",
                    f"{what} as a {type(given).__name__}{shape}, which cannot be read as a padding "
                    f"mask (batch, length){because}: padding counts in the statistics of the "
                    "swapped norms, unless you pass them a mask: `with "
                    "powernorm.padding_mask(mask):`",
                )
                if self.is_observed:  # else the norms that no module inside gives a mask warn
                    self.checks.warn(*self.unreadable)
        # Vectors of another length than the mask may have other positions.
        elif data is not None and not (self.parts and data.ndim == 3):
            if mask is not None and mask.ndim == 1:
                data, mask = data[None], mask[None]
            elif self._is_length_first(data, mask):
                data = data.transpose(0, 1)
            if mask is not None:
                self.checks.look_at_rows(self.label, mask, data, self.side)
            else:
                what = f"{self._class} was called without {name}"
                self.checks.look_for_padding(what, data, self.side, f"Pass {name}")

    def _look_for_masks(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], data: Tensor | None
    ) -> bool:
        """Warn of another argument that looks like a mask; return whether there is one."""
        name = self._like_a_mask(args, kwargs, data)
        if name:
            self._warn_unused(name)
        return bool(name)

    def _like_a_mask(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], data: Tensor | None
    ) -> str:
        """Return the name of an argument of a user's module that looks like a mask, or ""."""
        if not self.is_own or not self.checks.may_look(f"like {self.label}"):
            return ""
        return like_a_mask(named_values(self.module, args, kwargs), data)

    def _warn_unused(self, name: str) -> None:
        """Warn that no norm gets an argument that looks like a mask."""
        cls = self._class
        how = f'call powernorm.declare_mask("{name}", "keep", "padding" or "lengths", {cls})'
        if not name.isidentifier():  # inside a dict
            how = f"make it an argument of {cls} and declare that (powernorm.declare_mask)"
        self.checks.warn(
            f"unused {name}",
            f"{name} of {cls} looks like a padding mask, and no norm gets it. If "
            f"it is one, {how} before the swap, or pass the mask yourself: `with "
            "powernorm.padding_mask(mask):`",
        )

    def _deferring(self) -> list[MaskOwner]:
        """Return the owners on the models around that leave their warnings to this one."""
        roots = {use.root for use in self.uses if use.root is not None} - {self.module}
        return [owner for root in roots for owner in _owners_on(root) if owner.defers]

    def _warn_of_unclaimed(self) -> None:
        """Warn of a mask of the model around that this module, which takes one, is not given."""
        for owner in self._deferring():
            if owner.unclaimed:
                owner._warn_unused(owner.unclaimed)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()
        if self.forward is not None:
            self.forward.remove()


class _CalledForward(ReplacedForward):
    """A forward that opens its owner's scope if it is called by name, which runs no hooks.

    Args:
        owner: owner of the module's mask.
    """

    def __init__(self, owner: MaskOwner) -> None:
        super().__init__(owner.module)
        self.owner = owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own forward inside the scope."""
        scope = innermost_scope(observing=True)
        if not self.owner.uses or (scope is not None and scope.opener is self.owner):
            return self.call_replaced(args, kwargs)
        self.owner.open(self.module, args, kwargs)
        try:
            return self.call_replaced(args, kwargs)
        finally:
            self.owner.close(self.module, args, None)


def _is_turned(sizes: Sequence[int], shape: Sequence[int]) -> bool | None:
    """Return whether sizes are in the reverse order of a shape's, None if that is unclear."""
    straight = same_sizes(sizes, shape[: len(sizes)])
    crossed = same_sizes(sizes, shape[::-1][: len(sizes)])
    return None if straight is crossed else crossed is True or straight is False


def _owners_on(module: nn.Module) -> list[MaskOwner]:
    owners = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    return [owner for owner in owners if isinstance(owner, MaskOwner)]


def retire_owners(model: nn.Module) -> Callable[[], None]:
    """Remove the hooks of owners that no longer have a norm to pass masks to.

    Returns:
        A function that restores the hooks.
    """
    kept: list[tuple[dict[int, Any], dict[int, Any]]] = []
    forwards: list[_CalledForward] = []
    for module in list(model.modules()):
        idle = [owner for owner in _owners_on(module) if not owner.is_needed]
        tables: tuple[dict[int, Any], ...] = (
            module._forward_pre_hooks,
            module._forward_pre_hooks_with_kwargs,
            module._forward_hooks,
            module._forward_hooks_always_called,
        )
        kept.extend((hooks, dict(hooks)) for hooks in tables if idle)
        forwards += [owner.forward for owner in idle if owner.forward is not None]
        for owner in idle:
            owner.remove()

    def put_back() -> None:
        for hooks, before in kept:
            hooks.clear()
            hooks.update(before)
        for forward in forwards:
            forward.module.__dict__.setdefault("forward", forward)

    return put_back


def masked_norms(model: nn.Module) -> dict[str, list[str]]:
    """Return the norms that a swap passes the model's own mask to.

    Returns:
        Their dotted names by that of the swapped module, within which owners of masks were
        searched. It is "" for the model, and for one around it.
    """
    names: dict[nn.Module | None, str] = {one: name for name, one in model.named_modules()}
    roots: dict[nn.Module, str] = {}
    for module in model.modules():
        for use in (use for owner in _owners_on(module) for use in owner.uses if not use.observed):
            roots |= dict.fromkeys(use.parents, names.get(use.root, ""))
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for attribute, part in module._modules.items() if module in roots else ():
            if isinstance(part, Norm) and part.reads_mask:
                found.setdefault(roots[module], []).append(f"{name}.{attribute}".lstrip("."))
    return found


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
        model: the model with the norms in place.
        norm_names: dotted names, every name of a shared one.
        sides: the stacks of an encoder-decoder by dotted name.
        observed: offer the mask to observers even if no norm trains.
        evaluated: offer the mask in evaluation too.

    Returns:
        The caller's uses of the owners, to be released when the norms are removed.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    needs: dict[tuple[str, MaskArgument], tuple[Takers, dict[nn.Module, None]]] = {}
    handed: dict[tuple[str, MaskArgument], tuple[str, ...]] = {}
    for norm_name in norm_names:
        takers = takers_of(modules, norm_name, sides)
        handed |= {(name, argument): around for name, argument, around in takers.handed}
        for taker in (*takers.found, *(one[:2] for one in takers.handed)):
            _, parents = needs.setdefault(taker, (takers, {}))
            parents[modules[norm_name.rpartition(".")[0]]] = None
    checks = MaskChecks(model)
    uses: list[MaskUse] = []
    # A model that takes no mask is checked before an owner on it opens its scope.
    in_order = sorted(needs.items(), key=lambda need: need[0][1].name != "")
    for (name, argument), (takers, parents) in in_order:
        module, outer, warns = modules[name], modules[name.rpartition(".")[0]], not takers.is_sure
        owners = [_owner(module, argument, checks, module, warns)]
        around = (modules[one] for one in handed.get((name, argument), ()))
        owners[0].around = tuple(dict.fromkeys((*owners[0].around, *around)))
        if is_called_by_forward(module) and not (owners[0].around or owners[0].forward or warns):
            owners[0].forward = _CalledForward(owners[0])
        if takers.side == "encoder" and type(outer).__name__ in LENDERS:
            lent = replace(argument, position=list(parameters_of(outer)).index(argument.name))
            owners.insert(0, _owner(outer, lent, checks, module, warns))
        for owner in owners:
            given = () if owner.takes_none else tuple(parents)
            is_evaluated = evaluated and not owner.takes_none
            uses.append(MaskUse(owner, takers.side, given, observed, is_evaluated, model))
    if needs and not is_of_known_library(model) and not any(name == "" for name, _ in needs):
        first = next(iter(parameters_of(model)), "")
        argument = replace(NO_MASK, data_name=first)
        owner = _owner(model, argument, checks, model, True, defers=True)
        uses.append(MaskUse(owner, None, (), observed, False, model))
    return tuple(uses)


def _owner(
    module: nn.Module,
    argument: MaskArgument,
    checks: MaskChecks,
    reach: nn.Module,
    warns: bool,
    *,
    defers: bool = False,
) -> MaskOwner:
    """Return the owner on a module: an existing one, or a new one."""
    sought = (argument, reach, defers)
    found = (one for one in _owners_on(module) if (one.argument, one.reach, one.defers) == sought)
    return next(found, None) or MaskOwner(module, argument, checks, reach, warns, defers)


def how_read(model: nn.Module, source: str) -> str:
    """Return how the argument of a `mask_sources` entry is read, as text."""
    path, _, name = source.rpartition(".")
    module = model.get_submodule(path)
    owner = next((o for o in _owners_on(module) if o.argument.name == name), None)
    argument = MaskArgument(name, None, meanings_of(module, [name])[name])
    return str(owner or MaskReader(module, argument, MaskChecks(module)))
