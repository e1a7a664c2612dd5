"""Norms of each token in a fold: their weight and bias can go into the weights, x̂ stays.

LayerNorm and RMSNorm are `y = (offset + weight) ⊙ x̂ + bias`. The statistic x̂ depends on each token,
but what is done to it is an affine map per feature, as a static norm is of its input.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from powernorm.inspection.finder import OF_HEADS, FoundNorm
from powernorm.inspection.reading import Kind, Reading, kind_without_parameters, read_norm
from powernorm.norms.base import AffineNorm
from powernorm.norms.batch_statistics import BatchStatisticsNorm
from powernorm.norms.feature_dims import LAST, features_back
from powernorm.norms.token import LayerNorm, RMSNorm
from powernorm.surgery.folding.solution import Static


@dataclass(frozen=True)
class TokenNorm:
    """The affine part of a norm of each token, and where it is in the model.

    Args:
        kind: `layer`, `rms`, or `own` for another norm of this library.
        affine: `offset + weight` and bias; one number each where it has none, of any size.
        weight: name of γ in the model, "" if there is none.
        bias: name of β, "" if there is none.
        offset: what the class adds to its weight, 1 in Gemma.
        feature_dim: the dimension of its input that holds the features.
        eps: added to the variance or the mean square; None if that is not known.
    """

    kind: Kind
    affine: Static
    weight: str
    bias: str
    offset: float
    feature_dim: int
    eps: float | None

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of γ and β, as far as there are any."""
        return tuple(name for name in (self.weight, self.bias) if name)


def token_norms_of(
    norms: Iterable[FoundNorm],
) -> tuple[dict[str, TokenNorm], dict[str, str]]:
    """Return the norms of each token among these, and why nothing of others can fold, by name.

    Those that have neither weight nor bias are in both: what they read and write is known.
    """
    found: dict[str, TokenNorm] = {}
    reasons: dict[str, str] = {}
    for norm in norms:
        read = _token_norm(norm)
        if isinstance(read, str):
            reasons[norm.inner[0]] = read
            continue
        found[norm.names[0]] = read
        if not read.parameters:
            reasons[norm.names[0]] = "it has neither weight nor bias: there is nothing to fold"
    return found, reasons


def _token_norm(found: FoundNorm) -> TokenNorm | str:
    """Return the affine part of a norm, or why it cannot be taken off its statistic."""
    if found.function:
        return found.reason
    norm = found.module
    # In an attention too, where swapping leaves it alone: there the graph decides.
    reading = read_norm(norm) if found.reason == OF_HEADS else (found.reading or found.reason)
    if isinstance(reading, str):
        return _without_parameters(norm) or reading
    if reading.kind == "own" and not _is_affine_at_last(norm):
        return "it is no LayerNorm or RMSNorm, whose weight and bias come last"
    if reading.kind not in ("layer", "rms", "own"):
        return "its statistic is not that of each token"
    return _read(found, reading)


def _without_parameters(norm: nn.Module) -> TokenNorm | None:
    kind = kind_without_parameters(norm)
    if kind is None:
        return None
    one = torch.ones((), dtype=torch.float64, device="cpu")
    zero = torch.zeros_like(one)
    return TokenNorm(kind, Static(one, zero), "", "", 0.0, LAST, None)


def _read(found: FoundNorm, reading: Reading) -> TokenNorm | str:
    weight, bias = (_name_of(found, one) for one in (reading.weight, reading.bias))
    size = reading.num_features
    given = (one for one in (reading.weight, reading.bias) if one is not None)
    if any(one.is_meta or one.shape != (size,) for one in given):
        return "its weight or bias is not one number per feature"
    scale = torch.ones(size, dtype=torch.float64, device="cpu")
    shift = torch.zeros(size, dtype=torch.float64, device="cpu")
    if reading.weight is not None:
        scale = reading.weight.detach().cpu().double() + reading.offset
    if reading.bias is not None:
        shift = reading.bias.detach().cpu().double()
    if not bool(scale.isfinite().all() and shift.isfinite().all()):
        return "its weight or bias is not finite"
    own: dict[type, Kind] = {LayerNorm: "layer", RMSNorm: "rms"}
    kind = next((one for cls, one in own.items() if isinstance(found.module, cls)), reading.kind)
    affine, offset = Static(scale, shift), reading.offset
    return TokenNorm(kind, affine, weight, bias, offset, reading.feature_dim, reading.eps)


def _name_of(found: FoundNorm, parameter: nn.Parameter | None) -> str:
    if parameter is None:
        return ""
    slots = found.module._parameters.items()
    return next(f"{found.names[0]}.{name}" for name, one in slots if one is parameter)


_TRIAL: Final = (2, 3, 4)


def _is_affine_at_last(norm: nn.Module) -> bool:
    """Return whether a norm of this library computes `weight ⊙ f(x) + bias`; f is tried out."""
    if not isinstance(norm, AffineNorm) or isinstance(norm, BatchStatisticsNorm):
        return False
    if norm.weight is None and norm.bias is None:
        return True
    generator = torch.Generator().manual_seed(0)
    trial = deepcopy(norm).cpu().double().eval()
    tokens = torch.randn(
        *_TRIAL, norm.num_features, generator=generator, dtype=torch.float64, device="cpu"
    )
    x = features_back(tokens, norm.feature_dim)

    def drawn(like: Tensor | None, neutral: float) -> Tensor:
        value = torch.full((norm.num_features,), neutral, dtype=torch.float64, device="cpu")
        if like is not None:
            value.uniform_(0.5, 1.5, generator=generator)
        return value

    weight, bias = drawn(norm.weight, 1.0), drawn(norm.bias, 0.0)
    with torch.no_grad():
        neutral = _called(trial, x, torch.ones_like(weight), torch.zeros_like(bias))
        found = _called(trial, x, weight, bias)
    beyond = (-1 if norm.feature_dim < 0 else x.ndim - 1) - norm.feature_dim
    shape = (-1, *(1,) * beyond)
    return torch.allclose(found, neutral * weight.view(shape) + bias.view(shape), 1e-9, 1e-9)


def _called(norm: AffineNorm, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    for parameter, value in ((norm.weight, weight), (norm.bias, bias)):
        if parameter is not None:
            parameter.copy_(value)
    y = norm(x)
    assert isinstance(y, Tensor)
    return y
