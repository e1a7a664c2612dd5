"""Structure of a folded model: how its modules differ from the original's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from powernorm.inspection.mask_owners import retire_owners
from powernorm.norms.feature_dims import LAST
from powernorm.norms.token import RMSNorm
from powernorm.surgery.changes import Changes, empty_bias, parameter_like, slot_of
from powernorm.surgery.planned_norms import end_watches


class FoldedNorm(nn.Module):
    """Identity in place of a norm that was folded into its neighbors; takes a norm's arguments.

    Shape:
        x (..., C), output as x; with a residual (x + residual, x + residual), as every norm.
    """

    def forward(
        self,
        x: Tensor,
        padding_mask: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the input itself, or its sum with the residual, twice."""
        del padding_mask
        if residual is None:
            return x
        total = x + residual
        return total, total


class FeatureAffine(nn.Module):
    """One multiply-add per feature, for a static norm that no neighbor could absorb.

    Args:
        num_features: C.
        feature_dim: the dimension of x that holds the features.
        device: device of the parameters.
        dtype: type of the parameters.

    Shape:
        x (..., C), output as x; with a residual (y, x + residual), as every norm.
    """

    def __init__(
        self,
        num_features: int,
        *,
        feature_dim: int = LAST,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.feature_dim = feature_dim
        self.weight = nn.Parameter(torch.ones(num_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(num_features, device=device, dtype=dtype))

    def forward(
        self,
        x: Tensor,
        padding_mask: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return `weight ⊙ x + bias`."""
        del padding_mask
        total = x if residual is None else x + residual
        beyond = (-1 if self.feature_dim < 0 else total.ndim - 1) - self.feature_dim
        weight, bias = (part.view(-1, *(1,) * beyond) for part in (self.weight, self.bias))
        y = torch.addcmul(bias, total, weight).to(total.dtype)
        return y if residual is None else (y, total)

    def extra_repr(self) -> str:
        """Return the number of features, and their dimension."""
        dim = "" if self.feature_dim == LAST else f", feature_dim={self.feature_dim}"
        return f"{self.weight.shape[0]}{dim}"


Rest = Literal["nothing", "multiply-add", "rms"]


@dataclass(frozen=True)
class RmsRest:
    """RMSNorm in place of a LayerNorm whose stream is centered.

    Args:
        num_features: C.
        eps: that of the LayerNorm.
        affine: whether it has a weight.
    """

    num_features: int
    eps: float
    affine: bool


@dataclass(frozen=True)
class Structure:
    """What is left of the norms, and the parameters that folding adds.

    Args:
        norms: what is left of the norms, by name.
        features: number of features of those that leave a multiply-add.
        biases: sizes of the biases that are added, by name.
        untied: parameters that no longer share a tensor with others.
        feature_dims: the dimension of the features of those that leave a multiply-add, if it is
            not the last.
        rms: what is left of those that leave an RMSNorm.
    """

    norms: Mapping[str, Rest]
    features: Mapping[str, int]
    biases: Mapping[str, int]
    untied: tuple[str, ...]
    feature_dims: Mapping[str, int] = field(default_factory=dict)
    rms: Mapping[str, RmsRest] = field(default_factory=dict)


def build_structure(model: nn.Module, structure: Structure) -> Changes:
    """Give a model the modules and parameters of its folded form; values are set afterwards.

    Returns:
        The changes, which can be undone.
    """
    changes = Changes()
    changes.leave_fast_path(model, map(model.get_submodule, structure.norms))
    made: dict[int, nn.Module] = {}
    for name, rest in structure.norms.items():
        parent, attribute = slot_of(model, name)
        norm = model.get_submodule(name)
        if id(norm) not in made:
            made[id(norm)] = _rest(norm, rest, structure, name, model)
        changes.set_module(parent, attribute, made[id(norm)])
    # The hooks that passed masks to the norms have no receiver any more.
    changes.on_undo(retire_owners(model))
    end_watches(model)
    make_tensors(model, (*structure.biases, *structure.untied), changes)
    return changes


_MADE: Final = "_powernorm_made"
"""Attribute of a module with the names of its tensors that a fold has made."""


def made_in(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the biases and untied tensors that folds have made in a model."""
    return tuple(
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module.__dict__.get(_MADE, ())
    )


def make_tensors(model: nn.Module, names: Iterable[str], changes: Changes) -> None:
    """Give a model biases of zeros where it has none, and tensors of their own to tied ones.

    They are noted in their modules, as no class tells of them.
    """
    untied = False
    for name in names:
        module, attribute = slot_of(model, name)
        old = module._parameters[attribute]
        if old is None:
            weight = next(module.parameters(recurse=False))
            changes.set_tensor(module, attribute, empty_bias(len(weight), weight))
            changes.leave_fast_path(model, [module])
        else:
            untied = True
            changes.set_tensor(module, attribute, parameter_like(old.detach().clone(), old))
        known = module.__dict__.get(_MADE, ())
        changes.set_entry(module, _MADE, tuple(sorted({*known, attribute})))
    if untied:
        stop_tying(model, changes)


def stop_tying(model: nn.Module, changes: Changes) -> None:
    """Take the ties that are gone from the Hugging Face models inside, whose methods tie again.

    `config.tie_word_embeddings` stays: some models scale by it in their forward.
    """
    for module in model.modules():
        # Of the class: wrappers hand on the attributes of the model inside.
        expand = getattr(type(module), "get_expanded_tied_weights_keys", None)
        if expand is None:
            continue
        tensors = _all_tensors(module)
        for name, ties in (
            # What a model's class says, with patterns, and what the model found when it was built.
            ("_tied_weights_keys", expand(module)),
            ("all_tied_weights_keys", getattr(module, "all_tied_weights_keys", {})),
        ):
            kept = {
                one: other for one, other in ties.items() if tensors.get(one) is tensors.get(other)
            }
            if len(kept) < len(ties):
                changes.set_entry(module, name, kept)


def _all_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _rest(
    norm: nn.Module, rest: Rest, structure: Structure, name: str, model: nn.Module
) -> nn.Module:
    if rest == "nothing":
        return FoldedNorm().train(norm.training)
    own = next(norm.parameters(recurse=False), None)
    candidates = (own, *norm.buffers(recurse=False), *model.parameters())
    like = next(
        (t for t in candidates if t is not None and t.is_floating_point()),
        torch.empty((), dtype=torch.float32, device="cpu"),
    )
    kind: Any = {"device": like.device, "dtype": like.dtype}
    if rest == "rms":
        left = structure.rms[name]
        module: nn.Module = RMSNorm(left.num_features, left.eps, left.affine, **kind)
    else:
        module = FeatureAffine(
            structure.features[name], feature_dim=structure.feature_dims.get(name, LAST), **kind
        )
    module.requires_grad_(own is None or own.requires_grad)
    return module.train(norm.training)
