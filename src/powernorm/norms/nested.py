"""Nested tensors: a batch of sequences of different lengths, packed without padding.

A jagged nested tensor (batch, j*, features) stores its tokens one after the other. The norms use
them as they are, and their output has the same structure. There is no padding, so masks of scopes
are ignored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from powernorm.errors import InputError


def packed_tokens(x: Tensor) -> Tensor:
    """Return the tokens of a jagged nested tensor, (tokens, …, C) or all of them, (tokens, C).

    The latter if it has holes: memory between the sequences that belongs to none, as in a view of
    a padded tensor.
    """
    values = x.values()
    taken = _taken(x)
    return values if taken is None else values[taken]


def nested_like(tokens: Tensor, x: Tensor) -> Tensor:
    """Return tokens of `packed_tokens` as a nested tensor with the structure of x.

    The two can be added. Holes hold 0.
    """
    taken = _taken(x)
    if taken is not None:
        tokens = tokens.new_zeros(x.values().shape).index_put((taken,), tokens)
    nested: Tensor = torch.nested.nested_tensor_from_jagged(
        tokens,
        *_structure(x),
        jagged_dim=_ragged_dim(x),
        # Known already, or None: computing them would need a device sync.
        min_seqlen=getattr(x, "_maybe_min_seqlen", None),
        max_seqlen=getattr(x, "_maybe_max_seqlen", None),
    )
    return nested


def _taken(x: Tensor) -> Tensor | None:
    """Return which positions of the memory belong to a sequence; None if there are no holes."""
    offsets, lengths = _structure(x)
    if lengths is None:
        return None
    shape = x.values().shape[:-1]
    dim = _ragged_dim(x) - 1
    starts = offsets[: lengths.shape[0]]
    position = torch.arange(shape[dim], device=x.device)
    row = torch.searchsorted(starts, position, right=True) - 1
    # A position before the first sequence has the row -1.
    taken = (row >= 0) & (position < (starts + lengths)[row])
    return taken.reshape([-1 if at == dim else 1 for at in range(len(shape))]).expand(shape)


def check_nested(name: str, x: Tensor, feature_dim: int) -> None:
    """Raise an InputError unless a nested tensor has its features in the last dimension, all alike.

    Args:
        name: class of the norm.
        x: a nested tensor.
        feature_dim: the dimension of the features that the norm was built with.
    """
    if x.layout is not torch.jagged:
        raise InputError(
            f"{name} got a nested tensor of layout {x.layout}, expected torch.jagged: build it by "
            "torch.nested.nested_tensor(sequences, layout=torch.jagged)"
        )
    if feature_dim != -1:
        raise InputError(
            f"{name} has feature_dim={feature_dim} and got a nested tensor, whose features have to "
            "be in the last dimension: build the layer with feature_dim=-1"
        )
    if _ragged_dim(x) == x.ndim - 1:
        raise InputError(
            f"{name} got a nested tensor of shape {tuple(x.shape)}, whose last dimension differs "
            "between the sequences, expected the features there: transpose it to (batch, j, C)"
        )


def check_beside_nested(
    name: str, x: Tensor, padding_mask: Tensor | None, residual: Tensor | None
) -> None:
    """Raise an InputError unless there is no mask and the residual has the input's structure."""
    if padding_mask is not None:
        raise InputError(
            f"{name} got a nested tensor and a padding_mask of shape {tuple(padding_mask.shape)}: "
            "a nested tensor holds no padding, leave the mask out"
        )
    if residual is not None and not (residual.is_nested and residual.shape == x.shape):
        raise InputError(
            f"residual has shape {_shape(residual)}, expected a nested tensor of the structure of "
            f"the input {_shape(x)}: build both from the same offsets, as "
            "torch.nested.nested_tensor_from_jagged(values, x.offsets()) does"
        )


def _shape(x: Tensor) -> tuple[object, ...] | str:
    strided = x.is_nested and x.layout is not torch.jagged
    return "of the layout torch.strided" if strided else tuple(x.shape)


def _structure(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the offsets of the sequences, and their lengths if there are holes."""
    nested: Any = x
    return nested.offsets(), nested.lengths()


def _ragged_dim(x: Tensor) -> int:
    dim: int | None = getattr(x, "_ragged_idx", None)
    # The ragged dimension's size is a symbolic integer.
    return next(at for at, n in enumerate(x.shape) if type(n) is not int) if dim is None else dim
