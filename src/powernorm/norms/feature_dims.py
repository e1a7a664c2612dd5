"""The dimension of an input that holds the features: there and back, copied only where needed."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from powernorm.errors import InputError

LAST = -1
"""The dimension that the layers compute over."""


class Call(NamedTuple):
    """The arguments of a norm's forward."""

    x: Tensor
    padding_mask: Tensor | None
    residual: Tensor | None


Normalized = Tensor | tuple[Tensor, Tensor]
"""What a forward returns: y, or (y, x + residual) where a residual was given."""


def answer(result: tuple[Tensor, Tensor | None], residual: Tensor | None) -> Normalized:
    """A forward's answer from (y, the sum with the residual)."""
    y, total = result
    return y if residual is None else (y, cast(Tensor, total))


def check_feature_dim(feature_dim: int) -> int:
    """A dimension, or an InputError; whether an input has it shows in the forward."""
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
    """Does a tensor have this dimension?"""
    return -x.ndim <= dim < x.ndim


def features_last(x: Tensor, dim: int) -> Tensor:
    """A view of x with the features in the last dimension."""
    return x if dim == LAST else x.movedim(dim, LAST)


def features_back(x: Tensor, dim: int) -> Tensor:
    """A view of what has the features last with the features in a dimension."""
    return x if dim == LAST else x.movedim(LAST, dim)


def shape_without(shape: torch.Size, dim: int) -> tuple[int, ...]:
    """Shape of the positions: all dimensions but that of the features."""
    index = dim % len(shape)
    return (*shape[:index], *shape[index + 1 :])


def over_dimension(
    normalize: Callable[[Call], Normalized], call: Call, dim: int, is_pointwise: bool
) -> Normalized:
    """Normalize over a dimension by what normalizes over the last one.

    Channels-last input is contiguous once its features are moved last, so that nothing is copied;
    other input is copied in and the results out. The results lie in memory as the input does.

    Args:
        normalize: the layer's work, (..., C) in and out.
        call: input, mask and residual, checked.
        dim: the dimension of the features.
        is_pointwise: does the layer work as well, in place as it were, on a view that is not
            contiguous?
    """
    x, mask, residual = call
    inputs = features_last(x, dim)
    others = None if residual is None else features_last(residual, dim)
    if not is_pointwise:
        # Here and not in the ops: so the gradient that comes back is of a contiguous input, too.
        inputs = inputs.contiguous()
        others = None if others is None else others.contiguous()
    result = normalize(Call(inputs, mask, others))
    if isinstance(result, tuple):
        y, total = result
        return _laid_out(y, x, dim), _laid_out(total, x, dim)
    return _laid_out(result, x, dim)


def _laid_out(y: Tensor, x: Tensor, dim: int) -> Tensor:
    """What has the features last in the shape and memory layout of x; no copy where it fits."""
    y = features_back(y, dim)
    if x.is_contiguous():
        return y.contiguous()
    if features_last(x, dim).is_contiguous():
        return y
    # Dense, in the order of x's dimensions in memory: what torch's own layers give.
    strides = x.stride()
    order = sorted(range(x.ndim), key=lambda d: -strides[d])
    places = [order.index(d) for d in range(x.ndim)]
    return y.permute(order).contiguous().permute(places)
