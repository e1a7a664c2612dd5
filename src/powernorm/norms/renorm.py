"""Batch Renormalization: BatchNorm corrected toward the running statistics."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from powernorm.norms.arguments import Start, check_count, check_number
from powernorm.norms.batch_statistics import BatchStatisticsNorm
from powernorm.norms.carrier import CarrierNorm
from powernorm.norms.feature_dims import Normalized
from powernorm.ops.batch_norm import batch_norm
from powernorm.ops.operators import snapshot


class BatchRenorm(CarrierNorm, BatchStatisticsNorm):
    """Batch Renormalization over the valid tokens (Ioffe 2017, Algorithm 1).

    `x̂ = r (x - μ_B)/σ_B + d` with `r = clip(σ_B/σ, 1/max_r, max_r)` and
    `d = clip((μ_B - μ)/σ, -max_d, max_d)`, where μ, σ are the running statistics; r and d are
    constants in the backward, which is therefore not the forward's derivative. For `warmup_steps`
    steps r = 1 and d = 0 (BatchNorm), then the bounds grow linearly over `ramp_steps`
    (Wang et al. 2022, App. F: one epoch of BatchNorm, then to 3 and 5).

    Args:
        num_features: C.
        eps: added to the variance.
        momentum: weight of the new batch in the running statistics, in (0, 1]; None for the plain
            average of all batches.
        affine: learn γ and β.
        track_running_stats: True, torch's argument of this name; False is refused.
        start: how running statistics start: `average` (None means that too) of the first
            1/momentum batches, the first of which has r = 1 and d = 0; or `torch`, at 0 and 1.
        max_r: final bound of r, ≥ 1.
        max_d: final bound of d, ≥ 0.
        warmup_steps: steps of plain BatchNorm.
        ramp_steps: steps over which the bounds grow after that; 0 applies the final bounds at once.
        groups: GroupScaling with this many groups before the norm; None leaves it out.
        sync: statistics over all processes.
        process_group: the processes; None is the default group if torch.distributed runs.
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        device: device of parameters and buffers.
        dtype: type of parameters.

    Shape:
        x (..., C), padding_mask `x.shape[:-1]` bool with True = padding; output as x.

    State:
        As BatchNorm's, but updated in the *backward*, because training reads them.

    >>> norm = BatchRenorm(4, max_r=3.0, max_d=5.0, warmup_steps=10, ramp_steps=100)
    >>> y = norm(torch.randn(2, 3, 4))
    """

    num_sums = 4
    read_in_training = ("running_mean", "running_var", "num_batches_tracked")

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        start: Start | None = None,
        max_r: float = 3.0,
        max_d: float = 5.0,
        warmup_steps: int = 1000,
        ramp_steps: int = 4000,
        groups: int | None = None,
        sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        feature_dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features,
            eps=eps,
            momentum=momentum,
            affine=affine,
            track_running_stats=track_running_stats,
            start=start,
            groups=groups,
            sync=sync,
            process_group=process_group,
            feature_dim=feature_dim,
            device=device,
            dtype=dtype,
        )
        self.max_r = check_number("max_r", max_r, at_least=1)
        self.max_d = check_number("max_d", max_d, at_least=0)
        self.warmup_steps = check_count("warmup_steps", warmup_steps, 0)
        self.ramp_steps = check_count("ramp_steps", ramp_steps, 0)
        self.register_hook()

    @property
    def trains_by_running_stats(self) -> bool:
        """Whether r and d have corrected toward the running statistics."""
        return int(self.num_batches_tracked) > self.warmup_steps

    def normalize(
        self, x: Tensor, padding_mask: Tensor | None, residual: Tensor | None, /
    ) -> Normalized:
        """Normalize (..., C); see the class."""
        if not self.training:
            return self.evaluate(x, padding_mask, residual)
        seen = self.see_inputs(x, padding_mask, residual)
        mean, var, step = seen.state
        limits = self._limits(step)
        args = self.batch_norm_args(x, residual, seen, mean, var, self.carrier_for(x), limits)
        output = batch_norm(args)
        return output.y if residual is None else (output.y, cast(Tensor, output.total))

    def _limits(self, step: Tensor) -> Tensor:
        """Return (r_max, d_max) of this step, on the device: no host sync, no recompilation."""
        step = snapshot(step).to(torch.float32)
        share = ((step - self.warmup_steps + 1) / max(self.ramp_steps, 1)).clamp(0, 1)
        if self.starts_by_average:
            share = share * (step > 0)  # before the first batch there is nothing to correct to
        return torch.stack([1 + share * (self.max_r - 1), share * self.max_d])

    def extra_repr(self) -> str:
        """Return the features and the bounds."""
        return f"{super().extra_repr()}, max_r={self.max_r}, max_d={self.max_d}"
