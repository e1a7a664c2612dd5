"""Base classes of the centered and the uncentered batch-statistics norms."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from powernorm.norms.batch_statistics import BatchStatisticsNorm, rename_key
from powernorm.norms.carrier import BackwardStateNorm
from powernorm.norms.feature_dims import Call, Normalized, answer
from powernorm.ops.dispatch import functions_for
from powernorm.ops.functions import BatchNormResult, static_norm
from powernorm.ops.reference.arrays import reciprocal_root
from powernorm.ops.reference.batch import in_backward
from powernorm.ops.reference.state import Update, unbiased


def evaluate(norm: BatchStatisticsNorm, call: Call, mean: Tensor | None, var: Tensor) -> Normalized:
    """Normalize by given statistics."""
    call, _ = norm.prepare(call)
    result = static_norm(
        call.x,
        call.residual,
        norm.weight,
        norm.bias,
        mean,
        var,
        norm.groups or 0,
        norm.eps,
        norm.floor,
    )
    return answer(result, call.residual)


def move_forward(
    norm: BatchStatisticsNorm,
    result: BatchNormResult,
    updates: Callable[[Tensor], tuple[Update, ...]],
) -> None:
    """Update the running statistics of a norm that does so in its forward.

    Args:
        norm: the layer.
        result: the result of its op.
        updates: returns the updates for `move_statistics` from the op's statistics, which hold for
            all processes; used in compiled code and with several processes.
    """
    has_tokens = result.has_tokens
    if has_tokens is None:
        if in_backward():
            return
        if norm.is_holding:
            norm.gather(result.sums)
            return
        if not norm.group_name:
            norm.update_running_stats(result.sums)
            return
        has_tokens = result.statistics[-1, 0] > 0
    if norm.is_holding:
        norm.gather(torch.where(has_tokens, result.sums, 0.0))
    else:
        norm.move_statistics(has_tokens, *updates(result.statistics.detach()))


class CenteredNorm(BatchStatisticsNorm):
    """Base of BatchNorm and its variants: running mean and variance, and evaluation by them."""

    num_sums = 4
    running_mean: Tensor
    running_var: Tensor

    def add_statistics(self, device: torch.device | str | None) -> None:
        """Register the buffers: mean 0, variance 1."""
        self.add_statistic("running_mean", 0.0, device)
        self.add_statistic("running_var", 1.0, device)

    def evaluate(self, call: Call) -> Normalized:
        """Normalize by the running statistics."""
        return evaluate(self, call, self.running_mean, self.running_var)

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return (a, c): a = γ/sqrt(σ² + eps), c = β - a μ, (C,) float64."""
        if not self.is_static:
            return super().affine()
        scale = reciprocal_root(self.running_var.double(), self.eps, self.floor)
        if self.weight is not None:
            scale = scale * self.weight.double()
        shift = -scale * self.running_mean.double()
        return scale, shift if self.bias is None else shift + self.bias.double()

    def running_target(self, var: Tensor, count: Tensor) -> Tensor:
        """Return the new value for the running variance.

        It divides by M - 1, or by M if M = 1 or the variant is `released`.
        """
        return var if self.variant == "released" else unbiased(var, count)

    def updates(self, statistics: Tensor) -> tuple[Update, ...]:
        """Return the updates for `move_statistics` from a forward's statistics."""
        target = self.running_target(statistics[1], statistics[-1])
        return (
            (self.running_mean, statistics[0], self.momentum),
            (self.running_var, target, self.momentum),
        )

    def update_running_stats(self, sums: Tensor) -> None:
        """Update the running mean and variance by one step from its sums."""
        functions_for(sums).absorb_centered(
            *self.buffers_to_move("running_mean", "running_var"),
            sums,
            self.momentum,
            self.variant == "paper",
        )

    def reset_running_stats(self) -> None:
        """Set the mean to 0, the variance to 1 and the counters to 0."""
        self.running_mean.zero_()
        self.running_var.fill_(1)
        super().reset_running_stats()

    def adopt_keys(self, state_dict: dict[str, Tensor], prefix: str) -> None:
        """Drop the last batch's statistics, which released checkpoints also hold."""
        for name in ("batch_mean", "batch_var"):
            state_dict.pop(prefix + name, None)
        for name in ("running_mean", "running_var"):
            key = prefix + name
            rename_key(state_dict, key, key, (self.num_features,))


class CenteredBackwardNorm(CenteredNorm, BackwardStateNorm):
    """Base of centered norms whose training reads running statistics: updated in the backward."""


class UncenteredNorm(BatchStatisticsNorm):
    """Base of PowerNorm and its variants: running quadratic mean ψ², and evaluation by it."""

    centered = False
    running_second_moment: Tensor

    def evaluate(self, call: Call) -> Normalized:
        """Divide by the running quadratic mean."""
        return evaluate(self, call, None, self.running_second_moment)

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return (a, c): a = γ/sqrt(ψ² + eps), c = β, (C,) float64."""
        if not self.is_static:
            return super().affine()
        scale = reciprocal_root(self.running_second_moment.double(), self.eps, self.floor)
        if self.weight is not None:
            scale = scale * self.weight.double()
        return scale, torch.zeros_like(scale) if self.bias is None else self.bias.double()

    def reset_running_stats(self) -> None:
        """Set ψ² to 1 and the counters to 0."""
        self.running_second_moment.fill_(1)
        super().reset_running_stats()
