"""What a folded model holds in place of a norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from powernorm.norms.feature_dims import LAST


class FoldedNorm(nn.Module):
    """Where a norm was folded into its neighbours: gives its input, and takes a norm's arguments.

    Shape:
        x (..., C), output as x; with a residual (x + residual, x + residual), as every norm.
    """

    def forward(
        self,
        x: Tensor,
        padding_mask: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The input itself, or its sum with the residual, twice."""
        del padding_mask
        if residual is None:
            return x
        total = x + residual
        return total, total


class FeatureAffine(nn.Module):
    """One multiply-add per feature, for a static norm that no neighbour could take up.

    Args:
        num_features: C.
        feature_dim: the dimension of x that holds the features.
        device: of the parameters.
        dtype: of the parameters.

    Shape:
        x (..., C), output as x; with a residual (y, x + residual), as every norm.
    """

    def __init__(
        self,
        num_features: int,
        *,
        feature_dim: int = LAST,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.feature_dim = feature_dim
        self.weight = nn.Parameter(torch.ones(num_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(num_features, device=device, dtype=dtype))

    def forward(
        self,
        x: Tensor,
        padding_mask: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`weight ⊙ x + bias`."""
        del padding_mask
        total = x if residual is None else x + residual
        beyond = (-1 if self.feature_dim < 0 else total.ndim - 1) - self.feature_dim
        weight, bias = (part.view(-1, *(1,) * beyond) for part in (self.weight, self.bias))
        y = torch.addcmul(bias, total, weight).to(total.dtype)
        return y if residual is None else (y, total)

    def extra_repr(self) -> str:
        """Number of features, and their dimension."""
        dim = "" if self.feature_dim == LAST else f", feature_dim={self.feature_dim}"
        return f"{self.weight.shape[0]}{dim}"
