"""Plans of swaps and insertions: a row per norm, `apply` and `undo`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from powernorm.errors import InputError
from powernorm.inspection.mask_owners import attach_mask_owners
from powernorm.inspection.modules import is_compiled
from powernorm.inspection.rows import NormRow, NormTable
from powernorm.inspection.selection import Role, Side
from powernorm.norms import Norm, check_norm_options
from powernorm.norms.preserved_state import made_like
from powernorm.surgery.changes import (
    Changes,
    drop_later_hooks,
    hook_ids,
    put_behind,
    share_hooks,
)
from powernorm.surgery.optimizers import (
    NewNorm,
    Optimizers,
    checked_optimizers,
    follow_norms,
)
from powernorm.surgery.planned_norms import MaskWatch, PlannedNorms
from powernorm.surgery.saving.records import mark
from powernorm.surgery.successors import follow, kind_of, mode_of

Verb = Literal["swap", "insert"]

_WRAPPERS: Final = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
"""torch's wrappers that record parameters when they are built; the last is `fully_shard`'s."""


@dataclass(frozen=True, kw_only=True)
class PlanRow(NormRow):
    """One norm of the model, or one linear map, and its planned change.

    Attributes:
        type_name: name of the class of the norm or the map, or of the function that a forward
            calls.
        num_features: C, for a map that of its output; None if it is unknown.
        role: part of the model that the norm belongs to; None for a map.
        side: side of an encoder-decoder.
        layer: index of the norm's layer, 0 next to the input; None outside.
        shared: the module's other names, if it is used in several places.
    """

    type_name: str
    num_features: int | None
    role: Role | None = None
    side: Side | None = None
    layer: int | None = None
    shared: tuple[str, ...] = ()


class PlanSite(Protocol):
    """A norm that can be replaced, or a linear map that can have a norm behind it."""

    def is_in(self, model: nn.Module) -> bool:
        """Return whether the model still has the module of the plan here."""

    def build(self, norm: str, options: Mapping[str, Any], model: nn.Module) -> NewNorm:
        """Return the new norm, not yet in its place.

        Args:
            norm: short name.
            options: options of the norm.
            model: model around the site.

        Raises:
            InputError: the norm cannot be built.
        """


@dataclass(frozen=True)
class NormPlan(NormTable):
    """A planned swap or insertion: nothing is changed until `apply`.

    Args:
        rows: one per norm or linear map; those with the action `verb` change.
        verb: `swap` or `insert`.
        norm: short name of the new norms.
        options: options of the new norms.
        model: the model.
    """

    rows: tuple[PlanRow, ...]
    verb: Verb
    norm: str
    options: Mapping[str, Any]
    model: nn.Module = field(repr=False, compare=False)
    _sites: Mapping[str, PlanSite] = field(repr=False, compare=False)
    _sides: Mapping[str, Side] = field(repr=False, compare=False)
    _notes_on: Callable[[NormPlan], list[str]] = field(repr=False, compare=False)

    def _notes(self) -> list[str]:
        return self._notes_on(self)

    def apply(self, *, optimizer: Optimizers = None) -> AppliedPlan:
        """Put the new norms in place: all of them, or none if one cannot be built.

        Args:
            optimizer: as in `swap` and `insert`.

        Raises:
            InputError: the model has changed since the plan, a norm cannot be built, or an
                optimizer is not of this model.
        """
        check_untouched(self.model, self.verb)
        optimizers = checked_optimizers(optimizer, self.model)
        chosen = {row.name: self._sites[row.name] for row in self.rows if row.action == self.verb}
        if not chosen:
            raise InputError(
                "none of the selected norms can change, see the rows of the plan; "
                "powernorm.modularize makes modules of functional norms"
            )
        for name, site in chosen.items():
            if not site.is_in(self.model):
                raise InputError(f"{name} is no longer the module of the plan: plan again")
        with made_like(self.model):
            new = [site.build(self.norm, self.options, self.model) for site in chosen.values()]
            return AppliedPlan(self, new, optimizers)


class AppliedPlan:
    """An applied swap or insertion, which can be undone.

    Args:
        plan: the plan.
        new: the new norms.
        optimizers: they get the new parameters; None if none was given.

    Attributes:
        model: the model that was changed.
        norms: the new norms by dotted name, each once.
    """

    def __init__(
        self,
        plan: NormPlan,
        new: Sequence[NewNorm],
        optimizers: tuple[Optimizer, ...] | None = None,
    ) -> None:
        self.plan = plan
        self.model = model = plan.model
        self.norms = {one.names[0]: one.norm for one in new}
        self._new = new
        self._changes = changes = Changes()
        changes.on_undo(lambda: mark(model))
        self._replaced = [
            (one, one.old, kind_of(one.norm, model), hook_ids(one.old))
            for one in new
            if one.old is not None
        ]
        for one, old, *_ in self._replaced:
            share_hooks(old, one.module)
        for one in new:
            if one.behind is not None:
                put_behind(one.behind, one.norm, changes)
                continue
            for slot in one.slots:
                changes.set_module(slot.parent, slot.attribute, one.module)
        changes.leave_fast_path(model, list(self.norms.values()))
        masked = [name for one in new for name in one.names if one.norm.reads_mask]
        for use in attach_mask_owners(model, masked, plan._sides):
            changes.on_undo(use.release)
        by_mask: dict[str, dict[str, Norm]] = {}
        changed = (row for row in plan.rows if row.action == plan.verb)
        for row, one in zip(changed, new, strict=True):
            if row.mask is not None:
                by_mask.setdefault(row.mask, {})[one.names[0]] = one.norm
        for mask, norms in by_mask.items():
            changes.on_undo(MaskWatch(norms, mask).remove)
        changes.on_undo(follow_norms(model, new, optimizers, plan.verb))
        changes.on_undo(PlannedNorms(model, new, plan.verb).remove)
        mark(model)

    def on_undo(self, step: Callable[[], None]) -> None:
        """Register a function that `undo` calls before the norms are removed."""
        self._changes.on_undo(step)

    def undo(self) -> None:
        """Restore the old norm objects, or remove the new ones, with all hooks of the change.

        Training is not undone: parameters that old and new norms share and all others of the model
        keep their learned values. Hooks that were added to a new norm since are removed with it.

        Raises:
            InputError: undo was called already, or other modules have replaced the new norms.
        """
        self._changes.check_not_undone()
        for one in self._new:
            if not all(slot.holds(one.module) for slot in one.slots):
                raise InputError(
                    f"{one.names[0]} is no longer the norm that this {self.plan.verb} added: "
                    "undo later changes first"
                )
        with made_like(self.model):
            for one, old, kind, _ in self._replaced:
                follow(old, kind, kind_of(one.norm, self.model))
            self._changes.undo()
        for one, old, _, hooks in self._replaced:
            drop_later_hooks(old, hooks)
            old.train(mode_of(one.norm))

    def __repr__(self) -> str:
        """Return the kind of the change and the number of norms."""
        state = ", undone" if self._changes.is_undone else ""
        return f"AppliedPlan({self.plan.verb}, {len(self._new)} norms {self.plan.norm}{state})"


def check_options(norm: str, options: Mapping[str, Any], argument: str = "to") -> None:
    """Check the name of a new norm and its options.

    Args:
        norm: short name.
        options: as in `build_norm`.
        argument: argument that gave the name.

    Raises:
        InputError: a name or option is unknown, or cannot be used.
    """
    if not isinstance(norm, str):
        raise InputError(f"{argument} is {norm!r}, expected the short name of a norm, as 'rbn'")
    check_norm_options(norm, options)
    dtype = options.get("dtype")
    if isinstance(dtype, torch.dtype) and not dtype.is_floating_point:
        raise InputError(f"dtype is {dtype}, expected a floating point type")
    if options.get("device") is not None:
        try:
            torch.device(options["device"])
        except (RuntimeError, TypeError) as error:
            raise InputError(f"device is {options['device']!r}: {error}") from error


def check_untouched(model: nn.Module, verb: str) -> None:
    """Raise an InputError if the model was compiled or wrapped, which would miss the change."""
    if is_compiled(model):
        raise InputError(
            f"{type(model).__name__} is compiled already, and compiled code would not see the new "
            f"norms' masks: {verb} before torch.compile"
        )
    for module in model.modules():
        wrapper = next((c.__name__ for c in type(module).__mro__ if c.__name__ in _WRAPPERS), None)
        if wrapper is not None:
            raise InputError(
                f"{wrapper} has already recorded the model's parameters and would not see the "
                f"new norms': {verb} before the model is wrapped"
            )
