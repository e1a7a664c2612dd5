"""Observers of norms' calls and gradients in training, and the columns computed from them.

Unlike `powernorm.inspection.observer.observe`, which uses plain hooks, they put the operators of
`observer_ops` around each call, which run when compiled code runs, forward and backward. They
reduce inputs and gradients to `CallRecord`s of float64 sums on the device, for which they never
wait. At the end of a step the monitor copies the records to the host, where an observer turns its
own into cells of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from powernorm.diagnosis.distances import Statistics, discrepancies, fluctuations
from powernorm.diagnosis.gradients import (
    Calls,
    gradient_sums,
    input_sums,
    needs_products,
    part_norms,
    state_of,
    wide,
)
from powernorm.diagnosis.observer_ops import number_of, observe
from powernorm.inspection.observer import (
    ObserverHook,
    arguments_of,
    dense,
    scoped_mask,
    tokens_last,
)
from powernorm.norms import BatchStatisticsNorm, Norm
from powernorm.norms.nested import check_nested
from powernorm.norms.pointwise import SaturatingNorm
from powernorm.norms.sharded import is_sharded
from powernorm.ops.moments import Moments
from powernorm.ops.running_stats import centered_moments, centered_sums
from powernorm.ops.torch_private import in_backward

_FINGERPRINT_SIZE: Final = 16

Cells = dict[str, float]
"""Columns of `powernorm.records.MONITORED` that have a value."""


@dataclass(frozen=True, eq=False)
class CallRecord:
    """Record of one call of a norm, forward or backward.

    Attributes:
        layer: index of the norm in the model.
        kind: which tensor was observed.
        sums: sums that add up over processes, float64.
        own: values that are the same on every process or that only this one needs, float64.
        is_finite: whether the whole tensor was finite; known on the host only.
    """

    layer: int
    kind: Literal["input", "input gradient", "output gradient"]
    sums: Tensor
    own: Tensor
    is_finite: bool = True


class TokenObserver:
    """Observer of a norm that treats every token by itself.

    Args:
        layer: index of the norm in the model.
        name: its dotted name.
        norm: its short name.
        module: the norm; it is not changed.
        keep: called with each record, in the order of events.
        feature_dim: the dimension of the features in the norm's input.
    """

    def __init__(
        self,
        layer: int,
        name: str,
        norm: str,
        module: nn.Module,
        keep: Callable[[CallRecord], None],
        feature_dim: int,
    ) -> None:
        self.layer = layer
        self.name = name
        self.norm = norm
        self.module = module
        self._keep = keep
        self.feature_dim = feature_dim
        self._total: Tensor | None = None
        """Sum of input and residual, kept between the two hooks of a call."""
        self._number = number_of(self)

    def register_hooks(self, wanted: Callable[[], bool]) -> list[RemovableHandle]:
        """Register the hooks, which report calls in training mode while `wanted` returns True.

        Copies of the module, by `copy` or by pickling, are not observed: their hooks do nothing.
        """
        before = ObserverHook(self, "before", wanted)
        handles = [self.module.register_forward_pre_hook(before, with_kwargs=True)]
        if isinstance(self.module, Norm):
            handles.append(self.module.register_forward_hook(ObserverHook(self, "after", wanted)))
        return handles

    def before(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments of a call with the input observed; None leaves them unchanged."""
        self._total = None  # left over if a call raised an exception between the hooks
        module = self.module
        if not isinstance(module, Norm):
            return self._before_foreign(args, kwargs)
        x, mask, residual = arguments_of(args, kwargs)
        module.check_input(x, None if x.is_nested or is_sharded(x) else mask, residual)
        if residual is not None:
            # Added here, so that the observed gradient is only the norm's, not the stream's too.
            x = self._total = x + residual
        tokens, seen, wrap = self._dense(x, mask)
        if seen is not None and isinstance(module, BatchStatisticsNorm) and module.floor:
            # Such a layer does this itself, but here it must come before the operator saves x.
            tokens = tokens.masked_fill(seen.unsqueeze(self.feature_dim), 0.0)
        return (wrap(observe(tokens, seen, self._number)), mask), {}

    def _before_foreign(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        for name, x in (*enumerate(args[:1]), *kwargs.items()):
            if isinstance(x, Tensor) and x.is_floating_point():
                tokens, seen, wrap = self._dense(x, None)
                x = wrap(observe(tokens, seen, self._number))
                if isinstance(name, str):
                    return args, {**kwargs, name: x}
                return (x, *args[1:]), kwargs
        return None

    def _dense(
        self, x: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Callable[[Tensor], Tensor]]:
        """Return the tokens of an input and their padding: the call's mask, or the scope's."""
        if x.is_nested:
            check_nested(type(self.module).__name__, x, self.feature_dim)
        elif mask is None:
            found, _ = scoped_mask(tokens_last(x, self.feature_dim), self.module)
            mask = found if found is None or found.dtype == torch.bool else None
        return dense(x, mask, self.feature_dim)

    def after(self, args: tuple[Any, ...], output: Any) -> Any:
        """Return the output of a call with its gradient observed."""
        x = args[0]
        if self.needs_output(x) and isinstance(output, Tensor) and output.requires_grad:
            y, _, wrap = dense(output, None, self.feature_dim)
            tokens, seen, _ = self._dense(x, args[1])
            output = wrap(observe(y, seen, self._number, tokens))
        total, self._total = self._total, None
        return output if total is None else (output, total)

    def see_input(self, x: Tensor, padding_mask: Tensor | None) -> None:
        """Receive an input from the operator, unless checkpointing repeats the forward."""
        if not in_backward():
            self.on_input(tokens_last(x, self.feature_dim), padding_mask)

    def see_gradient(self, gradient: Tensor, x: Tensor | None, masked: bool) -> None:
        """Record `gradient_sums` of an input, from the operator; with x it is an output's."""
        del x, masked
        sums = gradient_sums(tokens_last(gradient, self.feature_dim))
        self._keep(CallRecord(self.layer, "input gradient", sums, sums.new_empty(0)))

    def needs_output(self, x: Tensor) -> bool:
        """Return whether the gradient of the output for x has to be observed."""
        del x
        return False

    def on_input(self, x: Tensor, padding_mask: Tensor | None) -> None:
        """Record `input_sums`, and the slope of a saturating norm."""
        sums = input_sums(self.module, x, padding_mask)
        own = sums.new_empty(0)
        if isinstance(self.module, SaturatingNorm):
            own = self.module.slope.detach().double()
        self._keep(CallRecord(self.layer, "input", sums, own))

    @property
    def group_name(self) -> str:
        """Name of the process group that the norm shares its statistics with, `""` for none."""
        return ""

    def state(self) -> Tensor:
        """Return what `cells` needs of the norm after the step, a vector in float64."""
        return torch.empty(0, dtype=torch.float64, device="cpu")

    def cells(self, records: Sequence[CallRecord], state: Tensor, scale: float) -> Cells:
        """Return the columns of a step; those without a value are missing.

        Args:
            records: records of the step, on the host.
            state: result of `state`, on the host.
            scale: factor that the loss was multiplied by.
        """
        del state
        inputs = [one for one in records if one.kind == "input"]
        if not inputs:
            return _gradient_cells(records, 0.0, scale)
        count, _, square, above, values = torch.stack([one.sums for one in inputs]).sum(0).tolist()
        cells = _gradient_cells(records, count, scale)
        if count:
            cells["input_scale"] = math.sqrt(square / count)
        is_saturating = isinstance(self.module, SaturatingNorm)
        if values:
            cells["saturated_share" if is_saturating else "outlier_share"] = above / values
        if is_saturating:
            cells["slope"] = float(inputs[0].own)
        return cells


class BatchObserver(TokenObserver):
    """Observer of a norm with batch statistics."""

    module: BatchStatisticsNorm

    @property
    def group_name(self) -> str:
        """Name of the norm's process group."""
        return self.module.group_name

    def needs_output(self, x: Tensor) -> bool:
        """Return whether parts of the gradient of x depend on the gradient of the output."""
        return x.requires_grad and needs_products(self.module)

    def on_input(self, x: Tensor, padding_mask: Tensor | None) -> None:
        """Record `centered_sums`, (4, C), a fingerprint of x, the layer's state."""
        tokens = wide(self.module.scaled(x)).reshape(-1, x.shape[-1])
        own = torch.cat([_fingerprint(x), state_of(self.module).flatten()])
        self._keep(CallRecord(self.layer, "input", _moment_sums(tokens, padding_mask), own))

    def see_gradient(self, gradient: Tensor, x: Tensor | None, masked: bool) -> None:
        """Record Σ ∂L/∂y and Σ ∂L/∂y t, (2, C), with t the values that the layer normalizes."""
        if x is None:
            super().see_gradient(gradient, x, masked)
            return
        gradient, x = (tokens_last(one, self.feature_dim) for one in (gradient, x))
        tokens = wide(self.module.scaled(x)).reshape(-1, x.shape[-1])
        flat = wide(gradient).reshape(tokens.shape).to(tokens.dtype)
        shift = self._rough_mean(tokens)
        products = flat * (tokens - shift)
        if masked:  # padding may hold infinities, which get no gradient
            products = torch.where(flat != 0, products, 0.0)
        total = flat.sum(0).double()
        along = products.sum(0).double() + shift.double() * total
        sums = torch.stack([total, along])
        self._keep(CallRecord(self.layer, "output gradient", sums, _fingerprint(x)))

    def _rough_mean(self, tokens: Tensor) -> Tensor:
        """Return an estimate of the mean, since float32 products of large numbers lose digits."""
        if not self.module.centered:
            return tokens.new_zeros(())
        mean = self.module.get_buffer("running_mean").to(tokens.dtype)
        return torch.where(mean.isfinite(), mean, 0.0)

    def state(self) -> Tensor:
        """Return the number of non-finite batches, and the running statistics."""
        running = Statistics.running(self.module)
        mean = [] if running.mean is None else [running.mean]
        return torch.cat(
            [self.module.num_nonfinite_batches.double().reshape(1), running.square, *mean]
        )

    def cells(self, records: Sequence[CallRecord], state: Tensor, scale: float) -> Cells:
        """Return TID, distances and parts of the gradient beside those of the whole gradient."""
        # A call without tokens has no statistics.
        inputs = [one for one in records if one.kind == "input" and one.sums[0, 0] > 0]
        num_tokens = sum(float(one.sums[0, 0]) for one in inputs)
        cells = _gradient_cells(records, num_tokens, scale)
        cells["num_nonfinite_batches"] = int(state[0])
        if not inputs:
            return cells
        square, *mean = state[1:].split(self.module.num_features)
        running, batch = Statistics(mean[0] if mean else None, square), _moments(inputs)
        tids, distances = (
            discrepancies(batch, running, self.module.eps),
            fluctuations(batch, running),
        )
        cells |= {"var_tid": float(tids[1].mean()), "var_distance": float(distances[1].mean())}
        if self.module.centered:
            cells |= {
                "mean_tid": float(tids[0].mean()),
                "mean_distance": float(distances[0].mean()),
            }
        if any(one.kind == "input gradient" for one in records):
            cells |= self._parts(records, inputs, scale)
        return cells

    def _parts(
        self, records: Sequence[CallRecord], inputs: Sequence[CallRecord], scale: float
    ) -> Cells:
        """Return the norms of the parts of the input's gradient."""
        products = None
        if needs_products(self.module):
            pairs = [pair for pair in _paired(records) if pair[0] in inputs]
            if not pairs:
                return {}
            inputs = [forward for forward, _ in pairs]
            products = torch.stack([backward.sums for _, backward in pairs])
        size = self.module.num_features
        states = torch.stack([one.own[_FINGERPRINT_SIZE:].view(-1, size) for one in inputs])
        mean, var = part_norms(self.module, Calls(_moments(inputs), states, products))
        cells = {"var_gradient_norm": math.sqrt(float(var.sum())) / scale}
        if mean is not None:
            cells["mean_gradient_norm"] = math.sqrt(float(mean.sum())) / scale
        return cells


def _gradient_cells(records: Sequence[CallRecord], num_tokens: float, scale: float) -> Cells:
    """Return the norm of the whole input gradient, mean and variance of a token's, and NaN counts.

    Args:
        records: records of one norm.
        num_tokens: number of tokens that it was called with.
        scale: factor that the loss was multiplied by.
    """
    inputs, gradients = (
        [one for one in records if one.kind == kind] for kind in ("input", "input gradient")
    )
    cells: Cells = {
        "nonfinite_input": sum(not one.is_finite for one in inputs),
        "nonfinite_gradient": sum(not one.is_finite for one in gradients),
    }
    if gradients:
        squares, mean, var = torch.stack([one.sums for one in gradients]).sum(0).tolist()
        size = max(num_tokens, 1.0)
        cells["gradient_norm"] = math.sqrt(squares / scale**2)
        cells["token_gradient_mean"] = mean / scale / size
        cells["token_gradient_var"] = var / scale**2 / size
    return cells


def _moments(inputs: Sequence[CallRecord]) -> Moments:
    count, mean, squares = centered_moments(torch.stack([one.sums for one in inputs]))
    return Moments(count[:, :1], mean, squares)


def _paired(records: Sequence[CallRecord]) -> list[tuple[CallRecord, CallRecord]]:
    """Return each forward with the output gradient of the same input, matched by fingerprint.

    The nearest fingerprint is used; if several are equal, that of the latest call, as backwards run
    in reverse.
    """
    left = [one for one in records if one.kind == "input"]
    pairs = []
    for gradient in records:
        if gradient.kind == "output gradient" and left:
            nearest = 0
            if len(left) > 1:
                distances = [_distance(one.own[:_FINGERPRINT_SIZE], gradient.own) for one in left]
                nearest = min(range(len(left)), key=lambda i: (distances[i], -i))
            pairs.append((left.pop(nearest), gradient))
    return pairs


def _fingerprint(x: Tensor) -> Tensor:
    """Return a few values of x, (_FINGERPRINT_SIZE,) float64, to recognize it.

    A recomputed input may differ in its last bits: compare by `_distance`.
    """
    flat = x.detach().reshape(-1)
    # Odd steps, so that the values are of different features.
    steps = max(1, flat.shape[0] // _FINGERPRINT_SIZE) | 1
    samples = flat[::steps][:_FINGERPRINT_SIZE].to(torch.float64)
    return torch.nn.functional.pad(samples, (0, _FINGERPRINT_SIZE - samples.shape[0]))


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the distance of two fingerprints."""
    return float((a.nan_to_num() - b.nan_to_num()).abs().max())


def _moment_sums(tokens: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Return `centered_sums` over valid tokens, (4, C), in two passes in the tokens' type.

    Converting all tokens to float64 would take five times as long.
    """
    if padding_mask is None:
        count = tokens.new_full((), float(tokens.shape[0]), dtype=torch.float64)
        mean = tokens.sum(0) / max(tokens.shape[0], 1)
        deviations = tokens - mean
    else:
        padding = padding_mask.reshape(-1, 1)
        count = (~padding).sum(dtype=torch.float64)
        # `where`, not a product: padding may hold infinities.
        kept = torch.where(padding, 0.0, tokens)
        mean = kept.sum(0) / count.clamp(min=1).to(tokens.dtype)
        deviations = torch.where(padding, 0.0, kept - mean)
    rest = deviations.sum(0).double()
    squares = deviations.square().sum(0).double()
    # The mean was rounded: exact is mean + rest/count.
    shift = rest / count.clamp(min=1)
    return centered_sums(count, mean.double() + shift, (squares - rest * shift).clamp(min=0))
