"""Putting norms between or behind the linear maps of a model: plan, apply, undo."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from powernorm.errors import InputError
from powernorm.inspection.mask_arguments import mask_sources
from powernorm.inspection.mask_owners import attach_mask_owners
from powernorm.inspection.rows import NormRow, NormTable
from powernorm.inspection.selection import Side, stacks
from powernorm.norms import Norm, build_norm
from powernorm.norms.arguments import check_model
from powernorm.norms.preserved_state import made_like
from powernorm.surgery.changes import Changes, modules_around
from powernorm.surgery.inserted_norms import CHILD, has_one_behind, put_behind
from powernorm.surgery.optimizers import (
    Exchange,
    Optimizers,
    checked_optimizers,
    follow_exchanges,
)
from powernorm.surgery.planned_norms import PlannedNorms
from powernorm.surgery.saving.marking import mark
from powernorm.surgery.swapping import check_options, check_untouched

Places = Literal["feed-forward", "linears"] | str | Sequence[str] | Callable[[str, nn.Module], bool]
"""Between the maps of each feed-forward network, behind every map of the layers, globs over the
maps' dotted names, or a predicate of (name, module)."""

FEED_FORWARD: Final = "feed-forward"
LINEARS: Final = "linears"
_CONV1D: Final = ("transformers.pytorch_utils", "Conv1D")
_SHOWN: Final = 8


@dataclass(frozen=True, kw_only=True)
class InsertRow(NormRow):
    """One linear map that was chosen: `insert`, or `keep` with the reason why it gets no norm.

    Attributes:
        num_features: of its output, and so of the norm.
        shared: the map's other names, if one module is used in several places.
    """

    num_features: int
    shared: tuple[str, ...] = ()


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
        """Return why no norm can stand behind the map, or ""."""
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


@dataclass(frozen=True)
class InsertPlan(NormTable):
    """What an insertion would do: nothing is changed until `apply`."""

    rows: tuple[InsertRow, ...]
    norm: str
    options: Mapping[str, Any]
    model: nn.Module = field(repr=False, compare=False)
    _maps: Mapping[str, nn.Module] = field(repr=False, compare=False)
    _sides: Mapping[str, Side] = field(repr=False, compare=False)

    def _notes(self) -> list[str]:
        inserted = sum(row.action == "insert" for row in self.rows)
        return [f"{inserted} of {len(self.rows)} maps get {self.norm}"]

    def apply(self, *, optimizer: Optimizers = None) -> Insertion:
        """Put the norms in: all of them, or none if one cannot be built.

        Args:
            optimizer: as in `insert`.

        Raises:
            InputError: the model has changed since the plan, a norm cannot be built, or an
                optimizer is not of this model.
        """
        check_untouched(self.model, "insert")
        optimizers = checked_optimizers(optimizer, self.model)
        current = dict(self.model.named_modules(remove_duplicate=False))
        norms: dict[str, Norm] = {}
        for row in self.rows:
            if row.action != "insert":
                continue
            linear = self._maps[row.name]
            if current.get(row.name) is not linear or has_one_behind(linear):
                raise InputError(
                    f"{row.name} is no longer the map that the plan was made for: plan again"
                )
            weight = linear.weight
            assert isinstance(weight, torch.Tensor)
            given = {"device": weight.device, "dtype": weight.dtype, **self.options}
            with made_like(self.model):
                norms[row.name] = build_norm(self.norm, row.num_features, **given)
            norms[row.name].train(linear.training)
        return Insertion(self, norms, optimizers)


class Insertion:
    """An insertion that was made; `undo` takes the norms out again.

    Args:
        plan: what was planned.
        norms: the new norms by the names of the maps in front of them.
        optimizers: they get the new parameters; None where none was given.

    Attributes:
        model: the model that was changed.
        norms: the new norms by their own dotted names.
    """

    def __init__(
        self,
        plan: InsertPlan,
        norms: Mapping[str, Norm],
        optimizers: tuple[Optimizer, ...] | None = None,
    ) -> None:
        self.plan = plan
        self.model = plan.model
        self._behind = dict(norms)
        self.norms = {f"{name}.{CHILD}": norm for name, norm in norms.items()}
        self._changes = changes = Changes()
        changes.on_undo(lambda: mark(plan.model))
        for name, norm in norms.items():
            put_behind(plan._maps[name], norm, changes)
        changes.leave_fast_path(plan.model, norms.values())
        shared = {row.name: row.shared for row in plan.rows}
        masked = [
            f"{one}.{CHILD}"
            for name, norm in norms.items()
            if norm.reads_mask
            for one in (name, *shared[name])
        ]
        for use in attach_mask_owners(plan.model, masked, plan._sides):
            changes.on_undo(use.release)
        modules = dict(plan.model.named_modules(remove_duplicate=False))
        exchanges = [
            Exchange(None, norm, (), (plan._maps[name], *modules_around(modules, name)[::-1]))
            for name, norm in norms.items()
        ]
        changes.on_undo(follow_exchanges(plan.model, exchanges, optimizers, "insert"))
        maps = {f"{name}.{CHILD}": (name, *shared[name]) for name in norms}
        changes.on_undo(PlannedNorms(plan.model, self.norms, maps, "insert").remove)
        mark(plan.model)

    def undo(self) -> None:
        """Take the norms and every hook of the insertion out; training is not undone.

        Raises:
            InputError: undone already, or other modules are where the norms were put.
        """
        self._changes.check_not_undone()
        for name, norm in self._behind.items():
            if self.plan._maps[name]._modules.get(CHILD) is not norm:
                raise InputError(
                    f"{name}.{CHILD} is no longer the norm that this insertion put there: undo "
                    "what came later first"
                )
        self._changes.undo()

    def __repr__(self) -> str:
        """Return how many norms were inserted."""
        state = ", undone" if self._changes.is_undone else ""
        return f"Insertion({len(self._behind)} norms {self.plan.norm}{state})"


def plan_insert(
    model: nn.Module, norm: str = "bn", where: Places = FEED_FORWARD, **norm_options: Any
) -> InsertPlan:
    """Plan where norms are put behind the linear maps of a model; changes nothing.

    Args:
        model: a model of torch, Hugging Face, timm, this library or your own.
        norm: short name of the norm, one of `powernorm.NORMS` or of your own, or `module:Class`.
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
    maps = list(_maps_of(model))
    chosen = _chosen(maps, where)
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
    modules = {one.name: one.module for one in chosen}
    return InsertPlan(rows, norm, dict(norm_options), model, modules, sides)


def insert(
    model: nn.Module,
    norm: str = "bn",
    where: Places = FEED_FORWARD,
    *,
    optimizer: Optimizers = None,
    **norm_options: Any,
) -> Insertion:
    """Put norms behind linear maps of a model in place, and pass them the model's padding mask.

    BatchNorm between the maps of a feed-forward network is what lets a Transformer train with
    batch statistics elsewhere, too (Yao et al. 2021); behind every map it needs no other norm.
    Static norms fold into the maps afterwards (`powernorm.fold`), which then cost nothing. The
    maps keep their names and weights; the norm of `fc1` is `fc1.inserted_norm`. It changes what
    the model computes: train it on, or calibrate the statistics first (`powernorm.calibrate`).
    Insert before `torch.compile`, before the model is wrapped for several processes, and before
    the optimizer is built, or give it: it would miss the new parameters.

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


def _row(one: _Map, norm: str, reason: str, masks: Mapping[str, str | None]) -> InsertRow:
    mask = "" if reason else masks.get(f"{one.name}.{CHILD}", "")
    return InsertRow(
        name=one.name,
        kind="linear",
        action="keep" if reason else "insert",
        into=() if reason else (norm,),
        mask=mask or None,
        reason="no mask reaches" if mask is None else reason,
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
    """Return the numbers of inputs and outputs of a linear map; None of another module."""
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
    """Return the maps into hidden features, which the next map brings back."""
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
