"""Gradients of tensors that a result does not depend on: a norm's carrier, unused parameters."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from powernorm.ops.operators import PlainFunction, is_plain


class _Attached(PlainFunction):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, _carrier: Tensor | None, sums: Tensor, *resting: Tensor
    ) -> Tensor:
        ctx.save_for_backward(sums, *resting)
        # Detached: autograd forbids in-place changes of a view that a custom function returns.
        return y.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sums, *resting = ctx.saved_tensors
        carried = sums if ctx.needs_input_grad[1] else None
        return grad, carried, None, *(torch.zeros_like(parameter) for parameter in resting)


def attach(y: Tensor, carrier: Tensor | None, sums: Tensor, *resting: Tensor | None) -> Tensor:
    """Return y, and let its backward also give the carrier its sums and unused parameters zeros.

    Parameters of a branch that is off get zeros, because data-parallel training waits for a
    gradient of each parameter.

    Args:
        y: the result of a norm.
        carrier: a leaf of the shape of the sums; see `powernorm.norms.carrier`.
        sums: the carrier's gradient; they have no gradients of their own.
        resting: parameters that y does not depend on.
    """
    waiting = [one for one in resting if one is not None and one.requires_grad]
    if not torch.is_grad_enabled() or (carrier is None and not waiting):
        return y
    tensors = y, *waiting
    apply = _Attached.apply_plain if is_plain(*tensors) else _Attached.apply
    return cast(Tensor, apply(y, carrier, sums, *waiting))
