"""Gradients with a graph of their own, for derivatives of the derivative."""

from __future__ import annotations

import torch
from torch import Tensor

from powernorm.ops.operators import Gradients


def without_lost(inputs: Tensor, grad_y: Tensor) -> Tensor:
    """Return the inputs, but 0 in tokens that are not finite and that no gradient arrives at.

    Autograd would multiply them by that 0, and give NaN.
    """
    lost = ~inputs.isfinite().all(-1, keepdim=True) & (grad_y == 0).all(-1, keepdim=True)
    return torch.where(lost, 0.0, inputs)


def starting_points(
    inputs: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the same tensors as starting points of their own.

    With respect to the tensors themselves a gradient would also run through what came before, such
    as an earlier use of the same γ, and with a residual through this very node without an end.
    """
    return (
        inputs.view_as(inputs),
        None if weight is None else weight.view_as(weight),
        None if bias is None else bias.view_as(bias),
    )


def differentiate(
    y: Tensor,
    sources: tuple[Tensor | None, Tensor | None, Tensor | None],
    grad_y: Tensor,
    grad_total: Tensor | None,
) -> Gradients:
    """Return the gradients of `starting_points` with a graph of their own."""
    wanted = [s for s in sources if s is not None and s.requires_grad]
    found = iter(torch.autograd.grad(y, wanted, grad_y, create_graph=True, allow_unused=True))
    grad_x, grad_weight, grad_bias = (
        next(found) if s is not None and s.requires_grad else None for s in sources
    )
    if grad_total is not None:
        grad_x = grad_total if grad_x is None else grad_x + grad_total
    return Gradients(grad_x, grad_weight, grad_bias)
