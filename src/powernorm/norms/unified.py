"""Unified Normalization: means of the last batches' statistics, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from powernorm.errors import InputError
from powernorm.norms.arguments import (
    Start,
    Variant,
    check_count,
    check_flag,
    check_share,
)
from powernorm.norms.carrier import GradientMomentNorm
from powernorm.norms.feature_dims import Normalized
from powernorm.norms.stateful import rename_key
from powernorm.ops.unified_norm import (
    UnifiedNormArgs,
    geometric_mean,
    is_left_out,
    unified_norm,
)


class Acting(NamedTuple):
    """Parts of the layer that are active in a stage of its training."""

    own_forward: bool
    """Use only the batch's ψ_B²."""
    own_backward: bool
    """Use only the batch's mean(u z)."""
    ratio: bool
    """Apply r."""
    filters: bool
    """Filter outliers."""


class UnifiedNorm(GradientMomentNorm):
    """Unified Normalization (Yang et al. 2022), over the valid tokens; no mean.

    Forward `z = x/sqrt(σ² + eps)`, `y = γ z + β`, with σ² the *geometric* mean of ψ_B² over the
    last batches, this one included. Backward `∂L/∂x = (u - z ν)/sqrt(σ² + eps)` with
    `u = γ r ∂L/∂y` and ν a running mean that moves toward the mean of the last batches' mean(u z),
    this one included. In the warm-up both use this batch only. r, the ratio of σ to the running
    ψ clipped to [1/5, 5], is applied in the backward only (in MABN in the forward too).

    Fidelity:
        The formulas are the released code's, whose golden data are reproduced to 1e-10; the paper's
        text has no r (`ratio_start=None`), and its filter of outliers cannot act. That code trains
        translation without a mask; there, padding takes part in ν (`variant="released"`).

    Args:
        num_features: C.
        eps: added to σ².
        momentum: weight of σ² in the running ψ², in (0, 1].
        affine: learn γ and β.
        track_running_stats: True, torch's argument of this name; False is refused.
        start: how ψ² starts: `average` of the first 1/momentum batches, or `torch`,
            at 1. None means `average`, and `torch` in the released variant.
        window: M ≥ 1, number of batches averaged, or a pair of them for forward and backward. With
            1 in the forward only the batch counts: PowerNormV, with its exact gradient.
        backward_momentum: weight in ν; None means `momentum`.
        warmup_steps: steps that use only the batch (at least the window).
        ratio_start: steps with r = 1 (at least the warm-up); None leaves r out.
        filter_outliers: exclude a batch from the windows if its ψ_B² is an outlier in any feature,
            and normalize it by itself; from the end of the warm-up on. Off for text, on for images
            in the released code.
        variant: `paper`, or `released`: mean(u z) is over all positions, padding too, and its
            term is applied there.
        sync: statistics over all processes (never in the released code).
        process_group: the processes; None is the default group if torch.distributed runs.
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        device: device of parameters and buffers.
        dtype: type of parameters.

    Shape:
        x (..., C), padding_mask `x.shape[:-1]` bool with True = padding; output as x.

    State:
        running_second_moment (ψ²), running_gradient_moment (ν), (C,); window_second_moment (M_f, C)
        and window_gradient_moment (M_b, C), newest last; counters, one of which counts excluded
        batches (num_skipped_batches); updated in the *backward*. ν and its window are in units of
        the loss: see `set_loss_scale`. For fine-tuning the authors reset the counters:
        `num_batches_tracked.zero_()`.

    >>> norm = UnifiedNorm(4, window=4, warmup_steps=100)
    >>> norm(torch.randn(2, 3, 4)).sum().backward()
    """

    num_sums = 4
    centered = False
    read_in_training = (
        "running_second_moment",
        "running_gradient_moment",
        "window_second_moment",
        "window_gradient_moment",
    )
    running_gradient_moment: Tensor
    window_second_moment: Tensor
    window_gradient_moment: Tensor
    num_skipped_batches: Tensor

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        start: Start | None = None,
        window: int | Sequence[int] = 4,
        backward_momentum: float | None = None,
        warmup_steps: int = 4000,
        ratio_start: int | None = 1000,
        filter_outliers: bool = False,
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
        self.windows = _check_window(window)
        self.warmup_steps = check_count("warmup_steps", warmup_steps, 0)
        self.backward_momentum = (
            None
            if backward_momentum is None
            else check_share("backward_momentum", backward_momentum)
        )
        self.ratio_start = (
            None if ratio_start is None else check_count("ratio_start", ratio_start, 0)
        )
        self.filter_outliers = check_flag("filter_outliers", filter_outliers)
        self.add_statistic("running_gradient_moment", 0.0, device)
        self.add_statistic("window_second_moment", 0.0, device, self.windows[0])
        self.add_statistic("window_gradient_moment", 0.0, device, self.windows[1])
        skipped = torch.zeros((), dtype=torch.long, device=device)
        self.register_buffer("num_skipped_batches", skipped)
        self.register_hook()

    @property
    def window(self) -> int | list[int]:
        """Numbers of batches averaged, forward and backward; one number if they are the same."""
        forward, backward = self.windows
        return forward if forward == backward else [forward, backward]

    @property
    def floor(self) -> bool:
        """Whether eps is a floor: never, both variants add it to σ²."""
        return False

    @property
    def _own_ends(self) -> tuple[int, int]:
        """Steps that use only the batch, t ≤ M or t < warm-up, forward and backward."""
        forward, backward = (max(size, self.warmup_steps - 1) for size in self.windows)
        return forward, backward

    @property
    def thresholds(self) -> tuple[int, ...]:
        """Steps at which filtering, the windows and r begin."""
        begins = [max(self.warmup_steps - 1, 0), *self._own_ends]
        if self.ratio_start is not None:
            begins.append(self._ratio_begin(self.ratio_start))
        return tuple(sorted(begins))

    def _ratio_begin(self, start: int) -> int:
        """Return the steps with r = 1; for an average the first has no running value yet."""
        return max(start, self.warmup_steps, int(self.starts_by_average))

    def acting_in(self, stage: int) -> Acting:
        """Return the parts that are active in a stage."""
        passed = self.thresholds[stage - 1] if stage else -1
        forward, backward = self._own_ends
        start = self.ratio_start
        return Acting(
            own_forward=passed < forward,
            own_backward=passed < backward,
            ratio=start is not None and passed >= self._ratio_begin(start),
            filters=self.filter_outliers and passed >= max(self.warmup_steps - 1, 0),
        )

    @property
    def backward_weight(self) -> float:
        """Weight of the new value in ν."""
        momentum = self.momentum if self.backward_momentum is None else self.backward_momentum
        return cast(float, momentum)

    def normalize(
        self, x: Tensor, padding_mask: Tensor | None, residual: Tensor | None, /
    ) -> Normalized:
        """Normalize (..., C); see the class."""
        if not self.training:
            return self.evaluate(x, padding_mask, residual)
        seen = self.see_inputs(x, padding_mask, residual)
        second_moment, gradient_moment, second_window, gradient_window = seen.state
        now = self.acting_in(seen.stage)
        y, total = unified_norm(
            UnifiedNormArgs(
                x,
                residual,
                seen.padding_mask,
                self.weight,
                self.bias,
                second_moment,
                self.to_loss(gradient_moment),
                second_window,
                self.to_loss(gradient_window),
                self.carrier_for(x),
                self.eps,
                self.backward_weight,
                own_forward=now.own_forward,
                own_backward=now.own_backward,
                use_ratio=now.ratio,
                filter_outliers=now.filters,
                counts_padding=self.variant == "released",
                group_name=self.group_name,
            )
        )
        return y if residual is None else (y, cast(Tensor, total))

    def update_running_stats(self, sums: Tensor) -> None:
        """Update windows, ψ² and ν by one step from (n, Σx², number of tokens of Λ, Σ u z)."""
        count, squares, averaged, products = self.from_loss(sums, 3).unbind()
        batch, current = squares / count.clamp(min=1), products / averaged.clamp(min=1)
        present = count.amax() > 0
        now = self.acting_in(self.stage)
        skip = is_left_out(self.window_second_moment, batch, now.filters)
        # As in the released code: a window of one batch keeps the batch itself, which counts as
        # kept.
        replaced = skip & (self.windows[0] > 1)
        second = _entered(
            self.window_second_moment, torch.where(replaced, self.running_second_moment, batch)
        )
        gradient = _entered(
            self.window_gradient_moment,
            torch.where(skip, self.running_gradient_moment, current),
        )
        used, moment = geometric_mean(second), gradient.mean(0)
        # A feature whose batch was not finite keeps all of its values.
        self.move_statistics(
            present,
            (
                self.running_second_moment,
                torch.where(skip | now.own_forward, batch, used),
                self.update_momentum,
            ),
            (
                self.running_gradient_moment,
                torch.where(skip | now.own_backward, current, moment),
                self.backward_weight,
            ),
            (self.window_second_moment, second + 0 * batch, 1.0),
            (self.window_gradient_moment, gradient + 0 * current, 1.0),
        )
        self.num_skipped_batches.add_(present & replaced)

    def reset_running_stats(self) -> None:
        """Set ψ² to 1, and ν, windows and counters to their initial values."""
        for name in ("running_gradient_moment", "window_second_moment", "window_gradient_moment"):
            self.get_buffer(name).zero_()
        self.num_skipped_batches.zero_()
        super().reset_running_stats()

    def adopt_keys(self, state_dict: dict[str, Tensor], prefix: str) -> None:
        """Rename the released layer's keys: `running_var`, `ema_gz`, `buffer_x2` and others.

        Its windows are ring buffers with the entry of step t at `t mod M`.
        """
        features = (self.num_features,)
        steps = state_dict.get(f"{prefix}iters")
        for old, new, size in zip(
            ("buffer_x2", "buffer_gz"), ("second", "gradient"), self.windows, strict=True
        ):
            rename_key(
                state_dict, f"{prefix}{old}", f"{prefix}window_{new}_moment", (size, *features)
            )
            key = f"{prefix}window_{new}_moment"
            if steps is not None and key in state_dict and steps.numel() == 1:
                newest = int(steps) % size
                state_dict[key] = state_dict[key].roll(size - 1 - newest, 0)
        for old, new in (("running_var", "second"), ("ema_gz", "gradient")):
            rename_key(state_dict, f"{prefix}{old}", f"{prefix}running_{new}_moment", features)
        for old, new in (("iters", "num_batches_tracked"), ("skip_counter", "num_skipped_batches")):
            rename_key(state_dict, f"{prefix}{old}", f"{prefix}{new}", ())

    def extra_repr(self) -> str:
        """Return the features, window and warm-up."""
        return f"{super().extra_repr()}, window={self.window}, warmup_steps={self.warmup_steps}"


def _check_window(window: int | Sequence[int]) -> tuple[int, int]:
    """Return the numbers of batches averaged, forward and backward, or raise an InputError."""
    if not isinstance(window, list | tuple):
        window = (cast(int, window),) * 2
    if len(window) != 2:
        raise InputError(f"window is {window!r}, expected an integer, or a pair for both passes")
    forward, backward = (check_count("window", size, 1) for size in window)
    return forward, backward


def _entered(window: Tensor, newest: Tensor) -> Tensor:
    """Return the window after a step, in float64."""
    return torch.cat([window[1:].double(), newest.double()[None]])
