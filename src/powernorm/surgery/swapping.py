"""Replacement of the norms of a model: plan, apply, undo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from powernorm.errors import InputError
from powernorm.inspection.finder import FoundNorm, find_norms
from powernorm.inspection.mask_arguments import mask_sources
from powernorm.inspection.mask_owners import how_read
from powernorm.inspection.selection import Selection, Site, inventory, place, select, stacks
from powernorm.norms import Norm, build_norm
from powernorm.norms.arguments import check_model
from powernorm.surgery.erasing import erase_padding
from powernorm.surgery.folding.structure import GatedNorm
from powernorm.surgery.optimizers import NewNorm, Optimizers
from powernorm.surgery.planned_norms import MaskWatch
from powernorm.surgery.plans import (
    AppliedPlan,
    NormPlan,
    PlanRow,
    check_options,
    check_untouched,
)
from powernorm.surgery.successors import a_tensor, remarks, same_parameters, successor


@dataclass(frozen=True)
class _NormSite:
    """A norm that a swap replaces."""

    found: FoundNorm

    def is_in(self, model: nn.Module) -> bool:
        del model
        return all(slot.holds(self.found.module) for slot in self.found.slots)

    def build(self, norm: str, options: Mapping[str, Any], model: nn.Module) -> NewNorm:
        found = self.found
        new = successor(found, norm, options, a_tensor(model))
        # A gate stays, around the new norm.
        module = new if found.gated is None else GatedNorm(new, found.gated[1])
        names = tuple(f"{name}.norm" if found.gated else name for name in found.names)
        parents = [slot.parent for slot in found.slots]
        pairs = same_parameters(found, new)
        return NewNorm(new, names, module, found.slots, names, parents, found.module, pairs)


def _notes(plan: NormPlan, calls: Sequence[FoundNorm] | None) -> list[str]:
    """Return notes on the number of changed norms, and on how their masks are read.

    Args:
        plan: plan of a swap.
        calls: calls of functional norms that a run has shown; None without a run.
    """
    swapped = sum(row.action == "swap" for row in plan.rows)
    masks = dict.fromkeys(row.mask for row in plan.rows if row.mask is not None)
    lines = [f"{swapped} of {len(plan.rows)} norms change to {plan.norm}"]
    lines += [f"{mask}: {how_read(plan.model, mask)}" for mask in masks]
    if calls is None:
        lines.append("functional norms behind helpers are only seen with example_inputs")
    elif not calls:
        lines.append("functional norms: none seen in the example call; arithmetic is not looked at")
    return lines


def plan_swap(
    model: nn.Module,
    to: str = "rbn",
    where: Selection = None,
    *,
    example_inputs: object = None,
    **norm_options: Any,
) -> NormPlan:
    """Plan the replacement of a model's norms; changes nothing.

    Args:
        model: a model of torch, Hugging Face, timm, x-transformers, this library or your own.
        to: short name of the new norm, one of `powernorm.NORMS` or your own, or `module:Class`;
            see `powernorm.register_norm`.
        where: selection of norms: a glob over dotted names or several, a function of (name,
            module), a `Where`, or None for all; None in an encoder-decoder means the encoder (Shen
            et al. 2020, App. A; Wang et al. 2022, App. A). None includes norms over channels, such
            as BatchNorm2d, only if the model has no norms over tokens; they get `feature_dim=1`.
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
    check_untouched(model, "swap")
    found = find_norms(model, example_inputs)
    return _planned(model, found, to, where, norm_options, example_inputs is not None)


def _planned(
    model: nn.Module,
    found: Sequence[FoundNorm],
    to: str,
    where: Selection,
    norm_options: dict[str, Any],
    was_run: bool,
) -> NormPlan:
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
    by_name = {site.name: _NormSite(site.norm) for site in sites}
    calls = [norm for norm in found if norm.call] if was_run else None
    notes = partial(_notes, calls=calls)
    return NormPlan(rows, "swap", to, dict(norm_options), model, by_name, sides, notes)


def swap(
    model: nn.Module,
    to: str = "rbn",
    where: Selection = None,
    *,
    example_inputs: object = None,
    optimizer: Optimizers = None,
    **norm_options: Any,
) -> AppliedPlan:
    """Replace norms of a model in place, and pass them the model's own padding mask.

    γ and β stay, as the same parameter objects if the new norm can use them; β of a new norm whose
    predecessor had none starts at 0. Device, dtype, mode, `requires_grad` and hooks stay; shared
    norms stay shared. Afterwards the model is called as before: padding given by `attention_mask`,
    `src_key_padding_mask` and similar arguments reaches the new norms. Swap before
    `torch.compile`, before the model is wrapped for several processes, and before the optimizer is
    built, or pass the optimizer, which would miss new parameters (β in place of an RMSNorm; γ and β
    if γ was 1 + weight, as in Gemma). Running statistics, their counter, eps and freezing stay if
    old and new norm keep the same statistics; a LayerNorm or RMSNorm that becomes this library's
    keeps its eps.

    Args:
        model: changed in place.
        to: short name of the new norm.
        where: as in `plan_swap`.
        example_inputs: as in `plan_swap`; the plan of the swap then shows functional norms, too.
        optimizer: an optimizer of the model or several, built before: new parameters get the place
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


def mask_batch_norms(model: nn.Module) -> AppliedPlan:
    """Make a model's own BatchNorms exclude padding, by the model's mask.

    Each `torch.nn.BatchNorm1d` (of a Conformer's convolution module, PatchTST's) becomes this
    library's `BatchNorm` with the same parameters, statistics, counter, momentum, eps and
    mode, and gets the model's mask like the norms of a swap. Convolutions next to such a norm that
    are wider than one position get zeros at padding, in evaluation too; otherwise the last
    positions of a sequence would see its padding. A padded sequence then gives the same result
    as without padding.

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
            f"{type(model).__name__} has no BatchNorm1d that could exclude padding: "
            "powernorm.swap replaces other norms by norms of the batch"
        )
    check_untouched(model, "swap")
    swapped = _planned(model, norms, "bn", lambda name, _: name in found, {}, False).apply()
    for step in erase_padding(model, tuple(swapped.norms)):
        swapped.on_undo(step)
    swapped.on_undo(MaskWatch(swapped.norms).remove)
    return swapped


def _is_batch_norm(norm: FoundNorm) -> bool:
    """Return whether a norm is a BatchNorm of sequences: torch's, or one that computes the same."""
    kinds = (nn.BatchNorm1d, nn.SyncBatchNorm)
    return norm.reading is not None and isinstance(norm.inner[1], kinds)


def _row(
    site: Site, to: str, selected: bool, built: Sequence[Norm], masks: Mapping[str, str | None]
) -> PlanRow:
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
    return PlanRow(
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
