"""State updated in the backward, for layers whose training reads their running statistics.

Such a layer passes its op a *carrier*: a leaf tensor that is neither parameter nor buffer and does
not affect the result. The op's backward returns the sums of the batch as the carrier's gradient.
Autograd adds them over all uses of the layer, and a hook on the leaf, run once per backward,
reduces them over the processes and updates the buffers, outside op and graph. A forward alone
therefore changes nothing, so a recomputed forward (activation checkpointing) sees what the first
one saw, in eager and compiled mode alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from powernorm.norms.batch_statistics import BatchStatisticsNorm
from powernorm.ops.reference.state import reduce_sums


class BackwardStateNorm(BatchStatisticsNorm):
    """A batch-statistics norm whose buffers are updated in the backward.

    Limits: A training-mode forward without a backward changes no state, and neither do
    `torch.autograd.grad` and `backward(inputs=…)` with respect to other tensors. Every `backward`
    through the layer updates the state, so two through one retained graph update it twice. A layer
    used several times inside *reentrant* activation checkpointing updates it once per use.
    `torch.func` transforms are not supported.
    """

    _carrier: Tensor
    _stage: int
    _last_stage: int

    @property
    def thresholds(self) -> tuple[int, ...]:
        """Numbers of tracked batches at which the layer's behavior changes, ascending."""
        return ()

    def register_hook(self) -> None:
        """Make the carrier and its hook; called at the end of a subclass's constructor."""
        device = self.num_batches_tracked.device
        carrier = torch.zeros(
            (self.num_sums, self.num_features),
            dtype=torch.float64,
            device=device,
            requires_grad=True,
        )
        layer = weakref.ref(self)
        carrier.register_post_accumulate_grad_hook(lambda leaf: _deliver(layer, leaf))
        self._carrier = carrier
        self._recount()

    def carrier_for(self, x: Tensor) -> Tensor | None:
        """Return the carrier for a forward, None if no backward will pass through the layer.

        It is passed even if nothing else requires a gradient (raw input, frozen weights), so that
        a layer in training mode never silently skips its update.
        """
        if not torch.compiler.is_compiling():
            if self._carrier.device != x.device:
                self.register_hook()
            else:
                self._follow_counter()
        return self._carrier if self.training and torch.is_grad_enabled() else None

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

    def receive(self, sums: Tensor) -> None:
        """Process the sums of one backward, of this process; without gradients."""
        if self._held is not None:
            self.gather(sums)
            return
        self.update_running_stats(reduce_sums(sums, self.centered, self.group_name))
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
        self._recount()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for name in ("_carrier", "_counter"):
            state.pop(name)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.register_hook()


def _version_of(tensor: Tensor) -> int:
    # Tensors made under inference_mode do not count their writes.
    return 0 if tensor.is_inference() else tensor._version


def _deliver(layer: weakref.ref[BackwardStateNorm], leaf: Tensor) -> None:
    sums, leaf.grad = leaf.grad, None
    norm = layer()
    if norm is None or sums is None:
        return
    if torch.is_grad_enabled():  # create_graph=True
        with torch.no_grad():
            norm.receive(sums.detach())
    else:
        norm.receive(sums)
