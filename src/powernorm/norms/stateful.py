"""The base class of the norms that keep a state from batch to batch, and their buffers.

One buffer, `OPTIONAL_BUFFER`, is in a state dict only if it is not 0. A norm's keys are then those
of torch's BatchNorm, so that each can load the other's.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor

from powernorm.norms.base import AffineNorm
from powernorm.norms.checkpointing import CallRecords, SeenInputs
from powernorm.norms.feature_dims import features_back
from powernorm.norms.masks import current_padding_mask, users_padding_mask
from powernorm.norms.sharded import check_group, local_state
from powernorm.ops.graphs import num_features_of
from powernorm.ops.processes import group_name_of
from powernorm.ops.running_stats import Move, merge_sums, move_buffers, reduce_sums
from powernorm.ops.torch_private import KNOWS_BACKWARDS, is_fake, may_be_repeated, unknown_backward

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

OPTIONAL_BUFFER: Final = "num_nonfinite_batches"

_NARROW: Final = (torch.float16, torch.bfloat16)


def settle_count(norm: StatefulNorm) -> None:
    """Give the optional buffer a value and decide whether loaders that list buffers expect it.

    Loaders that fill a model on the meta device key by key, such as Hugging Face's, leave missing
    keys on that device, or fill them with any value if they are not persistent. Others, such as
    Lightning's for FSDP2, require a key for each persistent buffer.
    """
    count, tracked = norm.num_nonfinite_batches, norm.num_batches_tracked
    if count.is_meta and not tracked.is_meta:
        norm.num_nonfinite_batches = count = torch.zeros_like(count, device=tracked.device)
    if count.is_meta:
        norm._non_persistent_buffers_set.discard(OPTIONAL_BUFFER)
    else:
        norm._non_persistent_buffers_set.add(OPTIONAL_BUFFER)


@contextmanager
def converted_buffers(norm: StatefulNorm) -> Iterator[None]:
    """Let tensors be moved or cast in the block, but keep buffers at least as wide as float32.

    An average with momentum 0.01 stalls in bfloat16.
    """
    settle_count(norm)
    wide = {
        name: buffer
        for name, buffer in norm._buffers.items()
        if buffer is not None and buffer.is_floating_point()
    }
    yield
    for name, before in wide.items():
        after = cast(Tensor, norm._buffers[name])
        if after.dtype in _NARROW:
            norm._buffers[name] = (
                torch.empty_like(before, device=after.device, dtype=torch.float32)
                if before.is_meta or after.is_meta
                else before.to(after.device, torch.float32)
            )
    settle_count(norm)


def save_count(norm: StatefulNorm, destination: Any, prefix: str, keep_vars: bool) -> None:
    """Put the optional buffer into a state dict, or remove it if it is 0."""
    key, count = prefix + OPTIONAL_BUFFER, norm.num_nonfinite_batches
    destination.pop(key, None)
    if has_value(count) and int(count) > 0:
        destination[key] = count if keep_vars else count.detach()


@contextmanager
def loaded_buffers(
    norm: StatefulNorm,
    state_dict: dict[str, Tensor],
    prefix: str,
    local_metadata: Any,
    missing_keys: list[str],
) -> Iterator[None]:
    """Let torch load a state dict in the block, then fix the optional buffer and the types.

    The arguments are those of `torch.nn.Module._load_from_state_dict`.
    """
    count = _take_count(state_dict, prefix)
    yield
    if prefix + OPTIONAL_BUFFER in missing_keys:
        missing_keys.remove(prefix + OPTIONAL_BUFFER)
    if count is not None and local_metadata.get("assign_to_params_buffers", False):
        norm.num_nonfinite_batches = count
    elif count is not None:
        with torch.no_grad():
            norm.num_nonfinite_batches.copy_(count)
    settle_count(norm)
    for name, buffer in norm._buffers.items():  # assign=True loads narrow types as they are
        if buffer is not None and buffer.dtype in _NARROW:
            norm._buffers[name] = buffer.float()


def _take_count(state_dict: dict[str, Tensor], prefix: str) -> Tensor | None:
    """Take the optional buffer out of a state dict; it is 0 for a counter without it."""
    tracked = state_dict.get(prefix + "num_batches_tracked")
    count = state_dict.pop(prefix + OPTIONAL_BUFFER, None)
    if count is None and tracked is not None:
        count = torch.zeros((), dtype=torch.long, device=tracked.device)
    return count


def is_optional_key(name: str) -> bool:
    """Return whether a key of a state dict may be missing: the optional counter, then 0."""
    return name.rpartition(".")[2] == OPTIONAL_BUFFER


def has_value(count: Tensor) -> bool:
    """Return whether a counter can be read: meta and fake tensors only have shapes."""
    return not (count.is_meta or is_fake(count))


def rename_key(
    state_dict: dict[str, Tensor], old: str, new: str, shape: tuple[int, ...], factor: float = 1.0
) -> None:
    """Move an entry to another key, shape and scale, if the old key exists."""
    if old in state_dict and state_dict[old].numel() == math.prod(shape):
        value = state_dict.pop(old)
        state_dict[new] = value.reshape(shape) * factor if factor != 1.0 else value.reshape(shape)


class StatefulNorm(AffineNorm):
    """Base of the norms with buffers that batches update: masks, processes, counters, copies.

    Args:
        num_features: C.
        eps: added inside the root.
        affine: learn γ and β.
        bias: learn β, if affine.
        sync: share the sums that update the state over all processes of the group.
        process_group: the group; None is the default one if torch.distributed runs.
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        device: device of parameters and buffers.
        dtype: type of parameters; buffers are float32, or float64 for float64 parameters.

    State:
        num_batches_tracked: number of batches that updated the state, 0-d int64.
        num_nonfinite_batches: number of batches in which some statistic was NaN or infinite and was
            left out, 0-d int64.
    """

    num_sums: int
    """Number of (C,) sums over a batch that update the state."""
    read_in_training: tuple[str, ...] = ()
    """Buffers that a training forward normalizes by."""

    checks_itself = True
    reads_mask = True
    strict_masks: bool = True
    """Whether a scope's mask that does not fit is an error; else padding counts."""
    centered: bool = False
    """Whether the sums are those of `running_stats.centered_sums`, else plain ones."""
    _stage: int = 0
    is_frozen: bool = False
    """Whether the layer evaluates in training too, see `freeze_statistics`."""

    num_batches_tracked: Tensor
    num_nonfinite_batches: Tensor

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        *,
        eps: float,
        affine: bool,
        bias: bool,
        sync: bool,
        process_group: dist.ProcessGroup | None,
        feature_dim: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(num_features, eps, affine, bias, feature_dim, device, dtype)
        self.sync = sync
        self.process_group = process_group
        self._records = CallRecords()
        self._held: Tensor | None = None
        self._mode = True
        self._buffer_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        for name in ("num_batches_tracked", "num_nonfinite_batches"):
            self.register_buffer(name, torch.zeros((), dtype=torch.long, device=device))
        settle_count(self)

    @property
    def wants_mask(self) -> bool:
        """Whether the layer uses a mask: in training, and always where padding is set to 0."""
        return self.training or self.floor

    @property
    def floor(self) -> bool:
        """Whether padding is set to 0 before anything else, and eps is a floor."""
        return False

    def add_statistic(self, name: str, value: float, device: Any, *leading: int) -> None:
        """Register a running statistic of shape (*leading, C), starting at `value`."""
        shape = (*leading, self.num_features)
        self.register_buffer(
            name, torch.full(shape, value, dtype=self._buffer_dtype, device=device)
        )

    @property
    def group_name(self) -> str:
        """Name of the process group that shares statistics, `""` if there is none."""
        if not _has_processes():
            return ""
        return group_name_of(self.process_group, self.sync)

    def check_copies(self, x: DTensor) -> None:
        """Raise an InputError if a forward's statistics would count tokens several times."""
        if self.training and self.group_name:
            check_group(self.class_name, x, self.process_group)

    def see_inputs(self, x: Tensor, mask: Tensor | None, residual: Tensor | None) -> SeenInputs:
        """Check the arguments of a forward and return the values that it normalizes by."""
        training = self.training
        if mask is None:
            # Evaluation needs a mask only in the released variants; a model's own mask, which may
            # be longer than the input in evaluation, is ignored.
            wanted = training or self.floor
            mask = current_padding_mask(x, self) if wanted else users_padding_mask()
        buffers = cast(dict[str, Tensor], self._buffers)
        state = tuple(map(buffers.__getitem__, self.read_in_training)) if training else ()
        seen = SeenInputs(mask, self._stage, state)
        # Evaluation reads a mask only in the released variants.
        if training or self.floor:
            if torch.compiler.is_compiling():
                if not KNOWS_BACKWARDS:
                    raise unknown_backward()
            elif may_be_repeated():
                seen = self._records.replay(self.class_name, x, seen)
                mask = seen.padding_mask
        plain = mask is None and residual is None and x.ndim and x.is_floating_point()
        if not plain or num_features_of(x) != self.num_features:
            dim = self.feature_dim
            others = None if residual is None else features_back(residual, dim)
            self.check_input(features_back(x, dim), mask, others)
        return seen

    def mask_for(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return the mask of a training call: its own, else that of the scope."""
        if mask is not None:
            return mask
        return current_padding_mask(x, self, strict=self.strict_masks)

    @property
    def stage(self) -> int:
        """Index of the layer's current behavior; for most layers 0 is the warm-up."""
        return self._stage

    def train(self, mode: bool = True) -> Self:
        """Set the mode; a frozen layer stays in evaluation and takes the mode once unfrozen."""
        settle_count(self)
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
            mode: training mode from now on; None means that of the last call of `train`.
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
    def move_statistics(self, present: Tensor, *moves: Move) -> None:
        """Update buffers toward new values, if these are finite, and count.

        Args:
            present: 0-d bool; False changes nothing (no valid token, or a recomputation).
            moves: (buffer, new value, weight) of each buffer.
        """
        move_buffers(self.num_batches_tracked, self.num_nonfinite_batches, present, *moves)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with converted_buffers(self):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        save_count(self, destination, prefix, keep_vars)

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
        with loaded_buffers(self, state_dict, prefix, local_metadata, missing_keys):
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, *others
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A process group cannot be copied; the copy uses the same one.
        memo[id(self.process_group)] = self.process_group
        reduced = cast(tuple[Any, ...], self.__reduce_ex__(4))
        copied = reduced[0](*reduced[1])
        memo[id(self)] = copied
        copied.__setstate__(deepcopy(reduced[2], memo))
        return cast(Self, copied)

    @abstractmethod
    def update_running_stats(self, sums: Tensor) -> None:
        """Update the state by one step.

        Args:
            sums: (num_sums, C) float64 sums over the tokens of the step, of all processes; the
                first row is the number of valid tokens.
        """

    def reset_running_stats(self) -> None:
        """Reset the counters."""
        self.num_batches_tracked.zero_()
        self.num_nonfinite_batches.zero_()

    def adopt_keys(self, state_dict: dict[str, Tensor], prefix: str) -> None:
        """Rename, in place, the keys of a released layer's checkpoint."""

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_records": CallRecords(), "_held": None}


_has_processes: Final = dist.is_initialized if dist.is_available() else lambda: False
