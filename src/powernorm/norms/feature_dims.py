"""Moving the features of an input to the last dimension and back, copying only if needed."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from powernorm.errors import InputError

LAST = -1
"""The dimension that the layers compute over."""


Normalized = Tensor | tuple[Tensor, Tensor]
"""Return value of a forward: y, or (y, x + residual) if a residual was given."""


def answer(result: tuple[Tensor, Tensor | None], residual: Tensor | None) -> Normalized:
    """Return a forward's return value from (y, the sum with the residual)."""
    y, total = result
    return y if residual is None else (y, cast(Tensor, total))


def check_feature_dim(feature_dim: int) -> int:
    """Return a dimension, or raise an InputError; the forward checks if an input has it."""
    try:
        dim = operator.index(feature_dim)
    except TypeError:
        dim = None
    if dim is None or isinstance(feature_dim, bool):
        raise InputError(
            f"feature_dim is {feature_dim!r}, expected an integer: 1 for (N, C, H, W) and "
            "(N, C, L), -1 for features last"
        )
    return dim


def has_dim(x: Tensor, dim: int) -> bool:
    """Return whether a tensor has this dimension."""
    return -x.ndim <= dim < x.ndim


def features_last(x: Tensor, dim: int) -> Tensor:
    """Return a view of x with the features in the last dimension."""
    return x if dim == LAST else x.movedim(_from_the_start(dim, x), x.ndim - 1)


def features_back(x: Tensor, dim: int) -> Tensor:
    """Return a view of a tensor with the features last that has them in dimension `dim`."""
    return x if dim == LAST else x.movedim(x.ndim - 1, _from_the_start(dim, x))


def _from_the_start(dim: int, x: Tensor) -> int:
    # TorchScript's exporter to ONNX writes negative dimensions into its transposition.
    return dim if dim >= 0 else dim + x.ndim


def shape_without(shape: torch.Size, dim: int) -> tuple[int, ...]:
    """Return the shape of the positions: all dimensions but that of the features."""
    index = dim % len(shape)
    return (*shape[:index], *shape[index + 1 :])


def over_dimension(
    normalize: Callable[[Tensor, Any, Any], Normalized],
    x: Tensor,
    padding_mask: Tensor | None,
    residual: Tensor | None,
    dim: int,
    is_pointwise: bool,
) -> Normalized:
    """Normalize over a dimension with a function that normalizes over the last one.

    Channels-last input is contiguous once its features are moved last, so that nothing is copied;
    other input is copied before, and the results after. The results have the input's memory layout.

    Args:
        normalize: the layer's computation, (..., C) in and out.
        x: the input, checked as the next two.
        padding_mask: its mask.
        residual: added to the input first.
        dim: the dimension of the features.
        is_pointwise: whether the layer also works on a view that is not contiguous.
    """
    inputs = features_last(x, dim)
    others = None if residual is None else features_last(residual, dim)
    if not is_pointwise:
        # Here and not in the ops, so that the incoming gradient is that of a contiguous input, too.
        inputs = inputs.contiguous()
        others = None if others is None else others.contiguous()
    result = normalize(inputs, padding_mask, others)
    if isinstance(result, tuple):
        y, total = result
        return _laid_out(y, x, dim), _laid_out(total, x, dim)
    return _laid_out(result, x, dim)


def _laid_out(y: Tensor, x: Tensor, dim: int) -> Tensor:
    """Return y, features last, in the shape and memory layout of x; without a copy if it fits."""
    y = features_back(y, dim)
    if x.is_contiguous():
        return y.contiguous()
    if features_last(x, dim).is_contiguous():
        return y
    # Dense, in the order of x's dimensions in memory, as torch's own layers return. Not by sorting
    # the strides, which a compiler with dynamic shapes does not know.
    return torch.empty_like(x, dtype=y.dtype).copy_(y)
