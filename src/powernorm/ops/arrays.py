"""Helpers of the reference ops: accumulation type, masked sums, affine output."""

from __future__ import annotations

import torch
from torch import Tensor

from powernorm.ops.graphs import num_features_of


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return float64 for float64 input, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def tokens_of(x: Tensor) -> Tensor:
    """Return the input as (tokens, C) in the accumulation type."""
    return x.reshape(-1, x.shape[-1]).to(accumulation_dtype(x))


def add_residual(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return (the input of the norm, its sum as an output); the latter None without a residual."""
    if residual is None:
        return x, None
    total = x + residual
    return total, total


def validity_of(padding_mask: Tensor | None) -> Tensor | None:
    """Return (tokens, 1) bool, True = valid; None without padding."""
    return None if padding_mask is None else ~padding_mask.reshape(-1, 1)


def count_of(tokens: Tensor, valid: Tensor | None) -> Tensor:
    """Return the number of valid tokens, 0-d, in the accumulation type."""
    if valid is None:
        return tokens.new_full((), float(tokens.shape[0]))
    return valid.sum().to(tokens.dtype)


def keep(values: Tensor, valid: Tensor | None) -> Tensor:
    """Set padding to 0. `where`, not a product: padding may hold infinities and NaN."""
    return values if valid is None else torch.where(valid, values, 0.0)


def scale_and_shift(normalized: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return γ ⊙ x̂ + β in the accumulation type."""
    if weight is not None:
        normalized = normalized * weight.to(normalized.dtype)
    if bias is not None:
        normalized = normalized + bias.to(normalized.dtype)
    return normalized


def reciprocal_root(second_moment: Tensor, eps: float, floor: bool) -> Tensor:
    """Return 1/sqrt(m + eps), or 1/sqrt(max(m, eps)) if eps is a floor (released variants)."""
    return torch.rsqrt(second_moment.clamp(min=eps) if floor else second_moment + eps)


def products(grad: Tensor, values: Tensor, valid: Tensor | None) -> Tensor:
    """Return grad ⊙ values, padding included, with 0 at padded positions whose gradient is 0.

    If the loss reads padded outputs, they count. It usually does not, and then an infinity in the
    padding must not turn a sum into NaN.
    """
    if valid is None:
        return grad * values
    return torch.where(valid | (grad != 0), grad * values, 0.0)


def where_arriving(grad: Tensor, values: Tensor) -> Tensor:
    """Return the values, with 0 wherever the gradient that multiplies them is 0.

    `where`, not the product itself: a token that no loss reads may hold NaN.
    """
    return torch.where(grad != 0, values, 0.0)


def affine_gradients(
    grad_y: Tensor, normalized: Tensor, weight: Tensor | None, valid: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (g = γ ∂L/∂y, ∂L/∂γ, ∂L/∂β); the last two over all positions, padding included."""
    grad_weight = products(grad_y, normalized, valid).sum(0)
    grad_bias = grad_y.sum(0)
    g = grad_y if weight is None else grad_y * weight.to(grad_y.dtype)
    return g, grad_weight, grad_bias


def scale_groups(tokens: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor | None]:
    """Return GroupScaling's scaled tokens and factors, (tokens, groups); None without groups.

    Args:
        tokens: (tokens, C) in the accumulation type.
        groups: number of groups of features; 0 leaves the tokens unchanged.
        eps: added to the mean square.
    """
    if not groups:
        return tokens, None
    parts = tokens.unflatten(-1, (groups, tokens.shape[-1] // groups))
    scales = torch.rsqrt(parts.square().mean(-1) + eps)
    return apply_scales(tokens, scales), scales


def apply_scales(tokens: Tensor, scales: Tensor | None) -> Tensor:
    """Multiply each group of a token's features by its factor; without factors change nothing."""
    if scales is None:
        return tokens
    scaled: Tensor = tokens.unflatten(-1, (scales.shape[-1], -1)) * scales.unsqueeze(-1)
    return scaled.flatten(-2)


def _through_scaling(gradient: Tensor, scaled: Tensor, scales: Tensor) -> Tensor:
    # A zero gradient stays zero, even where the padding holds NaN.
    parts = (scales.shape[-1], -1)
    products = torch.where(gradient != 0, gradient * scaled, 0.0)
    mean: Tensor = products.unflatten(-1, parts).mean(-1, keepdim=True)
    along = torch.where(mean != 0, scaled.unflatten(-1, parts) * mean, 0.0)
    rest = gradient - along.flatten(-2)
    return torch.where(rest != 0, apply_scales(rest, scales), 0.0)


def finish_gradient(
    gradient: Tensor,
    scaled: Tensor,
    scales: Tensor | None,
    grad_total: Tensor | None,
    like: Tensor,
) -> Tensor:
    """Return the gradient of the op's input from that of the normalized values.

    Go back through GroupScaling, `s (t - x̃ mean_group(t x̃))`, and add the residual's gradient.

    Args:
        gradient: t, (tokens, C).
        scaled: x̃, (tokens, C).
        scales: s, (tokens, groups), or None.
        grad_total: gradient of the sum with the residual, shape of `like`.
        like: gives the result's shape and type.
    """
    if scales is not None:
        gradient = _through_scaling(gradient, scaled, scales)
    if grad_total is not None:
        gradient = gradient + tokens_of(grad_total)
    return gradient.to(like.dtype).reshape(like.shape).contiguous()


def converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor, if its type differs: a redundant conversion would add a node to a graph."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def standardized(x: Tensor, groups: int, centered: bool, eps: float) -> Tensor:
    """Divide each group of features, centered if asked, by its standard deviation: (…, C).

    It uses few operators, for exported graphs.
    """
    size = num_features_of(x) // groups
    parts = x if groups == 1 else x.unflatten(-1, (groups, size))
    if centered:
        y = torch.nn.functional.layer_norm(parts, (size,), None, None, eps)
    else:
        y = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)
    return y if groups == 1 else y.flatten(-2)
