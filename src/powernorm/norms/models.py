"""Functions over all norms of a model: RBN's penalty, accumulation, units of ν."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Literal

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.norms.arguments import check_model, check_number
from powernorm.norms.batch_statistics import BatchStatisticsNorm
from powernorm.norms.moving_average import MovingAverageBatchNorm
from powernorm.norms.power import PowerNorm
from powernorm.norms.regularized import RegularizedBatchNorm

Reduction = Literal["mean", "token_sum"]


def penalty(
    model: nn.Module, reduction: Reduction = "mean", num_tokens: int | Tensor | None = None
) -> Tensor:
    """Return the penalty of all RegularizedBatchNorm layers, in the units of the loss.

    λ of Wang et al. 2022 applies to a cross entropy *summed* over tokens. Added to a mean it has
    to be divided by the number of tokens: at 4,096 tokens λ = 60 is 0.015.

    The backward drops the terms of its forwards, and so does dropping a forward's result. A loop
    that skips a backward (because a loss is not finite) and still has that loss has to call
    `model.train()` before it continues, preferably once per step: that drops pending terms, which
    the next penalty would otherwise contain, NaN and graph included. `layer.forget_penalty()`
    drops those of a single layer.

    Args:
        model: any module; layers that appear twice count once, layers in evaluation mode and
            layers that the forward left out do not count.
        reduction: how the loss is reduced: `mean` over tokens (the usual trainer) or `token_sum`.
        num_tokens: number of tokens that the mean is taken over (of all processes), at least 1 (a
            tensor, whose value is not read, counts as 1 below that); needed for `mean`, not used
            for `token_sum`.

    Returns:
        0-d tensor to add to the loss, once per update; zero if the model has no such layer.

    Raises:
        InputError: `mean` without a valid num_tokens; no training-mode forward before; a forward
            inside reentrant activation checkpointing; more than 64 compiled forwards of a layer
            without a backward.
    """
    check_model(model)
    if reduction not in ("mean", "token_sum"):
        raise InputError(f"reduction is {reduction!r}, expected 'mean' or 'token_sum'")
    layers = [m for m in model.modules() if isinstance(m, RegularizedBatchNorm) and m.training]
    # A frozen layer in evaluation mode, or one that this forward left out, has none.
    terms = [layer.penalty() for layer in layers if layer.has_penalty]
    if not terms:
        if layers:
            layers[0].penalty()  # raises, unless its λ are 0
        return torch.zeros(())
    total = torch.stack([term.to(terms[0].device) for term in terms]).sum()
    if reduction == "token_sum":
        return total
    if num_tokens is None:
        raise InputError(
            "reduction='mean' needs num_tokens, the number of tokens that the loss is the mean "
            "of; for a loss summed over tokens pass reduction='token_sum'"
        )
    num_tokens = check_num_tokens(num_tokens)
    return total / (num_tokens.clamp(min=1) if isinstance(num_tokens, Tensor) else num_tokens)


def check_num_tokens(num_tokens: int | Tensor) -> int | Tensor:
    """Return a tensor unchecked (reading it would wait for the device), or a number ≥ 1.

    Raises:
        InputError: anything else.
    """
    given: object = num_tokens
    if isinstance(given, Tensor):
        return num_tokens
    is_number = isinstance(given, Real) and not isinstance(given, bool)
    if not is_number or not 1 <= num_tokens < float("inf"):
        raise InputError(
            f"num_tokens is {num_tokens!r}, expected a number of at least 1, or a tensor of one"
        )
    return num_tokens


@contextmanager
def accumulated_statistics(model: nn.Module) -> Iterator[None]:
    """Update running statistics once for all forwards and backwards inside, not once for each.

    For gradient accumulation: put the micro-batches of one update inside. They are normalized as
    without it, but the running statistics are updated by the moments of all their tokens together,
    and every warm-up counts one step. After an exception nothing is updated.

    Args:
        model: any module.

    Raises:
        InputError: no model; inside another such scope of a layer.

    Distributed:
        One exchange per layer at the end; all processes have to reach it.

    >>> norm = powernorm.BatchNorm(4)
    >>> with accumulated_statistics(norm):
    ...     for x in torch.randn(3, 8, 4):
    ...         y = norm(x)
    >>> int(norm.num_batches_tracked)
    1
    """
    check_model(model)
    layers = [module for module in model.modules() if isinstance(module, BatchStatisticsNorm)]
    if any(layer.is_holding for layer in layers):
        raise InputError("accumulated_statistics is open already: use one scope an update")
    for layer in layers:
        layer.hold_statistics()
    try:
        yield
    except BaseException:
        for layer in layers:
            layer.drop_statistics()
        raise
    for layer in layers:
        layer.release_statistics()


def rescale_backward_statistics(model: nn.Module, factor: float) -> None:
    """Multiply the running gradient statistics (ν) of all layers by a factor.

    ν is in units of the loss. Call this function when those units change: pass 2 when a loss scale
    doubles, pass 1/N when a loss that was a sum becomes a mean over N tokens.

    Args:
        model: any module.
        factor: new unit over old unit, a finite number above 0.

    Raises:
        InputError: no model; a factor that is not finite or not above 0.
    """
    check_model(model)
    check_number("factor", factor, above=0)
    for module in model.modules():
        if isinstance(module, PowerNorm | MovingAverageBatchNorm):
            module.rescale_backward_statistics(factor)
