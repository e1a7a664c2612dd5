"""TaperNorm: RMSNorm or LayerNorm that becomes a constant scale during training."""

from __future__ import annotations

import math
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.norms.arguments import TokenKind, check_choice, check_count, check_share
from powernorm.norms.carrier import CarrierNorm
from powernorm.norms.feature_dims import Normalized, answer
from powernorm.norms.masks import current_padding_mask
from powernorm.ops.arrays import accumulation_dtype, count_of, keep, tokens_of, validity_of
from powernorm.ops.attached import attach
from powernorm.ops.operators import snapshot
from powernorm.ops.pointwise import scale_and_shift
from powernorm.ops.token_norm import TokenNormArgs, token_norm
from powernorm.ops.torch_private import are_transforms_active


class TaperNorm(CarrierNorm):
    """TaperNorm (Kanavalau et al. 2026): a per-token norm that tapers off to a constant scale.

    RMS form `y = g γ x/r + (1 - g) c γ̃ x`, `r = sqrt(mean x² + eps)`; LN form, with x̄ = x - mean x,
    `y = g γ x̄/σ + (1 - g) c γ̃ x̄ + β`. The gate g is 1 until `start_step`, then falls as half a
    cosine and is 0 from `end_step` on. Until the start the layer averages the factor that makes the
    two branches equal, `c = E[‖γ x‖²/r] / E[‖γ x‖²]`; at the start c is fixed and γ̃ begins as γ,
    and both γ and γ̃ continue to learn.

    The paper tapers the norms inside the blocks and keeps the final norm, or adds `scale_loss`:
    without either the logits grow. Its schedules from scratch begin at the end of the learning
    rate's warm-up and end with the last step; for fine-tuning GPT-2 S, M, L, XL they are 25 to 100,
    20 to 200, 30 to 500 and 50 to 700 with `momentum=0.1`.

    Args:
        num_features: C.
        eps: added to the mean square.
        start_step: step k_s ≥ 1 (from 0) at which the tapering begins; the paper's for GPT-2 S.
        end_step: step k_e > k_s from which on g is 0.
        kind: `rms` or `ln`. `powernorm.swap` takes that of the old norm.
        momentum: weight of the new batch in the averages; the paper has 0.01 from scratch, 0.1 for
            fine-tuning.
        accumulation: micro-batches per step, each with a backward through the layer; inside
            `powernorm.training_step` they count as one automatically.
        sync: averages over all processes.
        process_group: the processes; None is the default group if torch.distributed runs.
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        device: device of parameters and buffers.
        dtype: type of parameters; buffers are float32, or float64 for float64 parameters.

    Attributes:
        weight: γ, (C,).
        tapered_offset: γ̃ minus γ at the start, (C,): weight decay pulls γ̃ toward that γ.
        bias: β, (C,), in the LN form only.

    Shape:
        x (..., C), padding_mask `x.shape[:-1]` bool with True = padding, which counts in no
        average; output as x.

    State:
        running_numerator, running_denominator (raw averages from 0), branch_scale (c, 0 before the
        start), start_weight (γ at the start), running_scale (of r or σ), scale_target, counters;
        updated in the *backward*.

    Distributed:
        One all-reduce in the backward until the end. An unused parameter gets a gradient of zeros.

    >>> norm = TaperNorm(4, start_step=1, end_step=3)
    >>> for _ in range(3):
    ...     norm(torch.randn(2, 3, 4)).sum().backward()
    >>> norm.gate, norm.is_static
    (0.0, True)
    """

    shown_settings = (*CarrierNorm.shown_settings, "kind", "start_step", "end_step")
    num_sums = 6
    read_in_training = ("num_batches_tracked", "branch_scale", "start_weight")
    running_numerator: Tensor
    running_denominator: Tensor
    running_scale: Tensor
    branch_scale: Tensor
    scale_target: Tensor
    start_weight: Tensor
    weight: nn.Parameter

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        eps: float = 1e-5,
        *,
        start_step: int = 25,
        end_step: int = 100,
        kind: TokenKind = "rms",
        momentum: float = 0.01,
        accumulation: int = 1,
        sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        feature_dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.kind = check_choice("kind", kind, get_args(TokenKind))
        super().__init__(
            num_features,
            eps=eps,
            affine=True,
            bias=kind == "ln",
            sync=sync,
            process_group=process_group,
            feature_dim=feature_dim,
            device=device,
            dtype=dtype,
        )
        self.start_step = check_count("start_step", start_step, 1)
        self.end_step = check_count("end_step", end_step, 1)
        if end_step <= start_step:
            raise InputError(
                f"end_step is {end_step}, expected a step after start_step={start_step}, at which "
                "the gate begins to fall"
            )
        self.momentum = check_share("momentum", momentum)
        self.accumulation = check_count("accumulation", accumulation, 1)
        offset = torch.zeros(self.num_features, device=device, dtype=dtype)
        self.tapered_offset = nn.Parameter(offset)
        for name in _SCALARS:
            self.register_buffer(name, torch.zeros((), dtype=self._buffer_dtype, device=device))
        self.add_statistic("start_weight", 0.0, device)
        self.register_hook()

    @property
    def thresholds(self) -> tuple[int, ...]:
        """Numbers of micro-batches at which the tapering begins and ends."""
        return self.start_step * self.accumulation, self.end_step * self.accumulation

    @property
    def gate(self) -> float:
        """The gate g of the next step."""
        return float(self._gate(self.num_batches_tracked))

    @property
    def is_static(self) -> bool:
        """Whether the layer is an affine map per feature: the RMS form, once the gate is 0."""
        return self.kind == "rms" and self._is_over

    @property
    def centers(self) -> bool:
        """Whether it is an affine map of x minus its mean: the LN form, once the gate is 0."""
        return self.kind == "ln" and self._is_over

    @property
    def _is_over(self) -> bool:
        return int(self.num_batches_tracked) >= self.thresholds[-1]

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return (a, c): c γ̃ and β, or 0, (C,) float64; if `centers`, of x - mean x.

        Raises:
            InputError: the gate is not 0 yet.
        """
        if not self._is_over:
            return super().affine()
        weight = self.start_weight.double() + self.tapered_offset.double()
        scale = self.branch_scale.double() * weight
        return scale, torch.zeros_like(scale) if self.bias is None else self.bias.double()

    def _gate(self, count: Tensor) -> Tensor:
        """Return g after a number of micro-batches, on their device: no host sync."""
        past = count // self.accumulation - self.start_step
        phase = (past.double() / (self.end_step - self.start_step)).clamp(0, 1)
        return (1 + torch.cos(math.pi * phase)) / 2

    def normalize(self, x: Tensor, mask: Tensor | None, residual: Tensor | None, /) -> Normalized:
        """Normalize (..., C); see the class."""
        total = x if residual is None else x + residual
        if not self.training:
            now = self.num_batches_tracked, self.branch_scale, self.start_weight
            return answer((self._blended(total, self._stage_to_evaluate(), *now), total), residual)
        seen = self.see_inputs(x, mask, residual)
        y = self._blended(total, seen.stage, *map(snapshot, seen.state))
        sums = self._sums(total.detach(), seen.padding_mask)
        carrier = self.carrier_for(x) if seen.stage < 2 else None
        resting = ((self.tapered_offset,), (), (self.weight,))[seen.stage]
        return answer((attach(y, carrier, sums, *resting), total), residual)

    def _stage_to_evaluate(self) -> int:
        if not torch.compiler.is_compiling():
            if are_transforms_active():
                # The members of an ensemble may be in different stages: the tapering's formula also
                # holds before and after it.
                return 1
            self.follow_counter()
        return self.stage

    def _blended(
        self, total: Tensor, stage: int, count: Tensor, scale: Tensor, start: Tensor
    ) -> Tensor:
        """Return the output in a stage: before, during and after the tapering."""
        base = TokenNormArgs(
            total, None, self.weight, self.bias, eps=self.eps, centered=self.kind == "ln"
        )
        if stage == 0:
            return token_norm(base)[0]
        dtype = accumulation_dtype(total)
        factor = scale.to(dtype) * (start.to(dtype) + self.tapered_offset.to(dtype))
        wide = total.to(dtype)
        if self.kind == "ln":
            wide = wide - wide.mean(-1, keepdim=True)
        if stage == 2:
            return scale_and_shift(wide, factor, self.bias).to(total.dtype)
        gate = self._gate(count).to(dtype)
        y = gate * token_norm(base._replace(bias=None))[0].to(dtype)
        y = y + (1 - gate) * scale_and_shift(wide, factor, None)
        return (y if self.bias is None else y + self.bias.to(dtype)).to(total.dtype)

    def _sums(self, total: Tensor, mask: Tensor | None) -> Tensor:
        """Return the rows n, (γ x)²/r, (γ x)², r/C, 1 and γ, over the valid tokens."""
        tokens, weight = tokens_of(total), self.weight.detach()
        valid = validity_of(mask)
        count = count_of(tokens, valid).double()
        scales, tokens = self._scales(keep(tokens, valid))
        squares = keep((tokens * weight.to(tokens.dtype)).square(), valid)
        rows = [(squares / scales).sum(0), squares.sum(0)]
        length = keep(scales, valid).sum() / self.num_features
        ones = torch.ones_like(weight, dtype=torch.float64)
        numbers = [count * ones, *(row.double() for row in rows), length.double() * ones]
        return torch.stack([*numbers, ones, weight.double()])

    def _scales(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return r or σ of each token, (…, 1), and the tokens, centered in the LN form."""
        if self.kind == "ln":
            tokens = tokens - tokens.mean(-1, keepdim=True)
        return (tokens.square().mean(-1, keepdim=True) + self.eps).sqrt(), tokens

    def scale_loss(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the mean of (s - s*)² over the valid tokens, s the r or σ of a token, 0-d.

        This is the paper's anchor for the residual stream in front of a final norm that is tapered
        too: add it to the loss with a factor of 0.1 (0.01 for GPT-2 XL). The target s* is the
        average of s until the start; before that the loss is 0.

        Args:
            x: the layer's input, features in `feature_dim`.
            padding_mask: True = padding; None means the mask of the scope.
        """
        x = x.movedim(self.feature_dim, -1)
        if padding_mask is None:
            padding_mask = current_padding_mask(x, self)
        tokens, valid = tokens_of(x), validity_of(padding_mask)
        if not torch.compiler.is_compiling():
            self.follow_counter()
        if self.stage == 0:
            return tokens.new_zeros(())
        # The start's own backward sets the target.
        is_fixed = snapshot(self.branch_scale) != 0
        target = torch.where(is_fixed, snapshot(self.scale_target), self._averaged_scale())
        scales, _ = self._scales(keep(tokens, valid))
        gaps = keep((scales - target.to(tokens.dtype)).square(), valid)
        return gaps.sum() / count_of(tokens, valid).clamp(min=1)

    def _averaged_scale(self) -> Tensor:
        """Return the average of r or σ over the steps before the start."""
        num_averaged = self.thresholds[0] - self.num_nonfinite_batches
        correction = 1 - (1 - self.momentum) ** num_averaged.double()
        return self.running_scale / correction

    def update_running_stats(self, sums: Tensor) -> None:
        """Update the averages by one step, or at the start of the tapering fix c, γ̃ and s*."""
        count = sums[0].amax()
        present = count > 0
        if self.stage == 0:
            numerator, denominator, length = (sums[1:4].sum(-1) / count.clamp(min=1)).unbind()
            self.move_statistics(
                present,
                (self.running_numerator, numerator, self.momentum),
                (self.running_denominator, denominator, self.momentum),
                (self.running_scale, length, self.momentum),
            )
            return
        # γ̃ was not used so far: in this step g was still 1.
        first = present & (self.branch_scale == 0)
        ratio = self.running_numerator / self.running_denominator
        ratio = torch.where(ratio.isfinite(), ratio, 1.0)
        for buffer, value in (
            (self.scale_target, self._averaged_scale()),
            (self.start_weight, sums[5] / sums[4].clamp(min=1)),
            (self.branch_scale, ratio),
        ):
            buffer.copy_(torch.where(first, value.to(buffer.dtype), buffer))
        self.move_statistics(present)

    def reset_running_stats(self) -> None:
        """Restart the schedule."""
        for name in (*_SCALARS, "start_weight"):
            self.get_buffer(name).zero_()
        super().reset_running_stats()

    def reset_parameters(self) -> None:
        """Reset γ, γ̃, β and the schedule."""
        super().reset_parameters()
        nn.init.zeros_(self.tapered_offset)
        self.reset_running_stats()


_SCALARS = (
    "running_numerator",
    "running_denominator",
    "running_scale",
    "branch_scale",
    "scale_target",
)
