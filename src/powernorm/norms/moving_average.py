"""MABN: statistics of the last K batches, forward and backward."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize

from powernorm.errors import InputError
from powernorm.norms.arguments import Start, check_count
from powernorm.norms.carrier import GradientMomentNorm
from powernorm.norms.feature_dims import Normalized
from powernorm.norms.stateful import rename_key
from powernorm.ops.moving_average_norm import MovingAverageNormArgs, moving_average_norm


class _CenteredWeight(nn.Module):
    """Parametrization that subtracts the mean of each output's weights from W."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight - weight.flatten(1).mean(1).view(-1, *[1] * (weight.ndim - 1))


def center_weight(module: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) -> None:
    """Center the weight of a layer that feeds a MABN (Yan et al. 2020), in place and permanently.

    The norm does not center, so this keeps the mean of its input small. The raw weight stays the
    trained parameter (`module.parametrizations.weight.original`); undo with
    `torch.nn.utils.parametrize.remove_parametrizations(module, "weight")`.

    Args:
        module: Linear (out, in) or Conv; the mean is taken over all but the first dimension.

    Raises:
        InputError: a module of another kind.
    """
    if not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        raise InputError(
            f"center_weight got a {type(module).__name__}, expected a Linear or a Conv1d, 2d or 3d"
        )
    parametrize.register_parametrization(module, "weight", _CenteredWeight())


class MovingAverageBatchNorm(GradientMomentNorm):
    """Moving Average Batch Normalization (Yan et al. 2020), over the valid tokens.

    Forward `z = x/sqrt(χ + eps)`, `y = γ r z + β`, with χ the mean of ψ_B² over the last `window`
    batches, this one included, and r the ratio of χ's root to the running root, clipped to
    [1/5, 5] and constant in the backward. Backward `∂L/∂x = (g r - z m)/sqrt(χ + eps)` with m the
    mean of mean(g r z) over the same window. In the first `window` steps and the warm-up the
    batch's own statistics are used. Yan et al. also center the weight of the layer whose output is
    normalized: `center_weight(linear)`.

    Args:
        num_features: C.
        eps: added to χ.
        momentum: weight of χ in the slow running ψ², in (0, 1].
        affine: learn γ and β.
        track_running_stats: True, torch's argument of this name; False is refused.
        start: how ψ² starts: `average` (None means that too) of the first 1/momentum batches, or
            `torch`, at 1.
        window: K ≥ 1, number of batches averaged.
        warmup_steps: steps with the batch's own statistics (at least `window`).
        ratio_start: steps with r = 1 (at least the warm-up); 1,000 in the released code.
        groups: GroupScaling with this many groups before the norm; None leaves it out (Wang et al.
            2022 found MABN unstable without it).
        sync: statistics over all processes.
        process_group: the processes; None is the default group if torch.distributed runs.
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        device: device of parameters and buffers.
        dtype: type of parameters.

    Shape:
        x (..., C), padding_mask `x.shape[:-1]` bool with True = padding; output as x.

    State:
        running_second_moment (C,), window_second_moment and window_gradient_moment (K, C) newest
        last, counters; updated in the *backward*. window_gradient_moment is in units of the loss:
        see `set_loss_scale`.

    >>> norm = MovingAverageBatchNorm(4, window=8, warmup_steps=100)
    >>> norm(torch.randn(2, 3, 4)).sum().backward()
    """

    num_sums = 3
    centered = False
    read_in_training = (
        "running_second_moment",
        "window_second_moment",
        "window_gradient_moment",
    )
    window_second_moment: Tensor
    window_gradient_moment: Tensor

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        eps: float = 1e-5,
        momentum: float = 0.02,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        start: Start | None = None,
        window: int = 16,
        warmup_steps: int = 100,
        ratio_start: int = 1000,
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
        self.window = check_count("window", window, 1)
        self.warmup_steps = check_count("warmup_steps", warmup_steps, 0)
        self.ratio_start = check_count("ratio_start", ratio_start, 0)
        self.add_statistic("window_second_moment", 1.0, device, window)
        self.add_statistic("window_gradient_moment", 0.0, device, window)
        self.register_hook()

    @property
    def thresholds(self) -> tuple[int, ...]:
        """Steps at which the batch's own statistics end (t ≤ K or t < warm-up) and r starts."""
        own = max(self.window, self.warmup_steps - 1)
        return own, max(own, self.ratio_start, self.warmup_steps)

    def normalize(
        self, x: Tensor, padding_mask: Tensor | None, residual: Tensor | None, /
    ) -> Normalized:
        """Normalize (..., C); see the class."""
        if not self.training:
            return self.evaluate(x, padding_mask, residual)
        seen = self.see_inputs(x, padding_mask, residual)
        second_moment, window_second_moment, window_gradient_moment = seen.state
        y, total = moving_average_norm(
            MovingAverageNormArgs(
                x,
                residual,
                seen.padding_mask,
                self.weight,
                self.bias,
                second_moment,
                window_second_moment,
                self.to_loss(window_gradient_moment),
                self.carrier_for(x),
                self.groups or 0,
                self.eps,
                seen.stage == 0,
                seen.stage == 2,
                self.group_name,
            )
        )
        return y if residual is None else (y, cast(Tensor, total))

    def update_running_stats(self, sums: Tensor) -> None:
        """Update the windows and running ψ² by one step from (n, Σx², Σ g r z)."""
        count, squares, products = self.from_loss(sums, 2).unbind()
        size = count.clamp(min=1)
        batch = squares / size
        second = torch.cat([self.window_second_moment[1:], batch[None]])
        gradient = torch.cat([self.window_gradient_moment[1:], (products / size)[None]])
        used = batch if self.stage == 0 else second.mean(0)
        self.move_statistics(
            count.amax() > 0,
            (self.running_second_moment, used, self.update_momentum),
            # A feature whose batch was not finite keeps its whole window.
            (self.window_second_moment, second + 0 * batch, 1.0),
            (self.window_gradient_moment, gradient + 0 * products, 1.0),
        )

    def reset_running_stats(self) -> None:
        """Set ψ² to 1, and windows and counters to their initial values."""
        self.window_second_moment.fill_(1)
        self.window_gradient_moment.zero_()
        super().reset_running_stats()

    def adopt_keys(self, state_dict: dict[str, Tensor], prefix: str) -> None:
        """Rename `running_var`, `buffer_x2`, `buffer_gz` and `iters` of the released layer."""
        features = (self.num_features,)
        windows = (self.window, *features)
        rename_key(state_dict, f"{prefix}running_var", f"{prefix}running_second_moment", features)
        for old, new in (("buffer_x2", "second"), ("buffer_gz", "gradient")):
            rename_key(state_dict, f"{prefix}{old}", f"{prefix}window_{new}_moment", windows)
        rename_key(state_dict, f"{prefix}iters", f"{prefix}num_batches_tracked", ())

    def extra_repr(self) -> str:
        """Return the features, window and warm-up."""
        return f"{super().extra_repr()}, window={self.window}, warmup_steps={self.warmup_steps}"
