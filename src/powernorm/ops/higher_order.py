"""Gradients that are differentiable themselves, for second derivatives."""

from __future__ import annotations

import torch
from torch import Tensor

from powernorm.ops.operators import Gradients


def without_lost(inputs: Tensor, grad_y: Tensor) -> Tensor:
    """Return the inputs, with 0 in tokens that are not finite and receive no gradient.

    Autograd would multiply these by the gradient's 0, which gives NaN.
    """
    lost = ~inputs.isfinite().all(-1, keepdim=True) & (grad_y == 0).all(-1, keepdim=True)
    return torch.where(lost, 0.0, inputs)


def starting_points(
    inputs: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return views of the tensors, to differentiate with respect to.

    A gradient with respect to the tensors themselves would also run through earlier operations,
    such as a previous use of the same γ, and with a residual through this node without end.
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
    """Return differentiable gradients with respect to the tensors of `starting_points`."""
    wanted = [s for s in sources if s is not None and s.requires_grad]
    found = iter(torch.autograd.grad(y, wanted, grad_y, create_graph=True, allow_unused=True))
    grad_x, grad_weight, grad_bias = (
        next(found) if s is not None and s.requires_grad else None for s in sources
    )
    if grad_total is not None:
        grad_x = grad_total if grad_x is None else grad_x + grad_total
    return Gradients(grad_x, grad_weight, grad_bias)
