"""Finding the norms of a model: for surgery, diagnosis and monitors alike.

A module is a norm by its class, by `declare_norm`, by its name, or because it has no more than γ
and β and computes one (`powernorm.inspection.reading`). Calls of `torch.nn.functional.layer_norm`
and its kin in a forward are found in its code.
"""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Final

from torch import Tensor, nn
from torch.nn import functional

from powernorm.inspection.reading import (
    CHANNEL_NORMS,
    SCALES,
    SHIFTS,
    Kind,
    Reading,
    computes_norm,
    declared,
    read_norm,
    wrapped_batch_norm,
)
from powernorm.norms import Norm
from powernorm.norms.adapted import AdaptedNorm
from powernorm.norms.feature_dims import LAST
from powernorm.norms.registry import short_name

_NORM_NAME: Final = re.compile(
    r"norm(alization)?(1d|2d|3d)?(fp32)?(gated)?$|^(rms|rmsn|ln)$", re.IGNORECASE
)
_NORM_WORDS: Final = {"norm", "layernorm", "rmsnorm", "layer", "ln", "rms"}
_QUERY_PARTS: Final = {"q", "k", "qk", "query", "key"}
_HEAD_PARTS: Final = {"q", "k", "v", "qk", "query", "key", "value"}
_FUNCTION_KINDS: Final[dict[str, Kind]] = {
    "layer_norm": "layer",
    "rms_norm": "rms",
    "batch_norm": "batch",
    "group_norm": "channel",
    "instance_norm": "channel",
}
_FUNCTIONS: Final = {getattr(functional, name): name for name in _FUNCTION_KINDS}
_OF_POSITIONS: Final = {("DebertaV2Encoder", "LayerNorm")}
"""Class and attribute of norms that see no tokens at all."""


@dataclass(frozen=True)
class Slot:
    """A place that holds a module: an attribute of its parent."""

    parent: nn.Module
    attribute: str

    def put(self, module: nn.Module) -> None:
        """Fill the place; the order among its neighbors stays."""
        self.parent._modules[self.attribute] = module

    def holds(self, module: nn.Module) -> bool:
        """Whether this very module is in the place."""
        return self.parent._modules.get(self.attribute) is module


@dataclass(frozen=True)
class FoundNorm:
    """A norm in a model."""

    names: tuple[str, ...]
    """Its dotted names; several where it is shared."""
    module: nn.Module
    slots: tuple[Slot, ...]
    reading: Reading | None
    reason: str = ""
    """Why it cannot be swapped, where there is no reading."""
    function: str = ""
    """Of a call in the forward of `module`: the function of `torch.nn.functional`."""

    @property
    def type_name(self) -> str:
        """The name of its class, or of the function that the module calls."""
        if self.function:
            return f"F.{self.function}"
        norm = self.module
        return norm.class_name if isinstance(norm, Norm) else type(norm).__name__

    def is_a(self, cls: type[nn.Module]) -> bool:
        """Whether it is a norm of a class, or one that such a module became."""
        if self.function:
            return False
        layer = self.module.layer if isinstance(self.module, AdaptedNorm) else self.module
        return isinstance(layer, cls) or isinstance(self.module, cls)

    @property
    def kind(self) -> str:
        """What it computes, as in a `NormRow`."""
        if self.function:
            return _FUNCTION_KINDS[self.function]
        if isinstance(self.module, Norm):
            return short_name(self.module)
        return "unknown" if self.reading is None else self.reading.kind

    @property
    def inner(self) -> tuple[str, nn.Module]:
        """Name and module of what computes: of a wrapper around a BatchNorm1d the one inside."""
        wrapped = wrapped_batch_norm(self.module)
        if wrapped is None:
            return self.names[0], self.module
        parts = self.module._modules.items()
        attribute = next(name for name, part in parts if part is wrapped)
        return f"{self.names[0]}.{attribute}", wrapped

    @property
    def is_over_channels(self) -> bool:
        """Are its features in another dimension than the last?"""
        return self.reading is not None and self.reading.feature_dim != LAST


def find_norms(model: nn.Module) -> tuple[FoundNorm, ...]:
    """The norms of a model in its order, each once; what is inside a norm is no norm of its own.

    Calls of functions in a forward are named as what cannot be swapped, `encoder.forward`.

    Args:
        model: any module, also on the meta device; nothing in it is run or changed.
    """
    names: dict[nn.Module, list[str]] = {}
    slots: dict[nn.Module, list[Slot]] = {}
    callers: dict[nn.Module, str] = {}
    for name, module, slot, function in _norms_below(model):
        names.setdefault(module, []).append(name)
        known = slots.setdefault(module, [])
        if function:
            callers[module] = function
        elif slot is not None and slot not in known:
            known.append(slot)
    return tuple(
        _called(names[module], module, callers[module])
        if module in callers
        else _describe(names[module], module, slots[module])
        for module in names
    )


def _called(names: list[str], module: nn.Module, function: str) -> FoundNorm:
    reason = f"its forward calls torch.nn.functional.{function}: make that a module to swap it"
    return FoundNorm(tuple(names), module, (), None, reason, function)


def _norms_below(
    module: nn.Module, name: str = "", slot: Slot | None = None
) -> Iterator[tuple[str, nn.Module, Slot | None, str]]:
    """Name, module and place of each norm; of a forward that calls one, the function too."""
    if looks_like_norm(module):
        yield name, module, slot, ""
        return
    function = _function_called(module)
    if function:
        yield (f"{name}.forward" if name else "forward"), module, None, function
    for attribute, child in module._modules.items():
        if child is not None:
            inner = f"{name}.{attribute}" if name else attribute
            yield from _norms_below(child, inner, Slot(module, attribute))


def _describe(names: list[str], module: nn.Module, slots: list[Slot]) -> FoundNorm:
    reading = _elsewhere(slots) or _head_norm(names[0]) or _altered(module) or read_norm(module)
    if isinstance(reading, str):
        return FoundNorm(tuple(names), module, tuple(slots), None, reading)
    return FoundNorm(tuple(names), module, tuple(slots), reading)


def looks_like_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, calls itself one or computes one, and has no other parts."""
    if isinstance(module, (Norm, nn.LayerNorm, nn.RMSNorm, *CHANNEL_NORMS)):
        return True
    if declared(module) is not None:
        return True
    if wrapped_batch_norm(module) is not None:
        return True
    if type(module).__module__.startswith("torch.nn.utils"):
        return False  # a parametrization, as of torch's weight_norm
    if _NORM_NAME.search(type(module).__name__) is None:
        return computes_norm(module)
    # A norm of this library inside, also one without γ and β, is the norm itself.
    parts = [part for child in module.children() for part in child.modules()]
    return not any(isinstance(part, Norm) or _has_parameters(part) for part in parts)


def _has_parameters(module: nn.Module) -> bool:
    return any(parameter is not None for parameter in module._parameters.values())


def _function_called(module: nn.Module) -> str:
    """The function for a norm that a module's own forward calls, empty where it calls none."""
    forward = inspect.unwrap(type(module).forward)
    if not inspect.isfunction(forward) or type(module).__module__.startswith("torch."):
        return ""
    return _function_in(forward)


@lru_cache(maxsize=1024)
def _function_in(forward: FunctionType) -> str:
    value: object = None
    for step in dis.get_instructions(forward.__code__):
        if step.opname == "LOAD_GLOBAL":
            value = forward.__globals__.get(step.argval)
        elif step.opname.startswith(("LOAD_ATTR", "LOAD_METHOD")):
            value = getattr(value, step.argval, None) if isinstance(value, ModuleType) else None
        elif step.opname != "PUSH_NULL":
            value = None
        if inspect.isroutine(value) and value in _FUNCTIONS:
            return _FUNCTIONS[value]
    return ""


def _elsewhere(slots: list[Slot]) -> str:
    """A reason if a library is known to give the norm something else than tokens."""
    for slot in slots:
        if (type(slot.parent).__name__, slot.attribute) in _OF_POSITIONS:
            return "normalizes the embeddings of relative positions, not the tokens of a stream"
    return ""


def _altered(module: nn.Module) -> str:
    """A reason if this one norm was changed since it was built, else empty."""
    if hasattr(module, "_hf_hook"):
        return "accelerate has put a hook in: swap before the model is dispatched or offloaded"
    if "forward" in module.__dict__:
        return "its forward was replaced in this instance"
    if nn.utils.parametrize.is_parametrized(module):
        return "its parameters are parametrized: remove the parametrization first"
    if any(name.endswith("_orig") for name in module._parameters):
        return "its parameters are pruned: make that permanent by torch.nn.utils.prune.remove"
    if any(isinstance(module.__dict__.get(name), Tensor) for name in (*SCALES, *SHIFTS)):
        return "its parameters are computed from something else: a plain tensor is in their place"
    return ""


def _head_norm(name: str) -> str:
    """A reason if the name says that queries, keys or values are normalized, else empty."""
    path, _, last = name.lower().rpartition(".")
    words = set(re.split(r"[_\W\d]+", last)) - {""}
    parts = words - _NORM_WORDS
    # Outside of what calls itself an attention "value_norm" and "key" may be anything.
    known = _HEAD_PARTS if "att" in path else _QUERY_PARTS
    if parts and parts <= known and ("att" in path or len(words) > len(parts)):
        return "normalizes queries, keys or values inside an attention, not the tokens of a stream"
    return ""
