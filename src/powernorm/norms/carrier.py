"""State updated in the backward, for layers whose training reads their running statistics.

Such a layer passes its op a *carrier*: a leaf tensor that is neither parameter nor buffer and does
not affect the result. The op's backward returns the sums of the batch as the carrier's gradient.
Autograd adds them over all uses of the layer, and a hook on the leaf, run once per backward,
reduces them over the processes and updates the buffers, outside op and graph. A forward alone
therefore changes nothing, so a recomputed forward (activation checkpointing) sees what the first
one saw, in eager and compiled mode alike.

A forward with other buffers than the layer's own, as in `torch.func.functional_call`, gets a
separate carrier, whose hook updates those: by then the layer has its own buffers again.
"""

from __future__ import annotations

import operator
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm.norms.batch_statistics import BatchStatisticsNorm
from powernorm.norms.checkpointing import SeenInputs, refuse_reentrant
from powernorm.norms.stateful import StatefulNorm, has_value
from powernorm.ops.graphs import refuse_transforms
from powernorm.ops.running_stats import reduce_sums
from powernorm.ops.torch_private import is_exporting, version_of


class CarrierNorm(StatefulNorm):
    """A norm whose buffers are updated in the backward; of batch statistics with their base class.

    Limits: A training-mode forward without a backward changes no state, and neither do
    `torch.autograd.grad` and `backward(inputs=…)` with respect to other tensors. Every `backward`
    through the layer updates the state, so two through one retained graph update it twice.
    `torch.func` transforms are not supported.
    """

    _carrier: Tensor
    _home: tuple[Tensor, ...]
    """Buffers that the layer had when the carrier was made."""
    _guest: tuple[tuple[Tensor, ...], Tensor] | None
    """Other buffers of the last forward that used some, and their carrier."""
    _last_stage: int
    _writes: int | None
    """Number of writes to the counter when it was last read."""

    @property
    def thresholds(self) -> tuple[int, ...]:
        """Numbers of tracked batches at which the layer's behavior changes, ascending."""
        return ()

    def register_hook(self) -> None:
        """Make the carrier and its hook; called at the end of a subclass's constructor."""
        self._carrier = self._new_carrier()
        self._home, self._guest = self._buffers_now(), None
        self._recount()

    def _new_carrier(self, buffers: dict[str, Tensor | None] | None = None) -> Tensor:
        """Return a carrier that updates these buffers, by default the layer's current ones."""
        carrier = torch.zeros(
            (self.num_sums, self.num_features),
            dtype=torch.float64,
            device=self.num_batches_tracked.device,
            requires_grad=True,
        )
        layer = weakref.ref(self)
        carrier.register_post_accumulate_grad_hook(lambda leaf: _deliver(layer, leaf, buffers))
        return carrier

    def _buffers_now(self) -> tuple[Tensor, ...]:
        return tuple(cast(dict[str, Tensor], self._buffers).values())

    def _guest_carrier(self) -> Tensor:
        """Return the carrier of buffers that are not the layer's own."""
        guests = self._buffers_now()
        if self._guest is None or not all(map(operator.is_, self._guest[0], guests)):
            self._guest = guests, self._new_carrier(dict(self._buffers))
        return self._guest[1]

    def carrier_for(self, x: Tensor) -> Tensor | None:
        """Return the carrier for a forward, None if no backward will pass through the layer.

        It is passed even if nothing else requires a gradient (raw input, frozen weights), so that
        a layer in training mode never silently skips its update.
        """
        if torch.compiler.is_compiling():
            self._check_own_buffers()
        elif self._carrier.device != x.device:
            self.register_hook()
        elif not all(map(operator.is_, self._home, self._buffers.values())):
            return self._guest_carrier() if torch.is_grad_enabled() else None
        return self._carrier if self.training and torch.is_grad_enabled() else None

    def _check_own_buffers(self) -> None:
        # An export passes the buffers as inputs, and its graph updates nothing.
        if self._counter is not self.num_batches_tracked and not is_exporting():
            raise InputError(
                f"{self.class_name} was called with other buffers than its own in compiled code, "
                "where their update in the backward would be lost: do not compile the call of "
                "torch.func.functional_call, or pass it parameters only"
            )

    def see_inputs(self, x: Tensor, mask: Tensor | None, residual: Tensor | None) -> SeenInputs:
        """Check the arguments of a forward and return the values that it normalizes by."""
        if self.training and not torch.compiler.is_compiling():
            self.follow_counter()
        return super().see_inputs(x, mask, residual)

    def release_statistics(self) -> None:
        """Update the buffers by the gathered sums, as one batch, and count one step."""
        holding = self._held is not None
        super().release_statistics()
        if holding:
            self.advance()

    def receive_for(self, buffers: dict[str, Tensor | None], sums: Tensor) -> None:
        """Process the sums of one backward through a forward that had these buffers."""
        own = self._buffers
        self.__dict__["_buffers"] = buffers
        try:
            self.receive(sums)
        finally:
            self.__dict__["_buffers"] = own

    def receive(self, sums: Tensor) -> None:
        """Process the sums of one backward, of this process; without gradients.

        Raises:
            InputError: reentrant checkpointing has started the backward.
        """
        if not torch.compiler.is_compiling():
            refuse_reentrant(self.class_name)
        self.follow_counter()  # other code may have written or replaced it since the forward
        if self._held is not None:
            self.gather(sums)
            return
        if group_name := self.group_name:
            sums = reduce_sums(sums, self.centered, group_name)
        self.update_running_stats(sums)
        self.advance()

    def advance(self) -> None:
        """Count one step in the mirror, after `update_running_stats`."""
        self.follow_counter(own_step=True)
        if self._stage == self._last_stage:
            return  # no threshold is left
        self._steps += 1
        if self._stage < len(self.thresholds) and self._steps >= self.thresholds[self._stage]:
            # Steps without a valid token do not count. The mirror may run ahead of the buffer,
            # never behind, so reading the buffer at the threshold keeps the two in step.
            self._recount()

    def follow_counter(self, own_step: bool = False) -> None:
        """Read the counter again if other code has written or replaced the buffer.

        Loaders, data-parallel wrappers that broadcast buffers, and users do that. The layer's own
        steps are known, so they need no read from the device.

        Raises:
            InputError: a transform of torch.func has replaced it, by counters that may differ.
        """
        if self._counter is not self._buffers["num_batches_tracked"]:
            refuse_transforms()
            self._recount()
        elif self._last_stage:
            version = version_of(self._counter)
            if version is None or self._writes is None or version != self._writes + own_step:
                self._recount(own_step)
            elif own_step:
                self.__dict__["_writes"] = version  # which is faster than to set the attribute

    def _recount(self, own_step: bool = False) -> None:
        self._counter = self.num_batches_tracked
        self._writes = version_of(self._counter)
        is_known = has_value(self._counter)
        self._steps = int(self._counter) - own_step if is_known else 0
        self._stage = sum(self._steps >= threshold for threshold in self.thresholds)
        self._last_stage = len(self.thresholds)

    def reset_running_stats(self) -> None:
        """Reset running statistics and counters to their initial values."""
        super().reset_running_stats()
        self._recount()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.register_hook()
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._home, self._guest = self._buffers_now(), None  # assign=True replaces buffers
        self._recount()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for name in ("_carrier", "_counter", "_home", "_guest"):
            state.pop(name)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.register_hook()


class GradientMomentNorm(CarrierNorm, BatchStatisticsNorm):
    """A norm with running moments of the gradient (ν), which are in units of the loss.

    After its warm-up it also normalizes by running statistics in training.

    The buffers hold them in units of the loss without the factor that was set by
    `powernorm.set_loss_scale`.
    """

    trains_by_average = True
    _fixed_scale: float | None = None
    """Factor set by the user; None by default."""
    _live_scale: Tensor | None = None
    """The scale of a GradScaler, which the scaler updates in place."""
    _has_warned_of_float16: ClassVar[bool] = False

    @property
    def scales_loss(self) -> bool:
        """Whether the loss has a factor, set by `set_loss_scale`."""
        return self._fixed_scale is not None or self._live_scale is not None

    @property
    def trains_by_running_stats(self) -> bool:
        """Whether the layer has been trained and is past its warm-up."""
        self.follow_counter()
        return self.stage > 0 and int(self.num_batches_tracked) > 0

    def set_loss_scale(self, scale: float | None, live: Tensor | None) -> None:
        """Set the factor of the loss: a number, times a 0-d tensor that may change in place."""
        self._fixed_scale, self._live_scale = scale, live

    def to_loss(self, moment: Tensor) -> Tensor:
        """Return moments of the gradient of this backward's loss, given those of the buffers."""
        if self._fixed_scale is None and not torch.compiler.is_compiling():
            self._warn_of_float16(moment)
        if not self.scales_loss:
            return moment
        scale = self._loss_scale(moment.device)
        return moment if scale is None else moment * scale

    def from_loss(self, sums: Tensor, row: int) -> Tensor:
        """Return the sums of a backward with the gradient's row in the units of the buffers."""
        if not self.scales_loss:
            return sums
        scale = self._loss_scale(sums.device)
        if scale is None:
            return sums
        sums = sums.clone()
        sums[row] /= scale
        return sums

    def _loss_scale(self, device: torch.device) -> float | Tensor | None:
        """Return the factor of the loss, None for 1."""
        fixed, live = self._fixed_scale, self._live_scale
        if live is None:
            return None if fixed == 1 else fixed
        return live.to(device) if fixed is None or fixed == 1 else live.to(device) * fixed

    def _warn_of_float16(self, moment: Tensor) -> None:
        if GradientMomentNorm._has_warned_of_float16 or moment.is_meta:  # meta has no autocast
            return
        device = moment.device.type
        if not torch.is_autocast_enabled(device):
            return
        if torch.get_autocast_dtype(device) == torch.float16:
            GradientMomentNorm._has_warned_of_float16 = True
            warnings.warn(
                f"a {self.class_name} is trained under float16 autocast: a GradScaler changes the "
                "scale of the loss, in whose units its gradient statistics are; after creating the "
                "scaler call powernorm.set_loss_scale(model, scaler=scaler), without one "
                "powernorm.set_loss_scale(model)",
                stacklevel=2,
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = super().__deepcopy__(memo)
        copied.set_loss_scale(self._fixed_scale, self._live_scale)  # follows the same scaler
        return copied

    def __getstate__(self) -> dict[str, Any]:
        # In another process there is no scaler to follow.
        return super().__getstate__() | {"_fixed_scale": None, "_live_scale": None}


def _deliver(
    layer: weakref.ref[CarrierNorm], leaf: Tensor, buffers: dict[str, Tensor | None] | None
) -> None:
    sums, leaf.grad = leaf.grad, None
    norm = layer()
    if norm is None or sums is None:
        return
    receive = norm.receive if buffers is None else partial(norm.receive_for, buffers)
    if torch.is_grad_enabled():  # create_graph=True
        with torch.no_grad():
            receive(sums.detach())
    else:
        receive(sums)
