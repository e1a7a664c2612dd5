"""Whether a call is compiled, exported or traced, and the checks that graphs need."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm.ops.torch_private import (
    are_transforms_active,
    in_forward_mode,
    is_exporting,
    is_tracing,
)


def is_exported() -> bool:
    """Return whether the graph has to run without this library: torch.export and TorchScript."""
    if torch.compiler.is_compiling():
        return is_exporting()
    return is_tracing()


def is_traced() -> bool:
    """Return whether the call is recorded as a graph that will run on other values."""
    return torch.compiler.is_compiling() or is_tracing()


def shape_of(x: Tensor) -> torch.Size:
    """Return the shape as numbers, under TorchScript's tracer too.

    That tracer turns sizes into operators of the graph, which functions that need numbers reject.
    """
    if torch.compiler.is_compiling() or not is_tracing():
        return x.shape
    with warnings.catch_warnings():  # about numbers in the trace, which are intended here
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        return torch.Size(int(size) for size in x.shape)


def num_features_of(x: Tensor) -> int:
    """Return the size of the last dimension as a number; see `shape_of`."""
    return shape_of(x)[-1]


def is_known(condition: bool | torch.SymBool) -> bool:
    """Return whether a condition on sizes holds for all sizes that the graph is made for.

    Compilers and torch.export represent sizes by symbols. Python's own comparison would restrict
    the graph to the example's outcome: `batch != 80` would forbid a batch of 80.
    """
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def same_sizes(one: Sequence[int], other: Sequence[int]) -> bool | None:
    """Compare sizes; return None if they are symbols of a graph that may or may not be equal."""
    if not torch.compiler.is_compiling():
        return tuple(one) == tuple(other)
    if len(one) != len(other):
        return False
    pairs = list(zip(one, other, strict=True))
    if all(is_known(size == wanted) for size, wanted in pairs):
        return True
    return False if any(is_known(size != wanted) for size, wanted in pairs) else None


def is_transformed() -> bool:
    """Return whether this is inside a transform of torch.func, or forward-mode differentiation.

    Registered ops have no rules for those; forward mode would silently give zeros.
    """
    if torch.compiler.is_compiling():
        return False
    return are_transforms_active() or in_forward_mode()


def refuse_transforms() -> None:
    """Refuse a call inside a transform of torch.func, for ops that have no rules for it.

    Raises:
        InputError: the call is inside a transform.
    """
    if is_transformed():
        raise InputError(
            "norms with batch statistics cannot be trained inside torch.func transforms or "
            "forward-mode differentiation: use norm.eval(), or a per-token norm; train the members "
            "of an ensemble one after the other"
        )
