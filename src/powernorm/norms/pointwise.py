"""Replacements of norms without statistics: DynamicTanh and Identity."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from powernorm.norms.arguments import check_number
from powernorm.norms.base import AffineNorm, Norm
from powernorm.norms.feature_dims import Normalized, answer
from powernorm.ops.pointwise import dynamic_tanh


class DynamicTanh(AffineNorm):
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

    is_pointwise = True

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
        # No root here, hence no eps of its own; the contract's is not used.
        super().__init__(num_features, 1e-5, affine, True, device, dtype, feature_dim)
        self.initial_alpha = check_number("alpha", alpha)
        self.alpha = nn.Parameter(torch.full((), alpha, device=device, dtype=dtype))

    def normalize(self, x: Tensor, _: Tensor | None, residual: Tensor | None, /) -> Normalized:
        """Apply the scaled tanh to (..., C)."""
        total = x if residual is None else x + residual
        y = dynamic_tanh(total, self.alpha, self.weight, self.bias)
        return answer((y, total), residual)

    def reset_parameters(self) -> None:
        """Reset α, γ and β to their initial values."""
        super().reset_parameters()
        nn.init.constant_(self.alpha, self.initial_alpha)

    def extra_repr(self) -> str:
        """Return the features and the initial α."""
        affine = self.weight is not None
        return f"{Norm.extra_repr(self)}, alpha={self.initial_alpha}, affine={affine}"


class Identity(AffineNorm):
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
        # No root here, hence no eps of its own; the contract's is not used.
        super().__init__(num_features, 1e-5, affine, True, device, dtype, feature_dim)

    @property
    def is_static(self) -> bool:
        """Whether the layer is static: always."""
        return True

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return (γ, β), or (1, 0)."""
        ones = torch.ones(self.num_features, dtype=torch.float64)
        scale = ones if self.weight is None else self.weight.double()
        return scale, torch.zeros_like(scale) if self.bias is None else self.bias.double()

    def normalize(self, x: Tensor, _: Tensor | None, residual: Tensor | None, /) -> Normalized:
        """Return the input itself, or γ x + β."""
        total = x if residual is None else x + residual
        return answer((self.scale_and_shift(total), total), residual)

    def extra_repr(self) -> str:
        """Return the features."""
        return f"{Norm.extra_repr(self)}, affine={self.weight is not None}"
