"""What kind of graph is being made of a call, if any."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm.ops.torch_private import are_transforms_active, in_forward_mode, is_tracing


def is_exported() -> bool:
    """Return whether the graph has to run without this library: torch.export, TorchScript."""
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    return is_tracing()


def num_features_of(x: Tensor) -> int:
    """Return the size of the last dimension, for TorchScript's tracer too a number.

    To that tracer sizes are operators of the graph, and what takes a number cannot take those.
    """
    if torch.compiler.is_compiling() or not is_tracing():
        return x.shape[-1]
    with warnings.catch_warnings():  # of a number in the trace, which is what is wanted
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        return int(x.shape[-1])


def is_transformed() -> bool:
    """Return whether this is inside a transform of torch.func, or forward-mode differentiation.

    Registered ops have no rules for those; forward mode would give zeros without a word.
    """
    if torch.compiler.is_compiling():
        return False
    return are_transforms_active() or in_forward_mode()


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
