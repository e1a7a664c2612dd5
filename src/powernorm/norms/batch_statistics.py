"""The base class of the norms with batch statistics."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from powernorm.errors import InputError
from powernorm.norms.arguments import (
    Variant,
    check_groups,
    check_share,
    check_tracking,
)
from powernorm.norms.base import AffineNorm
from powernorm.norms.checkpointing import CallRecords, Seen, may_replay
from powernorm.norms.feature_dims import Call, features_back, features_last
from powernorm.norms.masks import current_padding_mask, users_padding_mask
from powernorm.norms.sharded import check_group, local_state
from powernorm.ops.moments import Moments
from powernorm.ops.processes import group_name_of
from powernorm.ops.reference.arrays import (
    scale_groups,
    tokens_of,
)
from powernorm.ops.reference.state import Update, merge_sums, move_statistics, reduce_sums

OPTIONAL_BUFFER: Final = "num_nonfinite_batches"
"""Buffer that a state dict holds only if it is not 0, as torch's BatchNorm has none such."""

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class BatchStatisticsNorm(AffineNorm):
    """Base of the norms with statistics over the valid tokens of a batch.

    Subclasses name their buffers and compute; this class handles groups, masks, processes, the
    types of buffers and the counters.

    Args:
        num_features: C.
        eps: added inside the root.
        momentum: weight of the new batch in running statistics, in (0, 1]; None for the plain
            average of all batches, as in torch.
        affine: learn γ and β.
        track_running_stats: True; False is refused.
        groups: GroupScaling with this many groups before the norm; None leaves it out.
        sync: take statistics over all processes of the group. With False under
            DistributedDataParallel pass `broadcast_buffers=False` too, or rank 0's statistics
            overwrite the others'.
        process_group: the group; None is the default one if torch.distributed runs.
        device: device of parameters and buffers.
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        dtype: type of parameters; buffers are float32, or float64 for float64 parameters.

    State:
        num_batches_tracked: number of batches that updated the running statistics, 0-d int64.
        num_nonfinite_batches: number of batches in which some feature's statistics were NaN or
            infinite and were left out, 0-d int64.
    """

    num_sums: int
    """Number of (C,) sums over a batch that update the running statistics."""

    checks_itself = True
    reads_mask = True
    centered: bool = True
    variant: Variant = "paper"
    trains_by_average: bool = False
    """Whether training normalizes by running statistics, so that they must not become slow."""
    is_frozen: bool = False
    """Whether the layer evaluates in training too, see `freeze_statistics`."""

    num_batches_tracked: Tensor
    num_nonfinite_batches: Tensor

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        *,
        eps: float,
        momentum: float | None,
        affine: bool,
        track_running_stats: bool,
        groups: int | None,
        sync: bool,
        process_group: dist.ProcessGroup | None,
        feature_dim: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(num_features, eps, affine, True, device, dtype, feature_dim)
        check_tracking(track_running_stats)
        self.momentum = momentum
        self.groups = None if groups is None else check_groups(groups, self.num_features)
        self.sync = sync
        self.process_group = process_group
        self._records = CallRecords()
        self._held: Tensor | None = None
        self._mode = True
        self._buffer_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        for name in ("num_batches_tracked", "num_nonfinite_batches"):
            self.register_buffer(name, torch.zeros((), dtype=torch.long, device=device))
        self._settle_count()

    @property
    def momentum(self) -> float | None:
        """Weight of the new batch in running statistics; None for the plain average of all."""
        return self._momentum

    @momentum.setter
    def momentum(self, momentum: float | None) -> None:
        if momentum is None and self.trains_by_average:
            raise InputError(
                f"momentum is None, expected a number in (0, 1]: {self.class_name} normalizes by "
                "its running average in training, which has to follow the weights, and the plain "
                "average of all batches does so less and less"
            )
        self._momentum = None if momentum is None else check_share("momentum", momentum)

    def add_statistic(self, name: str, value: float, device: Any, *leading: int) -> None:
        """Register a running statistic of shape (*leading, C), starting at `value`."""
        shape = (*leading, self.num_features)
        self.register_buffer(
            name, torch.full(shape, value, dtype=self._buffer_dtype, device=device)
        )

    @property
    def wants_mask(self) -> bool:
        """Whether the layer uses a mask: in training, and in released variants always."""
        return self.training or self.variant == "released"

    @property
    def is_static(self) -> bool:
        """Whether the layer is static: without GroupScaling."""
        return self.groups is None

    @property
    def trains_by_running_stats(self) -> bool:
        """Whether the weights have been trained with what the running statistics normalize.

        Then these are part of the trained function, and re-estimating them changes it.
        """
        return False

    @property
    def group_name(self) -> str:
        """Name of the process group that shares statistics, `""` if there is none."""
        return group_name_of(self.process_group, self.sync)

    def check_copies(self, x: DTensor) -> None:
        """Raise an InputError if a forward's statistics would count tokens several times."""
        if self.training and self.group_name:
            check_group(self.class_name, x, self.process_group)

    def batch_moments(self, x: Tensor, padding_mask: Tensor | None = None) -> Moments:
        """Return the moments of what the layer normalizes, over this process's valid tokens.

        Args:
            x: the layer's input, features in `feature_dim`.
            padding_mask: True = padding; None means the mask of the scope.
        """
        return self.token_moments(features_last(x, self.feature_dim), padding_mask)

    def token_moments(self, x: Tensor, padding_mask: Tensor | None = None) -> Moments:
        """Return the same moments for an x with the features last, (..., C)."""
        mask = padding_mask if padding_mask is not None else current_padding_mask(x, self)
        with torch.no_grad():
            return Moments.of(self.scaled(x), mask)

    def scaled(self, x: Tensor) -> Tensor:
        """Return x, (..., C), after GroupScaling if the layer has it, in the accumulation type."""
        return scale_groups(tokens_of(x), self.groups or 0, self.eps)[0].reshape(x.shape)

    def prepare(self, call: Call, *state: Tensor) -> tuple[Call, Seen]:
        """Check a call and return what to normalize and what to normalize it by.

        Args:
            call: the arguments of the forward.
            state: the buffers that training reads.
        """
        x, mask, residual = call
        if mask is None:
            # Evaluation needs a mask only in the released variants; a model's own mask, which may
            # be longer than the input in evaluation, is ignored.
            mask = current_padding_mask(x, self) if self.wants_mask else users_padding_mask()
        seen = Seen(mask, self.stage, state)
        # Evaluation reads a mask only in the released variants.
        if (self.training or self.floor) and not torch.compiler.is_compiling() and may_replay():
            seen = self._records.replay(self.class_name, x, seen)
            mask = seen.padding_mask
        plain = mask is None and residual is None
        if not (plain and x.shape[-1:] == (self.num_features,) and x.is_floating_point()):
            dim = self.feature_dim
            others = None if residual is None else features_back(residual, dim)
            self.check_input(features_back(x, dim), mask, others)
        if self.variant == "released":
            call = self._hide_padding(call, seen.padding_mask)
        return call, seen

    @property
    def stage(self) -> int:
        """Index of the layer's current behavior; for most layers 0 is the warm-up."""
        return 0

    @property
    def floor(self) -> bool:
        """Whether eps is a floor of the second moment (released), not added to it (paper)."""
        return self.variant == "released"

    def _hide_padding(self, call: Call, padding_mask: Tensor | None) -> Call:
        # The released variants with a floor set padding to 0 before anything else.
        if not self.floor or padding_mask is None:
            return call
        hidden = padding_mask.unsqueeze(-1)
        residual = None if call.residual is None else call.residual.masked_fill(hidden, 0.0)
        return Call(call.x.masked_fill(hidden, 0.0), padding_mask, residual)

    def reset_running_stats(self) -> None:
        """Reset running statistics and counters to their initial values."""
        self.num_batches_tracked.zero_()
        self.num_nonfinite_batches.zero_()

    def reset_parameters(self) -> None:
        """Reset γ, β and the running statistics to their initial values."""
        super().reset_parameters()
        self.reset_running_stats()

    def buffers_to_move(self, *names: str) -> tuple[Tensor, ...]:
        """Return buffers by name, and the two counters.

        They are looked up directly: reading an attribute of a module takes as long as updating it.
        """
        buffers = cast(dict[str, Tensor], self._buffers)
        counters = (buffers["num_batches_tracked"], buffers["num_nonfinite_batches"])
        return *(buffers[name] for name in names), *counters

    @abstractmethod
    def update_running_stats(self, sums: Tensor) -> None:
        """Update the running statistics by one step.

        Args:
            sums: (num_sums, C) float64 sums over the tokens of the step, of all processes; the
                first row is the number of valid tokens.
        """

    def train(self, mode: bool = True) -> Self:
        """Set the mode; a frozen layer stays in evaluation and takes the mode once unfrozen."""
        self._settle_count()
        self._mode = mode
        return super().train(mode and not self.is_frozen)

    def freeze_statistics(self) -> None:
        """Use the running statistics in training too from now on, without updating them."""
        mode = self._mode if self.is_frozen else self.training
        self.is_frozen = True
        self.train(mode)

    def unfreeze_statistics(self, mode: bool | None = None) -> None:
        """Undo `freeze_statistics`.

        Args:
            mode: training mode from now on; None means what `train` was last called with.
        """
        if self.is_frozen:
            self.is_frozen = False
            self.train(self._mode if mode is None else mode)

    def hold_statistics(self) -> None:
        """Gather the sums of batches from now on instead of updating the running statistics."""
        self._held = torch.zeros(
            (self.num_sums, self.num_features),
            dtype=torch.float64,
            device=self.num_batches_tracked.device,
        )

    @property
    def is_holding(self) -> bool:
        """Whether sums are gathered instead of updating the running statistics."""
        return self._held is not None

    def gather(self, sums: Tensor) -> None:
        """Add a batch's sums to the gathered ones."""
        assert self._held is not None
        if self.centered:
            self._held.copy_(merge_sums(torch.stack([self._held, sums])))
        else:
            self._held.add_(sums)

    def drop_statistics(self) -> None:
        """Discard the gathered sums."""
        self._held = None

    @torch.no_grad()
    def release_statistics(self) -> None:
        """Update the running statistics by the gathered sums, as one batch."""
        held, self._held = self._held, None
        if held is not None:
            with local_state(self):
                self.update_running_stats(reduce_sums(held, self.centered, self.group_name))

    @torch.no_grad()
    def move_statistics(self, present: Tensor, *updates: Update) -> None:
        """Update buffers toward new values where those are finite, and count.

        Args:
            present: 0-d bool; False changes nothing (no valid token, or a recomputation).
            updates: of each buffer.
        """
        move_statistics(self.num_batches_tracked, self.num_nonfinite_batches, present, *updates)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._settle_count()
        # An average with momentum 0.01 stalls in bfloat16: buffers stay float32 through .half().
        wide = {
            name: buffer
            for name, buffer in self._buffers.items()
            if buffer is not None and buffer.is_floating_point()
        }
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in wide.items():
            after = cast(Tensor, self._buffers[name])
            if after.dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = (
                    torch.empty_like(before, device=after.device, dtype=torch.float32)
                    if before.is_meta or after.is_meta
                    else before.to(after.device, torch.float32)
                )
        self._settle_count()
        return self

    def _settle_count(self) -> None:
        """Give the optional buffer a value and say whether loaders that go by buffers expect it.

        Those that fill a model on the meta device key by key, as Hugging Face's, leave there what
        is in no file, or give it any value if it is not persistent. Others, as Lightning's for
        FSDP2, want a key for each persistent buffer.
        """
        count, tracked = self.num_nonfinite_batches, self.num_batches_tracked
        if count.is_meta and not tracked.is_meta:
            self.num_nonfinite_batches = count = torch.zeros_like(count, device=tracked.device)
        if count.is_meta:
            self._non_persistent_buffers_set.discard(OPTIONAL_BUFFER)
        else:
            self._non_persistent_buffers_set.add(OPTIONAL_BUFFER)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        key, count = prefix + OPTIONAL_BUFFER, self.num_nonfinite_batches
        destination.pop(key, None)
        if _is_positive(count):
            destination[key] = count if keep_vars else count.detach()

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        *others: Any,
    ) -> None:
        self.adopt_keys(state_dict, prefix)
        count = self._loaded_count(state_dict, prefix)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, *others
        )
        if prefix + OPTIONAL_BUFFER in missing_keys:
            missing_keys.remove(prefix + OPTIONAL_BUFFER)
        if count is not None and local_metadata.get("assign_to_params_buffers", False):
            self.num_nonfinite_batches = count
        elif count is not None:
            with torch.no_grad():
                self.num_nonfinite_batches.copy_(count)
        self._settle_count()
        for name, buffer in self._buffers.items():  # assign=True loads narrow types as they are
            if buffer is not None and buffer.dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = buffer.float()

    def _loaded_count(self, state_dict: dict[str, Tensor], prefix: str) -> Tensor | None:
        """Take the optional buffer out of a state dict; it is 0 for a counter without it."""
        tracked = state_dict.get(prefix + "num_batches_tracked")
        count = state_dict.pop(prefix + OPTIONAL_BUFFER, None)
        if count is None and tracked is not None:
            count = torch.zeros((), dtype=torch.long, device=tracked.device)
        return count

    def adopt_keys(self, state_dict: dict[str, Tensor], prefix: str) -> None:
        """Rename, in place, the keys of a released layer's checkpoint."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A process group cannot be copied; the copy uses the same one.
        memo[id(self.process_group)] = self.process_group
        reduced = cast(tuple[Any, ...], self.__reduce_ex__(4))
        copied = reduced[0](*reduced[1])
        memo[id(self)] = copied
        copied.__setstate__(deepcopy(reduced[2], memo))
        return cast(Self, copied)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.update(_held=None)
        return state

    def extra_repr(self) -> str:
        """Return the features, eps, momentum, affine, groups."""
        groups = "" if self.groups is None else f", groups={self.groups}"
        groups += "" if self.variant == "paper" else f", variant={self.variant!r}"
        groups += ", frozen" if self.is_frozen else ""
        return f"{super().extra_repr()}, momentum={self.momentum}{groups}"


def is_optional_key(name: str) -> bool:
    """Return whether a key of a state dict may be missing: the counter that is 0 then."""
    return name.rpartition(".")[2] == OPTIONAL_BUFFER


def _is_positive(count: Tensor) -> bool:
    """Return whether a counter is known to be above 0: meta and fake tensors have no value."""
    return not (count.is_meta or is_fake(count)) and int(count) > 0


def rename_key(
    state_dict: dict[str, Tensor], old: str, new: str, shape: tuple[int, ...], factor: float = 1.0
) -> None:
    """Move an entry to another key, shape and scale, if the old key exists."""
    if old in state_dict and state_dict[old].numel() == math.prod(shape):
        value = state_dict.pop(old)
        state_dict[new] = value.reshape(shape) * factor if factor != 1.0 else value.reshape(shape)
