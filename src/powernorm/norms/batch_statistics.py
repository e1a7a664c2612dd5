"""The base class of the norms with batch statistics."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from powernorm.errors import InputError
from powernorm.norms.arguments import (
    Variant,
    check_groups,
    check_share,
    check_tracking,
)
from powernorm.norms.averaging import is_update_bn_asking, stand_in_for
from powernorm.norms.base import AffineNorm
from powernorm.norms.buffers import (
    OPTIONAL_BUFFER,
    converted_buffers,
    loaded_buffers,
    rename_key,
    save_count,
    settle_count,
)
from powernorm.norms.checkpointing import CallRecords, Seen
from powernorm.norms.feature_dims import Normalized, features_back, features_last
from powernorm.norms.masks import current_padding_mask, users_padding_mask
from powernorm.norms.sharded import check_group, local_state
from powernorm.ops.arrays import reciprocal_root, scale_groups, tokens_of
from powernorm.ops.batch_norm import OPERATOR as BATCH_NORM
from powernorm.ops.batch_norm import BatchNormArgs, BatchNormOutput, batch_norm
from powernorm.ops.dispatch import functions_for
from powernorm.ops.moments import Moments
from powernorm.ops.operators import in_backward, may_be_repeated
from powernorm.ops.processes import group_name_of
from powernorm.ops.running_stats import (
    CenteredUpdate,
    Move,
    UncenteredUpdate,
    Update,
    merge_sums,
    move_buffers,
    reduce_sums,
    unbiased,
)
from powernorm.ops.static_norm import StaticNormArgs, static_norm

_COUNTERS: Final = ("num_batches_tracked", OPTIONAL_BUFFER)
_CENTERED_BUFFERS: Final = ("running_mean", "running_var", *_COUNTERS)
_UNCENTERED_BUFFERS: Final = ("running_second_moment", *_COUNTERS)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class BatchStatisticsNorm(AffineNorm):
    """Base of the norms with statistics over the valid tokens of a batch.

    Centered ones (BatchNorm and its variants) have a running mean and variance, the others
    (PowerNorm and its variants) a running quadratic mean ψ². Subclasses compute in training; this
    class evaluates, and handles groups, masks, processes, the types of buffers and the counters.

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
        running_mean, running_var: (C,), 0 and 1 at the start, if centered.
        running_second_moment: ψ², (C,), 1 at the start, if not.
        num_batches_tracked: number of batches that updated the running statistics, 0-d int64.
        num_nonfinite_batches: number of batches in which some feature's statistics were NaN or
            infinite and were left out, 0-d int64.
    """

    num_sums: int
    """Number of (C,) sums over a batch that update the running statistics."""
    read_in_training: tuple[str, ...] = ()
    """Buffers that a training forward normalizes by."""

    checks_itself = True
    reads_mask = True
    centered: bool = True
    variant: Variant = "paper"
    trains_by_average: bool = False
    """Whether training normalizes by running statistics, so that they must not become slow."""
    trains_by_batch: bool = False
    """Whether training uses the batch's statistics alone, so that running ones may be taken anew by
    `torch.optim.swa_utils.update_bn`. Those that training reads are part of what was trained."""
    is_reestimated: bool = False
    """Whether `update_bn` is running."""
    _stage: int = 0
    is_frozen: bool = False
    """Whether the layer evaluates in training too, see `freeze_statistics`."""

    running_mean: Tensor
    running_var: Tensor
    running_second_moment: Tensor
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
        self._update: Update | None = None
        self._update_of: tuple[object, ...] = ()
        self._mode = True
        self._buffer_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        for name in ("num_batches_tracked", "num_nonfinite_batches"):
            self.register_buffer(name, torch.zeros((), dtype=torch.long, device=device))
        if self.centered:
            self.add_statistic("running_mean", 0.0, device)
            self.add_statistic("running_var", 1.0, device)
        else:
            self.add_statistic("running_second_moment", 1.0, device)
        settle_count(self)

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
        """Whether the layer uses a mask: in training, and always where padding is set to 0."""
        return self.training or self.floor

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
        if not _has_processes():
            return ""
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

    def prepare(self, x: Tensor, mask: Tensor | None, residual: Tensor | None) -> Seen:
        """Check the arguments of a forward and return what to normalize by."""
        training = self.training
        if mask is None:
            # Evaluation needs a mask only in the released variants; a model's own mask, which may
            # be longer than the input in evaluation, is ignored.
            wanted = training or self.floor
            mask = current_padding_mask(x, self) if wanted else users_padding_mask()
        buffers = cast(dict[str, Tensor], self._buffers)
        state = tuple(map(buffers.__getitem__, self.read_in_training)) if training else ()
        seen = Seen(mask, self._stage, state)
        # Evaluation reads a mask only in the released variants.
        if (training or self.floor) and not torch.compiler.is_compiling() and may_be_repeated():
            seen = self._records.replay(self.class_name, x, seen)
            mask = seen.padding_mask
        plain = mask is None and residual is None and x.ndim and x.is_floating_point()
        if not plain or x.shape[-1] != self.num_features:
            dim = self.feature_dim
            others = None if residual is None else features_back(residual, dim)
            self.check_input(features_back(x, dim), mask, others)
        return seen

    def evaluate(self, x: Tensor, mask: Tensor | None, residual: Tensor | None) -> Normalized:
        """Normalize (..., C) by the running statistics."""
        seen = self.prepare(x, mask, residual)
        x, residual = self.without_padding(x, residual, seen.padding_mask)
        mean, var = self.running_stats
        parameters = self._parameters
        weight, bias = parameters["weight"], parameters["bias"]
        settings = self.groups or 0, self.eps, self.floor
        y, total = static_norm(StaticNormArgs(x, residual, weight, bias, mean, var, *settings))
        return y if residual is None else (y, cast(Tensor, total))

    def normalize(self, x: Tensor, mask: Tensor | None, residual: Tensor | None, /) -> Normalized:
        """Normalize (..., C) by the batch's statistics and update the running ones.

        In evaluation by the running statistics.
        """
        if not self.training:
            return self.evaluate(x, mask, residual)
        prepares = self.may_prepare(x, residual)
        if prepares and self._prepared is not None:
            settings = self.call_settings()
            y = self.run_prepared(x, self.mask_for(x, mask), settings)
            if y is not None:
                torch.autograd.graph.increment_version(cast(Update, self._update).buffers)
                return cast(Tensor, y)
        return self.normalize_batch(x, residual, self.prepare(x, mask, residual), prepares)

    def normalize_batch(
        self, x: Tensor, residual: Tensor | None, seen: Seen, prepares: bool
    ) -> Normalized:
        """Normalize (..., C) by the batch's statistics and update the running ones.

        Args:
            x: (..., C).
            residual: added to x first.
            seen: what `prepare` has given.
            prepares: may the call be kept prepared?
        """
        update = self._update_within()
        *mean, var = seen.state
        args = self.batch_norm_args(x, residual, seen, mean[0] if mean else None, var, None)
        output = batch_norm(args, update)
        if update is None or output.has_tokens is not None:
            self.update_after(output)
        elif prepares and self._prepared is None and (settings := self.call_settings()):
            self.keep_prepared(BATCH_NORM.prepare(args, update), settings)
        return output.y if residual is None else (output.y, cast(Tensor, output.total))

    def batch_norm_args(
        self,
        x: Tensor,
        residual: Tensor | None,
        seen: Seen,
        mean: Tensor | None,
        var: Tensor,
        carrier: Tensor | None,
        limits: Tensor | None = None,
    ) -> BatchNormArgs:
        """Return the arguments of the op `batch_norm`; see there."""
        mask = seen.padding_mask
        x, residual = self.without_padding(x, residual, mask)
        # Looked up directly: reading an attribute of a module takes as long as updating it.
        parameters = self._parameters
        weight, bias = parameters["weight"], parameters["bias"]
        settings = self.groups or 0, self.eps, self.floor, self.group_name
        return BatchNormArgs(x, residual, mask, weight, bias, mean, var, carrier, limits, *settings)

    def mask_for(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return the mask of a training call: its own, else that of the scope."""
        return current_padding_mask(x, self) if mask is None else mask

    def call_settings(self) -> tuple[Any, ...] | None:
        """Return what a training call depends on besides its tensors; see `run_prepared`.

        Buffers may be replaced, and their memory too. None where statistics are of several batches
        or processes, or padding is hidden.
        """
        if self._held is not None or self.variant != "paper" or self.group_name:
            return None
        update = self.current_update()
        addresses = [buffer.data_ptr() for buffer in update.buffers]
        return self.eps, self.groups, update, update.buffers[0].dtype, addresses

    @property
    def running_stats(self) -> tuple[Tensor | None, Tensor]:
        """Running mean and variance, or (None, ψ²)."""
        buffers = cast(dict[str, Tensor], self._buffers)
        if self.centered:
            return buffers["running_mean"], buffers["running_var"]
        return None, buffers["running_second_moment"]

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return (a, c): a = γ/sqrt(σ² + eps), c = β - a μ, (C,) float64; uncentered without μ."""
        if not self.is_static:
            return super().affine()
        mean, var = self.running_stats
        scale = reciprocal_root(var.double(), self.eps, self.floor)
        if self.weight is not None:
            scale = scale * self.weight.double()
        shift = torch.zeros_like(scale) if mean is None else -scale * mean.double()
        return scale, shift if self.bias is None else shift + self.bias.double()

    @property
    def stage(self) -> int:
        """Index of the layer's current behavior; for most layers 0 is the warm-up."""
        return self._stage

    @property
    def floor(self) -> bool:
        """Whether eps is a floor of the second moment (released), not added to it (paper)."""
        return self.variant == "released"

    def without_padding(
        self, x: Tensor, residual: Tensor | None, padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return x and residual, with padding set to 0 in the released variants with a floor."""
        if padding_mask is None or not self.floor:
            return x, residual
        hidden = padding_mask.unsqueeze(-1)
        others = None if residual is None else residual.masked_fill(hidden, 0.0)
        return x.masked_fill(hidden, 0.0), others

    def reset_running_stats(self) -> None:
        """Reset running statistics and counters to their initial values."""
        mean, var = self.running_stats
        if mean is not None:
            mean.zero_()
        var.fill_(1)
        self.num_batches_tracked.zero_()
        self.num_nonfinite_batches.zero_()

    def reset_parameters(self) -> None:
        """Reset γ, β and the running statistics to their initial values."""
        super().reset_parameters()
        self.reset_running_stats()

    def update_running_stats(self, sums: Tensor) -> None:
        """Update the running statistics by one step.

        Args:
            sums: (num_sums, C) float64 sums over the tokens of the step, of all processes; the
                first row is the number of valid tokens.
        """
        functions_for(sums).update_running_stats(self.current_update(), sums)

    def current_update(self) -> Update:
        """Return the update of the buffers that the layer has now, made anew where one is not."""
        update, known, made_of = self._update, self._update_of, self._update_sources()
        if update is None or not all(map(_is, known, made_of)):
            update = self._new_update(self._updated_buffers(), self.update_momentum)
            # Setting an attribute of a module takes as long as an update.
            self.__dict__.update(_update=update, _update_of=made_of)
        return update

    def _update_sources(self) -> tuple[object, ...]:
        """Return all that an update is made of, each of which may be another at the next step."""
        return (self.update_momentum, self.variant, *self._buffers.values())

    @property
    def update_momentum(self) -> float | None:
        """Weight of the batch in the next update; None for the plain average of all."""
        return self._momentum

    def _updated_buffers(self) -> tuple[Tensor, ...]:
        buffers = cast(dict[str, Tensor], self._buffers)
        return tuple(
            map(buffers.__getitem__, _CENTERED_BUFFERS if self.centered else _UNCENTERED_BUFFERS)
        )

    def _new_update(self, buffers: tuple[Tensor, ...], momentum: float | None) -> Update:
        if self.centered:
            return CenteredUpdate(buffers, momentum, not self.floor)
        return UncenteredUpdate(buffers, momentum)

    def _update_within(self) -> Update | None:
        """Return the update that the op can make; None leaves it to `update_after`."""
        if torch.compiler.is_compiling() or self._held is not None or self.group_name:
            return None
        return None if in_backward() else self.current_update()

    def update_after(self, output: BatchNormOutput) -> None:
        """Update the running statistics in the forward, behind the op.

        By its statistics, which hold for all processes: in compiled code and with several
        processes.
        """
        has_tokens, sums = output.has_tokens, output.sums
        assert sums is not None
        if has_tokens is None:
            if in_backward():
                return  # a checkpoint repeats the forward
            if self.is_holding:
                self.gather(sums)
                return
            if not self.group_name:
                self.update_running_stats(sums)
                return
            has_tokens = output.statistics[-1, 0] > 0
        elif not torch.compiler.is_compiling() and in_backward():
            # A selective checkpoint may give what it has saved of the first run. It counts the
            # operators of both runs, so that this one is hidden and those of the update are not.
            with _disable_current_modes():
                has_tokens = torch.zeros_like(has_tokens)
        if self.is_holding:
            self.gather(torch.where(has_tokens, sums, 0.0))
        else:
            self.move_statistics(has_tokens, *self._moves(output.statistics.detach()))

    def _moves(self, statistics: Tensor) -> tuple[Move, ...]:
        mean, var = self.running_stats
        if mean is None:
            return ((var, statistics[1], self.momentum),)
        target = self.running_target(statistics[1], statistics[-1])
        return (mean, statistics[0], self.momentum), (var, target, self.momentum)

    def running_target(self, var: Tensor, count: Tensor) -> Tensor:
        """Return the new value for the running variance.

        It divides by M - 1, or by M if M = 1 or the variant is `released` with its floor.
        """
        return var if self.floor else unbiased(var, count)

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
    def move_statistics(self, present: Tensor, *moves: Move) -> None:
        """Update buffers toward new values where those are finite, and count.

        Args:
            present: 0-d bool; False changes nothing (no valid token, or a recomputation).
            moves: of each buffer.
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

    def adopt_keys(self, state_dict: dict[str, Tensor], prefix: str) -> None:
        """Rename, in place, the keys of a released layer's checkpoint.

        Those of its batch statistics go.
        """
        if not self.centered:
            return
        for name in ("batch_mean", "batch_var"):
            state_dict.pop(prefix + name, None)
        for name in ("running_mean", "running_var"):
            key = prefix + name
            rename_key(state_dict, key, key, (self.num_features,))

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """Return the modules of the layer as any module does; for `update_bn` its stand-in too."""
        modules: Iterator[tuple[str, nn.Module]]
        modules = super().named_modules(memo, prefix, remove_duplicate)
        if not is_update_bn_asking() or not self.trains_by_batch or self.is_frozen:
            return modules
        if memo is not None and self in memo:
            return modules
        return itertools.chain(modules, [(f"{prefix}.stand_in", stand_in_for(self))])

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A process group cannot be copied; the copy uses the same one.
        memo[id(self.process_group)] = self.process_group
        reduced = cast(tuple[Any, ...], self.__reduce_ex__(4))
        copied = reduced[0](*reduced[1])
        memo[id(self)] = copied
        copied.__setstate__(deepcopy(reduced[2], memo))
        return cast(Self, copied)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.update(_records=CallRecords(), _held=None, _update=None, _update_of=())
        return state

    def extra_repr(self) -> str:
        """Return the features, eps, momentum, affine, groups."""
        groups = "" if self.groups is None else f", groups={self.groups}"
        groups += "" if self.variant == "paper" else f", variant={self.variant!r}"
        groups += ", frozen" if self.is_frozen else ""
        return f"{super().extra_repr()}, momentum={self.momentum}{groups}"


_is: Final = operator.is_
_has_processes: Final = dist.is_initialized if dist.is_available() else lambda: False


def memory_of(buffer: Tensor) -> tuple[Any, ...]:
    """Return what must not change of a buffer that a prepared call reads by its address."""
    return buffer.data_ptr(), buffer.dtype, buffer.numel(), buffer.is_contiguous()
