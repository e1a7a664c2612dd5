"""Observers of norms' calls and gradients in training, which reduce them to records.

Unlike `powernorm.inspection.observer.observe`, which uses plain hooks, they put the operators of
`observer_ops` around each call, which run when compiled code runs, forward and backward. They never
wait for a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from powernorm.diagnosis.gradients import gradient_sums, input_sums, needs_products, state_of, wide
from powernorm.diagnosis.metrics import CallRecord, fingerprint
from powernorm.diagnosis.observer_ops import number_of, observe
from powernorm.inspection.observer import (
    ObserverHook,
    arguments_of,
    dense,
    scoped_mask,
    tokens_last,
)
from powernorm.norms import BatchStatisticsNorm, Norm
from powernorm.norms.feature_dims import LAST
from powernorm.norms.nested import check_nested
from powernorm.norms.pointwise import SaturatingNorm
from powernorm.norms.sharded import is_sharded
from powernorm.ops.running_stats import centered_sums
from powernorm.ops.torch_private import in_backward


class TokenObserver:
    """Observer of a norm that treats every token by itself.

    Args:
        layer: index of the norm in the model.
        module: the norm; it is not changed.
        keep: called with each record, in the order of events.
        feature_dim: the dimension of the features in the norm's input.
    """

    def __init__(
        self,
        layer: int,
        module: nn.Module,
        keep: Callable[[CallRecord], None],
        feature_dim: int = LAST,
    ) -> None:
        self.layer = layer
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


class BatchObserver(TokenObserver):
    """Observer of a norm with batch statistics."""

    module: BatchStatisticsNorm

    def needs_output(self, x: Tensor) -> bool:
        """Return whether parts of the gradient of x depend on the gradient of the output."""
        return x.requires_grad and needs_products(self.module)

    def on_input(self, x: Tensor, padding_mask: Tensor | None) -> None:
        """Record `centered_sums`, (4, C), a fingerprint of x, the layer's state."""
        tokens = wide(self.module.scaled(x)).reshape(-1, x.shape[-1])
        own = torch.cat([fingerprint(x), state_of(self.module).flatten()])
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
        self._keep(CallRecord(self.layer, "output gradient", sums, fingerprint(x)))

    def _rough_mean(self, tokens: Tensor) -> Tensor:
        """Return an estimate of the mean, since float32 products of large numbers lose digits."""
        if not self.module.centered:
            return tokens.new_zeros(())
        mean = self.module.get_buffer("running_mean").to(tokens.dtype)
        return torch.where(mean.isfinite(), mean, 0.0)


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
