"""Hooks that pass a model's own mask argument to the norms inside it.

They open and close the scope of `powernorm.padding_mask` around the forward of a mask's owner, the
module that takes it (`masking.py` says which that is).

The hooks are bound methods of plain objects that refer to modules: they are copied and pickled with
the model, and a copy's hooks ask the copy's norms.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    is_tower,
    library_of,
    named_values,
    parameters_of,
    takes_length_first,
    turns_round,
)
from powernorm.inspection.mask_checks import MaskChecks, OrderWatch, Taker
from powernorm.inspection.mask_reading import MaskReader, UndecidedError, like_a_mask
from powernorm.inspection.mask_rules import mask_after, parts_with_rules
from powernorm.inspection.selection import Side
from powernorm.norms import Norm
from powernorm.norms.masks import MaskSource, ScopedMask, close_scope, innermost_scope, open_scope
from powernorm.ops.graphs import is_known, is_traced, same_sizes, shape_of
from powernorm.ops.torch_private import in_backward

_WATCHED: Final = 2
"""Number of calls with padding in which functions of torch are looked at."""


@dataclass(frozen=True, eq=False)
class MaskUse:
    """One swap or observer that needs an owner; the owner stays as long as it has uses."""

    owner: MaskOwner | Lookout
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
        self.reader = MaskReader(module, argument, checks)
        self._watches: list[OrderWatch] = []
        self._num_watched = 0
        self.undecided = ""  # the error of a norm that would need this call's mask
        # What eager calls have shown of the order of dimensions, for those where sizes do not show
        # it: of the data, and of the norms' inputs.
        self._data_length_first: bool | None = None
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
        """Return a norm's dotted name below the module, and its class; or that of a function."""
        if isinstance(norm, str):
            return f"{norm} in {type(self.module).__name__}"
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
        if mask is not None and getattr(given, "ndim", 0) == 4 and outer and outer[0].source:
            # What attention may see need not hide all padding; the model's mask does.
            mask = None if same_sizes(shape_of(outer[0].mask), shape_of(mask)) else mask
        warns = given is not None and (self.only_warns or self.undecided)
        if not is_traced() and not warns:
            self._check(given, mask, data, outer)
            if given is None and not outer and self.is_own:
                self._look_for_masks(args, kwargs, data)
        if mask is not None:
            # A user's scope is for a model that is called without a mask.
            outer = tuple(one for one in outer if one.source is not None)
            outer = (self._laid_out(mask, data), *outer)
        elif warns:
            around = self
        self._watch_order(mask)
        open_scope(outer, self, observed=self.is_only_observed, given=around)

    def close(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """Close the scope; runs after the forward, also if that failed."""
        del module, args, output
        close_scope(self)
        if self._watches:
            self._watches.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _watch_order(self, mask: Tensor | None) -> None:
        """Look at the first calls with padding for what changes the order of positions."""
        if mask is None or mask.ndim != 2 or not self.is_own or is_traced() or mask.is_meta:
            return
        if self._num_watched >= _WATCHED or not self.checks.may_look(f"order {self.label}"):
            return
        if not bool(mask.any()):
            return
        self._num_watched += 1
        watch = OrderWatch(
            mask,
            lambda what: self.checks.warn(
                f"order {self.label}",
                f"{type(self.module).__name__} {what}, and the mask from {self.label} does not "
                "follow: hand the norms behind that masks of their inputs by "
                "`with powernorm.padding_mask(mask):` inside the model",
            ),
        )
        watch.__enter__()  # type: ignore[no-untyped-call]
        self._watches.append(watch)

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
        around, _ = self._outer(True)
        batch_dim = int(data is not None and self._is_length_first(data, given))
        try:
            mask = self.reader.read(given, data, batch_dim, [one.mask for one in around], self.side)
        except UndecidedError as error:
            # The modules inside may be given masks that say it.
            self.undecided = error.args[0]  # compiled by torch 2.11, which str is not
            return None
        if mask is None or mask.ndim == 1 or data is None or self.parts:
            return mask
        # With a cache the mask also covers the positions before the input.
        sizes, shape = shape_of(mask), shape_of(data)
        if self.is_own and (
            same_sizes(sizes, shape[1::-1])
            or any(norm.training for norm in batch_norms(self.reach))  # nobody trains with a cache
        ):
            return mask
        longer = is_known(sizes[1] > shape[1 - batch_dim])
        return mask[:, -data.shape[1 - batch_dim] :] if longer else mask

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
        fits = same_sizes(shape_of(mask), shape)
        # Where a tracer leaves it open, the graph will hold for the sizes that fit.
        may_fit = fits if self.parts else fits is not False
        if mask.ndim != 2 or len(shape) != 2:
            return mask if may_fit else None
        for part in self.parts:
            plain = mask.transpose(0, 1) if batch_dim else mask
            if same_sizes(shape[batch_dim : batch_dim + 1], shape_of(plain)[:1]) is False:
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
            return mask if may_fit else None
        return self._turned(mask, batch_dim, shape, norm)

    def _turned(
        self, mask: Tensor, batch_dim: int, shape: torch.Size, norm: object
    ) -> Tensor | None:
        """Return the mask in the order of an input's dimensions, in a model of one's own."""
        sizes, traced = shape_of(mask), is_traced()
        straight, crossed = same_sizes(sizes, shape), same_sizes(sizes[::-1], shape)
        if straight is False and crossed is False:
            return None
        if straight is not crossed:
            turned = crossed is True or straight is False
            if norm is not None and not traced:
                self._length_first_at[norm] = turned != bool(batch_dim)
            return mask.transpose(0, 1) if turned else mask
        if norm is None:
            return mask
        if norm not in self._length_first_at and not traced:
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
        masks, opener, around = scope.masks, scope.opener, scope.given
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
        return self.side is not None or is_tower(self.module, owner.module)

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
            if data is not None and self.reader.is_attention(given, data):
                self.checks.look_without_mask(
                    self.module, data, f"was given {self.argument.name} for its attention alone"
                )
            elif data is not None or self.argument.meaning is not None:
                self.checks.unreadable(taker, given, self.reader.misfit)
        # Vectors of another length than the mask may have it in another place.
        elif data is not None and not (self.parts and data.ndim == 3):
            if mask is not None and mask.ndim == 1:
                data, mask = data[None], mask[None]
            elif self._is_length_first(data, mask):
                data = data.transpose(0, 1)
            self.checks.look(taker, data, mask)

    def _look_for_masks(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], data: Tensor | None
    ) -> None:
        """Warn of another argument than this that looks like a mask."""
        if self.is_read() and not in_backward() and self.checks.may_look(f"like {self.label}"):
            name = like_a_mask(named_values(self.module, args, kwargs), data)
            if name:
                self.checks.unused(self.module, name)

    def _is_length_first(self, data: Tensor, value: object) -> bool:
        """Return whether data are (length, batch, …), by lengths (batch,) or a mask of theirs."""
        if not isinstance(value, Tensor) or not (
            value.ndim == 1 or (self.is_own and value.ndim == 2)
        ):
            return self._transposed(data)
        sizes, (first, second) = shape_of(value), shape_of(data)[:2]
        straight = same_sizes(sizes, (first, second)[: len(sizes)])
        crossed = same_sizes(sizes, (second, first)[: len(sizes)])
        if straight is crossed:
            seen = self._data_length_first
            return self._transposed(data) if seen is None else seen
        turned = crossed is True or straight is False
        if not is_traced():
            self._data_length_first = turned
        return turned

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()


class Lookout:
    """Hook on a model that takes no mask: warns of inputs that look padded, and gives no mask.

    Args:
        module: the model.
        checks: gives the warnings.
    """

    def __init__(self, module: nn.Module, checks: MaskChecks) -> None:
        self.module = module
        self.checks = checks
        self.uses: list[MaskUse] = []
        self.argument = replace(NO_MASK, data_name=next(iter(parameters_of(module)), ""))
        self.handle = module.register_forward_pre_hook(self.look, with_kwargs=True)

    def look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at a call; runs before the forward."""
        del module
        is_observed = any(use.observed for use in self.uses)
        # With a scope around, the user or a larger model has given the mask.
        scope = innermost_scope(observing=is_observed)
        if torch.compiler.is_compiling() or in_backward() or scope is not None:
            return
        data = self.argument.data(args, kwargs)
        if not is_observed and not any(norm.wants_mask for norm in batch_norms(self.module)):
            return
        name = ""
        if library_of(self.module) not in HANDS_ON and self.checks.may_look("like"):
            name = like_a_mask(named_values(self.module, args, kwargs), data)
        if name:
            self.checks.unused(self.module, name)
        elif data is not None:
            self.checks.look_without_mask(
                self.module, data, "takes no argument that is known to say what is padding"
            )

    @property
    def is_needed(self) -> bool:
        """Whether there is a norm to which a mask would matter."""
        return any(batch_norms(self.module))

    def remove(self) -> None:
        """Remove the hook."""
        self.handle.remove()


def batch_norms(module: nn.Module) -> Iterable[Norm]:
    """Return the norms in a module that need masks."""
    return (part for part in module.modules() if isinstance(part, Norm) and part.reads_mask)
