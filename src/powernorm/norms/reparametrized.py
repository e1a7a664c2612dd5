"""RepBN and PRepBN: BatchNorm plus the identity, and the transition to it from LayerNorm."""

from __future__ import annotations

from typing import Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.norms.arguments import (
    Start,
    TokenKind,
    Variant,
    check_choice,
    check_count,
    check_number,
    check_share,
)
from powernorm.norms.batch_statistics import BatchStatisticsNorm
from powernorm.norms.carrier import CarrierNorm
from powernorm.norms.checkpointing import SeenInputs
from powernorm.norms.feature_dims import Normalized, answer
from powernorm.ops.arrays import accumulation_dtype
from powernorm.ops.attached import attach
from powernorm.ops.batch_norm import batch_norm
from powernorm.ops.moments import Moments
from powernorm.ops.operators import snapshot
from powernorm.ops.pointwise import add_scaled
from powernorm.ops.running_stats import Average, Momentum, centered_sums
from powernorm.ops.token_norm import TokenNormArgs, token_norm

Evaluation = Literal["rep", "blend"]
"""Branch that PRepBN evaluates: only RepBN, or the current training mixture."""


class _RepNorm(BatchStatisticsNorm):
    """Base of the norms `BN(x) + η x`."""

    num_sums = 4
    eta: nn.Parameter

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        start: Start | None = None,
        eta: float = 1.0,
        variant: Variant = "paper",
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
            sync=sync,
            process_group=process_group,
            feature_dim=feature_dim,
            device=device,
            dtype=dtype,
            variant=variant,
        )
        self.initial_eta = check_number("eta", eta)
        self.eta = nn.Parameter(torch.full((1,), eta, device=device, dtype=dtype))

    @property
    def floor(self) -> bool:
        """Whether eps is a floor: never, both variants add it to σ²."""
        return False

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return (a, c): a = γ/sqrt(σ² + eps) + η, c = β - μ γ/sqrt(σ² + eps), (C,) float64."""
        scale, shift = super().affine()
        return scale + self.eta.double(), shift

    def evaluate(self, x: Tensor, mask: Tensor | None, residual: Tensor | None) -> Normalized:
        """Normalize (..., C) by the running statistics."""
        y, total = _parts(super().evaluate(x, mask, residual), x)
        return answer((add_scaled(y, total, self.eta), total), residual)

    def with_identity(self, y: Tensor, total: Tensor, seen: SeenInputs) -> Tensor:
        """Return BN(x) + η x of a training forward; in the released form x + η x at padding."""
        mask = seen.padding_mask
        if self.variant == "released" and mask is not None:
            y = torch.where(mask.unsqueeze(-1), total, y)
        return add_scaled(y, total, self.eta)

    def reset_parameters(self) -> None:
        """Reset γ, β, η and the running statistics to their initial values."""
        super().reset_parameters()
        nn.init.constant_(self.eta, self.initial_eta)

    def extra_repr(self) -> str:
        """Return the features, eps, momentum and the initial η."""
        return f"{super().extra_repr()}, eta={self.initial_eta}"


class RepBatchNorm(_RepNorm):
    """RepBN (Guo et al. 2024): `y = BN(x) + η x`, η one learned number per layer.

    The statistics and their gradient are BatchNorm's (torch's, running variance by M - 1). In
    evaluation it is one affine map per feature, `a = γ/sqrt(σ² + eps) + η`, which folds as
    BatchNorm's does.

    Args:
        num_features: C.
        eps: added to the variance.
        momentum: weight of the new batch in the running statistics, in (0, 1]; None for the plain
            average of all batches.
        affine: learn γ and β (η is always learned).
        track_running_stats: True, torch's argument of this name; False is refused.
        start: how running statistics start: `average` of the first 1/momentum batches, or `torch`,
            at 0 and 1. None means `average`, and `torch` in the released variant.
        eta: start of η. The authors start at 1 for images; in their language model at 0 with γ = 0
            too, so that the branch starts as 0 (`nn.init.zeros_(norm.weight)`).
        variant: `paper`, or `released` for the padding of the authors' language model: a padded
            position skips BN in training, its output is x + η x.
        sync: statistics over all processes.
        process_group: the processes; None is the default group if torch.distributed runs.
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        device: device of parameters and buffers.
        dtype: type of parameters.

    Shape:
        x (..., C), padding_mask `x.shape[:-1]` bool with True = padding; output as x.

    State:
        As BatchNorm's; updated in the training-mode forward.

    >>> norm = RepBatchNorm(4, eta=0.5)
    >>> y = norm(torch.randn(2, 3, 4))
    >>> norm.is_static
    True
    """

    read_in_training = ("running_mean", "running_var")  # of a batch without valid tokens
    trains_by_batch = True

    def normalize(self, x: Tensor, mask: Tensor | None, residual: Tensor | None, /) -> Normalized:
        """Normalize (..., C) by the batch's statistics; in evaluation by the running ones."""
        if not self.training:
            return self.evaluate(x, mask, residual)
        if self.variant == "paper":
            y, total = _parts(super().normalize(x, mask, residual), x)
            return answer((add_scaled(y, total, self.eta), total), residual)
        seen = self.see_inputs(x, mask, residual)
        y, total = _parts(self.normalize_batch(x, residual, seen, prepares=False), x)
        return answer((self.with_identity(y, total, seen), total), residual)


class ProgressiveRepBatchNorm(_RepNorm, CarrierNorm, BatchStatisticsNorm):
    """PRepBN (Guo et al. 2024): a transition from LayerNorm to RepBN during training.

    `y = λ LN(x) + (1 - λ) RepBN(x)` in training. The first `warmup_steps` use LN only, and RepBN's
    statistics are not updated. Step k = 1, 2, … after them has `λ = r₀ max(0, S - k + 1)/S`: r₀ in
    the first, 0 from the (S + 1)-th on, where LN is no longer computed.

    *Evaluation uses RepBN only*, whatever λ is, so scores during the schedule are not those of the
    trained mixture; with `evaluation="blend"` they are. From the end of the schedule on both are
    the same.

    S should be large, and below the whole training: a user who had NaN at S = 60,000 had none at
    0.8 of all steps. The authors then freeze the weights and re-estimate the statistics with
    `powernorm.calibrate`.

    Args:
        num_features: C.
        eps: added to the variance of RepBN.
        momentum: weight of the new batch in the running statistics, in (0, 1].
        affine: learn γ and β of both branches (η is always learned).
        track_running_stats: True, torch's argument of this name; False is refused.
        start: how running statistics start, after the warm-up: `average` of the first 1/momentum
            batches, or `torch`, at 0 and 1. None means `average`, and `torch` in the released
            variant.
        decay_steps: S ≥ 1, steps in which λ decreases; the authors have 300,000 as default, 60,000
            (DeiT, Swin) and 120,000 (CSwin).
        warmup_steps: steps of LN only; the authors' language model has 10,000, then S = 18,000.
        start_ratio: r₀, in [0, 1].
        accumulation: micro-batches per step, each with a backward through the layer; inside
            `powernorm.training_step` they count as one automatically. The authors' language model
            has 16.
        evaluation: `rep` or `blend`.
        kind: the norm of the branch that fades out, `ln` or `rms`. `powernorm.swap` takes the old
            one.
        branch_eps: eps of that branch; None means `eps`.
        eta: start of η, see RepBatchNorm.
        variant: `paper` or `released`, see RepBatchNorm.
        sync: statistics over all processes.
        process_group: the processes; None is the default group if torch.distributed runs.
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        device: device of parameters and buffers.
        dtype: type of parameters.

    Attributes:
        weight, bias, eta: γ, β and η of RepBN.
        branch_weight, branch_bias: γ and β of the branch that fades out (RMSNorm has no β).

    Shape:
        x (..., C), padding_mask `x.shape[:-1]` bool with True = padding; output as x.

    State:
        As BatchNorm's, but updated in the *backward*: training reads `num_batches_tracked`, which
        determines λ, and which counts the steps of the warm-up too. `reset_running_stats`
        restarts the schedule.

    Distributed:
        Parameters of a branch that is off get zeros as their gradient, so that
        DistributedDataParallel need not search for unused ones.

    >>> norm = ProgressiveRepBatchNorm(4, decay_steps=100)
    >>> norm(torch.randn(2, 3, 4)).sum().backward()
    >>> norm.share
    0.99
    """

    read_in_training = ("running_mean", "running_var", "num_batches_tracked")
    branch_weight: nn.Parameter | None
    branch_bias: nn.Parameter | None

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        start: Start | None = None,
        decay_steps: int = 300_000,
        warmup_steps: int = 0,
        start_ratio: float = 1.0,
        accumulation: int = 1,
        evaluation: Evaluation = "rep",
        kind: TokenKind = "ln",
        branch_eps: float | None = None,
        eta: float = 1.0,
        variant: Variant = "paper",
        sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        feature_dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features,
            eps=eps,
            momentum=check_share("momentum", momentum),
            affine=affine,
            track_running_stats=track_running_stats,
            start=start,
            eta=eta,
            sync=sync,
            process_group=process_group,
            feature_dim=feature_dim,
            device=device,
            dtype=dtype,
            variant=variant,
        )
        self.decay_steps = check_count("decay_steps", decay_steps, 1)
        self.warmup_steps = check_count("warmup_steps", warmup_steps, 0)
        self.accumulation = check_count("accumulation", accumulation, 1)
        self.start_ratio = check_number("start_ratio", start_ratio, at_least=0)
        if start_ratio > 1:
            raise InputError(f"start_ratio is {start_ratio!r}, expected a number in [0, 1]")
        self.evaluation = check_choice("evaluation", evaluation, get_args(Evaluation))
        self.kind = check_choice("kind", kind, get_args(TokenKind))
        self.branch_eps = (
            branch_eps if branch_eps is None else check_number("branch_eps", branch_eps, above=0)
        )
        for name, wanted, fill in (
            ("branch_weight", affine, torch.ones),
            ("branch_bias", affine and kind == "ln", torch.zeros),
        ):
            values = fill(self.num_features, device=device, dtype=dtype) if wanted else None
            self.register_parameter(name, None if values is None else nn.Parameter(values))
        self.register_hook()

    @property
    def thresholds(self) -> tuple[int, ...]:
        """Numbers of micro-batches at which RepBN begins and LN ends."""
        warmup = self.warmup_steps * self.accumulation
        return warmup, warmup + self.decay_steps * self.accumulation

    @property
    def update_momentum(self) -> Momentum:
        """Weight of the batch in the next update; batches of the warm-up are in no average."""
        momentum = super().update_momentum
        if isinstance(momentum, Average):
            momentum = momentum._replace(first=self.thresholds[0] + 1)
        return momentum

    def compare_with_batch(self, x: Tensor, mask: Tensor | None) -> None:
        """Warn if statistics are far from the batch's; in the warm-up there are none yet."""
        if self.stage:
            super().compare_with_batch(x, mask)

    def _update_sources(self) -> tuple[object, ...]:
        return self.warmup_steps, self.accumulation, *super()._update_sources()

    @property
    def share(self) -> float:
        """λ of the next step; 1 in the warm-up."""
        return float(self._share(self.num_batches_tracked))

    @property
    def is_static(self) -> bool:
        """Whether evaluation uses RepBN only: by `evaluation`, or because λ is 0.

        False in the warm-up, where RepBN has no statistics yet.
        """
        count, (begins, ends) = int(self.num_batches_tracked), self.thresholds
        if self.evaluation == "blend":
            return count >= ends
        return not 0 < count <= begins

    def _share(self, count: Tensor) -> Tensor:
        """Return λ after a number of micro-batches, on their device: no host sync."""
        past = count // self.accumulation - self.warmup_steps
        falling = self.start_ratio * (1 - past.double() / self.decay_steps).clamp(min=0)
        return torch.where(past < 0, 1.0, falling)

    def normalize(self, x: Tensor, mask: Tensor | None, residual: Tensor | None, /) -> Normalized:
        """Normalize (..., C); see the class."""
        if not self.training:
            y, total = _parts(self.evaluate(x, mask, residual), x)
            if self.evaluation == "blend":
                y = self._mixed(y, total, self.num_batches_tracked)
            return answer((y, total), residual)
        seen = self.see_inputs(x, mask, residual)
        if seen.stage == 0:
            return self._by_token(x, residual, seen)
        mean, var, count = seen.state
        output = batch_norm(self.batch_norm_args(x, residual, seen, mean, var, self.carrier_for(x)))
        total = x if residual is None else cast(Tensor, output.total)
        y = self.with_identity(output.y, total, seen)
        if seen.stage == 1:
            y = self._mixed(y, total, snapshot(count))
        else:
            y = attach(y, None, output.statistics, self.branch_weight, self.branch_bias)
        return answer((y, total), residual)

    def _by_token(self, x: Tensor, residual: Tensor | None, seen: SeenInputs) -> Normalized:
        """Normalize by LN only, and count the step."""
        total = x if residual is None else x + residual
        # A copy, because another backward may end the warm-up before this forward's own.
        batch = Moments.of(total, seen.padding_mask)
        sums = centered_sums(batch.count, batch.mean, batch.squares)
        carrier = self.carrier_for(x)
        y = attach(self._branch(total), carrier, sums, self.weight, self.bias, self.eta)
        return answer((y, total), residual)

    def _branch(self, total: Tensor) -> Tensor:
        eps = self.eps if self.branch_eps is None else self.branch_eps
        parameters = self.branch_weight, self.branch_bias
        centered = self.kind == "ln"
        return token_norm(TokenNormArgs(total, None, *parameters, eps=eps, centered=centered))[0]

    def _mixed(self, rep: Tensor, total: Tensor, count: Tensor) -> Tensor:
        """Return λ LN(x) + (1 - λ) RepBN(x)."""
        dtype = accumulation_dtype(total)
        share = self._share(count).to(dtype)
        mixed = share * self._branch(total).to(dtype) + (1 - share) * rep.to(dtype)
        return mixed.to(rep.dtype)

    def update_running_stats(self, sums: Tensor) -> None:
        """Update the running statistics by one step; in the warm-up only count it."""
        if self.stage == 0:
            self.move_statistics(sums[0].amax() > 0)
        else:
            super().update_running_stats(sums)

    def reset_parameters(self) -> None:
        """Reset γ, β, η, the branch that fades out, the running statistics and the schedule."""
        super().reset_parameters()
        if self.branch_weight is not None:
            nn.init.ones_(self.branch_weight)
        if self.branch_bias is not None:
            nn.init.zeros_(self.branch_bias)

    def extra_repr(self) -> str:
        """Return the features and the schedule."""
        steps = f"decay_steps={self.decay_steps}, warmup_steps={self.warmup_steps}"
        return f"{super().extra_repr()}, kind={self.kind!r}, {steps}"


def _parts(result: Normalized, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (y, the normalized input) of a forward's result."""
    return result if isinstance(result, tuple) else (result, x)
