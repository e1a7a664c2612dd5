"""Regularized BatchNorm: BatchNorm with a penalty on the gap of batch and running statistics."""

from __future__ import annotations

import warnings
from typing import Any, Final, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor

from powernorm.errors import InputError
from powernorm.norms.arguments import Start, Variant, check_number
from powernorm.norms.batch_statistics import BatchStatisticsNorm
from powernorm.norms.carrier import CarrierNorm
from powernorm.norms.divergences import (
    Compared,
    Divergence,
    Terms,
    check_divergence,
    divergence_terms,
)
from powernorm.norms.feature_dims import Normalized
from powernorm.norms.penalties import MOST_COMPILED, Pending
from powernorm.ops.batch_norm import OPERATOR as BATCH_NORM
from powernorm.ops.batch_norm import batch_norm
from powernorm.ops.operators import snapshot
from powernorm.ops.running_stats import memory_of, mixed, next_weight

_PATIENCE: Final = 100
"""Backwards without a request of the penalty before a layer warns; a few mean nothing."""


class RegularizedBatchNorm(CarrierNorm, BatchStatisticsNorm):
    """Regularized BatchNorm (Wang et al. 2022, Section 4.1).

    BatchNorm over the valid tokens, and a penalty to be added to the loss,
    `λ_mean Σ_c d_mean + λ_var Σ_c d_var`: two divergences of the batch's statistics μ_B, σ²_B
    (biased) from the running ones μ_run, σ²_run, which are those after this step's update and
    constants. Get it from `penalty()` here or, over a whole model and with the right scale, from
    `powernorm.penalty`. If a layer within a model goes through 100 backwards without a call of
    `penalty`, it warns, once per process, that it has been plain BatchNorm.

    With s² = σ² + eps, the layer's squared divisor (`max(σ², eps)` in the released variant), each
    feature has

    ==========  ====================================  ================================  =========
    penalty     d_mean                                d_var                             unit of λ
    ==========  ====================================  ================================  =========
    `diff`      (μ_run - μ_B)²                        abs(σ²_run - σ²_B)                loss/x²
    `diff2`     (μ_run - μ_B)²                        (s_run - s_B)²                    loss/x²
    `relative`  (μ_run - μ_B)²/s²_run                 abs(σ²_run - σ²_B)/s²_run         loss
    `jeffreys`  (μ_run - μ_B)² (1/s²_run + 1/s²_B)/2  (s²_run - s²_B)²/(2 s²_run s²_B)  loss
    ==========  ====================================  ================================  =========

    `diff` is computed by the released code, with λ for a loss summed over tokens, and `diff2` by
    independent implementations of the paper, whose formula is lost in the available text. The
    other two are this library's: `relative` is `diff` of x/s_run, which does not change with the
    scale of a feature, and `jeffreys` is Jeffreys' divergence KL(B‖run) + KL(run‖B) of the
    Gaussians N(μ, s²). λ_mean multiplies its part with means, λ_var the other part. It and its
    gradient grow without bound as a batch's variance goes to 0, where only eps is left.

    Args:
        num_features: C.
        eps: added to the variance.
        momentum: weight of the new batch in the running statistics, in (0, 1]; None for the plain
            average of all batches.
        affine: learn γ and β.
        track_running_stats: True, torch's argument of this name; False is refused.
        start: how running statistics start: `average` of the first 1/momentum batches, or `torch`,
            at 0 and 1. None means `average`, and `torch` in the released variant.
        mean_penalty: λ_mean ≥ 0, in the units above.
        var_penalty: λ_var ≥ 0, in the units above.
        penalty: name of the divergence; the attribute is `divergence`.
        groups: GroupScaling with this many groups before the norm; None leaves it out.
        variant: `paper`, or `released` (see BatchNorm).
        sync: statistics over all processes.
        process_group: the processes; None is the default group if torch.distributed runs.
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        device: device of parameters and buffers.
        dtype: type of parameters.

    Shape:
        x (..., C), padding_mask `x.shape[:-1]` bool with True = padding; output as x.

    State:
        As BatchNorm's, but updated in the *backward*, because the penalty reads them.

    >>> norm = RegularizedBatchNorm(4)
    >>> loss = norm(torch.randn(2, 3, 4)).square().mean()
    >>> (loss + norm.penalty()).backward()
    """

    num_sums = 4
    read_in_training = ("running_mean", "running_var")
    trains_by_batch = True
    _pending: Pending
    _is_fed_leaf: bool = True
    """Whether the last eager input was a leaf, not computed by a model."""
    _num_unasked: int = 0
    """Backwards without a request of the penalty before; -1 after the first request."""
    _has_warned: bool = False
    """Whether any layer has warned; used on the class."""

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        eps: float = 1e-5,
        momentum: float | None = 0.05,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        start: Start | None = None,
        mean_penalty: float = 0.1,
        var_penalty: float = 0.01,
        penalty: Divergence = "diff",
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
            momentum=momentum,
            affine=affine,
            track_running_stats=track_running_stats,
            start=start,
            groups=groups,
            sync=sync,
            process_group=process_group,
            feature_dim=feature_dim,
            device=device,
            dtype=dtype,
            variant=variant,
        )
        self.mean_penalty = check_number("mean_penalty", mean_penalty, at_least=0)
        self.var_penalty = check_number("var_penalty", var_penalty, at_least=0)
        self.divergence = check_divergence(penalty)
        self.forget_penalty()
        self.register_hook()

    def forward(
        self, x: Tensor, padding_mask: Tensor | None = None, residual: Tensor | None = None
    ) -> Normalized:
        """Normalize over `feature_dim`; see the class."""
        watches = not torch.compiler.is_compiling() and self.training and self._num_unasked >= 0
        if watches and self._is_fed_leaf is not x.is_leaf:
            self._is_fed_leaf = x.is_leaf
        return super().forward(x, padding_mask, residual)

    def normalize(
        self, x: Tensor, padding_mask: Tensor | None, residual: Tensor | None, /
    ) -> Normalized:
        """Normalize (..., C); see the class."""
        if not self.training:
            return self.evaluate(x, padding_mask, residual)
        prepares = self.may_prepare(x, residual)
        if prepares and self._prepared is not None:
            mask, settings = self.mask_for(x, padding_mask), self.call_settings()
            result = self.run_prepared(x, mask, settings, self.carrier_for(x))
            if result is not None:
                y, statistics = result
                if self._is_penalized():
                    mean, var = self.running_stats
                    self._note(y, statistics, cast(Tensor, mean), var)
                return cast(Tensor, y)
        seen = self.see_inputs(x, padding_mask, residual)
        mean, var = seen.state
        args = self.batch_norm_args(x, residual, seen, mean, var, self.carrier_for(x))
        output = batch_norm(args)
        if prepares and self._prepared is None and (settings := self.call_settings()):
            self.keep_prepared(BATCH_NORM.prepare(args, None), settings)
        y = output.y
        if self.is_reestimated and not torch.is_grad_enabled():
            self.update_after(output, seen)
        elif self._is_penalized():
            self._note(y, output.statistics, mean, var, seen.is_repeated)
        return y if residual is None else (y, cast(Tensor, output.total))

    def call_settings(self) -> tuple[Any, ...] | None:
        """Return what a training call depends on besides its tensors; see `run_prepared`."""
        self.follow_counter()
        if self.variant != "paper" or self.group_name:
            return None
        mean, var = self.running_stats
        assert mean is not None
        return self.eps, self.groups, memory_of(mean, var)

    @property
    def has_penalty(self) -> bool:
        """Whether there was a training-mode forward with a penalty for `penalty()`."""
        return not self._pending.is_empty

    def penalty(self) -> Tensor:
        """Return the penalty of the training-mode forwards since the last request, 0-d.

        A layer that is used several times in a step gives the sum over its uses. A second call
        without a forward in between returns the same value. `forget_penalty` and `train()` drop it.

        The layer does not keep the graph of a forward, so a forward whose result (with everything
        computed from it) was dropped does not count. If none is left, this is the value of the last
        one, without a gradient. Compiled forwards are kept, up to 64 of them.

        Raises:
            InputError: there was no training-mode forward; one ran without gradients, as inside
                reentrant activation checkpointing, where the penalty would silently do nothing;
                there were more than 64 compiled ones without a backward.
        """
        if not self._is_penalized():
            return self.running_mean.new_zeros(())
        if self._pending.is_empty:
            raise InputError(
                "penalty() needs a training-mode forward: call it after the model's "
                "forward and before the backward, in training mode"
            )
        if self._pending.is_blind and torch.is_grad_enabled():
            raise InputError(
                "a training-mode forward of the layer ran without gradients, so its penalty would "
                "do nothing: under activation checkpointing pass use_reentrant=False; after your "
                "own pass under no_grad call forget_penalty() or model.train()"
            )
        if self._pending.is_overfull:
            raise InputError(
                f"more than {MOST_COMPILED} compiled training-mode forwards of the layer ran "
                "without a backward, so the penalty of the first is lost: call penalty() "
                "more often; after your own passes call forget_penalty() or model.train()"
            )
        return self._pending.read(self._evaluate)

    def forget_penalty(self) -> None:
        """Drop the pending penalties."""
        self._pending = Pending()

    def transient_state(self) -> dict[str, object]:
        """Return the pending penalties, and whether they were requested."""
        return {"_pending": self._pending.copy(), "_is_fed_leaf": self._is_fed_leaf}

    def train(self, mode: bool = True) -> Self:
        """Set the mode; the penalty of earlier forwards is dropped."""
        self.forget_penalty()
        return super().train(mode)

    def _is_penalized(self) -> bool:
        return bool(self.mean_penalty or self.var_penalty)

    def _note(
        self,
        y: Tensor,
        statistics: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        is_repeated: bool = False,
    ) -> None:
        """Keep the inputs of a penalty that may be requested."""
        if torch.compiler.is_compiling():
            self._note_compiled(statistics, running_mean, running_var)
            return
        counters = self.num_batches_tracked, self.num_nonfinite_batches
        weight = next_weight(self.update_momentum, *counters)
        if isinstance(weight, Tensor):
            weight = weight.to(statistics.dtype)  # or a compiled loss would compile twice
            # The buffers may have changed when the penalty is requested.
        measured = statistics, running_mean.clone(), running_var.clone(), weight
        # Not earlier, because a selective checkpoint counts the operators of both runs.
        if is_repeated:
            return  # activation checkpointing repeats the forward, which was counted before
        if torch.is_grad_enabled():
            self._pending.add(y, measured)
        else:
            self._pending.add_blind(measured)

    def _note_compiled(self, statistics: Tensor, running_mean: Tensor, running_var: Tensor) -> None:
        # Through `snapshot`, an opaque op: a compiled backward must not read the buffers again
        # after the hook has updated them.
        counters = snapshot(self.num_batches_tracked), snapshot(self.num_nonfinite_batches)
        weight = next_weight(self.update_momentum, *counters)
        measured = statistics, snapshot(running_mean), snapshot(running_var), weight
        if torch.is_grad_enabled():
            # In a repetition too, which has to save the same tensors as the first run.
            self._pending.add_compiled(self._sum(self._terms(*measured)))
        else:
            self._pending.add_blind(measured)

    def _terms(
        self, statistics: Tensor, running_mean: Tensor, running_var: Tensor, weight: float | Tensor
    ) -> Terms:
        """Return the divergences from the running statistics after this step's update."""
        mean, var, count = statistics[0], statistics[1], statistics[-1].detach()
        weight = (count > 0).to(mean.dtype) * weight
        new_mean = mixed(running_mean.to(mean.dtype), mean.detach(), weight)
        target = self.running_target(var.detach(), count)
        new_var = mixed(running_var.to(var.dtype), target, weight)
        return divergence_terms(
            self.divergence, Compared(mean, var, new_mean, new_var, self.eps, self.floor)
        )

    def _sum(self, terms: Terms) -> Tensor:
        mean_term = self.mean_penalty * terms.mean.sum()
        total: Tensor = mean_term + self.var_penalty * terms.var.sum()
        return total

    def _evaluate(
        self, statistics: Tensor, running_mean: Tensor, running_var: Tensor, weight: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the penalty of a forward and its gradient by the statistics; see `Evaluation`."""
        terms = self._terms(statistics, running_mean, running_var, weight)
        gradient = torch.zeros_like(statistics)
        gradient[0] = terms.mean_by_mean * self.mean_penalty
        gradient[1] = terms.var_by_var * self.var_penalty
        if terms.mean_by_var is not None:
            gradient[1] += terms.mean_by_var * self.mean_penalty
        return self._sum(terms), gradient

    def receive(self, sums: Tensor) -> None:
        """Process the sums of a backward, and drop the penalties of its forwards."""
        is_missed = self._num_unasked >= 0 and self._is_missed()
        self._pending.end_backward()
        super().receive(sums)
        if is_missed:
            self._warn_of_penalty()

    def _is_missed(self) -> bool:
        """Count the backwards before which the penalty was not requested; return if too many."""
        if self._pending.is_asked:
            self._num_unasked = -1
            return False
        # Tests and benchmarks run backwards to a leaf, sometimes a thousand of them. Compiled
        # forwards are not checked.
        if self._is_fed_leaf or not self._pending.is_eager:
            return False
        # Setting an attribute of a module takes as long as an update.
        self.__dict__["_num_unasked"] = count = self._num_unasked + 1
        return count == _PATIENCE

    def _warn_of_penalty(self) -> None:
        if RegularizedBatchNorm._has_warned:
            return
        RegularizedBatchNorm._has_warned = True
        warnings.warn(
            f"a RegularizedBatchNorm has gone through {_PATIENCE} backwards without a call of "
            "its penalty, so it trains as plain BatchNorm: add powernorm.penalty(model, …) "
            "to the loss, or use PenaltyCallback (Lightning) or PenaltyTrainerMixin (Hugging "
            "Face); if no penalty is wanted, set mean_penalty and var_penalty to 0",
            stacklevel=2,
        )

    def __getstate__(self) -> dict[str, object]:
        state = super().__getstate__()
        state["_pending"] = Pending()
        return state

    def extra_repr(self) -> str:
        """Return the features and the penalties."""
        penalty = "" if self.divergence == "diff" else f", penalty={self.divergence!r}"
        return (
            f"{super().extra_repr()}, mean_penalty={self.mean_penalty}, "
            f"var_penalty={self.var_penalty}{penalty}"
        )
