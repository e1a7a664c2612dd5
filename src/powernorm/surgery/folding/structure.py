"""Structure of a folded model: the differences of its modules from the original's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.inspection.mask_owners import retire_owners
from powernorm.inspection.trials import ACTIVATIONS, Gate
from powernorm.norms import BatchStatisticsNorm, Norm
from powernorm.norms.descriptions import describe_norm, rebuild_norm
from powernorm.norms.feature_dims import LAST
from powernorm.ops.arrays import accumulation_dtype
from powernorm.surgery.changes import (
    Changes,
    empty_bias,
    parameter_like,
    slot_of,
    tensors_of,
)
from powernorm.surgery.planned_norms import end_watches


class _Left(nn.Module):
    """Module that replaces a folded norm and takes a norm's arguments."""

    def forward(
        self,
        x: Tensor,
        padding_mask: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the remaining computation; with a residual, of the sum, and the sum."""
        del padding_mask
        total = x if residual is None else x + residual
        y = self._compute(total)
        if residual is None:  # two returns, as TorchScript requires
            return y
        return y, total

    def _compute(self, x: Tensor) -> Tensor:
        return x


class FoldedNorm(_Left):
    """Identity in place of a norm that was folded into its neighbors; takes a norm's arguments.

    Shape:
        x (..., C), output as x; with a residual (x + residual, x + residual), as every norm.
    """


class FeatureAffine(_Left):
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

    def _compute(self, x: Tensor) -> Tensor:
        """Return `weight ⊙ x + bias`."""
        beyond = (-1 if self.feature_dim < 0 else x.ndim - 1) - self.feature_dim
        weight, bias = (part.view(-1, *(1,) * beyond) for part in (self.weight, self.bias))
        return torch.addcmul(bias, x, weight).to(x.dtype)

    def extra_repr(self) -> str:
        """Return the number of features, and their dimension."""
        dim = "" if self.feature_dim == LAST else f", feature_dim={self.feature_dim}"
        return f"{self.weight.shape[0]}{dim}"


class GatedNorm(nn.Module):
    """A norm whose input, or output, is multiplied by a gate.

    `y = norm(x ⊙ f(gate))` or `y = norm(x) ⊙ f(gate)`, as in Mamba 2 and Qwen3-Next. It has no
    `weight`, so that fused kernels of a model, which would compute the old norm with it, fail.

    Args:
        norm: maps (..., C) to the same shape.
        gate: whether the gate is before or after the norm, and the name of f.
    """

    def __init__(self, norm: nn.Module, gate: Gate) -> None:
        super().__init__()
        self.norm = norm
        self.gate = gate

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalize x, (..., C).

        Args:
            x: the input.
            gate: of x's shape; None leaves it out.
        """
        if gate is None:
            y: Tensor = self.norm(x)
        elif self.gate.place == "before":
            y = self.norm(self._gated(x, gate))
        else:
            y = self._gated(self.norm(x), gate)
        return y

    def _gated(self, x: Tensor, gate: Tensor) -> Tensor:
        # As such norms do: half precision is multiplied in float32.
        dtype = accumulation_dtype(x)
        return (x.to(dtype) * ACTIVATIONS[self.gate.activation](gate.to(dtype))).to(x.dtype)

    def extra_repr(self) -> str:
        """Return position and function of the gate."""
        return f"gate={self.gate.activation} {self.gate.place}"


Kind = Literal["norm", "nothing", "multiply-add"]
"""Kind of a module: a norm of this library, or the remainder of a folded one."""


@dataclass(frozen=True)
class Part:
    """Modules that are alike.

    Args:
        kind: kind of the modules.
        names: the dotted names of each, several for a shared module.
        norm: short name of a norm.
        num_features: C; 0 if nothing remains.
        options: options of a norm; `feature_dim` of a multiply-add; `gate`, position and function
            of the gate next to it.
        frozen: whether the statistics of a norm are frozen.
        source: class of a norm from outside this library.
    """

    kind: Kind
    names: tuple[tuple[str, ...], ...] = ()
    norm: str = ""
    num_features: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    frozen: bool = False
    source: str = ""

    def build(self, like: Tensor) -> nn.Module:
        """Build one of the modules.

        Args:
            like: a tensor with the device and type for the module's parameters.

        Raises:
            InputError: the norm is not known in this process.
        """
        options = dict(self.options)
        if "gate" in options:
            gate = Gate(*options.pop("gate"))
            return GatedNorm(replace(self, options=options).build(like), gate)
        if self.kind == "nothing":
            return FoldedNorm()
        if self.kind == "multiply-add":
            return FeatureAffine(self.num_features, **options, device=like.device, dtype=like.dtype)
        norm = rebuild_norm(
            self.norm,
            self.num_features,
            options,
            self.source,
            device=like.device,
            dtype=like.dtype,
        )
        if self.frozen:
            cast(BatchStatisticsNorm, norm).freeze_statistics()
        return norm

    def is_built_as(self, module: nn.Module) -> bool:
        """Return whether a module is already built like this."""
        return part_of("", module) == replace(self, names=())


def part_of(name: str, module: nn.Module) -> Part | None:
    """Return a module's part, without its name; None if it is not of this library."""
    if isinstance(module, GatedNorm):
        inner = part_of(name, module.norm)
        return inner and replace(inner, options={**inner.options, "gate": list(module.gate)})
    if isinstance(module, FoldedNorm):
        return Part("nothing")
    if isinstance(module, FeatureAffine):
        dim = module.feature_dim
        options = {} if dim == LAST else {"feature_dim": dim}
        return Part("multiply-add", num_features=module.weight.shape[0], options=options)
    if not isinstance(module, Norm):
        return None
    try:
        short, options, source = describe_norm(module)
    except InputError as error:
        raise InputError(f"{name or 'the model'}: {error}") from error
    frozen = isinstance(module, BatchStatisticsNorm) and module.is_frozen
    return Part("norm", (), short, module.num_features, options, frozen, source)


@dataclass(frozen=True)
class Structure:
    """Modules that a fold leaves in the places of norms, and the parameters that it adds.

    Args:
        norms: what remains of the norms, by name.
        biases: sizes of the biases that are added, by name.
        untied: parameters that no longer share a tensor with others.
    """

    norms: Mapping[str, Part]
    biases: Mapping[str, int]
    untied: tuple[str, ...]


def build_structure(model: nn.Module, structure: Structure, changes: Changes) -> None:
    """Give a model the modules and parameters of its folded form; values are set afterwards.

    Args:
        model: changed in place.
        structure: the folded form.
        changes: record of the change, for undo.
    """
    changes.leave_fast_path(model, map(model.get_submodule, structure.norms))
    made: dict[int, nn.Module] = {}
    for name, rest in structure.norms.items():
        norm = model.get_submodule(name)
        if id(norm) not in made:
            made[id(norm)] = _rest(norm, rest, model)
        changes.set_module(*slot_of(model, name), made[id(norm)])
    # The hooks that passed masks to the norms have no receiver left.
    changes.on_undo(retire_owners(model))
    end_watches(model)
    make_tensors(model, (*structure.biases, *structure.untied), changes)


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
    """Add biases of zeros, and separate tensors for tied parameters.

    Their names are stored in the modules, as the classes do not declare them.
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
    """Remove untied parameters from the ties of inner Hugging Face models, which would tie again.

    `config.tie_word_embeddings` stays, because some models scale by it in their forward.
    """
    for module in model.modules():
        # From the class, because wrappers expose the attributes of the inner model.
        expand = getattr(type(module), "get_expanded_tied_weights_keys", None)
        if expand is None:
            continue
        tensors = tensors_of(module)
        for name, ties in (
            # Ties of the model's class, with patterns, and those found when the model was built.
            ("_tied_weights_keys", expand(module)),
            ("all_tied_weights_keys", getattr(module, "all_tied_weights_keys", {})),
        ):
            kept = {
                one: other for one, other in ties.items() if tensors.get(one) is tensors.get(other)
            }
            if len(kept) < len(ties):
                changes.set_entry(module, name, kept)


def _rest(norm: nn.Module, rest: Part, model: nn.Module) -> nn.Module:
    own = next(norm.parameters(recurse=False), None)
    candidates = (own, *norm.buffers(recurse=False), *model.parameters())
    like = next(
        (t for t in candidates if t is not None and t.is_floating_point()),
        torch.empty((), dtype=torch.float32, device="cpu"),
    )
    module = rest.build(like)
    module.requires_grad_(own is None or own.requires_grad)
    return module.train(norm.training)
