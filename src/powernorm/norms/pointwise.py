"""Replacements of norms without statistics: DynamicTanh, Derf, DyISRU and Identity."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn

from powernorm.norms.arguments import check_number
from powernorm.norms.base import StatelessNorm
from powernorm.ops.arrays import accumulation_dtype
from powernorm.ops.pointwise import dynamic_erf, dynamic_tanh, inverse_root_unit


class SaturatingNorm(StatelessNorm):
    """Base of norms that apply one bounded function to every value: `y = γ f(z) + β`.

    z is linear in x. At |z| = 1 f has less than half of its slope at 0: tanh 0.42, erf 0.37,
    z/√(1 + z²) 0.35. Values beyond that count as saturated.
    """

    is_pointwise = True

    alpha: nn.Parameter

    @property
    def slope(self) -> Tensor:
        """dz/dx, (1,): α, or 1/√B."""
        return self.alpha

    @torch.no_grad()
    def set_slope(self, slope: float) -> None:
        """Set the learned scalar such that dz/dx is `slope`, > 0."""
        self.alpha.fill_(slope)

    @abstractmethod
    def saturate(self, z: Tensor) -> Tensor:
        """Return f(z), of z's shape and type."""

    def argument(self, x: Tensor, slope: float | None = None) -> Tensor:
        """Return z, of x's shape; with the layer's own slope, or with another."""
        return (self.slope.to(x.dtype) if slope is None else slope) * x


class DynamicTanh(SaturatingNorm):
    """DynamicTanh (Zhu et al. 2025): `y = γ tanh(α x) + β`, no statistics at all.

    Args:
        num_features: C.
        alpha: start of the learned scalar α.
        affine: learn γ and β (α is always learned).
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        device: device of the parameters.
        dtype: type of the parameters.

    Shape:
        x (..., C), output as x.
    """

    shown_settings = ("initial_alpha", "affine")

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        alpha: float = 0.5,
        *,
        affine: bool = True,
        feature_dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # There is no root and so no eps; the value of the common interface is not used.
        super().__init__(num_features, 1e-5, affine, True, feature_dim, device, dtype)
        self.initial_alpha = check_number("alpha", alpha)
        self.alpha = nn.Parameter(torch.full((1,), alpha, device=device, dtype=dtype))

    def saturate(self, z: Tensor) -> Tensor:
        """Return tanh(z)."""
        return z.tanh()

    def transform(self, x: Tensor) -> Tensor:
        """Return y, (..., C)."""
        return dynamic_tanh(x, self.alpha, self.weight, self.bias)

    def reset_parameters(self) -> None:
        """Reset α, γ and β to their initial values."""
        super().reset_parameters()
        nn.init.constant_(self.alpha, self.initial_alpha)


class Derf(SaturatingNorm):
    """Derf, dynamic erf (Chen et al. 2025): `y = γ erf(α x + s) + β`, no statistics at all.

    For language models its authors start α at 1, let it differ between attention, feed-forward and
    final norm, and scale the sum of the embeddings by a learned number that starts at √C.

    Args:
        num_features: C.
        alpha: start of the learned scalar α.
        shift: start of the learned scalar s.
        affine: learn γ and β (α and s are always learned).
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        device: device of the parameters.
        dtype: type of the parameters.

    Shape:
        x (..., C), output as x.

    >>> Derf(1)(torch.tensor([1.0])).round(decimals=4)
    tensor([0.5205], grad_fn=<RoundBackward1>)
    """

    shown_settings = ("initial_alpha", "initial_shift", "affine")

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        *,
        alpha: float = 0.5,
        shift: float = 0.0,
        affine: bool = True,
        feature_dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # There is no root and so no eps; the value of the common interface is not used.
        super().__init__(num_features, 1e-5, affine, True, feature_dim, device, dtype)
        self.initial_alpha = check_number("alpha", alpha)
        self.initial_shift = check_number("shift", shift)
        self.alpha = nn.Parameter(torch.full((1,), alpha, device=device, dtype=dtype))
        self.shift = nn.Parameter(torch.full((1,), shift, device=device, dtype=dtype))

    def saturate(self, z: Tensor) -> Tensor:
        """Return erf(z)."""
        return z.erf()

    def argument(self, x: Tensor, slope: float | None = None) -> Tensor:
        """Return α x + s, with the layer's own α or with another."""
        return super().argument(x, slope) + self.shift.to(x.dtype)

    def transform(self, x: Tensor) -> Tensor:
        """Return y, (..., C)."""
        return dynamic_erf(x, self.alpha, self.shift, self.weight, self.bias)

    def reset_parameters(self) -> None:
        """Reset α, s, γ and β to their initial values."""
        super().reset_parameters()
        nn.init.constant_(self.alpha, self.initial_alpha)
        nn.init.constant_(self.shift, self.initial_shift)


class DyISRU(SaturatingNorm):
    """DyISRU (Stollenwerk 2025): `y = γ √C x/sqrt(B + x²) + β`, no statistics at all.

    With B = Σ x_j² over the token's other features it is RMSNorm; B is one learned scalar instead.

    Args:
        num_features: C.
        spread: start of B, > 0; None means C - 1 (1 for one feature), the value of B in RMSNorm
            for features with mean square 1. Its logarithm is the learned parameter, which keeps B
            positive (start and parametrization are ours: the paper trains nothing).
        affine: learn γ and β (B is always learned).
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        device: device of the parameters.
        dtype: type of the parameters.

    Shape:
        x (..., C), output as x.

    >>> DyISRU(4, spread=12.0)(torch.full((4,), 2.0)).round(decimals=4)
    tensor([1., 1., 1., 1.], grad_fn=<RoundBackward1>)
    """

    shown_settings = ("initial_spread", "affine")

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        *,
        spread: float | None = None,
        affine: bool = True,
        feature_dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # There is no separate eps: B takes its place.
        super().__init__(num_features, 1e-5, affine, True, feature_dim, device, dtype)
        start = max(self.num_features - 1, 1) if spread is None else spread
        self.initial_spread = check_number("spread", start, above=0)
        start = math.log(start)
        self.log_spread = nn.Parameter(torch.full((1,), start, device=device, dtype=dtype))

    @property
    def spread(self) -> Tensor:
        """B, (1,)."""
        return self.log_spread.exp()

    @property
    def slope(self) -> Tensor:
        """1/√B, (1,)."""
        return (-0.5 * self.log_spread).exp()

    @torch.no_grad()
    def set_slope(self, slope: float) -> None:
        """Set B to 1/slope²."""
        self.log_spread.fill_(-2 * math.log(slope))

    def saturate(self, z: Tensor) -> Tensor:
        """Return √C z/√(1 + z²), which is √C x/√(B + x²) of z = x/√B."""
        return math.sqrt(self.num_features) * z * (1 + z.square()).rsqrt()

    def transform(self, x: Tensor) -> Tensor:
        """Return y, (..., C)."""
        spread = self.log_spread.to(accumulation_dtype(x)).exp()
        return inverse_root_unit(x, spread, self.weight, self.bias)

    def reset_parameters(self) -> None:
        """Reset B, γ and β to their initial values."""
        super().reset_parameters()
        nn.init.constant_(self.log_spread, math.log(self.initial_spread))


class Identity(StatelessNorm):
    """No normalization: `y = x`; the "w/o Norm" row of comparisons.

    Args:
        num_features: C.
        affine: learn γ and β, `y = γ x + β`.
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        device: device of the parameters, if affine.
        dtype: type of the parameters, if affine.

    Shape:
        x (..., C), output as x.
    """

    shown_settings = ("affine",)
    is_pointwise = True

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        *,
        affine: bool = False,
        feature_dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # There is no root and so no eps; the value of the common interface is not used.
        super().__init__(num_features, 1e-5, affine, True, feature_dim, device, dtype)

    @property
    def is_static(self) -> bool:
        """Whether the layer is static: always."""
        return True

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return (γ, β), or (1, 0)."""
        ones = torch.ones(self.num_features, dtype=torch.float64, device="cpu")
        scale = ones if self.weight is None else self.weight.double()
        return scale, torch.zeros_like(scale) if self.bias is None else self.bias.double()

    def transform(self, x: Tensor) -> Tensor:
        """Return the input itself, or γ x + β."""
        return self.scale_and_shift(x)
