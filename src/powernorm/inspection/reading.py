"""Computation of a norm: by its class, by a user's declaration, or by a trial run.

Classes of other libraries are not trusted by name: `powernorm.inspection.trials` runs copies and
compares them with LayerNorm, RMSNorm and BatchNorm. This distinguishes `γ = 1 + weight` from `γ =
weight`, and a norm over channels or with a gate from one over tokens. `declare_norm` is for norms
that a trial cannot recognize.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.inspection.trials import (
    NOT_IN_TRAINING,
    Gate,
    does_more_than_torch,
    gated_norm,
    other_inputs,
    token_norm,
    torch_class,
    turns_batch_norm_round,
)
from powernorm.norms import Norm
from powernorm.norms.feature_dims import LAST

Kind = Literal["layer", "rms", "batch", "channel", "own"]
"""LayerNorm, RMSNorm, BatchNorm, GroupNorm and InstanceNorm, or a norm of this library."""

SCALES: Final = ("weight", "gamma", "g", "scale", "a_2")
"""Names of γ."""
SHIFTS: Final = ("bias", "beta", "shift", "b_2")
"""Names of β."""
_EPSILONS: Final = ("eps", "variance_epsilon", "epsilon")
MORE_INPUTS: Final = "also takes"
CHANNEL_NORMS: Final = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LocalResponseNorm,
)
"""torch's norms for convolutional networks."""
CHANNELS: Final = 1
"""Dimension of the features in the inputs of `CHANNEL_NORMS`."""


@dataclass(frozen=True)
class Reading:
    """Computation of a norm: `y = (offset + weight) ⊙ x̂ + bias`, with x̂ by its kind."""

    kind: Kind
    num_features: int
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    offset: float = 0.0
    eps: float | None = None
    statistics: nn.Module | None = None
    """Module that holds running statistics, if there are any."""
    feature_dim: int = LAST
    """Dimension of the input that holds the features."""

    def scale(self) -> Tensor | None:
        """Return γ, (C,), or None if there is none; the parameter itself if that is γ."""
        if self.weight is None:
            return None
        if self.offset == 0.0 and self.weight.shape == (self.num_features,):
            return self.weight
        with torch.no_grad():
            scale = (self.weight.double() + self.offset).to(self.weight.dtype)
            return scale.reshape(-1).expand(self.num_features).clone()


_DECLARED: Final[dict[type[nn.Module], tuple[Kind, int]]] = {}
"""Users' declarations by class: kind and dimension of the features."""


def declare_norm(
    cls: type[nn.Module],
    *,
    kind: Literal["layer", "rms", "batch", "channel"],
    feature_dim: int = LAST,
) -> None:
    """Declare that a class is a norm, if its name and a trial run do not show it.

    From then on, in this process, `powernorm.swap`, `fold`, `diagnose` and the monitors treat
    instances of the class and its subclasses as norms of that kind.

    Args:
        cls: a class of modules with γ as `weight` (or `gamma`, `scale`), β as `bias` (or `beta`,
            `shift`), or without; and the number of features as the size of γ or as
            `normalized_shape` or `num_features`.
        kind: computation: `layer`, LayerNorm; `rms`, RMSNorm; `batch`, BatchNorm with or
            without running statistics; `channel`, another norm of a convolutional network.
        feature_dim: the dimension of its input that holds the features.

    Raises:
        InputError: `cls` is not a class of modules, or the kind does not exist.

    >>> class Scaled(nn.Module):
    ...     def __init__(self, size):
    ...         super().__init__()
    ...         self.gamma = nn.Parameter(torch.ones(size))
    ...     def forward(self, x, speed):
    ...         return self.gamma * x * x.square().mean(-1, keepdim=True).rsqrt()
    >>> model = nn.Sequential(Scaled(8))
    >>> powernorm.inspection.find_norms(model)
    ()
    >>> declare_norm(Scaled, kind="rms")
    >>> powernorm.inspection.find_norms(model)[0].kind
    'rms'
    """
    if not isinstance(cls, type) or not issubclass(cls, nn.Module):
        raise InputError(f"cls is {cls!r}, expected a class of torch.nn.Module")
    known = [one for one in get_args(Kind) if one != "own"]
    if kind not in known:
        raise InputError(f"kind is {kind!r}, expected one of {', '.join(known)}")
    _DECLARED[cls] = (kind, feature_dim)


def declared(module: nn.Module) -> tuple[Kind, int] | None:
    """Return the kind and feature dimension declared for a module's class or a base class."""
    return next((_DECLARED[cls] for cls in type(module).__mro__ if cls in _DECLARED), None)


def computes_norm(module: nn.Module) -> bool:
    """Return whether a module with no parameters but γ and β computes a known norm, or may."""
    parameters = [p for p in module._parameters.values() if p is not None]
    if (
        type(module).__module__.startswith("torch.")
        or module._modules
        or any(buffer is not None for buffer in module._buffers.values())
        or not 1 <= len(parameters) <= 2
        or any(p.ndim != 1 or len(p) < 2 for p in parameters)
    ):
        return False
    reading = _read_token_norm(module)
    if isinstance(reading, Reading) or NOT_IN_TRAINING in reading or MORE_INPUTS in reading:
        return True
    return read_gated(module) is not None


def kind_without_parameters(module: nn.Module) -> Kind | None:
    """Return the kind of a norm without γ and β over the last dimension, of any size, or None."""
    if any(True for _ in (*module.parameters(), *module.buffers())):
        return None
    computed = token_norm(module, "", "", 8)
    return None if isinstance(computed, str) or computed[2] != LAST else computed[0]


def wrapped_batch_norm(module: nn.Module) -> nn.BatchNorm1d | None:
    """Return the BatchNorm1d in a wrapper that feeds it (batch, features, length), as PatchTST's.

    None if the module is not such a wrapper, by trials of copies in training and evaluation.
    """
    children = list(module.children())
    if (
        len(children) != 1
        or type(children[0]) is not nn.BatchNorm1d
        or isinstance(module, nn.Sequential)
        or any(True for _ in module.parameters(recurse=False))
        or other_inputs(module)
        or not turns_batch_norm_round(module, children[0])
    ):
        return None
    return children[0]


def read_norm(module: nn.Module) -> Reading | str:
    """Return a norm's computation, or why it cannot be replaced by a norm over tokens."""
    if isinstance(module, Norm):
        weight, bias = map(module.affine_part._parameters.get, ("weight", "bias"))
        size, dim = module.num_features, module.feature_dim
        return Reading("own", size, weight, bias, 0.0, module.eps, module, dim)
    said = declared(module)
    if said is not None:
        return _read_declared(module, *said)
    wrapped = wrapped_batch_norm(module)
    if wrapped is not None:
        return _read_torch_norm(wrapped, "batch", wrapped.num_features, LAST)
    if isinstance(module, CHANNEL_NORMS):
        return _read_channel_norm(module)
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and len(module.normalized_shape) != 1:
        return f"normalizes over {len(module.normalized_shape)} dimensions"
    return _read_token_norm(module)


def _read_declared(module: nn.Module, kind: Kind, feature_dim: int) -> Reading | str:
    weight, bias = (
        module._parameters.get(_parameter_name(module, names)) for names in (SCALES, SHIFTS)
    )
    size = getattr(module, "num_features", None)
    num_features = size if isinstance(size, int) else _feature_count(module, weight)
    if num_features is None:
        return f"the number of features of {type(module).__name__} cannot be read"
    return Reading(
        kind, num_features, weight, bias, eps=epsilon_of(module), feature_dim=feature_dim
    )


def _read_channel_norm(norm: nn.Module) -> Reading | str:
    """Return the computation of a norm of torch with the features in the second dimension."""
    if isinstance(norm, nn.modules.lazy.LazyModuleMixin):
        return "has not seen an input yet: its number of features is not known"
    if does_more_than_torch(norm):
        return (
            f"{type(norm).__name__} does more than {torch_class(norm).__name__} of torch: make "
            "the rest of it, such as an activation, a module of its own"
        )
    if more := _with_more_inputs(norm):
        return more
    if isinstance(norm, nn.modules.batchnorm._BatchNorm):
        return _read_torch_norm(norm, "batch", norm.num_features, CHANNELS)
    if not isinstance(norm, nn.GroupNorm | nn.modules.instancenorm._InstanceNorm):
        return f"{type(norm).__name__} normalizes over neighboring channels"
    size = norm.num_channels if isinstance(norm, nn.GroupNorm) else norm.num_features
    return _read_torch_norm(norm, "channel", size, CHANNELS)


def _read_torch_norm(norm: Any, kind: Kind, size: int, dim: int) -> Reading:
    # torch evaluates by running statistics whatever `track_running_stats` is.
    statistics = norm if kind == "batch" and norm.running_mean is not None else None
    weight, bias = map(norm._parameters.get, ("weight", "bias"))
    return Reading(kind, size, weight, bias, 0.0, norm.eps, statistics, dim)


def _read_token_norm(module: nn.Module) -> Reading | str:
    name = type(module).__name__
    scale, shift = _parameter_name(module, SCALES), _parameter_name(module, SHIFTS)
    weight, bias = module._parameters.get(scale), module._parameters.get(shift)
    num_features = _feature_count(module, weight)
    if num_features is None:
        return f"the number of features of {name} cannot be read"
    known: Kind | None = None
    if type(module) in (nn.LayerNorm, nn.RMSNorm):
        known = "layer" if type(module) is nn.LayerNorm else "rms"
    tensors = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    if known is None and tensors - {id(weight), id(bias)}:
        return f"{name} has tensors besides γ and β"
    computed = (known, 0.0, LAST) if known else token_norm(module, scale, shift, num_features)
    if isinstance(computed, str):
        return computed
    if known is None and (more := _with_more_inputs(module)):
        return more
    kind, offset, dim = computed
    return Reading(kind, num_features, weight, bias, offset, epsilon_of(module), feature_dim=dim)


def read_gated(module: nn.Module) -> tuple[Reading, Gate] | None:
    """Return the reading of the norm inside a norm with a gate, and the gate, or None."""
    if len(other_inputs(module)) != 1:
        return None
    scale = _parameter_name(module, SCALES)
    weight = module._parameters.get(scale)
    tensors = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    num_features = _feature_count(module, weight)
    if num_features is None or tensors - {id(weight)}:
        return None
    computed = gated_norm(module, scale, num_features)
    if computed is None:
        return None
    kind, offset, gate = computed
    return Reading(kind, num_features, weight, None, offset, epsilon_of(module)), gate


def _with_more_inputs(module: nn.Module) -> str:
    """Return a reason if a norm's forward takes more than its input, or ""."""
    more = ", ".join(other_inputs(module))
    name = type(module).__name__
    return f"{name} {MORE_INPUTS} {more}: what it does with that is not known" if more else ""


def _parameter_name(module: nn.Module, names: tuple[str, ...]) -> str:
    parameters = module._parameters
    return next((name for name in names if parameters.get(name) is not None), "")


def _feature_count(module: nn.Module, weight: nn.Parameter | None) -> int | None:
    shape = getattr(module, "normalized_shape", None)
    if isinstance(shape, (tuple, list)) and len(shape) == 1:
        return int(shape[0])
    if weight is not None and weight.ndim == 1 and weight.shape[0] > 1:
        return int(weight.shape[0])
    # x-transformers' RMSNorm without γ, or with a single one, multiplies by the root of C.
    scale = getattr(module, "scale", None)
    return round(scale * scale) if isinstance(scale, float) else None


def epsilon_of(module: nn.Module) -> float | None:
    """Return the eps of a norm, by the names that classes have for it; None if there is none."""
    if isinstance(module, nn.RMSNorm) and module.eps is None:
        dtype = torch.float32 if module.weight is None else module.weight.dtype
        return torch.finfo(dtype).eps
    values = (getattr(part, name, None) for part in module.modules() for name in _EPSILONS)
    return next((value for value in values if isinstance(value, float)), None)
