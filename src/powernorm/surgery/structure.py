"""How the modules of a folded model differ from those of the original one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import nn

from powernorm.errors import InputError
from powernorm.surgery.changes import Changes, empty_bias, parameter_like, slot_of
from powernorm.surgery.fast_paths import restore, without_fast_path
from powernorm.surgery.folded import FeatureAffine, FoldedNorm
from powernorm.surgery.masking import retire_owners

Rest = Literal["nothing", "multiply-add"]


@dataclass(frozen=True)
class Structure:
    """What is left of the norms, and the parameters that folding adds.

    Args:
        norms: what is left of the norms, by name.
        features: number of features of those that leave a multiply-add.
        biases: sizes of the biases that are made, by name.
        untied: parameters that are no longer one with others.
    """

    norms: Mapping[str, Rest]
    features: Mapping[str, int]
    biases: Mapping[str, int]
    untied: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Structure:
        """From JSON."""
        return cls(
            dict(values["norms"]),
            dict(values["features"]),
            dict(values["biases"]),
            tuple(values["untied"]),
        )


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
            made[id(norm)] = _rest(norm, rest, structure.features.get(name), model)
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
    config = getattr(model, "config", None)
    if structure.untied and getattr(config, "tie_word_embeddings", False):
        # Else the next load ties them again.
        changes.set_attribute(config, "tie_word_embeddings", False)
    return changes


def _rest(norm: nn.Module, rest: Rest, features: int | None, model: nn.Module) -> nn.Module:
    if rest == "nothing":
        return FoldedNorm().train(norm.training)
    assert features is not None
    like = next(norm.parameters(recurse=False), None)
    if like is None:
        like = next(model.parameters())
    module = FeatureAffine(features, device=like.device, dtype=like.dtype)
    return module.requires_grad_(like.requires_grad).train(norm.training)


def _check(model: nn.Module, structure: Structure) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    owners = [name.rpartition(".")[0] for name in (*structure.biases, *structure.untied)]
    missing = [name for name in (*structure.norms, *owners) if name not in modules]
    if missing:
        raise InputError(
            f"{type(model).__name__} has no module {missing[0]!r}, which the folded model was made "
            "from: build the model with the same configuration"
        )
