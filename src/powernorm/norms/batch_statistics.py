"""The base class of the norms with batch statistics."""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar, Final, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.norms.arguments import (
    Start,
    Variant,
    check_choice,
    check_groups,
    check_share,
    check_tracking,
)
from powernorm.norms.averaging import is_update_bn_asking, stand_in_for
from powernorm.norms.checkpointing import SeenInputs
from powernorm.norms.feature_dims import Normalized
from powernorm.norms.masks import current_padding_mask
from powernorm.norms.stateful import (
    OPTIONAL_BUFFER,
    StatefulNorm,
    rename_key,
)
from powernorm.ops.arrays import reciprocal_root, scale_groups, tokens_of
from powernorm.ops.batch_norm import OPERATOR as BATCH_NORM
from powernorm.ops.batch_norm import BatchNormArgs, BatchNormOutput, batch_norm
from powernorm.ops.dispatch import functions_for
from powernorm.ops.moments import Moments
from powernorm.ops.running_stats import (
    Average,
    CenteredUpdate,
    Momentum,
    Move,
    UncenteredUpdate,
    Update,
    memory_of,
    unbiased,
)
from powernorm.ops.static_norm import StaticNormArgs, static_norm
from powernorm.ops.torch_private import (
    are_transforms_active,
    is_tracing,
    num_dispatch_modes,
    without_modes,
)

AVERAGE: Final = Average()
_FAR: Final = 2.0
"""Ratio of a batch's variance to the running one beyond which an evaluation warns."""
_ENOUGH, _MOST = 32, 4096
"""Numbers of tokens between which a batch's variance is compared."""
_COUNTERS: Final = ("num_batches_tracked", OPTIONAL_BUFFER)
_CENTERED_BUFFERS: Final = ("running_mean", "running_var", *_COUNTERS)
_UNCENTERED_BUFFERS: Final = ("running_second_moment", *_COUNTERS)


class BatchStatisticsNorm(StatefulNorm):
    """Base of the norms with statistics over the valid tokens of a batch.

    Centered ones (BatchNorm and its variants) have a running mean and variance, the others
    (PowerNorm and its variants) a running quadratic mean ψ². Subclasses compute in training; this
    class evaluates, and handles groups, masks, processes, the types of buffers and the counters.

    The first evaluation after training steps warns, once for a model, if the variance of its batch
    (of at least 32 valid tokens) and the running one differ by more than a factor of 2 in the
    middle one of the features; not in compiled or exported code.

    Args:
        num_features: C.
        eps: added inside the root.
        momentum: weight of the new batch in running statistics, in (0, 1]; None for the plain
            average of all batches, as in torch.
        affine: learn γ and β.
        track_running_stats: True; False is refused.
        start: `average`: running statistics start as the plain average of the first 1/momentum
            batches, the k-th of which has the weight max(1/k, momentum). `torch`: they start at 0
            and 1, as in torch.nn.BatchNorm1d, which stay noticeable for long if momentum is small:
            after 100 steps at 0.05 a start of 1 still adds 0.006, and the variance of embeddings
            may be small compared with that. None means `average`, and `torch` in the released
            variants.
        variant: `paper` or `released`.
        groups: GroupScaling with this many groups before the norm; None leaves it out.
        sync: take statistics over all processes of the group. With False under
            DistributedDataParallel pass `broadcast_buffers=False` too, or rank 0's statistics
            overwrite the others'.
        process_group: the group; None is the default one if torch.distributed runs.
        device: device of parameters and buffers.
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        dtype: type of parameters; buffers are float32, or float64 for float64 parameters.

    State:
        If centered, `running_mean` and `running_var`, (C,), 0 and 1 at the start; if not,
        `running_second_moment`, ψ², (C,), 1 at the start. `num_batches_tracked` is the number of
        batches that updated them, 0-d int64; `num_nonfinite_batches` that of batches in which some
        feature's statistics were NaN or infinite and were left out.
    """

    centered = True
    variant: Variant = "paper"
    _start: Start | None = "torch"  # of the class: for layers that were pickled without one
    trains_by_average: bool = False
    """Whether training normalizes by running statistics, which must then follow the weights."""
    trains_by_batch: bool = False
    """Whether training uses only the batch's statistics, so that `torch.optim.swa_utils.update_bn`
    may re-estimate the running ones. Statistics that training reads are part of the trained
    model."""
    is_reestimated: bool = False
    """Whether `update_bn` is running."""
    _is_unproven: bool | None = None
    """Whether the layer has trained and not evaluated since; None before its first training."""
    _has_warned_of_evaluation: ClassVar[bool] = False
    """Whether a layer has warned since another one began to train, to warn once per model."""

    running_mean: Tensor
    running_var: Tensor
    running_second_moment: Tensor

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        start: Start | None = None,
        groups: int | None = None,
        variant: Variant = "paper",
        sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        feature_dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features,
            eps=eps,
            affine=affine,
            bias=True,
            sync=sync,
            process_group=process_group,
            feature_dim=feature_dim,
            device=device,
            dtype=dtype,
        )
        check_tracking(track_running_stats)
        self.variant = check_choice("variant", variant, get_args(Variant))
        self.momentum = momentum
        self.start = start
        self.groups = None if groups is None else check_groups(groups, self.num_features)
        self._update: Update | None = None
        self._update_of: tuple[object, ...] = ()
        if self.centered:
            self.add_statistic("running_mean", 0.0, device)
            self.add_statistic("running_var", 1.0, device)
        else:
            self.add_statistic("running_second_moment", 1.0, device)

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
                "average of all batches changes ever more slowly"
            )
        self._momentum = None if momentum is None else check_share("momentum", momentum)

    @property
    def start(self) -> Start | None:
        """How running statistics start; None for `average`, and `torch` in released variants."""
        return self._start

    @start.setter
    def start(self, start: Start | None) -> None:
        self._start = check_choice("start", start, (*get_args(Start), None))

    @property
    def starts_by_average(self) -> bool:
        """Whether running statistics start as the plain average of the first batches."""
        return (self._start or ("average" if self.variant == "paper" else "torch")) == "average"

    @property
    def is_static(self) -> bool:
        """Whether the layer is static: without GroupScaling."""
        return self.groups is None

    @property
    def trains_by_running_stats(self) -> bool:
        """Whether the weights have been trained with inputs normalized by running statistics.

        These are then part of the trained function, and re-estimating them changes it.
        """
        return False

    def token_moments(self, x: Tensor, padding_mask: Tensor | None = None) -> Moments:
        """Return the moments of the layer's normalized input over this process's valid tokens.

        Args:
            x: the layer's input with the features last, (..., C).
            padding_mask: True = padding; None means the mask of the scope.
        """
        mask = padding_mask if padding_mask is not None else current_padding_mask(x, self)
        with torch.no_grad():
            return Moments.of(self.scaled(x), mask)

    def scaled(self, x: Tensor) -> Tensor:
        """Return x, (..., C), after GroupScaling if the layer has it, in the accumulation type."""
        return scale_groups(tokens_of(x), self.groups or 0, self.eps)[0].reshape(x.shape)

    def see_inputs(self, x: Tensor, mask: Tensor | None, residual: Tensor | None) -> SeenInputs:
        """Check the arguments of a forward and return the values that it normalizes by."""
        seen = super().see_inputs(x, mask, residual)
        if torch.compiler.is_compiling():
            return seen
        if self.training:
            if self._is_unproven is None:
                self._is_unproven = True
                BatchStatisticsNorm._has_warned_of_evaluation = False
        elif self._is_unproven and not self.is_frozen and _is_plain(x):
            self.compare_with_batch(x if residual is None else x + residual, mask)
        return seen

    def compare_with_batch(self, x: Tensor, mask: Tensor | None) -> None:
        """Warn once if the running statistics of an evaluation are far from its batch's.

        Only one of a model's layers warns.
        """
        tokens = x.numel() // self.num_features
        if tokens < _ENOUGH:
            return
        steps = int(self.num_batches_tracked)
        self._is_unproven = False if steps else None
        if mask is None:
            mask = current_padding_mask(x, self, strict=False)
        some = slice(max(1, _MOST * x.shape[0] // tokens))
        batch = Moments.of(self.scaled(x.detach()[some]), None if mask is None else mask[some])
        square = (batch.var if self.centered else batch.second_moment) + self.eps
        gap = (square / (self.running_stats[1] + self.eps)).log().abs().median().exp().item()
        is_far = steps > 0 and gap > _FAR and int(batch.count) >= _ENOUGH
        if not is_far or BatchStatisticsNorm._has_warned_of_evaluation:
            return
        BatchStatisticsNorm._has_warned_of_evaluation = True
        remedy = "train for more steps, or call powernorm.calibrate(model, batches) before"
        if self.trains_by_running_stats:
            remedy = "train for more steps"
        warnings.warn(
            f"a {self.class_name} evaluates after {steps} steps by running "
            f"statistics that differ from the variance of the batch by a factor of {gap:.1f} in "
            f"its median feature: {remedy}",
            stacklevel=2,
        )

    def evaluate(self, x: Tensor, mask: Tensor | None, residual: Tensor | None) -> Normalized:
        """Normalize (..., C) by the running statistics."""
        seen = self.see_inputs(x, mask, residual)
        x, residual = self.without_padding(x, residual, seen.padding_mask)
        mean, var = self.running_stats
        weight, bias = self.gamma_and_beta()
        settings = self.groups or 0, self.eps, self.floor
        y, total = static_norm(StaticNormArgs(x, residual, weight, bias, mean, var, *settings))
        return y if residual is None else (y, cast(Tensor, total))

    def normalize(self, x: Tensor, mask: Tensor | None, residual: Tensor | None, /) -> Normalized:
        """Normalize (..., C) by the batch's statistics and update the running ones.

        In evaluation normalize by the running statistics.
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
        return self.normalize_batch(x, residual, self.see_inputs(x, mask, residual), prepares)

    def normalize_batch(
        self, x: Tensor, residual: Tensor | None, seen: SeenInputs, prepares: bool
    ) -> Normalized:
        """Normalize (..., C) by the batch's statistics and update the running ones.

        Args:
            x: (..., C).
            residual: added to x first.
            seen: result of `see_inputs`.
            prepares: whether the call may be kept as a prepared call.
        """
        update = self._update_within(seen)
        *mean, var = seen.state
        args = self.batch_norm_args(x, residual, seen, mean[0] if mean else None, var, None)
        output = batch_norm(args, update)
        if update is None or output.has_tokens is not None:
            self.update_after(output, seen)
        elif prepares and self._prepared is None and (settings := self.call_settings()):
            self.keep_prepared(BATCH_NORM.prepare(args, update), settings)
        return output.y if residual is None else (output.y, cast(Tensor, output.total))

    def batch_norm_args(
        self,
        x: Tensor,
        residual: Tensor | None,
        seen: SeenInputs,
        mean: Tensor | None,
        var: Tensor,
        carrier: Tensor | None,
        limits: Tensor | None = None,
    ) -> BatchNormArgs:
        """Return the arguments of the op `batch_norm`; see there."""
        mask = seen.padding_mask
        x, residual = self.without_padding(x, residual, mask)
        weight, bias = self.gamma_and_beta()
        settings = self.groups or 0, self.eps, self.floor, self.group_name
        return BatchNormArgs(x, residual, mask, weight, bias, mean, var, carrier, limits, *settings)

    def call_settings(self) -> tuple[Any, ...] | None:
        """Return what a training call depends on besides its tensors; see `run_prepared`.

        Buffers may be replaced, and their memory too. None if statistics cover several batches or
        processes, or padding is hidden.
        """
        if self._held is not None or self.variant != "paper" or self.group_name:
            return None
        update = self.current_update()
        return self.eps, self.groups, update, memory_of(*update.buffers)

    @property
    def running_stats(self) -> tuple[Tensor | None, Tensor]:
        """Running mean and variance, or (None, ψ²)."""
        buffers = cast(dict[str, Tensor], self._buffers)
        if self.centered:
            return buffers["running_mean"], buffers["running_var"]
        return None, buffers["running_second_moment"]

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return (a, c): a = γ/sqrt(σ² + eps), c = β - a μ, (C,) float64; uncentered without μ."""
        if not (self.is_static or self.centers):
            return super().affine()
        mean, var = self.running_stats
        scale = reciprocal_root(var.double(), self.eps, self.floor)
        if self.weight is not None:
            scale = scale * self.weight.double()
        shift = torch.zeros_like(scale) if mean is None else -scale * mean.double()
        return scale, shift if self.bias is None else shift + self.bias.double()

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
        super().reset_running_stats()

    def reset_parameters(self) -> None:
        """Reset γ, β and the running statistics to their initial values."""
        super().reset_parameters()
        self.reset_running_stats()

    def update_running_stats(self, sums: Tensor) -> None:
        """Update the running statistics by one step; see the base class."""
        functions_for(sums).update_running_stats(self.current_update(), sums)

    def current_update(self) -> Update:
        """Return the update of the layer's current buffers, building a new one if one changed."""
        update, known, made_of = self._update, self._update_of, self._update_sources()
        if update is None or not all(map(_is, known, made_of)):
            update = self._new_update(self._updated_buffers(), self.update_momentum)
            # Setting an attribute of a module takes as long as an update.
            self.__dict__.update(_update=update, _update_of=made_of)
        return update

    def _update_sources(self) -> tuple[object, ...]:
        """Return everything that an update is made of, any of which may change between steps."""
        return (self._momentum, self._start, self.variant, *self._buffers.values())

    @property
    def update_momentum(self) -> Momentum:
        """Weight of the batch in the next update."""
        if self._momentum is None:
            return AVERAGE
        return Average(self._momentum) if self.starts_by_average else self._momentum

    def _updated_buffers(self) -> tuple[Tensor, ...]:
        buffers = cast(dict[str, Tensor], self._buffers)
        return tuple(
            map(buffers.__getitem__, _CENTERED_BUFFERS if self.centered else _UNCENTERED_BUFFERS)
        )

    def _new_update(self, buffers: tuple[Tensor, ...], momentum: Momentum) -> Update:
        if self.centered:
            return CenteredUpdate(buffers, momentum, not self.floor)
        return UncenteredUpdate(buffers, momentum)

    def _update_within(self, seen: SeenInputs) -> Update | None:
        """Return the update that the op can make; None leaves it to `update_after`."""
        if torch.compiler.is_compiling() or self._held is not None or self.group_name:
            return None
        return None if seen.is_repeated else self.current_update()

    def update_after(self, output: BatchNormOutput, seen: SeenInputs) -> None:
        """Update the running statistics in the forward, after the op.

        It uses the op's statistics, which are those of all processes, in compiled code and with
        several processes.
        """
        has_tokens, sums = output.has_tokens, output.sums
        assert sums is not None
        if has_tokens is None:
            if seen.is_repeated:
                return  # a checkpoint repeats the forward
            if self.is_holding:
                self.gather(sums)
                return
            if not self.group_name:
                self.update_running_stats(sums)
                return
            has_tokens = output.statistics[-1, 0] > 0
        elif seen.is_repeated:
            # A selective checkpoint may return results that it saved in the first run. It counts
            # the operators of both runs, so this one is hidden and those of the update are not.
            with without_modes():
                has_tokens = torch.zeros_like(has_tokens)
        if self.is_holding:
            self.gather(torch.where(has_tokens, sums, 0.0))
        else:
            self.move_statistics(has_tokens, *self._moves(output.statistics.detach()))

    def _moves(self, statistics: Tensor) -> tuple[Move, ...]:
        mean, var = self.running_stats
        if mean is None:
            return ((var, statistics[1], self.update_momentum),)
        target = self.running_target(statistics[1], statistics[-1])
        momentum = self.update_momentum
        return (mean, statistics[0], momentum), (var, target, momentum)

    def running_target(self, var: Tensor, count: Tensor) -> Tensor:
        """Return the new value for the running variance.

        It divides by M - 1, or by M if M = 1 or the variant is `released` with its floor.
        """
        return var if self.floor else unbiased(var, count)

    def adopt_keys(self, state_dict: dict[str, Tensor], prefix: str) -> None:
        """Rename the keys of a released layer's checkpoint in place, and drop batch statistics."""
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
        """Return the layer's modules as any module does; for `update_bn` its stand-in too."""
        modules: Iterator[tuple[str, nn.Module]]
        modules = super().named_modules(memo, prefix, remove_duplicate)
        if not is_update_bn_asking() or not self.trains_by_batch or self.is_frozen:
            return modules
        if memo is not None and self in memo:
            return modules
        return itertools.chain(modules, [(f"{prefix}.stand_in", stand_in_for(self))])

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_update": None, "_update_of": ()}

    def extra_repr(self) -> str:
        """Return the features, eps, momentum, affine, groups."""
        groups = "" if self.groups is None else f", groups={self.groups}"
        groups += "" if self._start is None else f", start={self._start!r}"
        groups += "" if self.variant == "paper" else f", variant={self.variant!r}"
        groups += ", frozen" if self.is_frozen else ""
        return f"{super().extra_repr()}, momentum={self.momentum}{groups}"


_is: Final = operator.is_


def _is_plain(x: Tensor) -> bool:
    """Return whether values can be read: nothing traces, transforms or captures the call."""
    return (
        type(x) is Tensor
        and not x.is_meta
        and not is_tracing()
        and not are_transforms_active()
        and not num_dispatch_modes()
        and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )
