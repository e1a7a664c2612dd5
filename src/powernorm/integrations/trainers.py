"""Parts for trainers of other libraries: RBN's penalty in units of a loss, log entries."""

import math
from collections.abc import Iterable
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from powernorm.diagnosis import NormRow
from powernorm.errors import InputError
from powernorm.norms import RegularizedBatchNorm, penalty
from powernorm.norms.models import Reduction, check_num_tokens
from powernorm.ops.processes import all_reduce_sum

IGNORED_LABEL: Final = -100
"""Label of positions that a loss ignores, in torch and Hugging Face."""


def count_labels(labels: Tensor) -> Tensor:
    """Return the number of labels that count in a loss, 0-d."""
    return labels.ne(IGNORED_LABEL).sum()


def penalized_layers(model: nn.Module) -> list[RegularizedBatchNorm]:
    """Return the layers in training mode that have a penalty."""
    return [m for m in model.modules() if isinstance(m, RegularizedBatchNorm) and m.training]


def process_penalty(
    model: nn.Module, reduction: Reduction, num_tokens: int | Tensor | None
) -> Tensor | None:
    """Return the term that a process adds to its loss so that an update has the penalty once.

    A data-parallel trainer averages gradients over W processes. Layers that share statistics have
    one common penalty P. Each process computes it, and the exchange of the statistics sums its
    gradient over the processes: each adds P/W to a loss that is a sum over its tokens, and
    P/(tokens of all processes) to one that is a mean over its tokens. If layers do not share
    statistics, each process adds its own penalty to its own loss, as in one process.

    Args:
        model: after a training-mode forward.
        reduction: reduction of this process's loss.
        num_tokens: number of tokens of this process that its mean is taken over; None for
            `token_sum`.

    Returns:
        0-d; None if no RegularizedBatchNorm is in training mode.

    Raises:
        InputError: as in `powernorm.penalty`, or layers of several process groups.

    Distributed:
        Exchanges one number if layers share statistics.
    """
    layers = penalized_layers(model)
    if not layers:
        return None
    groups = {layer.group_name for layer in layers}
    if len(groups) > 1:
        raise InputError(
            "the RegularizedBatchNorm layers belong to several process groups, so that there is no "
            "common number of tokens: give all of them the same `process_group` and `sync`"
        )
    group, device = groups.pop(), layers[0].running_mean.device
    if isinstance(num_tokens, Tensor) and not num_tokens.is_cpu:
        num_tokens = num_tokens.to(device)  # a model on several devices
    if not group:
        return penalty(model, reduction, num_tokens)
    own = 1 if reduction == "token_sum" else check_num_tokens(cast(int | Tensor, num_tokens))
    everywhere = all_reduce_sum(torch.as_tensor(own, dtype=torch.float64, device=device), group)
    total = penalty(model, "token_sum")
    return total / everywhere.clamp(min=1).to(total)


def loss_scale(scaler: Any, device: torch.device) -> float | Tensor:
    """Return the factor of the next loss, as a tensor, which avoids waiting for the device.

    Args:
        scaler: a GradScaler, or None.
        device: device of the loss.

    Returns:
        0-d; 1.0 without an enabled scaler.
    """
    if scaler is None or not scaler.is_enabled():
        return 1.0
    scale: Tensor = scaler.scale(torch.ones((), device=device))
    return scale


def log_entries(rows: Iterable[NormRow]) -> dict[str, float]:
    """Return a monitor's rows as `norm/<layer>/<quantity>`, finite values only.

    Loggers and their plots cannot show other values; other cells count non-finite values.
    """
    return {
        f"norm/{row['layer']}/{quantity}": float(value)
        for row in rows
        for quantity, value in row.items()
        if isinstance(value, int | float) and quantity != "step" and math.isfinite(value)
    }
