"""Layers that replace LayerNorm or RMSNorm while it is removed from a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.inspection.batches import Forward
from powernorm.inspection.modules import listed
from powernorm.inspection.observer import NormCall, observe
from powernorm.norms import BatchNorm
from powernorm.norms.arguments import check_flag, check_share
from powernorm.norms.checkpointing import SeenInputs
from powernorm.norms.feature_dims import Normalized, answer
from powernorm.norms.preserved_state import preserved_state
from powernorm.norms.stateful import StatefulNorm
from powernorm.ops.arrays import accumulation_dtype
from powernorm.ops.graphs import refuse_transforms
from powernorm.ops.operators import unless_repeated
from powernorm.ops.torch_private import without_modes


class FrozenDeviationNorm(StatefulNorm):
    """LayerNorm, or RMSNorm, whose deviation is a constant once it is frozen (FakeLN).

    Before `freeze`, over the features of each token, `y = γ (x - mean x)/σ + β` with
    `σ = sqrt(var x + eps)`, exactly LayerNorm; after it `y = γ (x - mean x)/D + β` with a constant
    D, one number for all features, which has no gradient and takes no eps. With `center=False` it
    is RMSNorm, `σ = sqrt(mean x² + eps)`, and `y = γ x/D + β`.

    While it normalizes, each training call moves the average `S ← (1 - m) S + m mean σ` over its
    valid tokens, with the momentum m, and sets D to S. So D is the average at the last call before
    `freeze`. A first token often has its own σ, many times that of the others (an attention
    sink): with `first_position` it has its own average and its own D until `merge_first_position`.

    Args:
        num_features: C.
        eps: added to the variance, while it normalizes.
        momentum: m, the weight of the new batch, in (0, 1].
        center: LayerNorm; False is RMSNorm.
        affine: learn γ and β.
        first_position: position 0 of the dimension before the features has its own D.
        feature_dim: the dimension of x that holds the features.
        device: device of parameters and buffers.
        dtype: type of the parameters.

    Shape:
        x (..., C), padding_mask `x.shape[:-1]` bool with True = padding; output as x. With
        `first_position` x is (..., length, C).

    State:
        running_deviation (S) and deviation (D), 0-d; with `first_position` (2,), of which the first
        is that of position 0; and the counters. Updated in the training-mode forward, as
        BatchNorm's: once if activation checkpointing repeats it, not by a batch whose mean is
        not finite, and by `powernorm.training_step` at its end. The state dict does not contain
        whether it is frozen.

    Numerics:
        In float32 (float64 for float64 input), also if the module is in bfloat16.

    Distributed:
        Each process has its own S.

    Fidelity:
        The layer of the authors' code, except that only training calls update S, once per forward,
        and that β is kept if γ has one.

    >>> norm = FrozenDeviationNorm(2).train()
    >>> _ = norm.freeze(2.0)
    >>> norm(torch.tensor([1.0, 3.0])).tolist()
    [-0.5, 0.5]
    """

    shown_settings = (*StatefulNorm.shown_settings, "center", "is_frozen")
    num_sums = 4
    checks_itself = False
    deviation: Tensor
    running_deviation: Tensor

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        eps: float = 1e-5,
        momentum: float = 0.1,
        *,
        center: bool = True,
        affine: bool = True,
        first_position: bool = False,
        feature_dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features,
            eps=eps,
            affine=affine,
            bias=True,
            sync=False,
            process_group=None,
            feature_dim=feature_dim,
            device=device,
            dtype=dtype,
        )
        self.momentum = check_share("momentum", momentum)
        self.center = check_flag("center", center)
        self.first_position = check_flag("first_position", first_position)
        shape = (2,) if first_position else ()
        for name in ("running_deviation", "deviation"):
            start = torch.ones(shape, device=device, dtype=self._buffer_dtype)
            self.register_buffer(name, start)

    @property
    def is_static(self) -> bool:
        """Whether the layer is static: RMSNorm, frozen, with one D for all positions."""
        return self._is_affine and not self.center

    @property
    def centers(self) -> bool:
        """Whether it is an affine map of x minus its mean: LayerNorm, frozen, with one D."""
        return self._is_affine and self.center

    @property
    def _is_affine(self) -> bool:
        return self.is_frozen and not self.first_position

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return (γ/D, β), (C,) float64, of x or of x minus its mean."""
        if not self._is_affine:
            return super().affine()
        ones = torch.ones(self.num_features, dtype=torch.float64, device=self.deviation.device)
        scale = (ones if self.weight is None else self.weight.double()) / self.deviation.double()
        return scale, torch.zeros_like(scale) if self.bias is None else self.bias.double()

    def freeze(self, deviation: float | Tensor | None = None) -> FrozenDeviationNorm:
        """Divide by a constant from now on.

        Args:
            deviation: D, in the shape of `deviation`; None means that of the last training call.

        Returns:
            The layer.

        Raises:
            InputError: D is not above 0.
        """
        if deviation is not None:
            with torch.no_grad():
                value = torch.as_tensor(deviation, dtype=self.deviation.dtype)
                self.deviation.copy_(value)
                self.running_deviation.copy_(value)
        if not bool((self.deviation > 0).all() & self.deviation.isfinite().all()):
            raise InputError(f"deviation is {self.deviation.tolist()}, expected numbers above 0")
        self.num_batches_tracked.clamp_(min=1)  # D is now known, as after a batch
        self.freeze_statistics()
        return self

    @torch.no_grad()
    def merge_first_position(self) -> None:
        """Give position 0 the D of the others from now on."""
        if not self.first_position:
            return
        self.first_position = False
        self.deviation = self.deviation[1].clone()
        self.running_deviation = self.running_deviation[1].clone()

    def normalize(self, x: Tensor, mask: Tensor | None, residual: Tensor | None, /) -> Normalized:
        """Normalize (..., C), or divide by D."""
        total = x if residual is None else x + residual
        wide = total.to(accumulation_dtype(total))
        centered = self._centered(wide)
        if self.is_frozen:
            y = centered / self._along_positions(wide)
        else:
            sigma = self._deviations(centered)
            if self.training:
                refuse_transforms()
                self._average(sigma.detach(), self.see_inputs(x, mask, residual))
            y = centered / sigma.unsqueeze(-1)
        return answer((self.scale_and_shift(y).to(total.dtype), total), residual)

    def deviations(self, x: Tensor) -> Tensor:
        """Return σ of each token, (...), of an x with the features last."""
        return self._deviations(self._centered(x))

    def _centered(self, x: Tensor) -> Tensor:
        return centered(x) if self.center else x

    def _deviations(self, centered: Tensor) -> Tensor:
        return (centered.square().mean(-1) + self.eps).sqrt()

    def _along_positions(self, x: Tensor) -> Tensor:
        """Return D as a divisor of (..., length, C)."""
        deviation = self.deviation.to(x.dtype)
        if not self.first_position:
            return deviation
        places = torch.ones(x.shape[-2], dtype=torch.long, device=x.device)
        places[0] = 0
        return deviation[places].unsqueeze(-1)

    @torch.no_grad()
    def _average(self, sigma: Tensor, seen: SeenInputs) -> None:
        """Update S and D by the deviations of a batch, (...), unless it has been counted."""
        if seen.is_repeated:
            return
        is_traced = torch.compiler.is_compiling()
        # A selective checkpoint counts the operators of both runs, and keeps their results.
        with nullcontext() if is_traced else without_modes():
            sums = self._sums(torch.atleast_1d(sigma), seen.padding_mask)
            if is_traced:
                sums = unless_repeated(sums)
            if self.is_holding:
                self.gather(sums)
            else:
                self.update_running_stats(sums)

    def _sums(self, sigma: Tensor, mask: Tensor | None) -> Tensor:
        """Return the number of valid tokens and the sum of their σ, at position 0 and others."""
        valid = torch.ones_like(sigma, dtype=torch.bool) if mask is None else ~mask
        kept = torch.where(valid, sigma, 0.0)
        begin = int(self.first_position)
        parts = slice(begin), slice(begin, None)
        sums = [one[..., part].double().sum() for part in parts for one in (valid, kept)]
        return torch.stack(sums).unsqueeze(1)

    def update_running_stats(self, sums: Tensor) -> None:
        """Update S and D by one step; see the base class."""
        counts, totals = sums[:, 0].view(2, 2).unbind(1)
        if not self.first_position:
            counts, totals = counts[1], totals[1]
        average = self.running_deviation
        present = counts > 0
        new = torch.where(present, totals / counts.clamp(min=1), average)
        self.move_statistics(present.any(), (average, new, self.momentum))
        self.deviation.copy_(average)

    def reset_running_stats(self) -> None:
        """Set S and D to 1, and the counters to 0."""
        self.running_deviation.fill_(1)
        self.deviation.fill_(1)
        super().reset_running_stats()


class CenteredBatchNorm(BatchNorm):
    """BatchNorm of each token minus its mean over the features: static, and similar to LayerNorm.

    `y = γ (x̄ - μ)/sqrt(σ² + eps) + β` with `x̄ = x - mean x`, and μ, σ² of the batch per feature,
    in evaluation the running ones: an affine map per feature after LayerNorm's own centering. It
    folds if its outputs only go into linear maps (pre-norm). Everything else is as in BatchNorm.

    Shape:
        x (..., C), padding_mask `x.shape[:-1]` bool with True = padding; output as x.

    >>> norm = CenteredBatchNorm(4).eval()
    >>> norm(torch.full((2, 4), 3.0)).abs().max().item()
    0.0
    """

    @property
    def is_static(self) -> bool:
        """Whether it is an affine map per feature: False, because the centering comes first."""
        return False

    @property
    def centers(self) -> bool:
        """Whether it is an affine map of x minus its mean in evaluation: without GroupScaling."""
        return self.groups is None

    def scaled(self, x: Tensor) -> Tensor:
        """Return x minus its mean over the features, (..., C), in the accumulation type."""
        return super().scaled(centered(x))

    def normalize(self, x: Tensor, mask: Tensor | None, residual: Tensor | None, /) -> Normalized:
        """Center (..., C), then normalize as BatchNorm."""
        total = x if residual is None else x + residual
        y = cast(Tensor, super().normalize(centered(total), mask, None))
        return answer((y.to(total.dtype), total), residual)


def centered(x: Tensor) -> Tensor:
    """Return x minus its mean over the features, which are last, in the accumulation type."""
    wide = x.to(accumulation_dtype(x))
    return wide - wide.mean(-1, keepdim=True)


@torch.no_grad()
def mean_deviations(
    model: nn.Module,
    layers: Mapping[str, FrozenDeviationNorm],
    batches: Sequence[Any],
    forward: Forward,
) -> dict[str, float]:
    """Return the mean deviation of each layer's valid tokens, in the order of the calls.

    Args:
        model: the model, in evaluation mode.
        layers: the layers by name.
        batches: batches of the training.
        forward: runs a model on a batch.

    Raises:
        InputError: no valid token goes through a layer.
    """
    sums: dict[str, Tensor] = {}

    def look(call: NormCall) -> None:
        layer = layers[call.name]
        deviations = layer.deviations(call.x.double())
        mask = call.padding_mask
        valid = deviations.flatten() if mask is None else deviations[~mask]
        pair = torch.stack([valid.sum(), valid.new_tensor(valid.numel())])
        sums[call.name] = sums.get(call.name, torch.zeros_like(pair)) + pair

    with preserved_state(model, layers.values()), observe(layers, on_input=look):
        for batch in batches:
            forward(model, batch)
    missing = [name for name in layers if name not in sums or not float(sums[name][1])]
    if missing:
        raise InputError(f"no valid token of the batches goes through {listed(missing)}")
    return {name: float(total / count) for name, (total, count) in sums.items()}
