"""Finding the norms of a model, and what each of them computes: for surgery and diagnosis alike.

Classes of other libraries are not trusted by name: a copy with random γ and β, on the CPU, is run
on a few tokens and compared with LayerNorm and RMSNorm. So `γ = 1 + weight` is told from
`γ = weight`, and a norm over channels or with a gate is seen to be something else, also in a model
on the meta device. A class whose name does not say that it is a norm is tried in the same way where
it has no more than γ and β. `declare_norm` tells what cannot be seen; calls of
`torch.nn.functional.layer_norm` and its kin in a forward are found in its code.
"""

from __future__ import annotations

import dis
import inspect
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Final, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from powernorm.errors import InputError
from powernorm.norms import Norm
from powernorm.norms.adapted import AdaptedNorm
from powernorm.norms.feature_dims import LAST, features_back, features_last
from powernorm.norms.registry import short_name

Kind = Literal["layer", "rms", "batch", "channel", "own"]
"""LayerNorm, RMSNorm, BatchNorm, GroupNorm and InstanceNorm, or a norm of this library."""

_KINDS: Final[tuple[Kind, ...]] = ("layer", "rms")
_NORM_NAME: Final = re.compile(
    r"norm(alization)?(1d|2d|3d)?(fp32)?(gated)?$|^(rms|rmsn|ln)$", re.IGNORECASE
)
_SCALES: Final = ("weight", "gamma", "g", "scale", "a_2")
_SHIFTS: Final = ("bias", "beta", "shift", "b_2")
_EPSILONS: Final = ("eps", "variance_epsilon", "epsilon")
_CHANNEL_NORMS: Final = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LocalResponseNorm,
)
_CHANNELS: Final = 1
"""The dimension of the features in torch's norms for convolutions."""
_TRIALS: Final = (((2, 3), LAST), ((2, 3, 4), _CHANNELS), ((2, 3), _CHANNELS))
"""Shapes without the features, and the dimension of these, that norms of other libraries get."""
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
class Reading:
    """What a norm computes: `y = (offset + weight) ⊙ x̂ + bias`, x̂ by its kind."""

    kind: Kind
    num_features: int
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    offset: float = 0.0
    eps: float | None = None
    statistics: nn.Module | None = None
    """The module that holds running statistics, where there are some."""
    feature_dim: int = LAST
    """The dimension of its input that holds the features."""

    def scale(self) -> Tensor | None:
        """γ, (C,), None where there is none; the parameter itself where that is γ."""
        if self.weight is None:
            return None
        if self.offset == 0.0 and self.weight.shape == (self.num_features,):
            return self.weight
        with torch.no_grad():
            scale = (self.weight.double() + self.offset).to(self.weight.dtype)
            return scale.reshape(-1).expand(self.num_features).clone()


@dataclass(frozen=True)
class Slot:
    """A place that holds a module: an attribute of its parent."""

    parent: nn.Module
    attribute: str

    def put(self, module: nn.Module) -> None:
        """Fill the place; the order among its neighbours stays."""
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


_DECLARED: Final[dict[type[nn.Module], tuple[Kind, int]]] = {}
"""What users have said of their classes: kind and dimension of the features."""


def declare_norm(
    cls: type[nn.Module],
    *,
    kind: Literal["layer", "rms", "batch", "channel"],
    feature_dim: int = LAST,
) -> None:
    """Say that a class is a norm, where its name and a trial do not show it.

    From then on `powernorm.swap`, `fold`, `diagnose` and the monitors take its instances and those
    of its subclasses for norms of that kind, in this process.

    Args:
        cls: a class of modules with γ as `weight` (or `gamma`, `scale`), β as `bias` (or `beta`,
            `shift`), or without; and the number of features as the size of γ or as
            `normalized_shape` or `num_features`.
        kind: what it computes: `layer`, LayerNorm; `rms`, RMSNorm; `batch`, BatchNorm with or
            without running statistics; `channel`, another norm of a convolutional network.
        feature_dim: the dimension of its input that holds the features.

    Raises:
        InputError: no class of modules, or no such kind.

    >>> class Scaled(nn.Module):
    ...     def __init__(self, size):
    ...         super().__init__()
    ...         self.gamma = nn.Parameter(torch.ones(size))
    ...     def forward(self, x, speed):
    ...         return self.gamma * x * x.square().mean(-1, keepdim=True).rsqrt()
    >>> model = nn.Sequential(Scaled(8))
    >>> find_norms(model)
    ()
    >>> declare_norm(Scaled, kind="rms")
    >>> find_norms(model)[0].reading.kind
    'rms'
    """
    if not isinstance(cls, type) or not issubclass(cls, nn.Module):
        raise InputError(f"cls is {cls!r}, expected a class of torch.nn.Module")
    known = [one for one in get_args(Kind) if one != "own"]
    if kind not in known:
        raise InputError(f"kind is {kind!r}, expected one of {', '.join(known)}")
    _DECLARED[cls] = (kind, feature_dim)


def _declared(module: nn.Module) -> tuple[Kind, int] | None:
    return next((_DECLARED[cls] for cls in type(module).__mro__ if cls in _DECLARED), None)


def find_norms(model: nn.Module) -> tuple[FoundNorm, ...]:
    """The norms of a model in its order, each once; what is inside a norm is no norm of its own.

    Calls of functions in a forward are named as what cannot be swapped, `encoder.forward`.

    Args:
        model: any module, also on the meta device; nothing in it is run or changed.
    """
    names: dict[int, list[str]] = {}
    slots: dict[int, list[Slot]] = {}
    modules: dict[int, nn.Module] = {}
    for name, module, slot in _norms_below(model):
        key = id(module)
        modules[key] = module
        names.setdefault(key, []).append(name)
        known = slots.setdefault(key, [])
        if slot is not None and not any(
            one.parent is slot.parent and one.attribute == slot.attribute for one in known
        ):
            known.append(slot)
    return tuple(
        _describe(names[key], module, slots[key])
        if looks_like_norm(module)
        else _called(names[key], module)
        for key, module in modules.items()
    )


def _called(names: list[str], module: nn.Module) -> FoundNorm:
    function = _function_called(module)
    reason = f"its forward calls torch.nn.functional.{function}: make that a module to swap it"
    return FoundNorm(tuple(names), module, (), None, reason, function)


def _norms_below(
    module: nn.Module, name: str = "", slot: Slot | None = None
) -> Iterator[tuple[str, nn.Module, Slot | None]]:
    if looks_like_norm(module):
        yield name, module, slot
        return
    if _function_called(module):
        yield (f"{name}.forward" if name else "forward"), module, None
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
    if isinstance(module, (Norm, nn.LayerNorm, nn.RMSNorm, *_CHANNEL_NORMS)):
        return True
    if _declared(module) is not None:
        return True
    if wrapped_batch_norm(module) is not None:
        return True
    if type(module).__module__.startswith("torch.nn.utils"):
        return False  # a parametrization, as of torch's weight_norm
    if _NORM_NAME.search(type(module).__name__) is None:
        return _computes_norm(module)
    # A norm of this library inside, also one without γ and β, is the norm itself.
    parts = [part for child in module.children() for part in child.modules()]
    return not any(isinstance(part, Norm) or _has_parameters(part) for part in parts)


def _has_parameters(module: nn.Module) -> bool:
    return any(parameter is not None for parameter in module._parameters.values())


def _computes_norm(module: nn.Module) -> bool:
    """Whether a module with no more than γ and β, whatever its name, computes a known norm."""
    parameters = [p for p in module._parameters.values() if p is not None]
    if (
        type(module).__module__.startswith("torch.")
        or module._modules
        or any(buffer is not None for buffer in module._buffers.values())
        or not 1 <= len(parameters) <= 2
        or any(p.ndim != 1 or len(p) < 2 for p in parameters)
    ):
        return False
    return isinstance(_read_token_norm(module), Reading)


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


def wrapped_batch_norm(module: nn.Module) -> nn.BatchNorm1d | None:
    """The BatchNorm1d in a wrapper that gives it (batch, features, length), as PatchTST's."""
    children = list(module.children())
    if not type(module).__name__.endswith("BatchNorm") or len(children) != 1:
        return None
    return children[0] if isinstance(children[0], nn.BatchNorm1d) else None


def read_norm(module: nn.Module) -> Reading | str:
    """What a norm computes, or the reason why it cannot be replaced by one over tokens."""
    if isinstance(module, Norm):
        weight, bias = (_parameter(module.affine_part, (name,)) for name in ("weight", "bias"))
        return Reading(
            "own",
            module.num_features,
            weight,
            bias,
            eps=module.eps,
            statistics=module,
            feature_dim=module.feature_dim,
        )
    declared = _declared(module)
    if declared is not None:
        return _read_declared(module, *declared)
    wrapped = wrapped_batch_norm(module)
    if wrapped is not None:
        return _read_batch_norm(wrapped)
    if isinstance(module, _CHANNEL_NORMS):
        return _read_channel_norm(module)
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and len(module.normalized_shape) != 1:
        return f"normalises over {len(module.normalized_shape)} dimensions"
    return _read_token_norm(module)


def _read_declared(module: nn.Module, kind: Kind, feature_dim: int) -> Reading | str:
    weight, bias = _parameter(module, _SCALES), _parameter(module, _SHIFTS)
    size = getattr(module, "num_features", None)
    num_features = size if isinstance(size, int) else _feature_count(module, weight)
    if num_features is None:
        return f"the number of features of {type(module).__name__} cannot be read"
    return Reading(kind, num_features, weight, bias, eps=_epsilon(module), feature_dim=feature_dim)


def _read_channel_norm(norm: nn.Module) -> Reading | str:
    """What torch computes with the features in the second dimension."""
    if isinstance(norm, nn.modules.lazy.LazyModuleMixin):
        return "has not seen an input yet: its number of features is not known"
    if isinstance(norm, nn.modules.batchnorm._BatchNorm):
        return replace(_read_batch_norm(norm), feature_dim=_CHANNELS)
    if not isinstance(norm, nn.GroupNorm | nn.modules.instancenorm._InstanceNorm):
        return f"{type(norm).__name__} normalises over neighbouring channels"
    size = norm.num_channels if isinstance(norm, nn.GroupNorm) else norm.num_features
    weight, bias = (_parameter(norm, (name,)) for name in ("weight", "bias"))
    return Reading("channel", size, weight, bias, eps=norm.eps, feature_dim=_CHANNELS)


def _read_batch_norm(norm: nn.modules.batchnorm._BatchNorm) -> Reading:
    return Reading(
        "batch",
        norm.num_features,
        _parameter(norm, ("weight",)),
        _parameter(norm, ("bias",)),
        eps=norm.eps,
        statistics=norm if norm.track_running_stats else None,
    )


def _read_token_norm(module: nn.Module) -> Reading | str:
    weight, bias = _parameter(module, _SCALES), _parameter(module, _SHIFTS)
    num_features = _feature_count(module, weight)
    if num_features is None:
        return f"the number of features of {type(module).__name__} cannot be read"
    known: Kind | None = None
    if type(module) in (nn.LayerNorm, nn.RMSNorm):
        known = "layer" if type(module) is nn.LayerNorm else "rms"
    computed = (known, 0.0, LAST) if known else _try_out(module, weight, bias, num_features)
    if isinstance(computed, str):
        return computed
    more = [] if known else _other_inputs(module)
    if more:
        return (
            f"{type(module).__name__} also takes {', '.join(more)}: what it does with that is not "
            "known"
        )
    kind, offset, dim = computed
    return Reading(kind, num_features, weight, bias, offset, _epsilon(module), feature_dim=dim)


def _other_inputs(module: nn.Module) -> list[str]:
    """What the forward of a norm takes by position besides its input, such as a gate."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(type(module).forward).parameters.values()
    return [one.name for one in parameters if one.kind in kinds][2:]


def _parameter(module: nn.Module, names: tuple[str, ...]) -> nn.Parameter | None:
    parameters = module._parameters
    return next((parameters[name] for name in names if parameters.get(name) is not None), None)


def _feature_count(module: nn.Module, weight: nn.Parameter | None) -> int | None:
    shape = getattr(module, "normalized_shape", None)
    if isinstance(shape, (tuple, list)) and len(shape) == 1:
        return int(shape[0])
    if weight is not None and weight.ndim == 1 and weight.shape[0] > 1:
        return int(weight.shape[0])
    # x-transformers' RMSNorm without γ, or with a single one, multiplies by the root of C.
    scale = getattr(module, "scale", None)
    return round(scale * scale) if isinstance(scale, float) else None


def _epsilon(module: nn.Module) -> float | None:
    if isinstance(module, nn.RMSNorm) and module.eps is None:
        dtype = torch.get_default_dtype() if module.weight is None else module.weight.dtype
        return torch.finfo(dtype).eps
    for part in module.modules():
        for name in _EPSILONS:
            value = getattr(part, name, None)
            if isinstance(value, float):
                return value
    return None


def _try_out(
    module: nn.Module, weight: nn.Parameter | None, bias: nn.Parameter | None, num_features: int
) -> tuple[Kind, float, int] | str:
    """Kind, offset of γ and dimension of the features, or a reason if nothing fits.

    Found by running a copy on random tokens, and then on random images and sequences of channels.
    """
    generator = torch.Generator().manual_seed(0)
    values = {
        id(parameter): nn.Parameter(
            torch.rand(parameter.shape, generator=generator, device="cpu") + 0.5,
            requires_grad=False,
        )
        for parameter in (weight, bias)
        if parameter is not None
    }
    shadow = _shadow(module, values)
    if shadow is None:
        return f"{type(module).__name__} has tensors besides γ and β"
    gamma = None if weight is None else values[id(weight)]
    beta = None if bias is None else values[id(bias)]
    reasons = []
    for positions, dim in _TRIALS:
        tokens = torch.randn(*positions, num_features, generator=generator, device="cpu") * 3 + 1
        x = features_back(tokens, dim)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                y = type(module).forward(shadow, x)
        except Exception as error:  # whatever a foreign forward raises, it is not ours to swap
            reasons.append(
                f"{type(module).__name__} does not take a tensor (batch, length, features) alone: "
                f"{type(error).__name__}"
            )
            continue
        if isinstance(y, Tensor) and y.shape == x.shape:
            found = _matching(tokens, features_last(y, dim), gamma, beta)
            if found is not None:
                return *found, dim
        reasons.append(
            f"{type(module).__name__} computes neither LayerNorm nor RMSNorm over the last "
            "dimension or the second"
        )
    return reasons[0]


def _matching(
    x: Tensor, y: Tensor, gamma: Tensor | None, beta: Tensor | None
) -> tuple[Kind, float] | None:
    offsets = (0.0,) if gamma is None else (0.0, 1.0)
    for kind in _KINDS:
        centered = x - x.mean(-1, keepdim=True) if kind == "layer" else x
        normal = centered * centered.square().mean(-1, keepdim=True).rsqrt()
        for offset in offsets:
            expected = normal if gamma is None else normal * (gamma.reshape(-1) + offset)
            expected = expected if beta is None else expected + beta.reshape(-1)
            if torch.allclose(y.float(), expected, rtol=1e-2, atol=1e-2):
                return kind, offset
    return None


def _shadow(module: nn.Module, values: dict[int, nn.Parameter]) -> nn.Module | None:
    """A copy with other parameters; None if it holds tensors that are not replaced."""
    held = [*module.parameters(), *module.buffers()]
    if any(id(tensor) not in values for tensor in held):
        return None
    shadow: nn.Module = type(module).__new__(type(module))
    shadow.__dict__.update(module.__dict__)
    shadow.__dict__["_parameters"] = {
        name: None if parameter is None else values[id(parameter)]
        for name, parameter in module._parameters.items()
    }
    shadow.__dict__["training"] = False
    return shadow


def _elsewhere(slots: list[Slot]) -> str:
    """A reason if a library is known to give the norm something else than tokens."""
    for slot in slots:
        if (type(slot.parent).__name__, slot.attribute) in _OF_POSITIONS:
            return "normalises the embeddings of relative positions, not the tokens of a stream"
    return ""


def _altered(module: nn.Module) -> str:
    """A reason if this one norm was changed since it was built, else empty."""
    if hasattr(module, "_hf_hook"):
        return "accelerate has put a hook in: swap before the model is dispatched or offloaded"
    if "forward" in module.__dict__:
        return "its forward was replaced in this instance"
    if nn.utils.parametrize.is_parametrized(module):
        return "its parameters are parametrised: remove the parametrisation first"
    if any(name.endswith("_orig") for name in module._parameters):
        return "its parameters are pruned: make that permanent by torch.nn.utils.prune.remove"
    if any(isinstance(module.__dict__.get(name), Tensor) for name in (*_SCALES, *_SHIFTS)):
        return "its parameters are computed from something else: a plain tensor is in their place"
    return ""


def _head_norm(name: str) -> str:
    """A reason if the name says that queries, keys or values are normalised, else empty."""
    path, _, last = name.lower().rpartition(".")
    words = set(re.split(r"[_\W\d]+", last)) - {""}
    parts = words - _NORM_WORDS
    # Outside of what calls itself an attention "value_norm" and "key" may be anything.
    known = _HEAD_PARTS if "att" in path else _QUERY_PARTS
    if parts and parts <= known and ("att" in path or len(words) > len(parts)):
        return "normalises queries, keys or values inside an attention, not the tokens of a stream"
    return ""
