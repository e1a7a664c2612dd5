"""What the reference functions share: accumulation type, masked sums, the affine end."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64 input, float32 for everything else."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def tokens_of(x: Tensor) -> Tensor:
    """The input as (tokens, C) in the accumulation type."""
    return x.reshape(-1, x.shape[-1]).to(accumulation_dtype(x))


def validity_of(padding_mask: Tensor | None) -> Tensor | None:
    """(tokens, 1) bool, True = valid; None where every token is."""
    return None if padding_mask is None else ~padding_mask.reshape(-1, 1)


def count_of(tokens: Tensor, valid: Tensor | None) -> Tensor:
    """Number of valid tokens, 0-d, in the accumulation type."""
    if valid is None:
        return tokens.new_full((), float(tokens.shape[0]))
    return valid.sum().to(tokens.dtype)


def keep(values: Tensor, valid: Tensor | None) -> Tensor:
    """Zero at padding. `where`, not a product: padding may hold infinities and NaN."""
    return values if valid is None else torch.where(valid, values, 0.0)


def scale_and_shift(normalized: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """γ ⊙ x̂ + β in the accumulation type."""
    if weight is not None:
        normalized = normalized * weight.to(normalized.dtype)
    if bias is not None:
        normalized = normalized + bias.to(normalized.dtype)
    return normalized


def reciprocal_root(second_moment: Tensor, eps: float, floor: bool) -> Tensor:
    """1/sqrt(m + eps), or 1/sqrt(max(m, eps)) where eps is a floor (released variants)."""
    return torch.rsqrt(second_moment.clamp(min=eps) if floor else second_moment + eps)


def products(grad: Tensor, values: Tensor, valid: Tensor | None) -> Tensor:
    """Grad ⊙ values, over padding too, but 0 where padding holds anything and grad is 0.

    The loss may look at padded outputs, then they count; it usually does not, and then an
    infinity in the padding must not turn a sum into NaN.
    """
    if valid is None:
        return grad * values
    return torch.where(valid | (grad != 0), grad * values, 0.0)


def affine_gradients(
    grad_y: Tensor, normalized: Tensor, weight: Tensor | None, valid: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(g = γ ∂L/∂y, ∂L/∂γ, ∂L/∂β); the last two over all positions, padding included."""
    grad_weight = products(grad_y, normalized, valid).sum(0)
    grad_bias = grad_y.sum(0)
    g = grad_y if weight is None else grad_y * weight.to(grad_y.dtype)
    return g, grad_weight, grad_bias
