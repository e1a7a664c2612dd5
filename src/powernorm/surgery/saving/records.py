"""Record of this library's changes of a model, as JSON, and its application to a new model.

A record describes the current model, whatever was swapped, folded and undone before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from types import UnionType
from typing import Any, Final, get_args

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.inspection.finder import find_norms
from powernorm.inspection.mask_owners import attach_mask_owners, masked_norms, retire_owners
from powernorm.inspection.selection import stacks
from powernorm.norms import Norm
from powernorm.surgery.changes import (
    Changes,
    has_one_behind,
    maps_with_one_behind,
    put_behind,
    slot_of,
)
from powernorm.surgery.erasing import erase_padding, erased_names
from powernorm.surgery.folding.structure import (
    FeatureAffine,
    FoldedNorm,
    GatedNorm,
    Kind,
    Part,
    made_in,
    make_tensors,
    part_of,
)
from powernorm.version import __version__

FORMAT: Final = 1
KEY: Final = "powernorm"
"""Key of a record in `config.json`, and in the metadata of tensors."""
REBUILD: Final = "build the model with the configuration of the one that was saved"
"""Advice about a model that the tensors do not fit."""

_MOST_FEATURES: Final = 2**31
_KEPT: Final = ("running_mean", "running_var", "running_second_moment")


@dataclass(frozen=True)
class ModelRecord:
    """The modules of this library in a model.

    Args:
        root: class of the model.
        parts: its modules of this library.
        masks: names of the norms that get the model's own padding mask, by the name of the module
            that was swapped.
        erased: names of norms in front of which padding is set to zero.
        attention: implementation of attention that a Hugging Face model is set to.
        version: of this library.
        inserted: names of the linear maps with a norm, or the remainder of one, behind them.
        made: names of the biases and untied tensors that folding has made.
    """

    root: str
    parts: tuple[Part, ...]
    masks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    erased: tuple[str, ...] = ()
    attention: Any = None
    version: str = __version__
    inserted: tuple[str, ...] = ()
    made: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the model is as its class builds it."""
        return not (self.parts or self.made)

    @classmethod
    def of(cls, model: nn.Module) -> ModelRecord:
        """Return the record of a model.

        Raises:
            InputError: a user-defined norm that could not be rebuilt.
        """
        return cls(
            type(model).__name__,
            _parts_of(model),
            masked_norms(model),
            erased_names(model),
            _attention_of(getattr(model, "config", None)),
            inserted=maps_with_one_behind(model),
            made=made_in(model),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        parts = [
            {
                **{key: value for key, value in asdict(part).items() if value},
                "names": [names[0] if len(names) == 1 else list(names) for names in part.names],
            }
            for part in self.parts
        ]
        return {
            "format": FORMAT,
            "version": self.version,
            "root": self.root,
            "modules": parts,
            "masks": dict(self.masks),
            "erased": list(self.erased),
            "attention": self.attention,
            **({"inserted": list(self.inserted)} if self.inserted else {}),
            **({"made": list(self.made)} if self.made else {}),
        }

    @classmethod
    def from_dict(cls, values: object) -> ModelRecord:
        """Return the record from JSON values.

        Raises:
            ValueError: they are not a record, or that of a newer version.
        """
        if not isinstance(values, Mapping) or "error" in values:
            why = f": {values['error']}" if isinstance(values, Mapping) else ""
            raise ValueError(f"the key powernorm holds no record of a model{why}")
        if values.get("format") != FORMAT:
            raise ValueError(
                f"its format is {values.get('format')!r}, and this version of powernorm reads "
                f"{FORMAT}: install the powernorm {values.get('version')!r} that wrote it"
            )
        parts = tuple(_part_from(part) for part in _listed(values.get("modules"), Mapping))
        masks = values.get("masks")
        if not isinstance(masks, dict):
            raise ValueError(f"{masks!r} is no object of names")
        masks = {str(root): list(_listed(names, str)) for root, names in masks.items()}
        erased = tuple(_listed(values.get("erased"), str))
        inserted = tuple(_listed(values.get("inserted", []), str))
        root, version = values.get("root"), values.get("version")
        if not isinstance(root, str) or not isinstance(version, str):
            raise ValueError("the class of the model or the version is no string")
        made = tuple(_listed(values.get("made", []), str))
        return cls(root, parts, masks, erased, values.get("attention"), version, inserted, made)

    def names(self) -> Iterator[str]:
        """Return the names of all modules."""
        return chain.from_iterable(names for part in self.parts for names in part.names)

    def below(self, prefix: str) -> ModelRecord:
        """Return the record for a model that has this record's model as a part.

        Args:
            prefix: dotted name of the part; "" for the model itself.
        """
        return self._renamed(lambda name: ".".join(filter(None, (prefix, name))))

    def inside(self, prefix: str) -> ModelRecord:
        """Return the record of a part of the model.

        Args:
            prefix: dotted name of the part.
        """

        def shortened(name: str) -> str | None:
            if name in ("", prefix):
                return ""
            return name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else None

        return self._renamed(shortened)

    def _renamed(self, rename: Callable[[str], str | None]) -> ModelRecord:
        """Return the record with other names; entries without a new name are dropped."""

        def kept(names: Iterable[str]) -> tuple[str, ...]:
            return tuple(new for name in names if (new := rename(name)) is not None)

        parts = [(part, tuple(filter(None, map(kept, part.names)))) for part in self.parts]
        masks = [(rename(root), kept(names)) for root, names in self.masks.items()]
        return replace(
            self,
            parts=tuple(replace(part, names=names) for part, names in parts if names),
            masks={root: names for root, names in masks if root is not None},
            erased=kept(self.erased),
            inserted=kept(self.inserted),
            made=kept(self.made),
        )

    def apply(self, model: nn.Module, state: Mapping[str, Tensor]) -> Changes:
        """Put the modules into a model of the same architecture, without their values.

        Args:
            model: its norms may be swapped or not.
            state: the values that will be loaded, for the types of the modules.

        Raises:
            InputError: the model lacks a module, or a norm cannot be built; it is unchanged.
        """
        changes = Changes()
        try:
            self._insert(model, changes)
            self._check(model)
            placed = list(self._place(model, state, changes))
            changes.leave_fast_path(model, placed)
            make_tensors(model, self._to_make(model), changes)
            changes.on_undo(retire_owners(model))
            self._attach(model, changes)
        except BaseException:
            changes.undo()
            raise
        return changes

    def _insert(self, model: nn.Module, changes: Changes) -> None:
        """Make the slots behind linear maps, which a new model of the architecture lacks."""
        modules = dict(model.named_modules())
        for name in self.inserted:
            if name not in modules:
                raise InputError(
                    f"{type(model).__name__} has no module {name!r}, behind which the saved model "
                    f"had a norm: {REBUILD}"
                )
            if not has_one_behind(modules[name]):
                put_behind(modules[name], FoldedNorm(), changes)

    def _to_make(self, model: nn.Module) -> Iterator[str]:
        """Yield the tensors that folding has made and the model does not have yet."""
        present = set(made_in(model))
        modules = dict(model.named_modules(remove_duplicate=False))
        for name in self.made:
            path, _, attribute = name.rpartition(".")
            if path not in modules or attribute not in modules[path]._parameters:
                raise InputError(
                    f"{type(model).__name__} has no place for {name!r}, which folding had made in "
                    f"the saved model: {REBUILD}"
                )
            if name not in present:
                yield name

    def _attach(self, model: nn.Module, changes: Changes) -> None:
        """Attach the hooks that pass the masks."""
        for root, names in self.masks.items():
            swapped = model.get_submodule(root)
            below = [name.removeprefix(f"{root}.") for name in names]
            norms = [name for norm in find_norms(swapped) for name in norm.names]
            for use in attach_mask_owners(swapped, below, stacks(swapped, norms)):
                changes.on_undo(use.release)
        present = set(erased_names(model))
        for step in erase_padding(model, [name for name in self.erased if name not in present]):
            changes.on_undo(step)

    def _place(
        self, model: nn.Module, state: Mapping[str, Tensor], changes: Changes
    ) -> Iterator[nn.Module]:
        for part in self.parts:
            for names in part.names:
                old = model.get_submodule(names[0])
                module = old if part.is_built_as(old) else part.build(_like(names[0], state, model))
                module.train(old.training)
                for name in names:
                    changes.set_module(*slot_of(model, name), module)
                yield module

    def _check(self, model: nn.Module) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        found = [norm for norm in find_norms(model) if not norm.function]
        norms = {id(module) for norm in found for module in (norm.module, norm.inner[1])}
        places = [*self.names(), *self.masks, *self.erased]
        for name in places:
            if name not in modules:
                raise InputError(
                    f"{type(model).__name__} has no module {name!r}, which the saved model had: "
                    f"{REBUILD}, and call powernorm.modularize on it if that was called there"
                )
        for name in self.names():
            if id(modules[name]) not in norms and part_of(name, modules[name]) is None:
                raise InputError(
                    f"{name!r} is a {type(modules[name]).__name__} where the saved model had a "
                    f"norm: {REBUILD}"
                )
        self._check_no_more(model)

    def _check_no_more(self, model: nn.Module) -> None:
        """Raise an InputError if the model has changes of this library that are not recorded."""
        known = set(self.names())
        for part in _parts_of(model):
            for name in chain(*part.names):
                if name not in known:
                    what = f"the norm {part.norm}" if part.norm else "a norm that was folded"
                    raise InputError(
                        f"the given {type(model).__name__} has {what} at {name!r}, where the saved "
                        f"model had none of this library: {REBUILD}"
                    )
        folded = {name for part in self.parts if not part.norm for name in chain(*part.names)}
        for root, names in masked_norms(model).items():
            masked = sorted(set(names) - set(self.masks.get(root, ())) - folded)
            if masked:
                raise InputError(
                    f"{masked[0]!r} of the given {type(model).__name__} gets a padding mask that "
                    f"that of the saved model did not: {REBUILD}"
                )


def _attention_of(config: Any) -> Any:
    """Return the attention implementation of a Hugging Face model, or that of each part."""
    own = getattr(config, "_attn_implementation", None)
    parts = {
        name: getattr(getattr(config, name, None), "_attn_implementation", None)
        for name in getattr(config, "sub_configs", None) or ()
    }
    alike = set(parts.values()) <= {own, None}
    return own if alike else {"": own, **{name: one for name, one in parts.items() if one}}


def _parts_of(model: nn.Module) -> tuple[Part, ...]:
    named: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        modules[id(module)] = module
        named.setdefault(id(module), []).append(name)
    inside = {
        id(part)
        for module in modules.values()
        if isinstance(module, Norm | GatedNorm)
        for part in module.modules()
        if part is not module
    }
    alike: dict[str, list[tuple[Part, tuple[str, ...]]]] = {}
    for key, module in modules.items():
        part = None if key in inside else part_of(named[key][0], module)
        if part is not None:
            alike.setdefault(repr(part), []).append((part, tuple(named[key])))
    return tuple(
        replace(parts[0][0], names=tuple(names for _, names in parts))
        for _, parts in sorted(alike.items())
    )


def _part_from(values: Mapping[str, Any]) -> Part:
    names = tuple(
        (item,) if isinstance(item, str) else tuple(_listed(item, str))
        for item in _listed(values.get("names"), str | list)
    )
    known = {one.name: values[one.name] for one in fields(Part) if one.name in values}
    part = Part(**{"kind": "", **known, "names": names})
    if (
        part.kind not in get_args(Kind)
        or not isinstance(part.norm, str)
        or not isinstance(part.source, str)
        or type(part.num_features) is not int
        or not 0 <= part.num_features <= _MOST_FEATURES
        or not isinstance(part.options, dict)
        or not isinstance(part.frozen, bool)
        or not all(names)
    ):
        raise ValueError(f"{dict(values)} describes no module")
    return part


def _listed(values: object, kind: type | UnionType) -> Sequence[Any]:
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise ValueError(f"{values!r} is not a list of the expected values")
    return values


def _like(name: str, state: Mapping[str, Tensor], model: nn.Module) -> Tensor:
    """Return a tensor of the type and device that a module's parameters had."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    own = [state[key] for key in (f"{name}.weight", f"{name}.bias") if key in state]
    # Statistics are float64 only if the norm was built that way.
    own += [state[key] for key in (f"{name}.{kept}" for kept in _KEPT) if key in state]
    inner = [value for key, value in state.items() if key.startswith(f"{name}.layer.")]
    floats = [value for value in (*own, *inner) if value.is_floating_point()]
    dtype = floats[0].dtype if floats else next((p.dtype for p in model.parameters()), None)
    return torch.empty(0, device=device, dtype=dtype)


# The record in the configuration of a Hugging Face model ------------------------------------------
#
# The configuration becomes the `config.json` of everything that Hugging Face's libraries write,
# from which `powernorm.load` knows the changes. No forward reads the key. The record describes the
# model when it is written: `to_dict` of a configuration copies its values, and a copy of the mark
# is the record.

_CONFIGURATION: Final = "PreTrainedConfig"
"""Class of the configurations of transformers."""
_MODEL: Final = "PreTrainedModel"
"""Class of its models."""


def mark(model: nn.Module) -> None:
    """Mark the configurations of a changed model, or unmark those of an unchanged one.

    Args:
        model: a Hugging Face model, a model around it, or a part of it that has its configuration.
    """
    for owner in _pretrained_in(model) or [model]:
        config = getattr(owner, "config", None)
        if not any(cls.__name__ == _CONFIGURATION for cls in type(config).__mro__):
            continue
        known = vars(config).pop(KEY, None)
        owners = [*known.owners(), owner] if isinstance(known, RecordMark) else [owner]
        changed = [one for one in dict.fromkeys(owners) if _is_changed(one)]
        if changed:
            vars(config)[KEY] = RecordMark(changed)


def is_pretrained(model: nn.Module) -> bool:
    """Return whether a model is one of transformers' own kind."""
    return any(
        cls.__name__ == _MODEL and cls.__module__.startswith("transformers.")
        for cls in type(model).__mro__
    )


class RecordMark:
    """Placeholder of the record in a configuration.

    Args:
        owners: the changed modules.
    """

    def __init__(self, owners: list[nn.Module]) -> None:
        # A configuration may outlive its model.
        self._owners = [weakref.ref(owner) for owner in owners]

    def owners(self) -> list[nn.Module]:
        """Return the modules that still exist, without those inside another one."""
        alive = [owner for owner in (ref() for ref in self._owners) if owner is not None]
        return [
            owner
            for owner in alive
            if not any(owner is part for one in alive if one is not owner for part in one.modules())
        ]

    def written(self) -> dict[str, Any]:
        """Return the record as JSON values; the first module's contains those of the others."""
        try:
            records = [ModelRecord.of(owner).to_dict() for owner in self.owners()]
        except InputError as error:
            # When it is read, it states that it is not a record, and why.
            return {"error": str(error)}
        first, *others = records or [{}]
        return {**first, "others": others} if others else first

    def __deepcopy__(self, memo: dict[int, Any]) -> RecordMark | dict[str, Any]:
        """Return the record; in a copy of the whole model, a mark of the copy."""
        owners = self.owners()
        copies = [one for one in (memo.get(id(owner)) for owner in owners) if one is not None]
        return RecordMark(copies) if owners and len(copies) == len(owners) else self.written()

    def __getstate__(self) -> list[nn.Module]:
        return self.owners()

    def __setstate__(self, owners: list[nn.Module]) -> None:
        self._owners = [weakref.ref(owner) for owner in owners]

    def __repr__(self) -> str:
        return repr(self.written())


def _is_changed(model: nn.Module) -> bool:
    """Return whether a model has a module of this library, or a tensor that a fold has made."""
    ours = Norm | GatedNorm | FoldedNorm | FeatureAffine
    return any(isinstance(module, ours) for module in model.modules()) or bool(made_in(model))


def _pretrained_in(model: nn.Module) -> list[nn.Module]:
    """Return the outermost models of transformers in a model, which may be one itself."""
    if is_pretrained(model):
        return [model]
    return [found for child in model.children() for found in _pretrained_in(child)]
