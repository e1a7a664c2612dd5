"""What the centred and the uncentred batch-statistics norms share: buffers and evaluation."""

from __future__ import annotations

import torch
from torch import Tensor

from powernorm.norms.base import BatchStatisticsNorm, rename_key
from powernorm.norms.carrier import BackwardStateNorm
from powernorm.ops.reference.arrays import (
    accumulation_dtype,
    reciprocal_root,
    scale_and_shift,
)


class CenteredNorm(BatchStatisticsNorm):
    """Running mean and variance, and evaluation by them: what BatchNorm and its kin share."""

    num_sums = 3
    running_mean: Tensor
    running_var: Tensor

    def add_statistics(self, device: torch.device | str | None) -> None:
        """Register the buffers: mean 0, variance 1."""
        self.add_statistic("running_mean", 0.0, device)
        self.add_statistic("running_var", 1.0, device)

    def evaluate(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        """Normalise by the running statistics."""
        x, seen = self.prepare(x, padding_mask)
        x = self.hide_padding(x, seen.padding_mask)
        dtype = accumulation_dtype(x)
        rstd = reciprocal_root(self.running_var.to(dtype), self.eps, self.floor)
        # Centred before it is scaled: a x + c cancels where |mean| >> std.
        normalized = (x.to(dtype) - self.running_mean.to(dtype)) * rstd
        return scale_and_shift(normalized, self.weight, self.bias).to(x.dtype)

    def affine(self) -> tuple[Tensor, Tensor]:
        """(a, c): a = γ/sqrt(σ² + eps), c = β - a μ, (C,) float64."""
        if not self.is_static:
            return super().affine()
        scale = reciprocal_root(self.running_var.double(), self.eps, self.floor)
        if self.weight is not None:
            scale = scale * self.weight.double()
        shift = -scale * self.running_mean.double()
        return scale, shift if self.bias is None else shift + self.bias.double()

    def running_target(self, var: Tensor, count: Tensor) -> Tensor:
        """What the running variance is fed: divided by M - 1, by M where M = 1 or released."""
        if self.variant == "released":
            return var
        return var * (count / (count - 1).clamp(min=1))

    def absorb(self, sums: Tensor) -> None:
        """One step of the running mean and variance from (n, Σx, Σx²)."""
        count, total, squares = sums.unbind()
        size = count.clamp(min=1)
        mean = total / size
        var = (squares / size - mean.square()).clamp(min=0)
        self.move_statistics(
            count.amax() > 0,
            (self.running_mean, mean, self.momentum),
            (self.running_var, self.running_target(var, count), self.momentum),
        )

    def reset_running_stats(self) -> None:
        """Mean to 0, variance to 1, counters to 0."""
        self.running_mean.zero_()
        self.running_var.fill_(1)
        super().reset_running_stats()

    def adopt_keys(self, state_dict: dict[str, Tensor], prefix: str) -> None:
        """Released checkpoints also hold the last batch's statistics; they are dropped."""
        for name in ("batch_mean", "batch_var"):
            state_dict.pop(prefix + name, None)
        for name in ("running_mean", "running_var"):
            key = prefix + name
            rename_key(state_dict, key, key, (self.num_features,))


class CenteredBackwardNorm(CenteredNorm, BackwardStateNorm):
    """A centred norm whose training reads its running statistics, so they move in the backward."""


class UncenteredNorm(BatchStatisticsNorm):
    """Running quadratic mean ψ², and evaluation by it: what PowerNorm and its kin share."""

    centered = False
    running_second_moment: Tensor

    def evaluate(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        """Divide by the running quadratic mean."""
        x, seen = self.prepare(x, padding_mask)
        dtype = accumulation_dtype(x)
        rstd = reciprocal_root(self.running_second_moment.to(dtype), self.eps, self.floor)
        x = self.hide_padding(x, seen.padding_mask)
        return scale_and_shift(x.to(dtype) * rstd, self.weight, self.bias).to(x.dtype)

    def affine(self) -> tuple[Tensor, Tensor]:
        """(a, c): a = γ/sqrt(ψ² + eps), c = β, (C,) float64."""
        if not self.is_static:
            return super().affine()
        scale = reciprocal_root(self.running_second_moment.double(), self.eps, self.floor)
        if self.weight is not None:
            scale = scale * self.weight.double()
        return scale, torch.zeros_like(scale) if self.bias is None else self.bias.double()

    def reset_running_stats(self) -> None:
        """ψ² to 1, counters to 0."""
        self.running_second_moment.fill_(1)
        super().reset_running_stats()
