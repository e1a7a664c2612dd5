"""Regularized BatchNorm: BatchNorm with a penalty on the gap of batch and running statistics."""

from __future__ import annotations

import warnings
from typing import Final, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node

from powernorm.errors import InputError
from powernorm.norms.arguments import Variant, check_number, check_variant
from powernorm.norms.families import CenteredBackwardNorm
from powernorm.norms.feature_dims import Call, Normalized, answer
from powernorm.ops.functions import batch_norm
from powernorm.ops.reference.batch import in_backward

_MOVES: Final = ("CloneBackward0", "PermuteBackward0")
"""What autograd calls the way from `feature_dim` to the last dimension."""

_PATIENCE: Final = 100
"""Backwards without anybody asking for the penalty before a layer warns: a few are no sign."""


def _input_of(node: Node | None) -> Node | None:
    """What autograd goes on to from a node, by its first input."""
    return node.next_functions[0][0] if node is not None and node.next_functions else None


class RegularizedBatchNorm(CenteredBackwardNorm):
    """Regularized BatchNorm (Wang et al. 2022, Section 4.1).

    BatchNorm over the valid tokens, and a penalty to be added to the loss,
    `λ_mean Σ_c (μ_run - μ_B)² + λ_var Σ_c |σ²_run - σ²_B|`, in which the running statistics are
    those after this step's update and constants. Get it from `penalty()` here or, over a whole
    model and with the right scale, from `powernorm.penalty`. A layer within a model that has gone
    through 100 backwards without being asked for it warns, once in a process: it has been plain
    BatchNorm.

    Args:
        num_features: C.
        mean_penalty: λ_mean ≥ 0.
        var_penalty: λ_var ≥ 0.
        eps: added to the variance.
        momentum: weight of the new batch in the running statistics, in (0, 1].
        affine: learn γ and β.
        groups: GroupScaling with this many groups in front; None leaves it out.
        variant: `paper`, or `released` (see BatchNorm).
        sync: statistics over all processes.
        process_group: the processes; None is the default group where torch.distributed runs.
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        device: of parameters and buffers.
        dtype: of parameters.

    Shape:
        x (..., C), padding_mask `x.shape[:-1]` bool with True = padding; output as x.

    State:
        As BatchNorm's, but moved in the *backward*, because the penalty reads them.

    >>> norm = RegularizedBatchNorm(4)
    >>> loss = norm(torch.randn(2, 3, 4)).square().mean()
    >>> (loss + norm.penalty()).backward()
    """

    _pending: Tensor | None
    _unsettled: list[tuple[Tensor, Tensor, Tensor]]
    _without_gradient: bool
    _read: bool
    _asked: bool
    _num_unasked: int = 0
    """Backwards before which nobody asked; -1 once somebody has."""
    _has_warned: bool = False
    """Of the class."""

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        *,
        mean_penalty: float = 0.1,
        var_penalty: float = 0.01,
        eps: float = 1e-5,
        momentum: float = 0.05,
        affine: bool = True,
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
            groups=groups,
            sync=sync,
            process_group=process_group,
            feature_dim=feature_dim,
            device=device,
            dtype=dtype,
        )
        self.variant = check_variant(variant)
        self.mean_penalty = check_number("mean_penalty", mean_penalty, at_least=0)
        self.var_penalty = check_number("var_penalty", var_penalty, at_least=0)
        self.add_statistics(device)
        self.forget_penalty()
        self.register_hook()

    def normalize(self, call: Call) -> Normalized:
        """Normalize (..., C); see the class."""
        if not self.training:
            return self.evaluate(call)
        call, seen = self.prepare(call, self.running_mean, self.running_var)
        running_mean, running_var = seen.state
        result = batch_norm(
            call.x,
            call.residual,
            seen.padding_mask,
            self.weight,
            self.bias,
            running_mean,
            running_var,
            self.carrier_for(call.x),
            None,
            self.groups or 0,
            self.eps,
            self.floor,
            self.group_name,
        )
        if self._is_penalized():
            self._note(result.statistics, running_mean, running_var)
        return answer((result.y, result.total), call.residual)

    @property
    def has_penalty(self) -> bool:
        """Was there a training-mode forward whose penalty `penalty()` would give?"""
        return self._pending is not None or bool(self._unsettled)

    def penalty(self) -> Tensor:
        """The penalty of the training-mode forwards since it was last asked for, 0-d.

        A layer used several times in one step gives the sum over its uses. Asked again without a
        forward in between it gives the same value. `forget_penalty` and `train()` drop it.

        Raises:
            InputError: no training-mode forward came before, or one ran without gradients, as
                inside reentrant activation checkpointing, where the penalty would silently do
                nothing.
        """
        if not self._is_penalized():
            return self.running_mean.new_zeros(())
        self._settle()
        if self._pending is None:
            raise InputError(
                "penalty() has no training-mode forward to speak of: call it after the model's "
                "forward and before the backward, in training mode"
            )
        if self._without_gradient and torch.is_grad_enabled():
            raise InputError(
                "a training-mode forward of the layer ran without gradients, so its penalty would "
                "do nothing: under activation checkpointing pass use_reentrant=False; after a "
                "pass of your own under no_grad call forget_penalty() or model.train()"
            )
        self._read = self._asked = True
        return self._pending

    def forget_penalty(self) -> None:
        """Drop what `penalty()` would give."""
        self._pending = None
        self._unsettled = []
        self._without_gradient = self._read = self._asked = False

    def transient_state(self) -> dict[str, object]:
        """What `penalty()` would give, and whether it has been asked for."""
        names = ("_pending", "_without_gradient", "_read", "_asked")
        return {**{name: getattr(self, name) for name in names}, "_unsettled": [*self._unsettled]}

    def train(self, mode: bool = True) -> Self:
        """Set the mode; the penalty of earlier forwards is dropped."""
        self.forget_penalty()
        return super().train(mode)

    def _is_penalized(self) -> bool:
        return bool(self.mean_penalty or self.var_penalty)

    def _note(self, statistics: Tensor, running_mean: Tensor, running_var: Tensor) -> None:
        """Keep a forward for the penalty that may be asked for."""
        if torch.compiler.is_compiling():
            # Computed in a repetition too, which has to save the same tensors as the first run.
            self._remember(self._penalty_of(statistics, running_mean, running_var))
        elif not in_backward():
            # Else the forward that activation checkpointing runs again: it has been counted.
            # Ten small operations, put off until somebody asks. The buffers may have moved by then.
            if torch.is_grad_enabled():
                if self._read:
                    self._pending, self._without_gradient, self._read = None, False, False
                state = (running_mean.detach().clone(), running_var.detach().clone())
                self._unsettled.append((statistics, *state))
            else:
                self._settle()
                self._remember(self._penalty_of(statistics, running_mean, running_var))

    def _settle(self) -> None:
        """Compute what was put off."""
        if not self._unsettled:
            return
        unsettled, self._unsettled = self._unsettled, []
        # Whoever asks first, perhaps a logger under inference_mode, leaves it usable for others.
        with torch.inference_mode(False), torch.enable_grad():
            for noted in unsettled:
                self._remember(self._penalty_of(*noted))

    def _penalty_of(self, statistics: Tensor, running_mean: Tensor, running_var: Tensor) -> Tensor:
        mean, var, count = statistics[0], statistics[1], statistics[-1].detach()
        # Through `snapshot`, an opaque op: a compiled backward must not read the buffer again
        # after the hook has moved it.
        snapshot = torch.ops.powernorm.snapshot
        weight = (count > 0).to(mean.dtype) * self.momentum
        old_mean, old_var = snapshot(running_mean), snapshot(running_var)
        new_mean = old_mean + weight * (mean.detach() - old_mean)
        new_var = old_var + weight * (self.running_target(var.detach(), count) - old_var)
        mean_term = self.mean_penalty * (new_mean - mean).square().sum()
        var_term = self.var_penalty * (new_var - var).abs().sum()
        total: Tensor = mean_term + var_term
        return total

    def _remember(self, value: Tensor) -> None:
        blind = not torch.is_grad_enabled()
        if self._read:
            self._pending, self._without_gradient = None, False
        # Uses without gradients replace each other: a pass over the data must not add up.
        earlier = None if blind or self._without_gradient else self._pending
        self._pending = value if earlier is None else earlier + value
        self._without_gradient = self._without_gradient or blind
        self._read = False

    def receive(self, sums: Tensor) -> None:
        """The end of a backward: what the penalty was of is over."""
        is_missed = self._num_unasked >= 0 and self._is_missed()
        # Else a later forward is waiting: forward A, penalty, forward B, backward A.
        if self._read or not self._asked or self._is_spent():
            self.forget_penalty()
        self._asked = False
        super().receive(sums)
        if is_missed:
            self._warn_of_penalty()

    def _is_missed(self) -> bool:
        """Count the backwards before which nobody asked for the penalty; are they too many?"""
        if self._asked:
            self._num_unasked = -1
            return False
        # A compiled forward has none here: it is not worth a look into its graph.
        node = self._unsettled[-1][0].grad_fn if self._unsettled else None
        below = _input_of(node)
        while below is not None and below.name() in _MOVES:
            below = _input_of(below)
        # A leaf is what tests and benchmarks go backward to, a thousand times if need be.
        if below is None or below.name().endswith("AccumulateGrad"):
            return False
        self._num_unasked += 1
        return self._num_unasked == _PATIENCE

    def _warn_of_penalty(self) -> None:
        if RegularizedBatchNorm._has_warned:
            return
        RegularizedBatchNorm._has_warned = True
        warnings.warn(
            f"a RegularizedBatchNorm has gone through {_PATIENCE} backwards and nobody asked for "
            "its penalty, so that it trains as plain BatchNorm: add powernorm.penalty(model, …) "
            "to the loss, or use PenaltyCallback (Lightning) or PenaltyTrainerMixin (Hugging "
            "Face); if no penalty is wanted, set mean_penalty and var_penalty to 0",
            stacklevel=2,
        )

    def _is_spent(self) -> bool:
        """Has the backward of the last forward run? Then its node has let go of what it saved."""
        last = self._unsettled[-1][0] if self._unsettled else self._pending
        if last is None or last.grad_fn is None:
            return False
        try:
            # Not `saved_tensors`, which would set off the recomputation of a checkpoint.
            last.grad_fn._raw_saved_tensors  # type: ignore[attr-defined] # noqa: B018
        except AttributeError:
            return False
        except RuntimeError:
            return True
        return False

    def __getstate__(self) -> dict[str, object]:
        state = super().__getstate__()
        state.update(
            _pending=None, _unsettled=[], _without_gradient=False, _read=False, _asked=False
        )
        return state

    def extra_repr(self) -> str:
        """Features and the penalties."""
        return (
            f"{super().extra_repr()}, mean_penalty={self.mean_penalty}, "
            f"var_penalty={self.var_penalty}"
        )
