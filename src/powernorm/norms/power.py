"""PowerNorm: normalize by the running quadratic mean, in training too."""

from __future__ import annotations

import math
import warnings
from typing import Any, ClassVar, Final, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from powernorm.errors import InputError
from powernorm.norms.arguments import (
    Variant,
    check_choice,
    check_count,
    check_number,
    check_share,
)
from powernorm.norms.batch_statistics import AVERAGE
from powernorm.norms.carrier import GradientMomentNorm
from powernorm.norms.feature_dims import Normalized
from powernorm.norms.stateful import rename_key
from powernorm.ops.power_norm import OPERATOR as POWER_NORM
from powernorm.ops.power_norm import PowerNormArgs, power_norm
from powernorm.ops.running_stats import (
    Momentum,
    PowerUpdate,
    Update,
    memory_of,
    mixed,
    next_gradient_moment,
)

Decay = Literal["plain", "floored"]

_BUFFERS: Final = (
    "running_second_moment",
    "running_gradient_moment",
    "num_batches_tracked",
    "num_nonfinite_batches",
)


class PowerNorm(GradientMomentNorm):
    """PowerNorm (Shen et al. 2020, Definition 3, Algorithm 2, eq. 8-13).

    Forward `y = γ x/sqrt(ψ² + eps) + β` with the *running* quadratic mean ψ², backward
    `∂L/∂x = (g - ν x̂)/sqrt(ψ² + eps)` with `g = γ ∂L/∂y` and the running moment ν of `g x̂`. After
    each step, over valid tokens, `ψ² += m (mean x² - ψ²)` and
    `ν ← ν (1 - m_b Γ) + m_b Λ` with `Γ = mean x̂²`, `Λ = mean g x̂`. During the first
    `warmup_steps` steps, if they are given, the batch's own ψ_B is used instead of ψ, and ψ² is the
    plain average of ψ_B² so far (App. A). The backward is intentionally not the forward's
    derivative.

    Args:
        num_features: C.
        eps: added to ψ².
        momentum: weight m of the new batch in ψ², in (0, 1]; the paper's 1 - α forward.
        affine: learn γ and β.
        track_running_stats: True, torch's argument of this name; False is refused.
        backward_momentum: m_b, the paper's 1 - α backward.
        warmup_steps: steps with the batch's own statistics and the plain average of them; the
            paper sets it to the warm-up of the learning rate. None means 1/m steps, after which the
            moving average is as slow as the plain one has become: it needs no schedule, and
            evaluation is right at any step.
        groups: GroupScaling with this many groups before the norm (the paper's layer-scale). None
            leaves it out: then the layer is static in evaluation, but plain PowerNorm can break
            down; stabilize it with `max_ratio` or `decay="floored"`.
        max_ratio: keep the ψ used within [ψ_B/r, r ψ_B] (r = 5 as in MABN); costs a second pass
            and a collective in the forward. None leaves it unbounded.
        decay: `floored` keeps ν's factor 1 - m_b Γ at 0 or above, at no cost; `plain` is the
            paper's. None means floored if `max_ratio` is set, else plain. While neither bound is
            active the layer is the paper's to the last bit.
        variant: `paper`, or `released` for the published code's computation: the batch's ψ_B
            divides every gradient, ψ² takes two updates per warm-up step, and the gradient moments
            count padding.
        sync: statistics over all processes.
        process_group: the processes; None is the default group if torch.distributed runs.
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        device: device of parameters and buffers.
        dtype: type of parameters.

    Shape:
        x (..., C), padding_mask `x.shape[:-1]` bool with True = padding; output as x.

    Raises:
        InputError: sizes, types or arguments that do not fit.

    State:
        running_second_moment (ψ², starts at 1), running_gradient_moment (ν, starts at 0),
        num_batches_tracked, num_nonfinite_batches; all updated in the *backward*. A training-mode
        forward alone changes nothing. ν is in units of the loss: a constant factor of the loss,
        such as that of gradient accumulation or of the number of processes, multiplies every
        gradient and changes nothing else; if the factor changes, see `set_loss_scale`.

    Numerics:
        Sums in float32 per batch, merged in float64. Without a valid token ψ is used, and nothing
        is updated.

    Distributed:
        One all-reduce of the sums in the backward; none in the forward after the warm-up
        (unless `max_ratio`).

    Fidelity:
        Golden data of both variants are reproduced to 1e-10 in float64.

    >>> norm = PowerNorm(8, warmup_steps=100)
    >>> norm(torch.randn(2, 3, 8)).sum().backward()
    >>> int(norm.num_batches_tracked)
    1
    """

    num_sums = 5
    centered = False
    read_in_training = ("running_second_moment", "running_gradient_moment")
    _has_warned_of_warmup: ClassVar[bool] = False
    running_gradient_moment: Tensor

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        backward_momentum: float = 0.1,
        warmup_steps: int | None = None,
        groups: int | None = 1,
        max_ratio: float | None = None,
        decay: Decay | None = None,
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
            groups=groups,
            sync=sync,
            process_group=process_group,
            feature_dim=feature_dim,
            device=device,
            dtype=dtype,
            variant=variant,
        )
        self.backward_momentum = check_share("backward_momentum", backward_momentum)
        self.warmup_steps = (
            None if warmup_steps is None else check_count("warmup_steps", warmup_steps, 0)
        )
        self.max_ratio = (
            None if max_ratio is None else check_number("max_ratio", max_ratio, at_least=1)
        )
        check_choice("decay", decay, (*get_args(Decay), None))
        self.decay: Decay = decay or ("plain" if max_ratio is None else "floored")
        if variant == "released" and (self.max_ratio is not None or self.decay == "floored"):
            raise InputError(
                "variant='released' reproduces the published layer and cannot be stabilized: "
                "drop max_ratio and decay, or take variant='paper'"
            )
        self.add_statistic("running_gradient_moment", 0.0, device)
        self.register_hook()

    @property
    def floor(self) -> bool:
        """Whether eps is a floor: never, both variants add it to ψ²."""
        return False

    @property
    def thresholds(self) -> tuple[int, ...]:
        """Step at which the warm-up ends."""
        if self.warmup_steps is None:
            return (math.ceil(1 / cast(float, self.momentum)),)
        return (self.warmup_steps,)

    def normalize(
        self, x: Tensor, padding_mask: Tensor | None, residual: Tensor | None, /
    ) -> Normalized:
        """Normalize (..., C); see the class."""
        if not self.training:
            self._warn_of_warmup()
            return self.evaluate(x, padding_mask, residual)
        prepares = self.may_prepare(x, residual)
        if prepares and self._prepared is not None:
            mask, settings = self.mask_for(x, padding_mask), self.call_settings()
            fast = self.run_prepared(x, mask, settings, self.carrier_for(x))
            if fast is not None:
                return cast(Tensor, fast)
        seen = self.see_inputs(x, padding_mask, residual)
        second_moment, gradient_moment = seen.state
        weight, bias = self.gamma_and_beta()
        args = PowerNormArgs(
            x,
            residual,
            seen.padding_mask,
            weight,
            bias,
            second_moment,
            self.to_loss(gradient_moment),
            self.carrier_for(x),
            self.groups or 0,
            self.eps,
            seen.stage == 0,
            self.max_ratio or 0.0,
            self.variant == "released",
            self.group_name,
        )
        y, total = power_norm(args)
        if prepares and self._prepared is None and (settings := self.call_settings()):
            self.keep_prepared(POWER_NORM.prepare(args), settings)
        return y if residual is None else (y, cast(Tensor, total))

    def call_settings(self) -> tuple[Any, ...] | None:
        """Return what a training call depends on besides its tensors; see `run_prepared`."""
        self.follow_counter()
        if self.scales_loss or self.group_name:
            return None
        buffers = cast(dict[str, Tensor], self._buffers)
        state = memory_of(*map(buffers.__getitem__, self.read_in_training))
        return self.eps, self.groups, self._stage == 0, self.max_ratio, self.variant, state

    def compare_with_batch(self, x: Tensor, mask: Tensor | None) -> None:
        """Compare nothing: training uses ψ as well, and `_warn_of_warmup` warns of the warm-up."""

    def _warn_of_warmup(self) -> None:
        if torch.compiler.is_compiling() or PowerNorm._has_warned_of_warmup:
            return
        is_long = self._steps * cast(float, self.momentum) > 1
        if self.warmup_steps is not None and self.stage == 0 and is_long:
            PowerNorm._has_warned_of_warmup = True
            warnings.warn(
                f"a PowerNorm is evaluated after {self._steps} of its {self.warmup_steps} warm-up "
                "steps, by the average over all of them, including the first: losses "
                "may be far off until the warm-up is over; give a fraction of the run as "
                "warmup_steps, or None, which needs no schedule",
                stacklevel=2,
            )

    def update_running_stats(self, sums: Tensor) -> None:
        """Update ψ² and ν by one step from (n, Σx², n of the gradient sums, Σx̂², Σ g x̂)."""
        sums = self.from_loss(sums, 4)
        if self.variant == "released" and self.stage == 0:
            self._update_released(sums)
        else:
            super().update_running_stats(sums)

    def _updated_buffers(self) -> tuple[Tensor, ...]:
        buffers = cast(dict[str, Tensor], self._buffers)
        return tuple(map(buffers.__getitem__, _BUFFERS))

    def _update_sources(self) -> tuple[object, ...]:
        momenta = self.update_momentum, self.backward_momentum
        return (*momenta, self.decay, *self._buffers.values())

    def _new_update(self, buffers: tuple[Tensor, ...], momentum: Momentum) -> Update:
        return PowerUpdate(buffers, momentum, self.backward_momentum, self.decay == "floored")

    @property
    def update_momentum(self) -> Momentum:
        """Weight of the batch in ψ²; the plain average in the warm-up."""
        return AVERAGE if self._stage == 0 else cast(float, self._momentum)

    def _update_released(self, sums: Tensor) -> None:
        # The plain average is taken of the already mixed value, then mixed again; it ends one step
        # before the warm-up.
        count = sums[0]
        batch = sums[1] / count.clamp(min=1)
        step = (self.num_batches_tracked + 1).double()
        running = self.running_second_moment.double()
        average = ((step - 1) * running + batch) / step
        running = torch.where(step < self.thresholds[0], average, running)
        nu = next_gradient_moment(self.running_gradient_moment, sums, self.backward_momentum, False)
        self.move_statistics(
            count.amax() > 0,
            (self.running_second_moment, mixed(running, batch, cast(float, self.momentum)), 1.0),
            (self.running_gradient_moment, nu, 1.0),
        )

    def reset_running_stats(self) -> None:
        """Set ψ² to 1, ν to 0 and the counters to 0."""
        self.running_gradient_moment.zero_()
        super().reset_running_stats()

    def adopt_keys(self, state_dict: dict[str, Tensor], prefix: str) -> None:
        """Rename `running_phi`, `ema_gz` (= ν/(1 - α_b)) and `iters` of the released layer."""
        shape = (self.num_features,)
        ema = f"{prefix}ema_gz"
        rename_key(state_dict, f"{prefix}running_phi", f"{prefix}running_second_moment", shape)
        rename_key(
            state_dict, ema, f"{prefix}running_gradient_moment", shape, self.backward_momentum
        )
        rename_key(state_dict, f"{prefix}iters", f"{prefix}num_batches_tracked", ())

    def extra_repr(self) -> str:
        """Return the features and the settings of the update."""
        return (
            f"{super().extra_repr()}, backward_momentum={self.backward_momentum}, "
            f"warmup_steps={self.warmup_steps}, max_ratio={self.max_ratio}, decay={self.decay!r}"
        )
