"""Which way a call goes: straight to the kernels, through torch's dispatcher, or in plain torch."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from powernorm.errors import InputError

PLAIN_TYPES: Final = (Tensor, nn.Parameter)


def is_plain(*tensors: Tensor | None) -> bool:
    """Are these ordinary tensors in eager mode, with nothing that records or replaces ops?

    The dispatcher costs about as much as a small norm itself. Compilers, export, tracers, dispatch
    modes and tensor subclasses need it, and get it.
    """
    for tensor in tensors:
        if tensor is not None and type(tensor) not in PLAIN_TYPES:
            return False
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
    )


def is_exported() -> bool:
    """Is a graph being made that has to run without this library: torch.export, TorchScript?"""
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
    """Is this inside a transform of torch.func, or forward-mode differentiation?

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
