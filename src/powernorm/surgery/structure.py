"""How the modules of a folded model differ from those of the original one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import nn

from powernorm.errors import InputError
from powernorm.inspection.masking import retire_owners
from powernorm.norms.feature_dims import LAST
from powernorm.surgery.changes import Changes, empty_bias, parameter_like, slot_of
from powernorm.surgery.fast_paths import restore, without_fast_path
from powernorm.surgery.folded import FeatureAffine, FoldedNorm
from powernorm.surgery.static_layers import norms_of

Rest = Literal["nothing", "multiply-add"]


@dataclass(frozen=True)
class Structure:
    """What is left of the norms, and the parameters that folding adds.

    Args:
        norms: what is left of the norms, by name.
        features: number of features of those that leave a multiply-add.
        biases: sizes of the biases that are made, by name.
        untied: parameters that are no longer one with others.
        feature_dims: the dimension of the features of those that leave a multiply-add, where it
            is not the last.
    """

    norms: Mapping[str, Rest]
    features: Mapping[str, int]
    biases: Mapping[str, int]
    untied: tuple[str, ...]
    feature_dims: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Structure:
        """From JSON."""
        found = cls(
            dict(values["norms"]),
            {str(name): int(size) for name, size in values["features"].items()},
            {str(name): int(size) for name, size in values["biases"].items()},
            tuple(map(str, values["untied"])),
            {str(name): int(dim) for name, dim in values.get("feature_dims", {}).items()},
        )
        for name, rest in found.norms.items():
            if rest not in get_args(Rest) or (rest != "nothing" and name not in found.features):
                raise ValueError(f"what is left of {name!r} is {rest!r}")
        return found


def build_structure(model: nn.Module, structure: Structure) -> Changes:
    """Give a model the modules and parameters of its folded form; their values come afterwards.

    Returns:
        What puts the model back.

    Raises:
        InputError: the model has no such module.
    """
    changes = Changes()
    _check(model, structure)
    switches = without_fast_path(model, [model.get_submodule(name) for name in structure.norms])
    changes.on_undo(lambda: restore(switches))
    made: dict[int, nn.Module] = {}
    for name, rest in structure.norms.items():
        parent, attribute = slot_of(model, name)
        norm = model.get_submodule(name)
        if id(norm) not in made:
            made[id(norm)] = _rest(norm, rest, structure, name, model)
        changes.set_module(parent, attribute, made[id(norm)])
    # What handed masks to the norms has no one to hand them to.
    changes.on_undo(retire_owners(model))
    for name, size in structure.biases.items():
        module, attribute = slot_of(model, name)
        weight = next(module.parameters(recurse=False))
        changes.set_tensor(module, attribute, empty_bias(size, weight))
    for name in structure.untied:
        module, attribute = slot_of(model, name)
        old = getattr(module, attribute)
        changes.set_tensor(module, attribute, parameter_like(old.detach().clone(), old))
    if structure.untied:
        _stop_tying(model, changes)
    return changes


def _stop_tying(model: nn.Module, changes: Changes) -> None:
    """Tell Hugging Face's models, wherever they are inside, or the next load ties them again."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "tie_word_embeddings", False) is True:
            changes.set_attribute(config, "tie_word_embeddings", False)


def _rest(
    norm: nn.Module, rest: Rest, structure: Structure, name: str, model: nn.Module
) -> nn.Module:
    if rest == "nothing":
        return FoldedNorm().train(norm.training)
    features, dim = structure.features[name], structure.feature_dims.get(name, LAST)
    own = next(norm.parameters(recurse=False), None)
    candidates = (own, *norm.buffers(recurse=False), *model.parameters())
    like = next((t for t in candidates if t is not None and t.is_floating_point()), torch.empty(()))
    module = FeatureAffine(features, feature_dim=dim, device=like.device, dtype=like.dtype)
    module.requires_grad_(own is None or own.requires_grad)
    return module.train(norm.training)


def _check(model: nn.Module, structure: Structure) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    owners = [name.rpartition(".")[0] for name in (*structure.biases, *structure.untied)]
    missing = [name for name in (*structure.norms, *owners) if name not in modules]
    if missing:
        raise InputError(
            f"{type(model).__name__} has no module {missing[0]!r}, which the folded model was made "
            "from: build the model with the same configuration"
        )
    norms = {id(place.module) for place in norms_of(model) if not place.found.function}
    for name in structure.norms:
        if id(modules[name]) not in norms:
            raise InputError(
                f"{name!r} is a {type(modules[name]).__name__} where the folded model had a norm: "
                "build the model with the same configuration"
            )
    for name in (*structure.biases, *structure.untied):
        path, _, attribute = name.rpartition(".")
        slot = modules[path]._parameters.get(attribute, modules[path])
        if slot is modules[path] or (slot is None) != (name in structure.biases):
            raise InputError(
                f"{type(modules[path]).__name__} {path!r} has no place for {attribute!r} as the "
                "folded model's has: build the model with the same configuration"
            )
