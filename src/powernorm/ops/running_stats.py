"""In-place updates of running statistics from the sums over a batch.

The sums of a centered norm have the rows n, Σx, M2 (squared deviations from the mean of this use)
and n μ² (of that mean). They can be added up, as autograd does over the uses of a shared layer,
and still a single use keeps its variance at any mean: it is M2/n, in which no large numbers cancel.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from powernorm.ops.moments import merge_moments
from powernorm.ops.processes import all_gather, all_reduce_sum

_ROUNDING: Final = 32 * torch.finfo(torch.float64).eps
"""Share of Σ n μ² below which the variance between uses is rounding error: 0 for a single use."""


class Average(NamedTuple):
    """The plain average of batches, until a batch's weight in it would fall below `least`."""

    least: float = 0.0
    """Smallest weight of a batch; 0 for the plain average of all."""
    first: int = 1
    """Number of the first batch of the average, counted from 1."""


Momentum = float | Average
"""Weight of a batch in running statistics."""
Move = tuple[Tensor, Tensor, Momentum]
"""(buffer, new value, weight of the new value)"""


def next_weight(
    momentum: Momentum, num_batches_tracked: Tensor, num_nonfinite_batches: Tensor
) -> float | Tensor:
    """Return the weight of the next batch; 0-d float64 for an average, without a host sync.

    Excluded batches do not count, or the initial value would stay in the average.
    """
    if not isinstance(momentum, Average):
        return momentum
    number = num_batches_tracked + 2 - momentum.first - num_nonfinite_batches
    return (1 / number.clamp(min=1).double()).clamp(min=momentum.least)


def mixed(old: Tensor, new: Tensor, weight: float | Tensor) -> Tensor:
    """Return `(1 - w) old + w new` as `torch.lerp` computes it, in the type of `old`.

    `old + w (new - old)` would lose a new value that is small compared with the old, even at w = 1.
    """
    if isinstance(weight, Tensor):
        weight = weight.to(old.dtype)
    return torch.lerp(old, new.to(old.dtype), weight)


def move_buffers(
    num_batches_tracked: Tensor,
    num_nonfinite_batches: Tensor,
    present: Tensor,
    *moves: Move,
) -> None:
    """Move buffers toward new values, if these are finite, and count batches.

    Args:
        num_batches_tracked: 0-d int64; increased by one if `present`.
        num_nonfinite_batches: 0-d int64; increased by one if a value was not finite.
        present: 0-d bool; False changes nothing (no valid token, or a recomputation).
        moves: (buffer, new value, weight) of each buffer.
    """
    nonfinite = torch.zeros_like(present)
    for buffer, value, momentum in moves:
        weight = next_weight(momentum, num_batches_tracked, num_nonfinite_batches)
        moved = mixed(buffer, value, weight)
        finite = torch.isfinite(value) & torch.isfinite(moved)
        buffer.copy_(torch.where(finite & present, moved, buffer))
        nonfinite = nonfinite | ~finite.all()
    # In place, because rebinding fails in a compiled and checkpointed region.
    num_batches_tracked.add_(present)
    num_nonfinite_batches.add_(present & nonfinite)


def unbiased(var: Tensor, count: Tensor) -> Tensor:
    """Return the variance divided by M - 1, or by M if M = 1."""
    return var * (count / (count - 1).clamp(min=1))


def centered_sums(count: Tensor, mean: Tensor, squares: Tensor) -> Tensor:
    """Return the rows n, Σx, M2 and n μ² of a batch, (4, C) float64.

    Args:
        count: number of tokens, (C,) or 0-d.
        mean: (C,).
        squares: sum of squared deviations from it, (C,).
    """
    count, mean = count.double().expand_as(mean), mean.double()
    total = mean * count
    return torch.stack([count, total, squares.double(), mean * total], dim=-2)


def centered_moments(sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (count, mean, sum of squared deviations from it) of rows that may be sums of several.

    Args:
        sums: (..., 4, C) of `centered_sums`.
    """
    count, total, within, raised = sums.unbind(-2)
    mean = total / count.clamp(min=1)
    between = raised - mean * total
    return count, mean, within + torch.where(between > _ROUNDING * raised, between, 0.0)


def merge_sums(parts: Tensor) -> Tensor:
    """Merge the rows of several batches into those of one: (parts, 4, C) to (4, C)."""
    return centered_sums(*merge_moments(*centered_moments(parts)))


def reduce_sums(sums: Tensor, centered: bool, group_name: str) -> Tensor:
    """Return the sums of all processes of a group; one collective, none for the empty name.

    Args:
        sums: the sums of this process; `centered_sums` for a centered norm.
        centered: whether the norm subtracts a mean.
        group_name: process group of `processes.group_name_of`.
    """
    if not group_name:
        return sums
    return (
        merge_sums(all_gather(sums, group_name)) if centered else all_reduce_sum(sums, group_name)
    )


class Update:
    """One update of running statistics: the buffers, and the weight of the batch.

    A layer keeps it from step to step, so that a backend prepares it once.

    Attributes:
        buffers: float32 or float64, (C,) each; the last two are 0-d int64, the number of batches
            with a token, and of those among them with a feature that was not finite.
        momentum: weight of the batch.
        native: the update as a backend has prepared it.
    """

    __slots__ = ("buffers", "momentum", "native")

    def __init__(self, buffers: tuple[Tensor, ...], momentum: Momentum) -> None:
        self.buffers = buffers
        self.momentum = momentum
        self.native: Any = None


def memory_of(*buffers: Tensor) -> list[Any]:
    """Return the addresses and sizes that must stay the same for buffers used by address."""
    return [
        (buffer.data_ptr(), buffer.dtype, buffer.numel(), buffer.is_contiguous())
        for buffer in buffers
    ]


class CenteredUpdate(Update):
    """Update of a running mean and variance by the sums of `centered_sums`.

    Attributes:
        unbiased: divide the variance by M - 1.
    """

    __slots__ = ("unbiased",)

    def __init__(self, buffers: tuple[Tensor, ...], momentum: Momentum, unbiased: bool) -> None:
        super().__init__(buffers, momentum)
        self.unbiased = unbiased


class UncenteredUpdate(Update):
    """Update of a running ψ² by n and Σx², (2, C) float64."""

    __slots__ = ()


class PowerUpdate(Update):
    """Update of PowerNorm's ψ² and ν (Shen et al. 2020, eq. 13).

    The sums are n, Σx², n of the gradient sums, Σx̂², Σ g x̂, (5, C) float64. The momentum is that
    of ψ², an average in the warm-up.

    Attributes:
        backward_momentum: weight of the batch in ν.
        floored: keep ν's factor 1 - m_b Γ at or above 0.
    """

    __slots__ = ("backward_momentum", "floored")

    def __init__(
        self,
        buffers: tuple[Tensor, ...],
        momentum: Momentum,
        backward_momentum: float,
        floored: bool,
    ) -> None:
        super().__init__(buffers, momentum)
        self.backward_momentum = backward_momentum
        self.floored = floored


def update_running_stats(update: Update, sums: Tensor) -> None:
    """Make one update in place.

    A feature whose statistics are not finite stays unchanged; without a valid token all do.

    Args:
        update: the buffers and weights.
        sums: sums over the valid tokens of all processes; the first row is their number.
    """
    count = sums[0]
    size = count.clamp(min=1)
    *vectors, tracked, nonfinite = update.buffers
    if isinstance(update, CenteredUpdate):
        _, mean, squares = centered_moments(sums)
        var = squares / size
        values: tuple[Tensor, ...] = mean, unbiased(var, count) if update.unbiased else var
        momenta: tuple[Momentum, ...] = (update.momentum, update.momentum)
    elif isinstance(update, PowerUpdate):
        nu = next_gradient_moment(vectors[1], sums, update.backward_momentum, update.floored)
        values, momenta = (sums[1] / size, nu), (update.momentum, 1.0)
    else:
        values, momenta = (sums[1] / size,), (update.momentum,)
    move_buffers(tracked, nonfinite, count.amax() > 0, *zip(vectors, values, momenta, strict=True))


def next_gradient_moment(
    gradient_moment: Tensor, sums: Tensor, backward_momentum: float, floored: bool
) -> Tensor:
    """Return `ν (1 - m_b Γ) + m_b Λ`, (C,) float64."""
    _, _, count, normalized_squares, products = sums.unbind()
    size = count.clamp(min=1)
    factor = 1 - backward_momentum * (normalized_squares / size)
    if floored:
        factor = factor.clamp(min=0)
    return gradient_moment * factor + backward_momentum * (products / size)
