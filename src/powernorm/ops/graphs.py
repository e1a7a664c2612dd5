"""What kind of graph is being made of a call, if any."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from powernorm.errors import InputError


def is_exported() -> bool:
    """Return whether the graph has to run without this library: torch.export, TorchScript."""
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    return torch._C._get_tracing_state() is not None


def num_features_of(x: Tensor) -> int:
    """Return the size of the last dimension, for TorchScript's tracer too a number.

    To that tracer sizes are operators of the graph, and what takes a number cannot take those.
    """
    state = None if torch.compiler.is_compiling() else torch._C._get_tracing_state()
    if state is None:
        return x.shape[-1]
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        return x.shape[-1]
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


def is_transformed() -> bool:
    """Return whether this is inside a transform of torch.func, or forward-mode differentiation.

    Registered ops have no rules for those; forward mode would give zeros without a word.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def refuse_transforms() -> None:
    """For what has no rules under transforms.

    Raises:
        InputError: inside one.
    """
    if is_transformed():
        raise InputError(
            "norms with batch statistics cannot be trained inside torch.func transforms or "
            "forward-mode differentiation: use norm.eval(), or a per-token norm"
        )
