"""Models of this library as checkpoints of their original architecture, if that can hold them.

A LayerNorm or RMSNorm of this library computes the same as the original's. A BatchNorm of torch can
hold any affine map per feature, so that of any static norm in evaluation, and the remainder of a
folded one.

A LayerNorm of torch can hold `y = a ⊙ (x - mean x) + c`, and an RMSNorm `y = a ⊙ x`, with an eps E
so large that the variance v of a token does not count beside it: with the weight a √E,

    a √E ⊙ (x - mean x)/sqrt(v + E) + c = a ⊙ (x - mean x) (1 - v/(2 E) + …) + c

E is a power of 4, so that √E is exact and multiplying by it rounds nothing. In float16 a √E has to
stay below 65,504, so that E is the largest power of 4 that the slopes a of all norms allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple, cast

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.inspection.finder import looks_like_norm
from powernorm.inspection.reading import (
    Reading,
    epsilon_of,
    read_norm,
    wrapped_batch_norm,
)
from powernorm.inspection.trials import does_more_than_torch
from powernorm.norms import Norm
from powernorm.norms.feature_dims import LAST, features_back
from powernorm.norms.registry import short_name
from powernorm.surgery.folding.structure import FeatureAffine, FoldedNorm
from powernorm.surgery.saving.storage import traits_of

CONSTANT_EPS: Final = 2.0**60
"""E, except in float16. In float64 v + E is E itself for every v below 2⁷, in float32 and bfloat16
below 2³⁶: there the norm is the constant exactly. Above, its error is v/2⁶¹."""
_HEADROOM: Final = 32.0
"""Minimum of √E over the deviation of a norm's tokens: v/(2 E) is then 2⁻¹¹, as float16 rounds."""
_FIX: Final = "leave out stock=True, and powernorm.load builds the model"
_SAME: Final = {"layer": "ln", "rms": "rms"}
_TOLERANCES: Final = {torch.float32: 1e-5, torch.float64: 1e-6}
_NARROW_TOLERANCE: Final = 0.03
"""Relative errors that rounding explains, such as that of a BatchNorm's statistics in bfloat16;
some classes compute in float32 whatever their type."""


class _Pair(NamedTuple):
    """A module of this library and the norm of the original architecture in its place.

    `original` is that norm with the eps of the original, which identifies it.
    """

    name: str
    ours: nn.Module
    stock: nn.Module
    original: nn.Module


def constant_norms(model: nn.Module, original: nn.Module) -> tuple[str, ...]:
    """Return the norms that divide by a constant although the original architecture's do not.

    Args:
        model: a swapped or folded model.
        original: a model of the original architecture; may be on the meta device.
    """
    return tuple(
        pair.name
        for pair in _pairs(model, original, original)
        if _is_constant(pair.ours) and _reading_of(pair) is not None
    )


def constant_eps(model: nn.Module, original: nn.Module) -> float | None:
    """Return E, None if no norm divides by a constant in the place of one that does not.

    Args:
        model: a swapped or folded model.
        original: a model of the original architecture; may be on the meta device.

    Raises:
        InputError: the type of the weights cannot hold a large enough value.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    root, steepest = CONSTANT_EPS**0.5, "powernorm sets a root"
    constant = constant_norms(model, original)
    for name in constant:
        norm = cast(Norm, modules[name])
        largest, dtype = float(norm.affine()[0].detach().abs().max()), _dtype_of(norm)
        while largest * root > torch.finfo(dtype).max:
            root /= 2
            steepest = f"{name} has slopes up to {largest:.1e}, which in {dtype} allow a root"
    for name in constant:
        needed = _HEADROOM * _deviation(cast(Norm, modules[name]))
        if not needed <= root:
            raise InputError(
                f"{name} needs an eps whose root is {needed:.2g} or more, {_HEADROOM:g} times what "
                f"its tokens deviate, to divide by a constant as a {type(original).__name__}, and "
                f"{steepest} of {root:.2g}: convert the model to float32 or bfloat16 first"
            )
    return root**2 if constant else None


def stock_state(model: nn.Module, stock: nn.Module, original: nn.Module) -> dict[str, Tensor]:
    """Return the state dict for a model of the original architecture that computes the same.

    Args:
        model: a swapped or folded model.
        stock: a model of the original architecture; its eps is that of
            `constant_eps`, if any.
        original: the same with the eps of the original; may be on the meta device.

    Raises:
        InputError: the original architecture has no place for a tensor, which the error names.
    """
    state = stock.state_dict()
    done: set[str] = set()
    _check_shared_eps(model, stock, original)
    for pair in _pairs(model, stock, original):
        done |= {f"{pair.name}.{name}" for name in pair.ours.state_dict()}
        state |= {f"{pair.name}.{name}": value for name, value in _converted(pair).items()}
    for name, value in model.state_dict().items():
        if name in done:
            continue
        if name not in state or state[name].shape != value.shape:
            raise InputError(
                f"{type(stock).__name__} has no place for {name} of shape {tuple(value.shape)}, "
                f"which folding has made: {_FIX}"
            )
        state[name] = value
    _check_ties(stock, state)
    return state


def verify_stock(model: nn.Module, stock: nn.Module, original: nn.Module) -> None:
    """Raise an InputError unless each norm computes the same and all other tensors are equal."""
    pairs = _pairs(model, stock, original)
    for pair in pairs:
        scale = _difference(pair)
        dtype = _dtype_of(pair.stock)
        if not scale <= _TOLERANCES.get(dtype, _NARROW_TOLERANCE):
            raise InputError(
                f"{pair.name} would compute something else as a {type(pair.stock).__name__}, by "
                f"{scale:.1e} of the largest value: {_FIX}"
            )
    traits = traits_of(stock)
    for name, trait in traits_of(model).items():
        if traits.get(name, trait) != trait:
            raise InputError(
                f"{name} is {trait}, and {traits[name]} in the original architecture: {_FIX}"
            )
    inside = tuple(f"{pair.name}." for pair in pairs)
    state = stock.state_dict()
    for name, value in model.state_dict().items():
        if not name.startswith(inside) and not torch.equal(state[name].to(value), value):
            raise InputError(f"{name} did not come back as it was saved: {_FIX}")


def _pairs(model: nn.Module, stock: nn.Module, original: nn.Module) -> list[_Pair]:
    modules, originals = (
        dict(one.named_modules(remove_duplicate=False)) for one in (stock, original)
    )
    return [
        _Pair(name, module, modules[name], originals[name])
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Norm | FoldedNorm | FeatureAffine) and name in modules
    ]


def _is_constant(module: nn.Module) -> bool:
    """Return whether a norm of this library divides by a constant in evaluation."""
    return isinstance(module, Norm) and (module.is_static or module.centers)


def _reading_of(pair: _Pair) -> Reading | None:
    """Return the reading of the original's per-token norm, None if it is none."""
    if _batch_norm(pair.original)[0] is not None or not looks_like_norm(pair.original):
        return None
    reading = read_norm(pair.original)
    return reading if isinstance(reading, Reading) and reading.kind in _SAME else None


def _check_shared_eps(model: nn.Module, stock: nn.Module, original: nn.Module) -> None:
    """Raise an InputError if a norm that still normalizes would get the eps of the constant ones.

    A configuration has one eps for all.
    """
    constant, eps = constant_norms(model, original), constant_eps(model, original)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in stock.named_modules(remove_duplicate=False):
        if eps is None or not looks_like_norm(module):
            continue
        has_it = epsilon_of(module) == eps
        if name in constant and not has_it:
            raise InputError(
                f"the configuration of a {type(stock).__name__} does not set the eps of {name}, "
                f"which would have to be {eps:.3g} to divide by a constant: {_FIX}"
            )
        if name not in constant and has_it:
            raise InputError(
                f"{name} is still a {type(modules[name]).__name__}, and {constant[0]} divides by a "
                f"constant: in a {type(stock).__name__} all norms have one eps, so that all or "
                f"none have to: {_FIX}"
            )


def _converted(pair: _Pair) -> dict[str, Tensor]:
    """Return the state of the original's norm that computes the same as ours."""
    batch_norm, prefix = _batch_norm(pair.stock)
    if batch_norm is not None:
        return {f"{prefix}{name}": value for name, value in _as_batch_norm(pair, batch_norm)}
    reading, ours = _reading_of(pair), pair.ours
    if isinstance(ours, FoldedNorm | FeatureAffine):
        raise _misfit(
            pair,
            "which computes a statistic of each token; it could divide by a constant: save with "
            "stock=True before folding",
        )
    if reading is None or not isinstance(ours, Norm):
        raise _misfit(pair, "which computes a statistic of each token")
    if _is_constant(ours):
        return _filled(pair, reading, *_constant(pair, ours, reading))
    if _SAME.get(reading.kind) != short_name(ours):
        raise _misfit(pair, "which computes something else")
    if reading.eps is not None and reading.eps != ours.eps:
        raise _misfit(pair, f"whose eps is {reading.eps}, not {ours.eps}")
    weight, bias = (ours._parameters.get(name) for name in ("weight", "bias"))
    return _filled(pair, reading, weight, bias)


def _constant(pair: _Pair, ours: Norm, reading: Reading) -> tuple[Tensor, Tensor]:
    """Return γ and β of a norm with a large eps that computes the same as our static one."""
    if ours.centers != (reading.kind == "layer"):
        raise _misfit(
            pair,
            "which does not subtract the mean of each token as this layer does"
            if ours.centers
            else "which subtracts the mean of each token as this layer does not: one that centers "
            "fits (`powernorm remove` with method.name=match-centered or freeze)",
        )
    scale, shift = ours.affine()
    if reading.bias is None and bool(shift.any()):
        raise _misfit(
            pair,
            "which has no bias for the shift of this layer: one without a shift fits "
            "(`powernorm remove` with method.name=freeze or taper)",
        )
    return scale.detach() * _eps_of(pair.stock) ** 0.5, shift.detach()


def _eps_of(norm: nn.Module) -> float:
    eps = epsilon_of(norm)
    assert eps is not None
    return eps


def _dtype_of(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters()), torch.float32)


def _deviation(norm: Norm) -> float:
    """Return the deviation of a norm's tokens by its statistics, 1 without statistics."""
    found = {name: buffer.detach().double() for name, buffer in norm.named_buffers()}
    if "running_var" in found:
        return math.sqrt((found["running_var"] + found["running_mean"].square()).mean())
    if "deviation" in found:
        return float(found["deviation"])
    return 1 / float(found["branch_scale"]) if "branch_scale" in found else 1.0


def _filled(
    pair: _Pair, reading: Reading, weight: Tensor | None, bias: Tensor | None
) -> dict[str, Tensor]:
    """Return the state of the original's norm with a γ and a β; None is the neutral one."""
    state: dict[str, Tensor] = {}
    for kind, offset, there, value in (
        ("weight", reading.offset, reading.weight, weight),
        ("bias", 0.0, reading.bias, bias),
    ):
        if there is None and value is not None and bool((value != (kind == "weight")).any()):
            raise _misfit(pair, f"which has no {kind}")
        if there is not None:
            name = next(n for n, p in pair.original._parameters.items() if p is there)
            own = pair.stock._parameters[name]
            assert own is not None
            neutral = torch.full_like(own, float(kind == "weight"))
            # In float64, and rounded once.
            found = neutral if value is None else value.detach()
            state[name] = (found.double() - offset).to(own)
    return state


def _batch_norm(module: nn.Module) -> tuple[nn.modules.batchnorm._BatchNorm | None, str]:
    """Return torch's BatchNorm that a module is, or wraps, and the prefix of its state."""
    wrapped = wrapped_batch_norm(module)
    if wrapped is not None:
        return wrapped, next(
            f"{name}." for name, part in module._modules.items() if part is wrapped
        )
    is_torchs = isinstance(module, nn.modules.batchnorm._BatchNorm)
    usable = is_torchs and module.track_running_stats and not does_more_than_torch(module)
    return (module, "") if usable else (None, "")  # type: ignore[return-value]


def _as_batch_norm(
    pair: _Pair, target: nn.modules.batchnorm._BatchNorm
) -> Iterator[tuple[str, Tensor]]:
    ours = pair.ours
    own = dict(target.named_buffers()) | dict(target.named_parameters())
    if isinstance(ours, Norm) and short_name(ours) in ("bn", "rbn") and ours.eps == target.eps:
        state = ours.state_dict()
        if own.keys() <= state.keys() and getattr(ours, "groups", None) is None:
            yield from ((name, state[name]) for name in own)
            return
    scale, shift = _affine(pair, target.num_features)
    if "weight" not in own and bool((shift != 0).any() or (scale != 1).any()):
        raise _misfit(pair, "which has no weight")
    neutral = {
        "weight": scale,
        "bias": shift,
        "running_mean": torch.zeros_like(scale),
        # The value whose root, with eps, is 1.
        "running_var": torch.full_like(scale, 1.0 - target.eps),
        "num_batches_tracked": torch.ones((), dtype=torch.int64, device="cpu"),
    }
    yield from ((name, neutral[name].to(value)) for name, value in own.items())


def _affine(pair: _Pair, num_features: int) -> tuple[Tensor, Tensor]:
    ours = pair.ours
    if isinstance(ours, FeatureAffine):
        return ours.weight.detach().double(), ours.bias.detach().double()
    if isinstance(ours, FoldedNorm):
        ones = torch.ones(num_features, dtype=torch.float64, device="cpu")
        return ones, torch.zeros_like(ones)
    assert isinstance(ours, Norm)
    if not ours.is_static:
        raise _misfit(pair, "which is an affine map per feature in evaluation")
    scale, shift = ours.affine()
    return scale.detach(), shift.detach()


def _misfit(pair: _Pair, why: str) -> InputError:
    return InputError(
        f"{pair.name} is a {type(pair.ours).__name__}, and the original architecture has a "
        f"{type(pair.stock).__name__} there, {why}: {_FIX}"
    )


def _check_ties(stock: nn.Module, state: dict[str, Tensor]) -> None:
    first: dict[int, str] = {}
    for name, parameter in stock.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if name in state and other in state and not torch.equal(state[name], state[other]):
            raise InputError(
                f"{name} and {other} are one tensor in {type(stock).__name__} and two in this "
                f"model, as folding has untied them: {_FIX}"
            )


@torch.no_grad()
def _difference(pair: _Pair) -> float:
    """Return the difference of the two on random tokens, over the largest value."""
    size = _size(pair.original)
    like = next(
        (p for p in (*pair.ours.parameters(), *pair.stock.parameters())),
        torch.ones(1, dtype=torch.float32, device="cpu"),
    )
    dim = getattr(pair.ours, "feature_dim", LAST)
    if isinstance(pair.ours, FoldedNorm):
        dim = LAST if _batch_norm(pair.stock)[0] is not pair.stock else 1
    generator = torch.Generator().manual_seed(0)
    for positions in ((2, 3), (2, 3, 3), (2, 3, 3, 3)):
        tokens = torch.randn(
            *positions, size, generator=generator, dtype=torch.float32, device="cpu"
        )
        x = features_back(tokens, dim).contiguous().to(like)
        try:
            ours, stock = pair.ours(x), pair.stock.to(like.dtype)(x)
        except (RuntimeError, ValueError):  # it takes inputs of another number of dimensions
            continue
        return float((ours - stock).abs().max() / stock.abs().max().clamp(min=1e-30))
    return float("inf")


def _size(module: nn.Module) -> int:
    batch_norm, _ = _batch_norm(module)
    if batch_norm is not None:
        return batch_norm.num_features
    reading = read_norm(module)
    assert isinstance(reading, Reading)
    return reading.num_features
