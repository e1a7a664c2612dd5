"""Registration of ops with `torch.library`: schema, implementation, fake and autograd rule.

Each op is a pure function of tensors that returns its output *and* the statistics that it used;
its backward reads saved outputs only, never a buffer. That is what keeps gradients right under
`torch.compile`, where a buffer that the graph overwrites would be read too late. The optional
`carrier` is a leaf tensor that takes no part in the result: the backward returns the sums that
move the running statistics as its "gradient" (see `powernorm.norms.carrier`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from powernorm.ops.reference.arrays import accumulation_dtype

_LIBRARY = torch.library.Library("powernorm", "DEF")


def define(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register an op.

    Args:
        schema: name, arguments and results in torch's notation.
        function: computes it on every device.
        fake: gives results of the right shapes without computing.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"powernorm::{name}", fake, lib=_LIBRARY)


def define_gradient(
    name: str, backward: Callable[..., Any], setup: Callable[..., Any] | None
) -> None:
    """Register an op's autograd rule; arguments as `torch.library.register_autograd`."""
    torch.library.register_autograd(
        f"powernorm::{name}", backward, setup_context=setup, lib=_LIBRARY
    )


def raise_on_double_backward(*_: object) -> NoReturn:
    """The autograd rule of a backward that has no derivative."""
    raise RuntimeError(
        "double backward through a powernorm batch-statistics norm is not available: drop "
        "create_graph=True, or use a per-token norm (ln, ln-simple, rms, gn) in this model"
    )


def features_like(x: Tensor, *leading: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty (*leading, C), in the accumulation type unless told otherwise."""
    return x.new_empty((*leading, x.shape[-1]), dtype=dtype or accumulation_dtype(x))


def dense_like(x: Tensor) -> Tensor:
    """An empty tensor of x's shape, contiguous."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def scales_like(x: Tensor, groups: int) -> Tensor:
    """An empty (tokens, groups), or nothing without groups."""
    if not groups:
        return x.new_empty(0, dtype=accumulation_dtype(x))
    return x.new_empty((x.numel() // x.shape[-1], groups), dtype=accumulation_dtype(x))


def total_like(x: Tensor, residual: Tensor | None) -> Tensor:
    """An empty sum with the residual, or nothing without one."""
    return x.new_empty(0) if residual is None else dense_like(x)
