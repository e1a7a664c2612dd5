"""Functions over all norms of a model: RBN's penalty, the step, the scale of the loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.norms.arguments import check_choice, check_model, check_number, shown
from powernorm.norms.carrier import GradientMomentNorm
from powernorm.norms.regularized import RegularizedBatchNorm
from powernorm.norms.stateful import StatefulNorm

Reduction = Literal["mean", "token_sum"]


def penalty(
    model: nn.Module, reduction: Reduction = "mean", num_tokens: int | Tensor | None = None
) -> Tensor:
    """Return the penalty of all RegularizedBatchNorm layers, in the units of the loss.

    λ of Wang et al. 2022 applies to a cross entropy *summed* over tokens. For a mean it has to be
    divided by the number of tokens: at 4,096 tokens λ = 60 is 0.015.

    A backward drops the terms of its forwards, and so does dropping a forward's result. If a loop
    skips a backward (because a loss is not finite) but keeps that loss, use `training_step`, or
    call `model.train()` before the next step: both drop pending terms, which the next penalty would
    otherwise contain, NaN and graph included. `layer.forget_penalty()` drops those of one layer.

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
    check_choice("reduction", reduction, get_args(Reduction))
    layers = [m for m in model.modules() if isinstance(m, RegularizedBatchNorm) and m.training]
    # A frozen layer in evaluation mode, or one that this forward skipped, has none.
    terms = [layer.penalty() for layer in layers if layer.has_penalty]
    if not terms:
        if layers:
            layers[0].penalty()  # raises an error, unless its λ are 0
        return torch.zeros((), dtype=torch.float32, device="cpu")
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


class TrainingStep:
    """An open `training_step`."""

    def __init__(self) -> None:
        self.is_skipped = False
        """Whether `skip` was called."""

    def skip(self) -> None:
        """Discard the statistics of this step, as the optimizer's step is skipped.

        All processes have to skip the step, or none.
        """
        self.is_skipped = True


@contextmanager
def training_step(model: nn.Module) -> Iterator[TrainingStep]:
    """Make one update of the running statistics from all forwards and backwards inside.

    Put the micro-batches of one optimizer step inside, and the code that may skip it. The
    micro-batches are normalized as usual, but every norm updates its running statistics once, at
    the end, by the moments of all their tokens together, and every warm-up counts one step. After
    `skip()`, as for a loss that is not finite or a step that a GradScaler skips, and after an
    exception, no statistic has changed, whether the norm updates in the forward or in the backward.
    Pending penalties of RegularizedBatchNorm are dropped before and after.

    Args:
        model: any module.

    Raises:
        InputError: `model` is not a module, or such a scope is already open for one of its layers.

    Distributed:
        One exchange per layer at the end; all processes have to reach it, and to agree on a skip.

    >>> norm = powernorm.BatchNorm(4)
    >>> for x in torch.randn(3, 8, 4):
    ...     with training_step(norm) as step:
    ...         loss = sum(norm(part).square().mean() for part in x.chunk(2))
    ...         if not loss.isfinite():
    ...             step.skip()
    >>> int(norm.num_batches_tracked)
    3
    """
    check_model(model)
    layers = [module for module in model.modules() if isinstance(module, StatefulNorm)]
    if any(layer.is_holding for layer in layers):
        raise InputError("training_step is open already: use one scope per update")
    step = TrainingStep()
    forget_penalties(model)
    for layer in layers:
        layer.hold_statistics()
    try:
        yield step
    except BaseException:
        step.skip()
        raise
    finally:
        forget_penalties(model)
        for layer in layers:
            if step.is_skipped:
                layer.drop_statistics()
            else:
                layer.release_statistics()


def forget_penalties(model: nn.Module) -> None:
    """Drop the pending penalties of a model, as for a batch without a backward."""
    for module in model.modules():
        if isinstance(module, RegularizedBatchNorm):
            module.forget_penalty()


def set_loss_scale(
    model: nn.Module, scale: float = 1.0, *, scaler: torch.amp.GradScaler | None = None
) -> None:
    """Set the factor by which the losses of all following backwards are multiplied.

    PowerNorm, MABN and UnifiedNorm keep moving averages of the gradient (ν), which are in units of
    the loss. A factor that is constant from the first step on needs no call: a loss divided by the
    number of micro-batches, a sum in place of a mean, a number of processes whose gradients are
    averaged. It multiplies every gradient of the layer and changes nothing else. Call this if the
    factor changes during training:

    - for a GradScaler, after creating it and moving the model to its device: `set_loss_scale(model,
      scaler=scaler)`. The layers then follow it, without a device sync;
    - if the number of micro-batches or processes changes, by which each loss is divided, or a sum
      becomes a mean: the new factor, relative to the loss of `scale=1`.

    Buffers then hold ν in units of the loss without the factor, so that a checkpoint does not
    depend on it. Powers of two are exact.

    Args:
        model: any module; layers without such statistics ignore it.
        scale: number above 0 by which the loss is multiplied.
        scaler: a GradScaler that also scales the loss.

    Raises:
        InputError: `model` is not a module; `scale` is not finite or not above 0; `scaler` is no
            GradScaler.

    >>> model = torch.nn.Sequential(powernorm.PowerNorm(4))
    >>> set_loss_scale(model, 1 / 8)
    """
    check_model(model)
    check_number("scale", scale, above=0)
    layers = [module for module in model.modules() if isinstance(module, GradientMomentNorm)]
    live = None
    if scaler is not None and layers:
        live = _live_scale(scaler, layers[0].num_batches_tracked.device)
    for layer in layers:
        layer.set_loss_scale(scale, live)


def _live_scale(scaler: torch.amp.GradScaler, device: torch.device) -> Tensor | None:
    """Return the tensor that holds a scaler's scale, which the scaler updates in place."""
    if not isinstance(scaler, torch.amp.GradScaler):
        raise InputError(f"scaler is {shown(scaler)}, expected a torch.amp.GradScaler")
    if not scaler.is_enabled():
        return None
    scaler.scale(torch.ones((), device=device))  # creates the tensor if there is none yet
    scale = getattr(scaler, "_scale", None)
    if not isinstance(scale, Tensor):
        raise InputError(
            f"the GradScaler of torch {torch.__version__} does not expose the tensor of its scale: "
            "call set_loss_scale(model, scaler.get_scale()) before every backward"
        )
    return scale
