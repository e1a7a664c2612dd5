"""Search for the norms of a model, for surgery, diagnosis and monitors.

A module is a norm by its class, by `declare_norm`, by its name, or because its only parameters are
γ and β and it computes one (`powernorm.inspection.reading`). Calls of
`torch.nn.functional.layer_norm` and similar functions in a forward are found in its bytecode, and
with example inputs also inside helpers (`powernorm.inspection.functional`).
"""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from types import FunctionType, ModuleType
from typing import Final

import torch
from torch import Tensor, nn

from powernorm.inspection.examples import as_call
from powernorm.inspection.functional import CALLS, FUNCTIONS, FunctionCall, see_calls
from powernorm.inspection.modules import held_outside
from powernorm.inspection.reading import (
    CHANNEL_NORMS,
    MORE_INPUTS,
    SCALES,
    SHIFTS,
    Kind,
    Reading,
    computes_norm,
    declared,
    read_gated,
    read_norm,
    wrapped_batch_norm,
)
from powernorm.inspection.trials import Gate, calls, other_inputs
from powernorm.norms import Norm
from powernorm.norms.adapted import AdaptedNorm
from powernorm.norms.arguments import check_model
from powernorm.norms.feature_dims import LAST
from powernorm.norms.registry import short_name

_NORM_NAME: Final = re.compile(
    r"norm(alization)?(1d|2d|3d)?(fp32)?(gated)?$|^(rms|rmsn|ln)$", re.IGNORECASE
)
_CONDITIONAL: Final = re.compile(
    r"(norm(alization)?|ada_?ln)(_?(zero|single|continuous|final))*(_?[123]d)?$", re.IGNORECASE
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
    "native_layer_norm": "layer",
    "native_group_norm": "channel",
}
OF_HEADS: Final = (
    "normalizes queries, keys or values inside an attention, not the tokens of a stream"
)
"""Why a norm inside an attention is not swapped."""
_HEAD_SIZES: Final = ("head_dim", "head_size", "attention_head_size", "dim_head", "d_head")
_HEAD_COUNTS: Final = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
_IN_SCRIPT: Final = "TorchScript"
_ADVICE: Final = "make it a module by powernorm.modularize"
_OF_POSITIONS: Final = {("DebertaV2Encoder", "LayerNorm")}
"""Class and attribute of norms whose inputs are not tokens."""


@dataclass(frozen=True)
class Slot:
    """An attribute of a parent module that holds a module."""

    parent: nn.Module
    attribute: str

    def holds(self, module: nn.Module) -> bool:
        """Return whether the slot holds this same module object."""
        return self.parent._modules.get(self.attribute) is module


@dataclass(frozen=True)
class FoundNorm:
    """A norm in a model."""

    names: tuple[str, ...]
    """Dotted names of the norm; several if it is shared."""
    module: nn.Module
    slots: tuple[Slot, ...]
    reading: Reading | None
    reason: str = ""
    """Why the norm cannot be swapped, if there is no reading; for a norm with a gate, why swap is
    the only verb for it."""
    function: str = ""
    """Name of the function of `torch.nn.functional` that the forward of `module` calls, or ""."""
    gated: tuple[Reading | None, Gate] | None = None
    """Reading of the norm inside a norm with a gate, None if it stays, and the gate. The whole then
    has no reading."""
    call: FunctionCall | None = None
    """A call that a run of the model has shown."""

    @property
    def to_swap(self) -> Reading | None:
        """Reading of the norm that a swap replaces: the norm itself, or the one next to a gate."""
        return self.reading if self.gated is None else self.gated[0]

    @property
    def type_name(self) -> str:
        """Name of the norm's class, or of the function that the module calls."""
        if self.function:
            return f"F.{self.function}"
        norm = self.module
        return norm.class_name if isinstance(norm, Norm) else type(norm).__name__

    def is_a(self, cls: type[nn.Module]) -> bool:
        """Return whether the norm is of a class, or was swapped in for a module of that class."""
        if self.function:
            return False
        layer = self.module.layer if isinstance(self.module, AdaptedNorm) else self.module
        return isinstance(layer, cls) or isinstance(self.module, cls)

    @property
    def kind(self) -> str:
        """Kind of the norm, as in a `NormRow`."""
        if self.function:
            return _FUNCTION_KINDS[self.function]
        if isinstance(self.module, Norm):
            return short_name(self.module)
        if self.gated is not None:
            return "gated"
        if self.reading is None:
            return "conditional" if _is_conditional(self.module) else "unknown"
        return self.reading.kind

    @property
    def inner(self) -> tuple[str, nn.Module]:
        """Name and module that compute; for a wrapper around a BatchNorm1d, the inner one."""
        if wrapped_batch_norm(self.module) is None:
            return self.names[0], self.module
        attribute, wrapped = next(self.module.named_children())
        return f"{self.names[0]}.{attribute}", wrapped

    @property
    def is_over_channels(self) -> bool:
        """Whether the features are in another dimension than the last."""
        return self.reading is not None and self.reading.feature_dim != LAST


def find_norms(model: nn.Module, example_inputs: object = None) -> tuple[FoundNorm, ...]:
    """Return the norms of a model in the model's order, each once.

    Modules inside a norm are not listed. Functions called in a forward are listed as norms that
    cannot be swapped, under names such as `encoder.norm_call0` for each call, or `encoder.forward`
    if only a module's code was read.

    Args:
        model: any module, also on the meta device; nothing in it is changed.
        example_inputs: as in `powernorm.fold`. The model runs once, in evaluation, and calls of
            functional norms are seen wherever they are made. None runs nothing, and calls inside a
            helper function are not seen. Arithmetic that computes a norm is never seen.

    Raises:
        InputError: the model is not a module, is TorchScript, or fails on the example inputs.
    """
    check_model(model)
    calls: Mapping[nn.Module, tuple[FunctionCall, ...]] = {}
    if example_inputs is not None:
        seen = see_calls(model, [as_call(example_inputs, model)], norm_modules(model))
        calls = {module: max(forwards, key=len) for module, forwards in seen.items()}
    found: dict[tuple[nn.Module, _Called], tuple[list[str], list[Slot]]] = {}
    for name, module, slot, called in _norms_below(model, calls):
        names, slots = found.setdefault((module, called), ([], []))
        names.append(name)
        if slot is not None and slot not in slots:
            slots.append(slot)
    held = held_outside(model)
    return tuple(
        _called(names, module, called)
        if called
        else _describe(model, names, module, slots, held.get(module, ""))
        for (module, called), (names, slots) in found.items()
    )


def norm_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules of a model that are norms, without those inside a norm."""
    return {module for _, module, _, called in _norms_below(model, {}) if not called}


_Called = str | FunctionCall
"""A function that a forward calls, by name or as seen; "" for a norm itself."""


def _called(names: list[str], module: nn.Module, called: _Called) -> FoundNorm:
    if called == _IN_SCRIPT:
        reason = "it is TorchScript, which cannot be changed: give the model before torch.jit"
        return FoundNorm(tuple(names), module, (), None, reason)
    if isinstance(called, str):
        reason = f"its forward calls torch.nn.functional.{called}: {_ADVICE}"
        return FoundNorm(tuple(names), module, (), None, reason, called)
    advice = called.obstacle or _ADVICE
    reason = f"calls {called.function} at {called.site}: {advice}"
    return FoundNorm(tuple(names), module, (), None, reason, called.function, call=called)


def _norms_below(
    module: nn.Module,
    calls: Mapping[nn.Module, tuple[FunctionCall, ...]],
    name: str = "",
    slot: Slot | None = None,
) -> Iterator[tuple[str, nn.Module, Slot | None, _Called]]:
    """Yield each norm's name, module, slot, and the called function if it is no module."""
    if isinstance(module, torch.jit.ScriptModule):
        for part, inner in module.named_modules(prefix=name):
            if _NORM_NAME.search(inner.original_name):
                yield part, inner, None, _IN_SCRIPT
        return
    if looks_like_norm(module) or _is_conditional(module):
        yield name, module, slot, ""
        return
    prefix = f"{name}." if name else ""
    known: tuple[FunctionCall, ...] = module.__dict__.get(CALLS, ())
    seen = calls.get(module) or tuple(call for call in known if call.obstacle)
    for call in seen:
        yield f"{prefix}{call.name}", module, None, call
    function = "" if seen or known else _function_called(module)
    if function:
        yield f"{prefix}forward", module, None, function
    for attribute, child in module._modules.items():
        if child is not None:
            yield from _norms_below(child, calls, prefix + attribute, Slot(module, attribute))


def _describe(
    model: nn.Module, names: list[str], module: nn.Module, slots: list[Slot], held: str
) -> FoundNorm:
    found = partial(FoundNorm, tuple(names), module, tuple(slots))
    if _is_conditional(module):
        other = ", ".join(other_inputs(module))
        name = type(module).__name__
        return found(None, f"{name} computes its γ and β from {other}: it stays as it is")
    reading = (
        _elsewhere(slots)
        or held
        or _head_norm(names[0])
        or _altered(module)
        or _uncalled(module, slots)
        or read_norm(module)
    )
    if isinstance(reading, Reading):
        of_a_head = _is_of_a_head(model, names[0], reading.num_features)
        return found(None, OF_HEADS) if of_a_head else found(reading)
    read = read_gated(module) if slots else None
    if read is None:
        return found(None, reading)
    sizes = {one for name, one in vars(slots[0].parent).items() if "head" in name and "dim" in name}
    if read[0].num_features in sizes:
        reading = OF_HEADS
    elif by := next(filter(_reads_weight, slots), None):
        reading = f"{type(by.parent).__name__} reads its weight, for a fused kernel perhaps"
    return found(None, reading, gated=read if MORE_INPUTS in reading else (None, read[1]))


def looks_like_norm(module: nn.Module) -> bool:
    """Return whether a module is, is named as, or computes a norm, and has no other parts."""
    if isinstance(module, (Norm, nn.LayerNorm, nn.RMSNorm, *CHANNEL_NORMS)):
        return True
    if declared(module) is not None or wrapped_batch_norm(module) is not None:
        return True
    if type(module).__module__.startswith("torch.nn.utils"):
        return False  # a parametrization, such as torch's weight_norm
    if _NORM_NAME.search(type(module).__name__) is None:
        return computes_norm(module)
    # If a norm of this library is inside, even without γ and β, that one is the norm.
    # Containers of parameters hold the module's own.
    held = (nn.ParameterDict, nn.ParameterList)
    inside = [child for child in module.children() if not isinstance(child, held)]
    parts = [part for child in inside for part in child.modules()]
    return not any(
        isinstance(part, Norm) or any(True for _ in part.parameters(False)) for part in parts
    )


def _is_conditional(module: nn.Module) -> bool:
    """Return whether a module is named a norm, takes a condition, and has weights for it.

    An example is the adaptive LayerNorm of diffusion models.
    """
    if _CONDITIONAL.search(type(module).__name__) is None or looks_like_norm(module):
        return False
    weights = [
        part
        for part in module.children()
        if any(True for _ in part.parameters()) and not looks_like_norm(part)
    ]
    plain = all(isinstance(part, nn.Linear | nn.Embedding | nn.Sequential) for part in weights)
    return bool(weights) and plain and bool(other_inputs(module))


def _function_called(module: nn.Module) -> str:
    """Return the name of the norm function that a module's own forward calls, or ""."""
    forward = inspect.unwrap(type(module).forward)
    is_foreign = inspect.isfunction(forward) and not type(module).__module__.startswith("torch.")
    return _function_in(forward) if is_foreign else ""


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
        if inspect.isroutine(value) and value in FUNCTIONS:
            return FUNCTIONS[value]
    return ""


def _elsewhere(slots: list[Slot]) -> str:
    """Return a reason if a known library gives the norm inputs other than tokens, or ""."""
    if any((type(slot.parent).__name__, slot.attribute) in _OF_POSITIONS for slot in slots):
        return "normalizes the embeddings of relative positions, not the tokens of a stream"
    return ""


def _uncalled(module: nn.Module, slots: list[Slot]) -> str:
    """Return a reason if a wrapper around the norm only reads its parameters, or ""."""
    size = getattr(module, "num_features", getattr(module, "normalized_shape", None))
    size = size[0] if isinstance(size, tuple) and len(size) == 1 else size
    for slot in slots:
        parent = slot.parent
        is_wrapper = bool(_NORM_NAME.search(type(parent).__name__) or _function_called(parent))
        if not is_wrapper or len(parent._modules) > 1 or not isinstance(size, int):
            continue
        if not calls(parent, slot.attribute, size):
            return f"{type(parent).__name__} does not call it, but computes by its parameters"
    return ""


def _altered(module: nn.Module) -> str:
    """Return a reason if this norm was changed since it was built, or ""."""
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
    """Return a reason if the name says that queries, keys or values are normalized, or ""."""
    path, _, last = name.lower().rpartition(".")
    words = set(re.split(r"[_\W\d]+", last)) - {""}
    parts = words - _NORM_WORDS
    # Outside a module that is named an attention, "value_norm" and "key" may have other meanings.
    known = _HEAD_PARTS if "att" in path else _QUERY_PARTS
    if parts and parts <= known and ("att" in path or len(words) > len(parts)):
        return OF_HEADS
    return ""


def _reads_weight(slot: Slot) -> bool:
    """Return whether a method of the parent's class reads the weight of its norm."""
    chain = ["self", slot.attribute, "weight"]
    for cls in type(slot.parent).__mro__[:-1]:
        for method in vars(cls).values() if not cls.__module__.startswith("torch.") else ():
            if inspect.isfunction(method):
                steps = dis.get_instructions(inspect.unwrap(method).__code__)
                names = [step.argval for step in steps]
                if any(names[i : i + 3] == chain for i in range(len(names) - 2)):
                    return True
    return False


def _is_of_a_head(model: nn.Module, name: str, num_features: int) -> bool:
    """Return whether a norm in an attention has the size of a head, not that of its input."""
    module = model
    for part in name.split(".")[:-1]:
        module = module.get_submodule(part)
        if "att" not in type(module).__name__.lower():
            continue
        widths = {getattr(child, "in_features", None) for child in module.children()} - {None}
        sizes = {module.__dict__.get(size) for size in _HEAD_SIZES}
        counts = {module.__dict__.get(count) for count in _HEAD_COUNTS} - {None}
        sizes |= {
            width // count
            for width in widths
            for count in counts
            if isinstance(width, int) and isinstance(count, int) and count > 1
        }
        if widths and num_features not in widths and num_features in sizes:
            return True
    return False
