"""How running statistics move by the sums over a batch, in place.

The sums of a centered norm have the rows n, Σx, M2 (squared deviations from the mean of this use)
and n μ² (of that mean). They may be added up, as autograd does over the uses of a shared layer,
and yet a single use keeps its variance at any mean: it is M2/n, in which no large numbers cancel.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from powernorm.ops.moments import merge_moments
from powernorm.ops.processes import all_gather, all_reduce_sum

_ROUNDING: Final = 32 * torch.finfo(torch.float64).eps
"""Share of Σ n μ² below which the spread between uses is rounding error: 0 for a single use."""

Update = tuple[Tensor, Tensor, float | None]
"""(buffer, new value, weight of the new value; None for the plain average of the batches so far)"""


def average_weight(num_batches_tracked: Tensor, num_nonfinite_batches: Tensor) -> Tensor:
    """The weight of the next batch in the plain average of all batches, 0-d float64.

    Batches that were left out take no part, or the start value would stay in the average.
    """
    return 1 / (num_batches_tracked + 1 - num_nonfinite_batches).double()


def mixed(old: Tensor, new: Tensor, weight: float | Tensor) -> Tensor:
    """`(1 - w) old + w new` as `torch.lerp` computes it, in the type of `old`.

    `old + w (new - old)` would lose a new value that is small beside the old one, even at w = 1.
    """
    if isinstance(weight, Tensor):
        weight = weight.to(old.dtype)
    return torch.lerp(old, new.to(old.dtype), weight)


def move_statistics(
    num_batches_tracked: Tensor,
    num_nonfinite_batches: Tensor,
    present: Tensor,
    *updates: Update,
) -> None:
    """Move buffers towards new values where those are finite, and count.

    Args:
        num_batches_tracked: 0-d int64; one more where `present`.
        num_nonfinite_batches: 0-d int64; one more where a value was not finite.
        present: 0-d bool; False leaves all as it was (no valid token, or a recomputation).
        updates: of each buffer.
    """
    nonfinite = torch.zeros_like(present)
    for buffer, value, momentum in updates:
        weight: float | Tensor | None = momentum
        if weight is None:
            weight = average_weight(num_batches_tracked, num_nonfinite_batches)
        moved = mixed(buffer, value, weight)
        finite = torch.isfinite(value) & torch.isfinite(moved)
        buffer.copy_(torch.where(finite & present, moved, buffer))
        nonfinite = nonfinite | ~finite.all()
    # In place: rebinding fails in a compiled and checkpointed region.
    num_batches_tracked.add_(present)
    num_nonfinite_batches.add_(present & nonfinite)


def unbiased(var: Tensor, count: Tensor) -> Tensor:
    """The variance divided by M - 1, by M where M = 1."""
    return var * (count / (count - 1).clamp(min=1))


def centered_sums(count: Tensor, mean: Tensor, squares: Tensor) -> Tensor:
    """The rows n, Σx, M2 and n μ² of a batch, (4, C) float64.

    Args:
        count: number of tokens, (C,) or 0-d.
        mean: (C,).
        squares: sum of squared deviations from it, (C,).
    """
    count, mean = count.double().expand_as(mean), mean.double()
    total = mean * count
    return torch.stack([count, total, squares.double(), mean * total], dim=-2)


def centered_moments(sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(count, mean, sum of squared deviations from it) of rows that may have been added up.

    Args:
        sums: (..., 4, C) of `centered_sums`.
    """
    count, total, within, raised = sums.unbind(-2)
    mean = total / count.clamp(min=1)
    between = raised - mean * total
    return count, mean, within + torch.where(between > _ROUNDING * raised, between, 0.0)


def merge_sums(parts: Tensor) -> Tensor:
    """The rows of several batches together, as of one: (parts, 4, C) to (4, C)."""
    return centered_sums(*merge_moments(*centered_moments(parts)))


def reduce_sums(sums: Tensor, centered: bool, group_name: str) -> Tensor:
    """The sums of all processes of a group; one collective, none for the empty name.

    Args:
        sums: of this process; `centered_sums` of a centered norm.
        centered: was there a mean?
        group_name: process group of `processes.group_name_of`.
    """
    if not group_name:
        return sums
    return (
        merge_sums(all_gather(sums, group_name)) if centered else all_reduce_sum(sums, group_name)
    )


def absorb_centered(
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor,
    num_nonfinite_batches: Tensor,
    sums: Tensor,
    momentum: float | None,
    correct_bias: bool,
) -> None:
    """One step of running mean and variance.

    Args:
        running_mean: (C,).
        running_var: (C,).
        num_batches_tracked: 0-d int64.
        num_nonfinite_batches: 0-d int64.
        sums: (4, C) float64 over valid tokens of all processes, see `centered_sums`.
        momentum: weight of the batch; None for the plain average of the batches so far.
        correct_bias: divide the variance by M - 1.
    """
    count, mean, squares = centered_moments(sums)
    var = squares / count.clamp(min=1)
    move_statistics(
        num_batches_tracked,
        num_nonfinite_batches,
        count.amax() > 0,
        (running_mean, mean, momentum),
        (running_var, unbiased(var, count) if correct_bias else var, momentum),
    )


def absorb_uncentered(
    running_second_moment: Tensor,
    num_batches_tracked: Tensor,
    num_nonfinite_batches: Tensor,
    sums: Tensor,
    momentum: float | None,
) -> None:
    """One step of running ψ² from (n, Σx²), (2, C) float64; else as `absorb_centered`."""
    count, squares = sums.unbind()
    move_statistics(
        num_batches_tracked,
        num_nonfinite_batches,
        count.amax() > 0,
        (running_second_moment, squares / count.clamp(min=1), momentum),
    )


def absorb_power(
    second_moment: Tensor,
    gradient_moment: Tensor,
    num_batches_tracked: Tensor,
    num_nonfinite_batches: Tensor,
    sums: Tensor,
    warmup: bool,
    momentum: float,
    backward_momentum: float,
    floored: bool,
) -> None:
    """One step of PowerNorm's ψ² and ν (Shen et al. 2020, eq. 13).

    Args:
        second_moment: ψ², (C,).
        gradient_moment: ν, (C,).
        num_batches_tracked: 0-d int64.
        num_nonfinite_batches: 0-d int64.
        sums: (5, C) float64 of all processes: n, Σx², n, Σx̂², Σ g x̂.
        warmup: ψ² is the plain average of the batches so far.
        momentum: weight of the batch in ψ² after that.
        backward_momentum: weight of the batch in ν.
        floored: keep ν's factor 1 - m_b Γ at 0 or above.
    """
    count = sums[0]
    nu = next_gradient_moment(gradient_moment, sums, backward_momentum, floored)
    move_statistics(
        num_batches_tracked,
        num_nonfinite_batches,
        count.amax() > 0,
        (second_moment, sums[1] / count.clamp(min=1), None if warmup else momentum),
        (gradient_moment, nu, 1.0),
    )


def next_gradient_moment(
    gradient_moment: Tensor, sums: Tensor, backward_momentum: float, floored: bool
) -> Tensor:
    """`ν (1 - m_b Γ) + m_b Λ`, (C,) float64."""
    _, _, count, normalized_squares, products = sums.unbind()
    size = count.clamp(min=1)
    factor = 1 - backward_momentum * (normalized_squares / size)
    if floored:
        factor = factor.clamp(min=0)
    return gradient_moment * factor + backward_momentum * (products / size)
