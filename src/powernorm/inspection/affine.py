"""The affine part of a norm: all of a static norm, and the last step of a per-token norm.

In evaluation a static norm is `y = a ⊙ x + c`, where its statistics and γ and β give
`a = γ/√(σ² + ε)` and `c = β - a ⊙ μ`. LayerNorm and RMSNorm are `y = (offset + γ) ⊙ x̂ + β`: x̂
depends on each token, and the rest is a map of the same form.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.inspection.finder import OF_HEADS, FoundNorm
from powernorm.inspection.reading import (
    CHANNEL_NORMS,
    CHANNELS,
    Kind,
    Reading,
    kind_without_parameters,
    read_norm,
)
from powernorm.inspection.trials import does_more_than_torch
from powernorm.norms import Norm, ProgressiveRepBatchNorm, TaperNorm
from powernorm.norms.adapted import AdaptedNorm
from powernorm.norms.base import AffineNorm
from powernorm.norms.batch_statistics import BatchStatisticsNorm
from powernorm.norms.feature_dims import LAST, features_back
from powernorm.norms.token import LayerNorm, RMSNorm

_TORCH_BATCH_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class AffineMap:
    """A map `y = scale ⊙ x + shift`, each (C,) float64.

    One that `centers` is `y = scale ⊙ (x - mean x) + shift`, with the mean over the features.
    """

    scale: Tensor
    shift: Tensor
    centers: bool = False

    def equals(self, other: AffineMap) -> bool:
        """Return whether both are the same."""
        return (
            torch.equal(self.scale, other.scale)
            and torch.equal(self.shift, other.shift)
            and self.centers == other.centers
        )

    def shifted(self, before: Tensor) -> Tensor:
        """Return the shift of the output if that of the input is `before`."""
        if self.centers and before.ndim:
            before = before - before.mean()
        elif self.centers:
            before = torch.zeros_like(before)
        return self.scale * before + self.shift


@dataclass(frozen=True)
class AffinePart:
    """The affine part of a norm, and its position in the model.

    Args:
        kind: `static`; for a per-token norm `layer`, `rms`, or `own` for another norm of this
            library.
        map: the map; scale and shift are single numbers if a per-token norm has neither γ nor β.
        feature_dim: the dimension of its input that holds the features.
        weight: name of γ in the model, "" if there is none. This and the next fields are for
            per-token norms only.
        bias: name of β, "" if there is none.
        offset: number that the class adds to its weight, 1 in Gemma.
        eps: added to the variance or the mean square; None if it is unknown.
    """

    kind: Kind | Literal["static"]
    map: AffineMap
    feature_dim: int
    weight: str = ""
    bias: str = ""
    offset: float = 0.0
    eps: float | None = None

    @property
    def has_statistic(self) -> bool:
        """Whether it comes after a per-token statistic."""
        return self.kind != "static"

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of γ and β, if there are any."""
        return tuple(name for name in (self.weight, self.bias) if name)


def affine_parts(
    norms: Iterable[FoundNorm], *, of_tokens: bool
) -> tuple[dict[str, AffinePart], dict[str, str]]:
    """Return the affine parts of norms, and why others have none, by the computing module.

    The static norms come first. Per-token norms without γ and β are in both: their inputs and
    outputs are known.

    Args:
        norms: norms of a model.
        of_tokens: whether per-token norms are read, too.
    """
    static: dict[str, AffinePart] = {}
    others: dict[str, AffinePart] = {}
    reasons: dict[str, str] = {}
    for found in norms:
        name, module = found.inner
        known = static_map(found)
        if known is not None:
            dim = module.feature_dim if isinstance(module, Norm) else CHANNELS
            static[name] = AffinePart("static", known, dim)
            continue
        part = _token_part(found) if of_tokens else why_not_static(found)
        if isinstance(part, str):
            reasons[name] = part
            continue
        others[name] = part
        if not part.parameters:
            reasons[name] = "it has neither weight nor bias: there is nothing to fold"
    return static | others, reasons


# Static norms ------------------------------------------------------------------------------------


def static_map(found: FoundNorm) -> AffineMap | None:
    """Return scale and shift of a static norm in evaluation, None for other norms."""
    _, norm = found.inner
    if found.function:
        return None
    if isinstance(norm, Norm):
        if not (norm.is_static or norm.centers):
            return None
        scale, shift = norm.affine()
        return AffineMap(scale.detach().cpu(), shift.detach().cpu(), norm.centers)
    if not isinstance(norm, _TORCH_BATCH_NORMS):
        return None if isinstance(norm, CHANNEL_NORMS) else _frozen(norm)
    if does_more_than_torch(norm):
        return None
    if norm.running_var is not None:
        assert norm.running_mean is not None
        scale = torch.rsqrt(norm.running_var.double() + norm.eps)
        if norm.weight is not None:
            scale = scale * norm.weight.double()
        shift = -scale * norm.running_mean.double()
        if norm.bias is not None:
            shift = shift + norm.bias.double()
        return AffineMap(scale.detach().cpu(), shift.detach().cpu())
    return None


def check_static(name: str, norm: nn.Module, static: AffineMap) -> None:
    """Check that a static norm has statistics, and that they are finite.

    Args:
        name: name of the computing module.
        norm: that module.
        static: its map.

    Raises:
        InputError: it has never seen a batch, or its scales or shifts are not finite.
    """
    counted = norm.layer if isinstance(norm, AdaptedNorm) else norm
    tracked = getattr(counted, "num_batches_tracked", None)
    if tracked is not None and int(tracked) == 0 and not _has_other_statistics(counted):
        raise InputError(
            f"the statistics of {name!r} ({type(norm).__name__}) have never seen a batch: "
            "train the model, or call powernorm.calibrate(model, batches) first; if the model "
            "never calls it, leave it out of the swap by where="
        )
    for what, value in (("scale", static.scale), ("shift", static.shift)):
        wrong = int((~value.isfinite()).sum())
        if wrong:
            raise InputError(
                f"the {what} of {name!r} ({type(norm).__name__}) is not finite in {wrong} of "
                f"{len(value)} features: its weights or statistics are broken, calibrate or "
                "train again"
            )


def _has_other_statistics(norm: nn.Module) -> bool:
    """Return whether a BatchNorm of torch has statistics other than the initial ones.

    Weights from before torch 0.4.1 have no counter, which is 0 after loading them.
    """
    if not isinstance(norm, _TORCH_BATCH_NORMS) or norm.running_var is None:
        return False
    assert norm.running_mean is not None
    return bool(norm.running_mean.any() or (norm.running_var != 1).any())


def _frozen(norm: nn.Module) -> AffineMap | None:
    """Return scale and shift of another library's BatchNorm with frozen statistics, else None.

    This covers the FrozenBatchNorm2d of torchvision and of DETR and its relatives: a few vectors of
    one length and no other part. A trial run in float64 shows that it is an affine map per channel.
    """
    tensors = [*norm._parameters.values(), *norm._buffers.values()]
    vectors = [one for one in tensors if one is not None and one.ndim == 1]
    sizes = {len(one) for one in vectors}
    others = [one for one in tensors if one is not None and one.ndim > 1]
    if norm._modules or others or len(sizes) != 1 or not hasattr(norm, "running_var"):
        return None
    (channels,) = sizes
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, channels, 3, 3, generator=generator, dtype=torch.float64, device="cpu")
    try:
        shadow = deepcopy(norm).cpu().double().eval()
        with torch.no_grad():
            y, one, zero = (
                type(norm).forward(shadow, value)
                for value in (x, torch.ones_like(x[:1]), torch.zeros_like(x[:1]))
            )
    except Exception:  # if a foreign forward raises anything, it needs more than a tensor
        return None
    if not all(isinstance(value, Tensor) and value.dtype == x.dtype for value in (y, one, zero)):
        return None
    shift = zero[0, :, 0, 0]
    scale = one[0, :, 0, 0] - shift
    expected = x * scale[:, None, None] + shift[:, None, None]
    is_affine = y.shape == x.shape and torch.allclose(y, expected, 1e-10, 1e-10, equal_nan=True)
    return AffineMap(scale, shift) if is_affine else None


def why_not_static(found: FoundNorm) -> str:
    """Return why a norm is not an affine map per feature."""
    if found.function:
        return found.reason
    norm = found.inner[1]
    if isinstance(norm, CHANNEL_NORMS) and does_more_than_torch(norm):
        return found.reason
    if isinstance(norm, _TORCH_BATCH_NORMS):
        return (
            "without running statistics it depends on the batch in evaluation: swap it, and train"
        )
    if isinstance(norm, CHANNEL_NORMS):
        return "it depends on each input in evaluation: swap it for a static norm to fold it"
    if isinstance(found.module, AdaptedNorm):
        return (
            "it does not say that it is an affine map per feature in evaluation (is_static = True)"
        )
    if isinstance(norm, ProgressiveRepBatchNorm):
        return f"its share of LayerNorm is {norm.share:.3g}, not 0 yet: train it to the end of that"
    if isinstance(norm, TaperNorm):
        return f"its gate is {norm.gate:.3g}, not 0 yet: train it to its end_step"
    return "it depends on each token in evaluation: swap it for a static norm to fold it"


# Norms of each token -----------------------------------------------------------------------------


def _token_part(found: FoundNorm) -> AffinePart | str:
    """Return the affine part of a norm, or why it cannot be separated from its statistic."""
    if found.function:
        return found.reason
    norm = found.module
    # In an attention too, which swapping excludes: there the graph decides.
    reading = read_norm(norm) if found.reason == OF_HEADS else (found.reading or found.reason)
    if isinstance(reading, str):
        return _without_parameters(norm) or reading
    if reading.kind == "own" and not _is_affine_at_last(norm):
        return "it is no LayerNorm or RMSNorm, whose weight and bias come last"
    if reading.kind not in ("layer", "rms", "own"):
        return "its statistic is not that of each token"
    return _read(found, reading)


def _without_parameters(norm: nn.Module) -> AffinePart | None:
    kind = kind_without_parameters(norm)
    if kind is None:
        return None
    one = torch.ones((), dtype=torch.float64, device="cpu")
    zero = torch.zeros_like(one)
    return AffinePart(kind, AffineMap(one, zero), LAST)


def _read(found: FoundNorm, reading: Reading) -> AffinePart | str:
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
    known = AffineMap(scale, shift)
    return AffinePart(kind, known, reading.feature_dim, weight, bias, reading.offset, reading.eps)


def _name_of(found: FoundNorm, parameter: nn.Parameter | None) -> str:
    if parameter is None:
        return ""
    slots = found.module._parameters.items()
    return next(f"{found.names[0]}.{name}" for name, one in slots if one is parameter)


_TRIAL: Final = (2, 3, 4)


def _is_affine_at_last(norm: nn.Module) -> bool:
    """Return whether a norm of this library computes `weight ⊙ f(x) + bias`, by a trial of f."""
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
