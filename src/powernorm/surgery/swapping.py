"""Replacing the norms of a model: plan, apply, undo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from powernorm.errors import InputError
from powernorm.inspection.finder import FoundNorm, find_norms
from powernorm.inspection.mask_arguments import mask_sources
from powernorm.inspection.mask_owners import attach_mask_owners, how_read
from powernorm.inspection.modules import is_compiled
from powernorm.inspection.rows import NormRow, NormTable
from powernorm.inspection.selection import (
    Role,
    Selection,
    Side,
    Site,
    inventory,
    place,
    select,
    stacks,
)
from powernorm.norms import Norm, build_norm, check_norm_options
from powernorm.norms.arguments import check_model
from powernorm.norms.preserved_state import made_like
from powernorm.surgery.changes import Changes, drop_later_hooks, hook_ids, share_hooks
from powernorm.surgery.erasing import erase_padding
from powernorm.surgery.gates import GatedNorm
from powernorm.surgery.optimizers import (
    Exchange,
    Optimizers,
    checked_optimizers,
    follow_exchanges,
)
from powernorm.surgery.planned_norms import PlannedNorms
from powernorm.surgery.saving.marking import mark
from powernorm.surgery.successors import (
    a_tensor,
    follow,
    kind_of,
    mode_of,
    remarks,
    same_parameters,
    successor,
)

_WRAPPERS: Final = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
"""torch's wrappers that record parameters when they are built; the last is `fully_shard`'s."""


@dataclass(frozen=True, kw_only=True)
class SwapRow(NormRow):
    """One norm of the model and what the plan does with it: `swap` or `keep`.

    Attributes:
        type_name: name of the norm's class, or of the function that a forward calls.
        num_features: C; None if it cannot be read.
        role: what the norm belongs to.
        side: side of an encoder-decoder.
        layer: index of the norm's layer, 0 next to the input; None outside.
        shared: the norm's other names, if one module is used in several places.
    """

    type_name: str
    num_features: int | None
    role: Role
    side: Side | None
    layer: int | None
    shared: tuple[str, ...] = ()


@dataclass(frozen=True)
class SwapPlan(NormTable):
    """What a swap would do: nothing is changed until `apply`."""

    rows: tuple[SwapRow, ...]
    to: str
    options: Mapping[str, Any]
    model: nn.Module = field(repr=False, compare=False)
    _found: Mapping[str, FoundNorm] = field(repr=False, compare=False)
    _sides: Mapping[str, Side] = field(repr=False, compare=False)
    _was_run: bool = field(default=False, repr=False, compare=False)

    def _notes(self) -> list[str]:
        """Return how many norms change, and how their masks are read."""
        swapped = sum(row.action == "swap" for row in self.rows)
        masks = dict.fromkeys(row.mask for row in self.rows if row.mask is not None)
        lines = [f"{swapped} of {len(self.rows)} norms change to {self.to}"]
        lines += [f"{mask}: {how_read(self.model, mask)}" for mask in masks]
        if not self._was_run:
            lines.append("functional norms behind helpers are only seen with example_inputs")
        elif not any(found.call for found in self._found.values()):
            lines.append(
                "functional norms: none seen in the example call; arithmetic is not looked at"
            )
        return lines

    def apply(self, *, optimizer: Optimizers = None) -> Swap:
        """Put the new norms in place: all of them, or none if one cannot be built.

        Args:
            optimizer: as in `swap`.

        Raises:
            InputError: the model has changed since the plan, a norm cannot be built, or an
                optimizer is not of this model.
        """
        check_untouched(self.model)
        optimizers = checked_optimizers(optimizer, self.model)
        chosen = {row.name: self._found[row.name] for row in self.rows if row.action == "swap"}
        if not chosen:
            raise InputError(
                "none of the selected norms can change, see the rows of the plan; "
                "powernorm.modularize makes modules of functional norms"
            )
        for name, found in chosen.items():
            if not all(slot.holds(found.module) for slot in found.slots):
                raise InputError(
                    f"{name} is no longer the module that the plan was made for: plan again"
                )
        fallback = a_tensor(self.model)
        with made_like(self.model):
            replacements = tuple(
                _Replacement.of(found, successor(found, self.to, self.options, fallback))
                for found in chosen.values()
            )
            return Swap(self, replacements, optimizers)


@dataclass(frozen=True)
class _Replacement:
    """An old norm, its slots, the new norm, and what is put into the slots."""

    found: FoundNorm
    new: Norm
    placed: nn.Module

    @classmethod
    def of(cls, found: FoundNorm, new: Norm) -> _Replacement:
        """Return the replacement of a norm, whose gate stays."""
        return cls(found, new, new if found.gated is None else GatedNorm(new, found.gated[1]))

    @property
    def names(self) -> tuple[str, ...]:
        """Dotted names of the new norm."""
        inner = ".norm" if self.found.gated else ""
        return tuple(f"{name}{inner}" for name in self.found.names)


class Swap:
    """A swap that was made; keeps the old norms for `undo`.

    Args:
        plan: what was planned.
        replacements: old and new norms.
        optimizers: they get the new parameters; None where none was given.
    """

    def __init__(
        self,
        plan: SwapPlan,
        replacements: tuple[_Replacement, ...],
        optimizers: tuple[Optimizer, ...] | None = None,
    ) -> None:
        self.plan = plan
        self.model = plan.model
        self._replacements = replacements
        self._changes = Changes()
        self._changes.on_undo(lambda: mark(plan.model))
        self._kinds = [kind_of(one.new, plan.model) for one in replacements]
        self._hooks_before = [hook_ids(one.found.module) for one in replacements]
        for one in replacements:
            share_hooks(one.found.module, one.placed)
            for slot in one.found.slots:
                self._changes.set_module(slot.parent, slot.attribute, one.placed)
        self._changes.leave_fast_path(plan.model, [one.new for one in replacements])
        masked = [name for one in replacements for name in one.names if one.new.reads_mask]
        for use in attach_mask_owners(plan.model, masked, plan._sides):
            self._changes.on_undo(use.release)
        names = {one.names[0]: one.names for one in replacements}
        exchanges = [
            Exchange(
                one.found.module,
                one.new,
                same_parameters(one.found, one.new),
                [slot.parent for slot in one.found.slots],
            )
            for one in replacements
        ]
        self._changes.on_undo(follow_exchanges(plan.model, exchanges, optimizers, "swap"))
        self._changes.on_undo(PlannedNorms(plan.model, self.norms, names, "swap").remove)
        mark(plan.model)

    def on_undo(self, step: Callable[[], None]) -> None:
        """Register a function to be called by `undo`, before the norms are put back."""
        self._changes.on_undo(step)

    @property
    def norms(self) -> dict[str, Norm]:
        """New norms by dotted name, each once."""
        return {one.names[0]: one.new for one in self._replacements}

    def undo(self) -> None:
        """Restore the old norm objects and remove every hook of the swap.

        Training is not undone: parameters that both norms share and all others of the model keep
        what they have learned. Hooks that were added to a new norm since are removed with it.

        Raises:
            InputError: undone already, or other modules are where the swap put its norms.
        """
        self._changes.check_not_undone()
        for one in self._replacements:
            if not all(slot.holds(one.placed) for slot in one.found.slots):
                raise InputError(
                    f"{one.found.names[0]} is no longer the norm that this swap put there: undo "
                    "what came later first"
                )
        with made_like(self.model):
            for one, kind in zip(self._replacements, self._kinds, strict=True):
                follow(one.found.module, kind, kind_of(one.new, self.model))
            self._changes.undo()
        for one, before in zip(self._replacements, self._hooks_before, strict=True):
            drop_later_hooks(one.found.module, before)
            one.found.module.train(mode_of(one.new))

    def __repr__(self) -> str:
        """Return how many norms changed to what."""
        state = ", undone" if self._changes.is_undone else ""
        return f"Swap({len(self._replacements)} norms to {self.plan.to}{state})"


def plan_swap(
    model: nn.Module,
    to: str = "rbn",
    where: Selection = None,
    *,
    example_inputs: object = None,
    **norm_options: Any,
) -> SwapPlan:
    """Plan which norms of a model become which; changes nothing.

    Args:
        model: a model of torch, Hugging Face, timm, x-transformers, this library or your own.
        to: short name of the new norm, one of `powernorm.NORMS` or of your own, or `module:Class`;
            see `powernorm.register_norm`.
        where: which norms: a glob over dotted names or several, a function of (name, module), a
            `Where`, or None for all; None in an encoder-decoder means those of the encoder (Shen et
            al. 2020, App. A; Wang et al. 2022, App. A). None includes norms over channels, such as
            BatchNorm2d, only if the model has no norms over tokens; they get `feature_dim=1`.
        example_inputs: as in `powernorm.fold`. The model runs once on them, in evaluation, and each
            call of a functional norm gets a row, to `keep`; see `powernorm.modularize`.
        norm_options: options of the new norm, as in `powernorm.build_norm`.

    Raises:
        InputError: unknown norm or option, a selection without a norm that can change or a call
            of one, a model that is compiled already, is itself a norm, or fails on the inputs.

    >>> layer = nn.TransformerEncoderLayer(8, 2)
    >>> [row.name for row in plan_swap(layer, to="bn").rows]
    ['norm1', 'norm2']
    """
    check_model(model)
    check_options(to, norm_options)
    check_untouched(model)
    found = find_norms(model, example_inputs)
    return _planned(model, found, to, where, norm_options, example_inputs is not None)


def _planned(
    model: nn.Module,
    found: Sequence[FoundNorm],
    to: str,
    where: Selection,
    norm_options: dict[str, Any],
    was_run: bool,
) -> SwapPlan:
    """Return the plan for the norms that were found; see `plan_swap`."""
    if any("" in norm.names for norm in found):
        raise InputError(
            f"the model itself is a norm, {type(model).__name__}, and a root cannot be replaced: "
            f"build the new one by powernorm.build_norm({to!r}, …)"
        )
    sites = place(model, found)
    chosen = select(sites, where)
    built = _check_possible(
        [site for site in sites if site.name in chosen], sites, to, norm_options
    )
    sides = stacks(model, [name for norm in found for name in norm.names])
    masks = mask_sources(model, [site.name for site in sites], sides)
    rows = tuple(_row(site, to, site.name in chosen, built, masks) for site in sites)
    by_name = {site.name: site.norm for site in sites}
    return SwapPlan(rows, to, dict(norm_options), model, by_name, sides, was_run)


def swap(
    model: nn.Module,
    to: str = "rbn",
    where: Selection = None,
    *,
    example_inputs: object = None,
    optimizer: Optimizers = None,
    **norm_options: Any,
) -> Swap:
    """Replace norms of a model in place, and pass them the model's own padding mask.

    γ and β stay, as the same parameter objects if the new norm can use them; β of a new norm whose
    predecessor had none starts at 0. Device, dtype, mode, `requires_grad` and hooks stay; shared
    norms stay shared. Afterwards the model is called as before: padding given by `attention_mask`,
    `src_key_padding_mask` and similar arguments reaches the new norms. Swap before
    `torch.compile`, before the model is wrapped for several processes, and before the optimizer is
    built, or give it: it would miss new parameters (β in place of an RMSNorm; γ and β where γ was
    1 + weight, as in Gemma). Running statistics, their counter, eps and freezing stay if old and
    new norm keep the same statistics; a LayerNorm or RMSNorm that becomes this library's keeps its
    eps.

    Args:
        model: changed in place.
        to: short name of the new norm.
        where: as in `plan_swap`.
        example_inputs: as in `plan_swap`; the plan of the swap then shows functional norms, too.
        optimizer: an optimizer of the model or several, built before: new parameters take the place
            and the state of those that they replace, or join the group of the old norm. Without it,
            a first step that leaves out new parameters warns.
        norm_options: as in `plan_swap`.

    Returns:
        The swap, with `undo()`.

    Raises:
        InputError: as in `plan_swap`; nothing is changed then.

    >>> layer = nn.TransformerEncoderLayer(8, 2)
    >>> swapped = swap(layer, to="rbn")
    >>> type(layer.norm1).__name__
    'RegularizedBatchNorm'
    >>> swapped.undo()
    >>> type(layer.norm1).__name__
    'LayerNorm'
    """
    return plan_swap(model, to, where, example_inputs=example_inputs, **norm_options).apply(
        optimizer=optimizer
    )


def mask_batch_norms(model: nn.Module) -> Swap:
    """Make a model's own BatchNorms leave out padding, as its mask says where it is.

    Each `torch.nn.BatchNorm1d` (of a Conformer's convolution module, PatchTST's) becomes this
    library's `BatchNorm` with the same parameters, statistics, counter, momentum, eps and
    mode, and gets the model's mask as the norms of a swap do. Convolutions beside such a norm that
    are wider than one position get zeros at padding, in evaluation too, where otherwise the last
    positions of a sequence would see what is padded to it: a padded sequence then gives what it
    gives alone.

    Args:
        model: changed in place.

    Returns:
        The swap of these norms, with `undo()`.

    Raises:
        InputError: the model has no such norm, or was compiled or wrapped already.

    >>> import torch
    >>> class Subsampled(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.conv, self.norm = nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4)
    ...     def forward(self, x, padding_mask):
    ...         return self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)
    >>> model = Subsampled()
    >>> masked = mask_batch_norms(model)
    >>> model.norm.class_name, masked.plan.rows[0].mask
    ('BatchNorm', 'padding_mask')
    >>> y = model(torch.randn(2, 5, 4), torch.arange(5) >= torch.tensor([[5], [3]]))
    """
    check_model(model)
    norms = find_norms(model)
    found = {name for norm in norms if _is_batch_norm(norm) for name in norm.names}
    if not found:
        raise InputError(
            f"{type(model).__name__} has no BatchNorm1d that could leave out padding: "
            "powernorm.swap puts norms of the batch in the place of others"
        )
    check_untouched(model)
    swapped = _planned(model, norms, "bn", lambda name, _: name in found, {}, False).apply()
    for step in erase_padding(model, tuple(swapped.norms)):
        swapped.on_undo(step)
    return swapped


def _is_batch_norm(norm: FoundNorm) -> bool:
    """Return whether a norm is a BatchNorm of sequences: torch's, or one that computes the same."""
    kinds = (nn.BatchNorm1d, nn.SyncBatchNorm)
    return norm.reading is not None and isinstance(norm.inner[1], kinds)


def _row(
    site: Site, to: str, selected: bool, built: Sequence[Norm], masks: Mapping[str, str | None]
) -> SwapRow:
    reads_mask = any(norm.reads_mask for norm in built)
    reading = site.norm.to_swap
    reason = "" if selected and reading else site.norm.reason
    if not selected:
        reason = _why_not_selected(site, masks)
    kept = bool(reason)
    if not kept:
        is_missed = reads_mask and site.name in masks and masks[site.name] is None
        said = ["no mask reaches"] if is_missed else []
        said += ["its gate stays"] if site.norm.gated else []
        reason = "; ".join([*said, *remarks(site.norm, built[0])])
    return SwapRow(
        name=site.name,
        kind=site.norm.kind,
        action="keep" if kept else "swap",
        into=() if kept else (to,),
        mask=masks.get(site.name) if reads_mask and not kept else None,
        reason=reason,
        type_name=site.type_name,
        num_features=None if reading is None else reading.num_features,
        role=site.role,
        side=site.side,
        layer=site.layer,
        shared=site.norm.names[1:],
    )


def _why_not_selected(site: Site, masks: Mapping[str, str | None]) -> str:
    reason = "not selected"
    if site.norm.is_over_channels:
        reason += ": normalizes over channels beside norms over tokens, name it in where="
    if type(site.norm.inner[1]) is nn.BatchNorm1d and masks.get(site.name) is not None:
        reason += "; powernorm.mask_batch_norms makes it leave out padding"
    return reason


def _check_possible(
    chosen: Sequence[Site], sites: Sequence[Site], to: str, options: Mapping[str, Any]
) -> list[Norm]:
    """Build the new norms on the meta device as a check, one for each number of features."""
    readings = [site.norm.to_swap for site in chosen if site.norm.to_swap is not None]
    if not readings and any(site.norm.call for site in chosen):
        return []  # the plan shows the calls
    if not readings:
        reasons = "; ".join(f"{site.name}: {site.norm.reason}" for site in chosen[:3])
        raise InputError(f"none of the selected norms can change ({reasons}); {inventory(sites)}")
    return [
        build_norm(to, num_features, **{**options, "device": "meta"})
        for num_features in {reading.num_features for reading in readings}
    ]


def check_options(norm: str, options: Mapping[str, Any], argument: str = "to") -> None:
    """Check the name of a new norm and its options.

    Args:
        norm: short name.
        options: as in `build_norm`.
        argument: by which the name was given.

    Raises:
        InputError: one of them is not known, or cannot be used.
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


def check_untouched(model: nn.Module, verb: str = "swap") -> None:
    """Raise an InputError if something was built around the model that would miss the change."""
    if is_compiled(model):
        raise InputError(
            f"{type(model).__name__} is compiled already, and compiled code would not see the new "
            f"norms' masks: {verb} before torch.compile"
        )
    for module in model.modules():
        wrapper = next((c.__name__ for c in type(module).__mro__ if c.__name__ in _WRAPPERS), None)
        if wrapper is not None:
            raise InputError(
                f"{wrapper} has taken down the model's parameters already and would not see the "
                f"new norms': {verb} before the model is wrapped"
            )
