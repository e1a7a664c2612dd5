"""State updated in the backward, for layers whose training reads their running statistics.

Such a layer passes its op a *carrier*: a leaf tensor that is neither parameter nor buffer and does
not affect the result. The op's backward returns the sums of the batch as the carrier's gradient.
Autograd adds them over all uses of the layer, and a hook on the leaf, run once per backward,
reduces them over the processes and updates the buffers, outside op and graph. A forward alone
therefore changes nothing, so a recomputed forward (activation checkpointing) sees what the first
one saw, in eager and compiled mode alike.

A forward with other buffers than the layer's own, as `torch.func.functional_call` gives it, gets a
carrier of its own, whose hook updates those: by then the layer has its own buffers again.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm.norms.batch_statistics import BatchStatisticsNorm
from powernorm.ops.processes import all_reduce_sum


class BackwardStateNorm(BatchStatisticsNorm):
    """A batch-statistics norm whose buffers are updated in the backward.

    Limits: A training-mode forward without a backward changes no state, and neither do
    `torch.autograd.grad` and `backward(inputs=…)` with respect to other tensors. Every `backward`
    through the layer updates the state, so two through one retained graph update it twice. A layer
    used several times inside *reentrant* activation checkpointing updates it once per use.
    `torch.func` transforms are not supported.
    """

    _carrier: Tensor
    _home: tuple[Tensor, ...]
    """Buffers that the layer had when the carrier was made."""
    _guest: tuple[tuple[Tensor, ...], Tensor] | None
    """Other buffers of the last forward that had some, and their carrier."""
    _stage: int
    _last_stage: int

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
        """Return a carrier that updates these buffers, None means those that the layer has then."""
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
        else:
            self._follow_counter()
            if not all(map(operator.is_, self._home, self._buffers.values())):
                return self._guest_carrier() if torch.is_grad_enabled() else None
        return self._carrier if self.training and torch.is_grad_enabled() else None

    def _check_own_buffers(self) -> None:
        if self._counter is not self.num_batches_tracked:
            raise InputError(
                f"{self.class_name} was called with other buffers than its own in compiled code, "
                "where their update in the backward would be lost: leave the call of "
                "torch.func.functional_call uncompiled, or give it parameters alone"
            )

    @property
    def stage(self) -> int:
        """Number of thresholds passed, mirrored on the host so that no sync is needed."""
        return self._stage

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
            self._follow_counter()  # another forward may have been the last
            self.receive(sums)
        finally:
            self.__dict__["_buffers"] = own

    def receive(self, sums: Tensor) -> None:
        """Process the sums of one backward, of this process; without gradients."""
        if self._held is not None:
            self.gather(sums)
            return
        name = self.group_name
        self.update_running_stats(all_reduce_sum(sums, name) if name else sums)
        self.advance()

    def advance(self) -> None:
        """Count one step in the mirror, after `update_running_stats`."""
        if self._stage == self._last_stage and self._counter is self.num_batches_tracked:
            return  # no threshold is left to be passed
        self._follow_counter(own_step=True)
        self._steps += 1
        if self._stage < len(self.thresholds) and self._steps >= self.thresholds[self._stage]:
            # Steps without a valid token do not count. The mirror may run ahead of the buffer,
            # never behind, so reading the buffer at the threshold keeps the two in step.
            self._recount()

    def _follow_counter(self, own_step: bool = False) -> None:
        """Read the counter again if other code has written or replaced the buffer.

        Loaders do that, and data-parallel wrappers that broadcast buffers. After the last
        threshold the count no longer matters, so that nothing is read back from the device.
        """
        if self._counter is not self.num_batches_tracked:
            self._recount()
        elif self._stage < self._last_stage:
            if _version_of(self._counter) != self._version + own_step:
                self._recount(own_step)
            self._version = _version_of(self._counter)

    def _recount(self, own_step: bool = False) -> None:
        self._counter = self.num_batches_tracked
        self._version = _version_of(self._counter)
        self._steps = 0 if self._counter.is_meta else int(self._counter) - own_step
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


def _version_of(tensor: Tensor) -> int:
    # Tensors made under inference_mode do not count their writes.
    return 0 if tensor.is_inference() else tensor._version


def _deliver(
    layer: weakref.ref[BackwardStateNorm], leaf: Tensor, buffers: dict[str, Tensor | None] | None
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
