"""Insertion of norms between or behind the linear maps of a model: plan, apply, undo."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.nn.utils import parametrize

from powernorm.errors import InputError
from powernorm.inspection.finder import Slot
from powernorm.inspection.mask_arguments import mask_sources
from powernorm.inspection.selection import stacks
from powernorm.norms import build_norm
from powernorm.norms.arguments import check_model
from powernorm.surgery.changes import CHILD, has_one_behind, modules_around
from powernorm.surgery.optimizers import NewNorm, Optimizers
from powernorm.surgery.plans import (
    AppliedPlan,
    NormPlan,
    PlanRow,
    check_options,
    check_untouched,
)

Places = Literal["feed-forward", "linears"] | str | Sequence[str] | Callable[[str, nn.Module], bool]
"""Places of the norms: between the maps of each feed-forward network, behind every map of the
layers, globs over the maps' dotted names, or a predicate of (name, module)."""

FEED_FORWARD: Final = "feed-forward"
LINEARS: Final = "linears"
_CONV1D: Final = ("transformers.pytorch_utils", "Conv1D")
_SHOWN: Final = 8


@dataclass(frozen=True)
class _Map:
    """A linear map of a model."""

    names: tuple[str, ...]
    module: nn.Module
    num_inputs: int
    num_outputs: int
    is_in_layers: bool
    parent: nn.Module

    @property
    def name(self) -> str:
        return self.names[0]

    def reason(self) -> str:
        """Return why no norm can be behind the map, or ""."""
        if has_one_behind(self.module):
            return "a norm was inserted behind it already"
        if isinstance(self.parent, nn.MultiheadAttention):
            return "nn.MultiheadAttention reads its weights and never calls it"
        if hasattr(self.module, "_hf_hook"):
            return "accelerate has put a hook in: insert before the model is dispatched"
        if "forward" in self.module.__dict__:
            return "its forward was replaced in this instance"
        if parametrize.is_parametrized(self.module):
            return "its parameters are parametrized: remove the parametrization first"
        return ""

    def is_in(self, model: nn.Module) -> bool:
        current = dict(model.named_modules(remove_duplicate=False)).get(self.name)
        return current is self.module and not has_one_behind(self.module)

    def build(self, norm: str, options: Mapping[str, Any], model: nn.Module) -> NewNorm:
        weight = self.module.weight
        assert isinstance(weight, torch.Tensor)
        given = {"device": weight.device, "dtype": weight.dtype, **options}
        new = build_norm(norm, self.num_outputs, **given)
        new.train(self.module.training)
        modules = dict(model.named_modules(remove_duplicate=False))
        around = (self.module, *modules_around(modules, self.name)[::-1])
        names = tuple(f"{name}.{CHILD}" for name in self.names)
        slots = (Slot(self.module, CHILD),)
        return NewNorm(new, names, new, slots, self.names, around, behind=self.module)


def _notes(plan: NormPlan) -> list[str]:
    inserted = sum(row.action == "insert" for row in plan.rows)
    return [f"{inserted} of {len(plan.rows)} maps get {plan.norm}"]


def plan_insert(
    model: nn.Module, norm: str = "bn", where: Places = FEED_FORWARD, **norm_options: Any
) -> NormPlan:
    """Plan where norms are put behind the linear maps of a model; changes nothing.

    Args:
        model: a model of torch, Hugging Face, timm, this library or your own.
        norm: short name of the norm, one of `powernorm.NORMS` or your own, or `module:Class`.
        where: `feed-forward`: behind each map into the hidden features of a feed-forward network,
            in front of its activation (a gated one has two); these are found by their sizes: maps
            from C to more features, which the next map brings back to C. `linears`: behind every
            map inside of layers (of a `ModuleList`; of a model without one, every map). Else a
            glob over the maps' dotted names (`*.fc1`) or several, or a function of (name, module).
        norm_options: options of the norm, as in `powernorm.build_norm`.

    Raises:
        InputError: unknown norm or option, a selection without a map that can have one, a model
            that is compiled or wrapped already.

    >>> layer = nn.TransformerEncoderLayer(8, 2, 16)
    >>> [row.name for row in plan_insert(layer).rows]
    ['linear1']
    """
    check_model(model)
    check_options(norm, norm_options, "norm")
    check_untouched(model, "insert")
    chosen = _chosen(list(_maps_of(model)), where)
    reasons = {one.name: one.reason() for one in chosen}
    possible = [one for one in chosen if not reasons[one.name]]
    if not possible:
        listed = "; ".join(f"{one.name}: {reasons[one.name]}" for one in chosen[:3])
        raise InputError(f"none of the selected maps can have a norm behind it ({listed})")
    built = [
        build_norm(norm, size, **{**norm_options, "device": "meta"})
        for size in {one.num_outputs for one in possible}
    ]
    reads_mask = any(one.reads_mask for one in built)
    names = [f"{name}.{CHILD}" for one in chosen for name in one.names]
    sides = stacks(model, names)
    masks = mask_sources(model, names, sides) if reads_mask else {}
    rows = tuple(_row(one, norm, reasons[one.name], masks) for one in chosen)
    maps = {one.name: one for one in chosen}
    return NormPlan(rows, "insert", norm, dict(norm_options), model, maps, sides, _notes)


def insert(
    model: nn.Module,
    norm: str = "bn",
    where: Places = FEED_FORWARD,
    *,
    optimizer: Optimizers = None,
    **norm_options: Any,
) -> AppliedPlan:
    """Put norms behind linear maps of a model in place, and pass them the model's padding mask.

    BatchNorm between the maps of a feed-forward network lets a Transformer train with
    batch statistics elsewhere, too (Yao et al. 2021); behind every map it needs no other norm.
    Static norms fold into the maps afterwards (`powernorm.fold`), and then cost nothing. The
    maps keep their names and weights; the norm of `fc1` is `fc1.inserted_norm`. The insertion
    changes the model's function: continue training, or calibrate the statistics first
    (`powernorm.calibrate`). Insert before `torch.compile`, before the model is wrapped for several
    processes, and before the optimizer is built, or pass it: it would miss the new parameters.

    Args:
        model: changed in place.
        norm: short name of the norm.
        where: as in `plan_insert`.
        optimizer: an optimizer of the model or several, built before: γ and β join the group of the
            map's bias, or of the parameters nearby. Without it, a first step that leaves them out
            warns.
        norm_options: as in `plan_insert`.

    Returns:
        The insertion, with `undo()`.

    Raises:
        InputError: as in `plan_insert`; nothing is changed then.

    >>> layer = nn.TransformerEncoderLayer(8, 2, 16)
    >>> inserted = insert(layer)
    >>> list(inserted.norms)
    ['linear1.inserted_norm']
    >>> inserted.undo()
    """
    return plan_insert(model, norm, where, **norm_options).apply(optimizer=optimizer)


def _row(one: _Map, norm: str, reason: str, masks: Mapping[str, str | None]) -> PlanRow:
    mask = "" if reason else masks.get(f"{one.name}.{CHILD}", "")
    return PlanRow(
        name=one.name,
        kind="linear",
        action="keep" if reason else "insert",
        into=() if reason else (norm,),
        mask=mask or None,
        reason="no mask reaches" if mask is None else reason,
        type_name=type(one.module).__name__,
        num_features=one.num_outputs,
        shared=one.names[1:],
    )


def _maps_of(model: nn.Module) -> Iterator[_Map]:
    """Yield the linear maps of a model in its order, each once."""
    found: dict[nn.Module, tuple[list[str], tuple[int, int]]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        sizes = _sizes_of(module) if name else None
        if sizes is not None:
            found.setdefault(module, ([], sizes))[0].append(name)
    for module, (names, sizes) in found.items():
        around = modules_around(modules, names[0])
        in_layers = any(isinstance(one, nn.ModuleList) for one in around)
        yield _Map(tuple(names), module, *sizes, in_layers, around[-1])


def _sizes_of(module: nn.Module) -> tuple[int, int] | None:
    """Return the numbers of inputs and outputs of a linear map; None for another module."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if (type(module).__module__, type(module).__name__) == _CONV1D:
        num_inputs, num_outputs = module.weight.shape  # type: ignore[misc]
        return num_inputs, num_outputs
    return None


def _chosen(maps: Sequence[_Map], where: Places) -> list[_Map]:
    if callable(where):
        chosen = [one for one in maps if any(where(name, one.module) for name in one.names)]
    elif where == FEED_FORWARD:
        chosen = _between(maps)
    elif where == LINEARS:
        chosen = [one for one in maps if one.is_in_layers] or list(maps)
    else:
        globs = [where] if isinstance(where, str) else list(where)
        if not all(isinstance(glob, str) for glob in globs):
            raise InputError(
                f"where is {where!r}, expected {FEED_FORWARD!r}, {LINEARS!r}, a glob over the "
                "names of linear maps or several, or a function of (name, module)"
            )
        chosen = [
            one for one in maps if any(fnmatchcase(n, glob) for n in one.names for glob in globs)
        ]
    if not chosen:
        listed = ", ".join(one.name for one in maps[:_SHOWN]) or "none"
        more = f" and {len(maps) - _SHOWN} more" if len(maps) > _SHOWN else ""
        raise InputError(
            f"where={where!r} selects no linear map; the model has {listed}{more}: give a glob "
            "over these names"
        )
    return chosen


def _between(maps: Sequence[_Map]) -> list[_Map]:
    """Return the maps into hidden features, which the next map reduces to the input size."""
    found: list[_Map] = []
    into: list[_Map] = []  # maps of the same sizes to more features, one after the other
    for one in maps:
        sizes = (one.num_inputs, one.num_outputs)
        if into and sizes == (into[0].num_outputs, into[0].num_inputs):
            found += into
            into = []
        elif sizes[0] < sizes[1]:
            same = into and sizes == (into[0].num_inputs, into[0].num_outputs)
            into = [*into, one] if same else [one]
        else:
            into = []
    return found
