"""The norms in torch's own operators, for graphs that leave the process: export and TorchScript.

Such a graph runs where this library is not installed: in onnxruntime, in a package of AOTInductor.
The forms are the short ones; gradients are those of the layers, for an exported graph may be
trained.
"""

from __future__ import annotations

import torch
from torch import Tensor

from powernorm.ops.plain import num_features_of
from powernorm.ops.reference.arrays import accumulation_dtype, reciprocal_root
from powernorm.ops.reference.token import differentiable_token_norm, layer_norm


def token_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    centered: bool,
    eps: float,
    released: bool,
    scale: float,
    k: float,
    detach_mean: bool,
    detach_std: bool,
) -> Tensor:
    """Return the norm of each token; arguments as of `reference.token`."""
    if released or detach_mean or detach_std:
        settings = (groups, centered, eps, released, scale, k, detach_mean, detach_std)
        return differentiable_token_norm(x, weight, bias, *settings)
    if centered and groups == 1 and scale == 1 and not k:
        return layer_norm(x, weight, bias, eps)
    y = _standardized(_converted(x, accumulation_dtype(x)), groups, centered, eps)
    if k:
        y = y * (scale - scale * k * y).detach()
    elif scale != 1:
        y = y * scale
    return _scaled_and_shifted(y, weight, bias, x.dtype)


def static_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor,
    groups: int,
    eps: float,
    floor: bool,
) -> Tensor:
    """Return the norm by given statistics; arguments as of `reference.static`."""
    dtype = accumulation_dtype(x)
    y = _converted(x, dtype)
    if groups:
        y = _standardized(y, groups, False, eps)
    if mean is not None:
        # Before the factor: a x + c cancels where |mean| >> std.
        y = y - _converted(mean, dtype)
    # One factor, of constants alone: exporters work it out beforehand.
    factor = reciprocal_root(_converted(var, dtype), eps, floor)
    if weight is not None:
        factor = factor * _converted(weight, dtype)
    return _scaled_and_shifted(y, factor, bias, x.dtype)


def _standardized(x: Tensor, groups: int, centered: bool, eps: float) -> Tensor:
    """Return (…, C) with each group of features by its own mean, if centered, and deviation."""
    size = num_features_of(x) // groups
    parts = x if groups == 1 else x.unflatten(-1, (groups, size))
    if centered:
        y = torch.nn.functional.layer_norm(parts, (size,), None, None, eps)
    else:
        y = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)
    return y if groups == 1 else y.flatten(-2)


def _scaled_and_shifted(
    y: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    if weight is not None:
        y = y * _converted(weight, y.dtype)
    if bias is not None:
        y = y + _converted(bias, y.dtype)
    return _converted(y, dtype)


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a type; a conversion to its own type would be an operator of the graph."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
