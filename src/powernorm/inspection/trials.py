"""Trial runs of other libraries' norms on random inputs, compared with known computations.

They use a twin: a copy on the CPU with random parameters and buffers and without hooks, so that a
trial changes nothing, also shows γ = 1 + weight, and works for a model on the meta device.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from powernorm.norms.feature_dims import LAST, features_back, features_last

Computed = Literal["layer", "rms"]
"""Norms over the features of a token that a trial recognizes."""

Activation = Literal["silu", "sigmoid", "gelu", "relu", "tanh", "identity"]
ACTIVATIONS: Final[dict[Activation, Callable[[Tensor], Tensor]]] = {
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "gelu": functional.gelu,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "identity": torch.clone,
}
"""Functions of a gate."""
NOT_IN_TRAINING: Final = "computes something else in training than in evaluation"
_KINDS: Final[tuple[Computed, ...]] = ("layer", "rms")
_LAYOUTS: Final = (((2, 3), LAST), ((2, 3, 4), 1), ((2, 3), 1))
"""Inputs of norms over the features of a token: shape without these, and their dimension."""
_SEQUENCES: Final = ((2, 3), (1, 3), (1, 1), (5,), (1,), (1030, 1))
"""Inputs of norms over the batch, without the features, which are last.

Single sequences and positions show special cases, many sequences show ghost batches.
"""
_IMAGES: Final = ((2, 9), (1, 9), (1, 1), (1030, 1))
"""The same for images, whose positions form a square or cube."""
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def other_inputs(module: nn.Module) -> list[str]:
    """Return the positional parameters of a norm's forward besides its input, such as a gate."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[2:]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    many = inspect.Parameter.VAR_POSITIONAL
    names = [f"*{one.name}" if one.kind is many else one.name for one in parameters]
    return [name for name, one in zip(names, parameters, strict=True) if one.kind in (*kinds, many)]


def twin_of(module: nn.Module, *, training: bool = False) -> nn.Module:
    """Return a copy with random parameters and buffers on the CPU, in one mode, without hooks."""
    generator = torch.Generator().manual_seed(0)

    def values(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        new = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        if new.is_floating_point():
            new = new.float().uniform_(0.5, 1.5, generator=generator)
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(new, requires_grad=False) if is_parameter else new

    def copy(part: nn.Module | None) -> Any:
        if part is None:
            return None
        new = type(part).__new__(type(part))
        new.__dict__.update(part.__dict__, training=training)
        tables: tuple[tuple[str, Mapping[str, Any], Callable[[Any], Any]], ...] = (
            ("_parameters", part._parameters, values),
            ("_buffers", part._buffers, values),
            ("_modules", part._modules, copy),
        )
        for table, held, change in tables:
            new.__dict__[table] = {name: change(one) for name, one in held.items()}
        new.__dict__.update({name: type(part.__dict__[name])() for name in _HOOKS})
        return new

    twin: nn.Module = copy(module)
    return twin


def _output(module: nn.Module, *inputs: Tensor, forward: Callable[..., Any] | None = None) -> Any:
    """Return the output of a forward, by default the module's, or the exception that it raises."""
    forward = type(module).forward if forward is None else forward
    with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return forward(module, *inputs)
        except Exception as error:  # if a foreign forward raises anything, the input does not fit
            return error


def token_norm(
    module: nn.Module, weight: str, bias: str, num_features: int
) -> tuple[Computed, float, int] | str:
    """Return kind, offset of γ and dimension of the features of a norm over a token's features.

    Args:
        module: a module with no tensors but γ and β.
        weight: name of γ, "" if there is none.
        bias: name of β, "" if there is none.
        num_features: C.

    Returns:
        The reason if it computes neither LayerNorm nor RMSNorm, or only in one mode.
    """
    name = type(module).__name__
    twin = twin_of(module)
    gamma, beta = map(twin._parameters.get, (weight, bias))
    reasons = []
    for positions, dim in _LAYOUTS:
        tokens = 1.5 * _random(*positions, num_features)
        x = features_back(tokens, dim)
        y = _output(twin, x)
        if isinstance(y, Exception):
            reasons.append(
                f"{name} does not take a tensor (batch, length, features) alone: {type(y).__name__}"
            )
            continue
        if isinstance(y, Tensor) and y.shape == x.shape:
            found = _matching(tokens, features_last(y, dim), gamma, beta)
            again = _output(twin_of(module, training=True), x)
            if found is not None:
                same = isinstance(again, Tensor) and torch.allclose(again, y)
                return (*found, dim) if same else f"{name} {NOT_IN_TRAINING}"
        reasons.append(
            f"{name} computes neither LayerNorm nor RMSNorm over the last dimension or the second"
        )
    return reasons[0]


class Gate(NamedTuple):
    """A gate next to a norm."""

    place: Literal["before", "after"]
    activation: Activation


def gated_norm(
    module: nn.Module, weight: str, num_features: int
) -> tuple[Computed, float, Gate] | None:
    """Return kind, offset of γ and gate of a norm with a gate as its second input, or None.

    Args:
        module: a module with no tensors but γ.
        weight: name of γ, "" if there is none.
        num_features: C.
    """
    x, values = _random(2, 3, num_features), _random(2, 3, num_features).sin()
    found = []
    for training in (False, True):
        twin = twin_of(module, training=training)
        gamma = twin._parameters.get(weight)
        y = _output(twin, x, values)
        if not isinstance(y, Tensor) or y.shape != x.shape:
            return None
        for activation, function in ACTIVATIONS.items():
            factor = function(values)
            before = _matching(x * factor, y, gamma, None)
            after = _matching(x, y / factor, gamma, None)
            if before is not None:
                found.append((*before, Gate("before", activation)))
            if after is not None:
                found.append((*after, Gate("after", activation)))
    return found[0] if len(found) == 2 and found[0] == found[1] else None


def _matching(
    x: Tensor, y: Tensor, gamma: Tensor | None, beta: Tensor | None
) -> tuple[Computed, float] | None:
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


def _computes_as(
    module: nn.Module,
    reference: Callable[[nn.Module, Tensor], Tensor],
    inputs: Sequence[Tensor],
) -> bool:
    """Return whether a module's twin computes the same as a reference on it, in both modes.

    Outputs and buffers are compared. The module has to accept the first input; others that it
    rejects are skipped. If only the reference rejects one, such as a single value in training, the
    module has a special case.
    """
    for training in (False, True):
        for number, x in enumerate(inputs):
            own, other = (twin_of(module, training=training) for _ in range(2))
            y, expected = _output(own, x), _output(other, x, forward=reference)
            if isinstance(y, Exception) and number:
                continue
            if not (isinstance(y, Tensor) and isinstance(expected, Tensor)):
                return False
            same = zip(own.buffers(), other.buffers(), strict=True)
            if y.shape != expected.shape or not all(
                torch.allclose(one, two, rtol=1e-4, atol=1e-5)
                for one, two in ((y, expected), *same)
            ):
                return False
    return True


def does_more_than_torch(norm: nn.Module) -> bool:
    """Return whether a subclass of a norm of torch computes something else, such as an activation.

    Twins are run in training and evaluation, on batches of one and of many.
    """
    base = torch_class(norm)
    if type(norm).forward is base.forward:
        return False
    size = getattr(norm, "num_features", getattr(norm, "num_channels", 8))
    flat = isinstance(norm, nn.BatchNorm1d | nn.InstanceNorm1d)
    three = isinstance(norm, nn.BatchNorm3d | nn.InstanceNorm3d)
    inputs = []
    for shape in _SEQUENCES if flat else _IMAGES:
        x = _random(*shape, size).movedim(-1, 1)
        root = round(x.shape[-1] ** 0.5)
        inputs.append(x if flat else x.unflatten(-1, (1, root, root) if three else (root, root)))
    return not _computes_as(norm, base.forward, inputs)


def torch_class(norm: nn.Module) -> type[nn.Module]:
    """Return torch's class of a norm: its own class or the nearest base class from torch."""
    return next(cls for cls in type(norm).__mro__ if cls.__module__.startswith("torch."))


def turns_batch_norm_round(module: nn.Module, inner: nn.BatchNorm1d) -> bool:
    """Return whether a module only applies its BatchNorm1d over the last dimension."""

    def reference(twin: nn.Module, x: Tensor) -> Tensor:
        (norm,) = twin.children()
        y: Tensor = norm(x.movedim(-1, 1)).movedim(1, -1)
        return y

    inputs = [_random(*shape, inner.num_features) for shape in _SEQUENCES]
    return _computes_as(module, reference, inputs)


def calls(module: nn.Module, attribute: str, num_features: int) -> bool:
    """Return whether a module's forward calls a submodule, as far as trial runs show.

    Returns:
        False if the module ran on a trial input and did not call it; True also if none ran.
    """
    seen: list[bool] = []
    for shape, dim in _LAYOUTS:
        twin = twin_of(module, training=True)
        was_called: list[bool] = []
        twin.get_submodule(attribute).register_forward_pre_hook(
            lambda *_, was_called=was_called: was_called.append(True)
        )
        output = _output(twin, features_back(_random(*shape, num_features), dim))
        if was_called or not isinstance(output, Exception):
            seen.append(bool(was_called))
    return any(seen) or not seen


def _random(*sizes: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*sizes, generator=generator, device="cpu", dtype=torch.float32) * 2 + 1
    x.view(-1)[0] = 200  # shows a clamp: x̂ is near √n, the maximum among n values
    return x
