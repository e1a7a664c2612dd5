"""What a norm computes: by its class, by a user's declaration, or by a trial run.

Classes of other libraries are not trusted by name: a copy with random γ and β, on the CPU, is run
on a few tokens and compared with LayerNorm and RMSNorm. This tells `γ = 1 + weight` from
`γ = weight`, and recognizes a norm over channels or with a gate as something else, also in a model
on the meta device. `declare_norm` covers what a trial cannot show.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.norms import Norm
from powernorm.norms.feature_dims import LAST, features_back, features_last

Kind = Literal["layer", "rms", "batch", "channel", "own"]
"""LayerNorm, RMSNorm, BatchNorm, GroupNorm and InstanceNorm, or a norm of this library."""

_KINDS: Final[tuple[Kind, ...]] = ("layer", "rms")
SCALES: Final = ("weight", "gamma", "g", "scale", "a_2")
"""Names of γ."""
SHIFTS: Final = ("bias", "beta", "shift", "b_2")
"""Names of β."""
_EPSILONS: Final = ("eps", "variance_epsilon", "epsilon")
CHANNEL_NORMS: Final = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LocalResponseNorm,
)
"""torch's norms for convolutional networks."""
_CHANNELS: Final = 1
"""Dimension of the features in the inputs of `CHANNEL_NORMS`."""
_TRIALS: Final = (((2, 3), LAST), ((2, 3, 4), _CHANNELS), ((2, 3), _CHANNELS))
"""Trial inputs for norms of other libraries: shape without the features, and their dimension."""


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
        kind: what it computes: `layer`, LayerNorm; `rms`, RMSNorm; `batch`, BatchNorm with or
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
    """Return whether a module with no parameters but γ and β computes a known norm."""
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


def kind_without_parameters(module: nn.Module) -> Kind | None:
    """Return what a norm without γ and β computes over the last dimension, of any size, or None."""
    if any(True for _ in (*module.parameters(), *module.buffers())):
        return None
    computed = _try_out(module, None, None, 8)
    return None if isinstance(computed, str) or computed[2] != LAST else computed[0]


def wrapped_batch_norm(module: nn.Module) -> nn.BatchNorm1d | None:
    """Return the BatchNorm1d in a wrapper that feeds it (batch, features, length), as PatchTST's.

    None if the module is no such wrapper: a copy is tried out in training and evaluation.
    """
    children = list(module.children())
    if len(children) != 1 or type(children[0]) is not nn.BatchNorm1d:
        return None
    if isinstance(module, nn.Sequential) or any(True for _ in module.parameters(recurse=False)):
        return None
    return children[0] if _only_turns_round(module, children[0]) else None


def _only_turns_round(module: nn.Module, norm: nn.BatchNorm1d) -> bool:
    """Return whether a module computes its BatchNorm1d over the last dimension, and only that."""
    if _other_inputs(module):
        return False
    attribute = next(iter(module._modules))
    for training in (True, False):
        inner = nn.BatchNorm1d(norm.num_features, norm.eps, device="cpu", dtype=torch.float32)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for values in (*inner.parameters(), *inner.buffers()):
                if values.is_floating_point():
                    values.uniform_(0.5, 1.5, generator=generator)
        shadow: nn.Module = type(module).__new__(type(module))
        shadow.__dict__.update(module.__dict__)
        shadow.__dict__["_modules"] = {attribute: inner.train(training)}
        shadow.__dict__["training"] = training
        x = torch.randn(2, 3, norm.num_features, generator=generator, device="cpu")
        expected = copy.deepcopy(inner)(x.transpose(1, 2)).transpose(1, 2)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                y = type(module).forward(shadow, x)
        except Exception:  # whatever a foreign forward raises, it is not that alone
            return False
        if not (isinstance(y, Tensor) and y.shape == x.shape and torch.allclose(y, expected)):
            return False
    return True


def read_norm(module: nn.Module) -> Reading | str:
    """Return what a norm computes, or the reason why it cannot be replaced by one over tokens."""
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
    said = declared(module)
    if said is not None:
        return _read_declared(module, *said)
    wrapped = wrapped_batch_norm(module)
    if wrapped is not None:
        return _read_batch_norm(wrapped)
    if isinstance(module, CHANNEL_NORMS):
        return _read_channel_norm(module)
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and len(module.normalized_shape) != 1:
        return f"normalizes over {len(module.normalized_shape)} dimensions"
    return _read_token_norm(module)


def _read_declared(module: nn.Module, kind: Kind, feature_dim: int) -> Reading | str:
    weight, bias = _parameter(module, SCALES), _parameter(module, SHIFTS)
    size = getattr(module, "num_features", None)
    num_features = size if isinstance(size, int) else _feature_count(module, weight)
    if num_features is None:
        return f"the number of features of {type(module).__name__} cannot be read"
    return Reading(
        kind, num_features, weight, bias, eps=epsilon_of(module), feature_dim=feature_dim
    )


def _read_channel_norm(norm: nn.Module) -> Reading | str:
    """Return what a norm of torch with the features in the second dimension computes."""
    if isinstance(norm, nn.modules.lazy.LazyModuleMixin):
        return "has not seen an input yet: its number of features is not known"
    if does_more_than_torch(norm):
        return (
            f"{type(norm).__name__} does more than {_torch_class(norm).__name__} of torch: make "
            "the rest of it, such as an activation, a module of its own"
        )
    if isinstance(norm, nn.modules.batchnorm._BatchNorm):
        return replace(_read_batch_norm(norm), feature_dim=_CHANNELS)
    if not isinstance(norm, nn.GroupNorm | nn.modules.instancenorm._InstanceNorm):
        return f"{type(norm).__name__} normalizes over neighboring channels"
    size = norm.num_channels if isinstance(norm, nn.GroupNorm) else norm.num_features
    weight, bias = (_parameter(norm, (name,)) for name in ("weight", "bias"))
    return Reading("channel", size, weight, bias, eps=norm.eps, feature_dim=_CHANNELS)


def does_more_than_torch(norm: nn.Module) -> bool:
    """Return whether a subclass of torch's norm computes something else, such as an activation.

    Runs a copy in evaluation, with random parameters and statistics.
    """
    base = _torch_class(norm)
    if type(norm).forward is base.forward:
        return False
    generator = torch.Generator().manual_seed(0)
    values = {
        id(tensor): torch.rand(tensor.shape, generator=generator, device="cpu") + 0.5
        for tensor in (*norm.parameters(), *norm.buffers())
        if tensor.is_floating_point()
    }
    shadow = copy.copy(norm)
    shadow.__dict__["_parameters"] = {
        name: None if p is None else nn.Parameter(values[id(p)], requires_grad=False)
        for name, p in norm._parameters.items()
    }
    shadow.__dict__["_buffers"] = {name: values.get(id(b), b) for name, b in norm._buffers.items()}
    shadow.__dict__["training"] = False
    num_channels = getattr(norm, "num_features", getattr(norm, "num_channels", 8))
    ndim = 3 if isinstance(norm, nn.BatchNorm1d | nn.InstanceNorm1d) else 4
    ndim = 5 if isinstance(norm, nn.BatchNorm3d | nn.InstanceNorm3d) else ndim
    x = torch.randn(2, num_channels, *(3,) * (ndim - 2), generator=generator, device="cpu")
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            own, torchs = type(norm).forward(shadow, x), base.forward(shadow, x)
    except Exception:  # whatever a foreign forward raises, it is not torch's
        return True
    return not (isinstance(own, Tensor) and own.shape == x.shape and torch.allclose(own, torchs))


def _torch_class(norm: nn.Module) -> type[nn.Module]:
    """Return torch's class of a norm: its own class or the nearest base class from torch."""
    return next(cls for cls in type(norm).__mro__ if cls.__module__.startswith("torch."))


def _read_batch_norm(norm: nn.modules.batchnorm._BatchNorm) -> Reading:
    return Reading(
        "batch",
        norm.num_features,
        _parameter(norm, ("weight",)),
        _parameter(norm, ("bias",)),
        eps=norm.eps,
        # torch evaluates by them whatever `track_running_stats` says.
        statistics=None if norm.running_mean is None else norm,
    )


def _read_token_norm(module: nn.Module) -> Reading | str:
    weight, bias = _parameter(module, SCALES), _parameter(module, SHIFTS)
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
    return Reading(kind, num_features, weight, bias, offset, epsilon_of(module), feature_dim=dim)


def _other_inputs(module: nn.Module) -> list[str]:
    """Return the positional parameters of a norm's forward besides its input, such as a gate."""
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


def epsilon_of(module: nn.Module) -> float | None:
    """Return the eps of a norm, by the names that classes have for it; None if there is none."""
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
    """Return kind, offset of γ and dimension of the features, or a reason if nothing fits.

    Runs a copy on random tokens, then on random images and sequences with the channels second.
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
    """Return a copy with other parameters, or None if it holds tensors that are not replaced."""
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
