"""What stands in a norm's place and looks at no statistic: DynamicTanh, and nothing at all."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from powernorm.norms.arguments import check_number
from powernorm.norms.base import AffineNorm, Normalised, answer
from powernorm.ops.reference.token import dynamic_tanh


class DynamicTanh(AffineNorm):
    """DynamicTanh (Zhu et al. 2025): `y = γ tanh(α x) + β`, no statistics at all.

    Args:
        num_features: C.
        alpha: start of the learned scalar α.
        affine: learn γ and β (α is always learned).
        device: of the parameters.
        dtype: of the parameters.

    Shape:
        x (..., C), output as x.
    """

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        alpha: float = 0.5,
        *,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # No root here, hence no eps of its own; the contract's is not used.
        super().__init__(num_features, 1e-5, affine, True, device, dtype)
        self.initial_alpha = check_number("alpha", alpha)
        self.alpha = nn.Parameter(torch.full((), alpha, device=device, dtype=dtype))

    def forward(
        self, x: Tensor, padding_mask: Tensor | None = None, residual: Tensor | None = None
    ) -> Normalised:
        """Squash (..., C)."""
        self.check_input(x, padding_mask, residual)
        total = x if residual is None else x + residual
        return answer((dynamic_tanh(total, self.alpha, self.weight, self.bias), total), residual)

    def reset_parameters(self) -> None:
        """α, γ and β back to their start."""
        super().reset_parameters()
        nn.init.constant_(self.alpha, self.initial_alpha)

    def extra_repr(self) -> str:
        """Features and the start of α."""
        return f"{self.num_features}, alpha={self.initial_alpha}, affine={self.weight is not None}"


class Identity(AffineNorm):
    """No normalisation: `y = x`; the "w/o Norm" row of comparisons.

    Args:
        num_features: C.
        affine: learn γ and β, `y = γ x + β`.
        device: of the parameters, where affine.
        dtype: of the parameters, where affine.

    Shape:
        x (..., C), output as x.
    """

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        *,
        affine: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # No root here, hence no eps of its own; the contract's is not used.
        super().__init__(num_features, 1e-5, affine, True, device, dtype)

    @property
    def is_static(self) -> bool:
        """True."""
        return True

    def affine(self) -> tuple[Tensor, Tensor]:
        """(γ, β), or (1, 0)."""
        ones = torch.ones(self.num_features, dtype=torch.float64)
        scale = ones if self.weight is None else self.weight.double()
        return scale, torch.zeros_like(scale) if self.bias is None else self.bias.double()

    def forward(
        self, x: Tensor, padding_mask: Tensor | None = None, residual: Tensor | None = None
    ) -> Normalised:
        """The input itself, or γ x + β."""
        self.check_input(x, padding_mask, residual)
        total = x if residual is None else x + residual
        return answer((self.scale_and_shift(total), total), residual)

    def extra_repr(self) -> str:
        """Features."""
        return f"{self.num_features}, affine={self.weight is not None}"
