"""What each norm computes, written down once more: plain float64 formulas on the CPU.

Independent of `powernorm.ops`: nothing is shared with the code that is checked. Exact gradients
come from autograd; where a norm's backward is not the derivative of its forward, its formula is
written out. All arrays have a first dimension of samples, see `rounding`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from powernorm.norms.kernel_check.rounding import Rounding

_MABN_LIMIT: Final = 5.0
_PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "pn": {"groups": 1},
    "pn-static": {"max_ratio": 5.0, "backward_momentum": 0.001},
}
"""Options that short names set, or that are not None by default."""


@dataclass
class Problem:
    """One call of a norm: what goes in and what its backward receives.

    Attributes:
        options: of the layer, those that are not given at their defaults.
        training: whether batch statistics are used.
        total: (samples, tokens, C) what is normalized, a leaf.
        valid: (tokens, 1) bool.
        weight: (samples, 1, C) γ, a leaf, or None.
        bias: (samples, 1, C) β, a leaf, or None.
        cotangent: (tokens, C) gradient of the output.
        state: running statistics before, (C,) or (window, C), float64.
        tracked: batches that the running statistics have seen.
        nonfinite: those of them that were left out.
        rounding: of intermediate results, in the type that kernels compute in.
        storing: of results in the type of the input.
    """

    options: Mapping[str, Any]
    training: bool
    total: Tensor
    valid: Tensor
    weight: Tensor | None
    bias: Tensor | None
    cotangent: Tensor
    state: Mapping[str, Tensor]
    tracked: int
    nonfinite: int
    rounding: Rounding
    storing: Rounding

    @property
    def samples(self) -> int:
        """Number of computations at once: the exact one and those with rounding errors."""
        return self.total.shape[0]

    @property
    def eps(self) -> float:
        """Eps of the layer."""
        return float(self.options.get("eps", 1e-5))

    @property
    def released(self) -> bool:
        """Whether the variant is the published code's."""
        return self.options.get("variant") == "released"

    @property
    def count(self) -> int:
        """Number of valid tokens."""
        return int(self.valid.sum())

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over valid tokens, (samples, 1, C)."""
        kept = torch.where(self.valid, values, 0.0)
        return self.rounding(kept.sum(1, keepdim=True) / self.count, self.count)

    def mean_of_all(self, values: Tensor) -> Tensor:
        """Return the mean over all tokens, (samples, 1, C)."""
        return self.rounding(values.mean(1, keepdim=True), values.shape[1])

    def over_tokens(self, sums: Tensor) -> Tensor:
        """Return sums over all tokens, (samples, 1, C), as (samples, C)."""
        return self.rounding(sums, self.total.shape[1]).squeeze(1)

    def running(self, name: str) -> Tensor:
        """Return a running statistic as (samples, 1, C), or (samples, window, C)."""
        value = self.state[name]
        return value.expand(self.samples, *value.shape[:-1] or (1,), value.shape[-1])

    def scaled_and_shifted(self, normalized: Tensor) -> Tensor:
        """Return γ ⊙ x̂ + β."""
        y = normalized
        if self.weight is not None:
            y = self.rounding(y * self.weight)
        return y if self.bias is None else self.rounding(y + self.bias)

    def arriving(self) -> Tensor:
        """Return g = γ ∂L/∂y, (samples, tokens, C), a constant."""
        cotangent = self.cotangent.expand(self.samples, *self.cotangent.shape)
        return cotangent if self.weight is None else self.rounding(cotangent * self.weight.detach())


@dataclass
class Formula:
    """What a norm's formula gives.

    Attributes:
        y: (samples, tokens, C), differentiable by the leaves of the problem.
        state: running statistics after the step, (samples, C) or (samples, window, C).
        tracked: batches that these have seen.
        nonfinite: those of them that were left out.
        penalty: (samples,) what the norm adds to the loss.
        correction: (samples,) what has to be added to the loss for the gradient of a surrogate.
    """

    y: Tensor
    state: dict[str, Tensor]
    tracked: int
    nonfinite: int
    penalty: Tensor | None = None
    correction: Tensor | None = None


@dataclass
class Truth:
    """The results of one call by name, (samples, ...), and the counters after it."""

    values: dict[str, Tensor]
    counters: dict[str, int]


def solve(norm: str, problem: Problem) -> Truth:
    """Compute outputs, gradients and running statistics of a norm."""
    options = {**_PRESETS.get(norm, {}), **problem.options}
    result = _FORMULAS[norm](replace(problem, options=options))
    loss = (result.y * problem.cotangent).sum()
    for more in (result.penalty, result.correction):
        loss = loss if more is None else loss + more.sum()
    leaves = {"gradient of x": problem.total}
    leaves |= {} if problem.weight is None else {"gradient of weight": problem.weight}
    leaves |= {} if problem.bias is None else {"gradient of bias": problem.bias}
    grads = torch.autograd.grad(loss, list(leaves.values()))
    values = {"y": result.y.detach()}
    for name, grad in zip(leaves, grads, strict=True):
        values[name] = grad if name == "gradient of x" else problem.over_tokens(grad)
    if result.penalty is not None:
        values["penalty"] = result.penalty.detach()[:, None]
    counters = {
        "num_batches_tracked": result.tracked,
        "num_nonfinite_batches": result.nonfinite,
    }
    return Truth(values | result.state, counters if problem.state else {})


def group_scaled(p: Problem, x: Tensor, groups: int | None) -> Tensor:
    """Divide each group of a token's features by its root mean square."""
    if groups is None:
        return x
    r = p.rounding
    parts = x.unflatten(-1, (groups, x.shape[-1] // groups))
    squares = r(r(parts.square()).mean(-1, keepdim=True), parts.shape[-1])
    return r(parts * r((squares + p.eps).rsqrt())).flatten(-2)


def _root(p: Problem, second: Tensor, *, floor: bool) -> Tensor:
    """Return 1/sqrt(m + eps), or with eps as a floor."""
    r = p.rounding
    return r(r(second.clamp(min=p.eps) if floor else second + p.eps).rsqrt())


# Norms of one token.


def _standardized(
    p: Problem,
    *,
    groups: int = 1,
    centered: bool = True,
    detach_mean: bool = False,
    detach_std: bool = False,
) -> Tensor:
    r = p.rounding
    parts = p.total.unflatten(-1, (groups, p.total.shape[-1] // groups))
    size = parts.shape[-1]
    deviations = constant = parts
    if centered:
        mean = r(parts.mean(-1, keepdim=True), size)
        # The variance has no derivative by the mean: as a constant, its rounding error is treated
        # as a backward does that leaves this derivative out.
        constant = r(parts - mean.detach())
        deviations = constant if detach_mean else r(parts - mean)
    squares = r(r(constant.square()).sum(-1, keepdim=True), size)
    if p.released and centered:
        std = r(r((squares / (size - 1)).sqrt()) + p.eps)
    else:
        std = r(r(squares / size + p.eps).sqrt())
    inverse = r(1 / (std.detach() if detach_std else std))
    return r(deviations * inverse).flatten(-2)


def _token(p: Problem, normalized: Tensor) -> Formula:
    return Formula(p.scaled_and_shifted(normalized), {}, 0, 0)


def _layer_norm(p: Problem) -> Formula:
    return _token(p, _standardized(p))


def _detach_norm(p: Problem) -> Formula:
    constants = {name: p.options.get(name, True) for name in ("detach_mean", "detach_std")}
    return _token(p, _standardized(p, **constants))


def _ada_norm(p: Problem) -> Formula:
    y, r = _standardized(p), p.rounding
    factor = r(p.options.get("scale", 1.0) * (1 - r(p.options.get("k", 0.1) * y)))
    return _token(p, r(factor.detach() * y))


def _rms_norm(p: Problem) -> Formula:
    return _token(p, _standardized(p, centered=False))


def _group_scaling(p: Problem) -> Formula:
    return _token(p, _standardized(p, groups=p.options.get("groups", 1), centered=False))


def _group_norm(p: Problem) -> Formula:
    return _token(p, _standardized(p, groups=p.options.get("groups", 1)))


# Norms over tokens.


def _moved(p: Problem, updates: Mapping[str, tuple[Tensor, float]]) -> dict[str, Any]:
    """Move running statistics toward new values, where these are finite and there are tokens.

    Args:
        p: the problem.
        updates: new value (samples, C) or (samples, window, C) and its weight, by buffer.
    """
    state = {name: value.expand(p.samples, *value.shape) for name, value in p.state.items()}
    if not (p.count and p.training):
        return {"state": state, "tracked": p.tracked, "nonfinite": p.nonfinite}
    bad = False
    for name, (value, weight) in updates.items():
        old, new = state[name], value.detach().reshape(state[name].shape)
        mixed = p.rounding((1 - weight) * old + weight * new)
        finite = new.isfinite().all(0)
        state[name] = torch.where(finite, mixed, old)
        bad = bad or not bool(finite.all())
    return {"state": state, "tracked": p.tracked + 1, "nonfinite": p.nonfinite + bad}


def _weight_of_batch(p: Problem, default: float | None) -> float:
    momentum = p.options.get("momentum", default)
    if momentum is None or _starts_by_average(p):
        return max(_weight_in_average(p), momentum or 0.0)
    return float(momentum)


def _starts_by_average(p: Problem) -> bool:
    return (p.options.get("start") or ("torch" if p.released else "average")) == "average"


def _weight_in_average(p: Problem) -> float:
    """Return the weight of this batch in the plain average of all that counted."""
    return 1 / (p.tracked + 1 - p.nonfinite)


def _masked(p: Problem) -> Tensor:
    """Return the input; in released variants with padding set to 0 first."""
    return torch.where(p.valid, p.total, 0.0) if p.released else p.total


def _by_running(p: Problem, mean: Tensor | None, second: Tensor, *, floor: bool) -> Formula:
    """Evaluation: running statistics are constants."""
    x = _masked(p) if floor else p.total
    x, r = group_scaled(p, x, p.options.get("groups")), p.rounding
    deviations = x if mean is None else r(x - mean)
    y = p.scaled_and_shifted(r(deviations * _root(p, second, floor=floor)))
    return Formula(y, **_moved(p, {}))


def _batch_moments(p: Problem, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of the batch; the running ones without a valid token."""
    if not p.count:
        return p.running("running_mean"), p.running("running_var")
    mean = p.mean(x)
    # The variance has no derivative by the mean, see `_standardized`.
    return mean, p.mean(p.rounding(p.rounding(x - mean.detach()).square()))


def _running_target(p: Problem, var: Tensor) -> Tensor:
    """Return what the running variance moves toward: divided by M - 1 in the paper's variants."""
    return var if p.released else p.rounding(var * (p.count / max(p.count - 1, 1)))


def _batch_updates(p: Problem, mean: Tensor, var: Tensor, momentum: float | None) -> dict[str, Any]:
    weight = _weight_of_batch(p, momentum)
    return _moved(
        p, {"running_mean": (mean, weight), "running_var": (_running_target(p, var), weight)}
    )


def _batch_norm(p: Problem) -> Formula:
    return _batch_norm_with(p, 0.1)


def _batch_norm_with(p: Problem, momentum: float) -> Formula:
    if not p.training:
        statistics = (p.running("running_mean"), p.running("running_var"))
        return _by_running(p, *statistics, floor=p.released)
    r = p.rounding
    x = group_scaled(p, _masked(p), p.options.get("groups"))
    mean, var = _batch_moments(p, x)
    normalized = r(r(x - mean) * _root(p, var, floor=p.released))
    moved = _batch_updates(p, mean, var, momentum)
    penalty = _penalty(p, mean, var, moved["state"]) if "mean_penalty" in p.options else None
    return Formula(p.scaled_and_shifted(normalized), **moved, penalty=penalty)


def _regularized_batch_norm(p: Problem) -> Formula:
    return _batch_norm_with(p, 0.05)


def _penalty(p: Problem, mean: Tensor, var: Tensor, after: Mapping[str, Tensor]) -> Tensor:
    """Return λ_mean and λ_var times the divergences, whose running statistics are after the step.

    See `RegularizedBatchNorm`.
    """
    r, kind = p.rounding, p.options.get("penalty", "diff")
    if not p.count:
        return p.total.new_zeros(p.samples)
    running_mean, running_var = (after[f"running_{k}"].unsqueeze(1) for k in ("mean", "var"))
    square, running_square = (
        v.clamp(min=p.eps) if p.released else r(v + p.eps) for v in (var, running_var)
    )
    mean_term = r(r(running_mean - mean).square())
    var_term = r(running_var - var).abs()
    if kind == "diff2":
        var_term = r(r(r(running_square.sqrt()) - r(square.sqrt())).square())
    elif kind == "reldiff":
        mean_term, var_term = r(mean_term / running_square), r(var_term / running_square)
    elif kind == "symkl":
        mean_term = r(mean_term * r(0.5 / running_square + 0.5 / square))
        gap = r(running_square - square)
        var_term = r(r(gap / running_square) * r(gap / square)) / 2
    total = p.options["mean_penalty"] * mean_term.sum((1, 2))
    summed: Tensor = total + p.options["var_penalty"] * var_term.sum((1, 2))
    return r(summed, mean.shape[-1])


def _batch_renorm(p: Problem) -> Formula:
    running_mean, running_var = p.running("running_mean"), p.running("running_var")
    if not p.training:
        return _by_running(p, running_mean, running_var, floor=False)
    r = p.rounding
    x = group_scaled(p, p.total, p.options.get("groups"))
    mean, var = _batch_moments(p, x)
    step, warmup = p.tracked + 1, p.options["warmup_steps"]
    grown = min(max((step - warmup) / max(p.options["ramp_steps"], 1), 0.0), 1.0)
    if not p.tracked and _starts_by_average(p):
        grown = 0.0
    max_r, max_d = 1 + grown * (p.options["max_r"] - 1), grown * p.options["max_d"]
    running_root = _root(p, running_var, floor=False)
    ratio = r(r((var.detach() + p.eps).sqrt()) * running_root)
    shift = r(r(mean.detach() - running_mean) * running_root)
    ratio = r(ratio.clamp(1 / max_r, max_r))
    shift = r(shift.clamp(-max_d, max_d))
    normalized = r(r(x - mean) * _root(p, var, floor=False))
    y = p.scaled_and_shifted(r(r(normalized * ratio) + shift))
    return Formula(y, **_batch_updates(p, mean, var, 0.1))


def _power_norm_v(p: Problem) -> Formula:
    running = p.running("running_second_moment")
    if not p.training:
        return _by_running(p, None, running, floor=p.released)
    r = p.rounding
    x = group_scaled(p, _masked(p), p.options.get("groups"))
    second = p.mean(r(x.square())) if p.count else running
    y = p.scaled_and_shifted(r(x * _root(p, second, floor=p.released)))
    weight = _weight_of_batch(p, 0.1)
    return Formula(y, **_moved(p, {"running_second_moment": (second, weight)}))


def _power_norm(p: Problem) -> Formula:
    running = p.running("running_second_moment")
    if not p.training:
        return _by_running(p, None, running, floor=False)
    r = p.rounding
    x = group_scaled(p, p.total, p.options.get("groups"))
    values = x.detach()
    batch = p.mean(r(values.square())) if p.count else running
    used = _psi_used(p, batch, running)
    divisor = _root(p, used, floor=False)
    gradient_divisor = _root(p, batch, floor=False) if p.released else divisor
    normalized = r(values * divisor)
    # Of value x̂ and gradient 1/ψ: then ∂L/∂x is g/ψ, and the correction takes ν x̂/ψ off.
    through = normalized + r((x - values) * gradient_divisor)
    nu = p.running("running_gradient_moment")
    carried = normalized if p.released else torch.where(p.valid, normalized, 0.0)
    correction = -(r(nu * carried) * r((x - values) * gradient_divisor)).sum((1, 2))
    moved = _moved(p, _power_updates(p, batch, normalized, nu))
    return Formula(p.scaled_and_shifted(through), **moved, correction=correction)


def _warmup_steps(p: Problem) -> int:
    steps = p.options.get("warmup_steps")
    return math.ceil(1 / p.options.get("momentum", 0.1)) if steps is None else int(steps)


def _psi_used(p: Problem, batch: Tensor, running: Tensor) -> Tensor:
    """Return the quadratic mean that the forward divides by."""
    if p.tracked + 1 <= _warmup_steps(p):
        return batch
    bound = p.options.get("max_ratio")
    if bound is None:
        return running
    # The root is kept within [ψ_B/r, r ψ_B].
    square = float(bound) ** 2
    return torch.minimum(torch.maximum(running, p.rounding(batch / square)), batch * square)


def _power_updates(
    p: Problem, batch: Tensor, normalized: Tensor, nu: Tensor
) -> dict[str, tuple[Tensor, float]]:
    r = p.rounding
    if not p.count:
        return {}
    over = p.mean_of_all if p.released else p.mean
    gamma = over(r(normalized.square()))
    product = over(r(p.arriving() * normalized))
    share = p.options.get("backward_momentum", 0.1)
    factor = r(1 - share * gamma)
    if _is_floored(p):
        factor = factor.clamp(min=0)
    new_nu = r(r(nu * factor) + share * product)
    step, momentum = p.tracked + 1, p.options.get("momentum", 0.1)
    weight = momentum
    if p.released and step < _warmup_steps(p):
        # The plain average of the already mixed value, and then mixed again.
        average = r(((step - 1) * p.running("running_second_moment") + batch) / step)
        batch, weight = r((1 - momentum) * average + momentum * batch), 1.0
    elif not p.released and step <= _warmup_steps(p):
        weight = _weight_in_average(p)
    return {"running_second_moment": (batch, weight), "running_gradient_moment": (new_nu, 1.0)}


def _is_floored(p: Problem) -> bool:
    decay = p.options.get("decay")
    return p.options.get("max_ratio") is not None if decay is None else decay == "floored"


def _moving_average_norm(p: Problem) -> Formula:
    running = p.running("running_second_moment")
    if not p.training:
        return _by_running(p, None, running, floor=False)
    r, step = p.rounding, p.tracked + 1
    window, warmup = p.options["window"], p.options["warmup_steps"]
    x = group_scaled(p, p.total, p.options.get("groups"))
    if "groups" in p.options:
        x = p.storing(x)  # a norm of its own before this one
    values = x.detach()
    batch = p.mean(r(values.square())) if p.count else running
    uses_own = step <= window or step < warmup
    seconds = torch.cat([p.running("window_second_moment")[:, 1:], batch], 1)
    used = batch if uses_own or not p.count else r(seconds.mean(1, keepdim=True))
    root = _root(p, used, floor=False)
    ratio = torch.ones_like(root)
    if step > max(p.options["ratio_start"], warmup, window):
        ratio = r(r((used + p.eps).sqrt()) * _root(p, running, floor=False))
        ratio = ratio.clamp(1 / _MABN_LIMIT, _MABN_LIMIT)
    z = r(values * root)
    through = z + r((x - values) * root)
    product = (r(r(p.arriving() * ratio) * z)).sum(1, keepdim=True) / max(p.count, 1)
    product = r(product, x.shape[1])
    moments = torch.cat([p.running("window_gradient_moment")[:, 1:], product], 1)
    moment = product if uses_own else r(moments.mean(1, keepdim=True))
    moment = moment if p.count else torch.zeros_like(moment)
    carried = torch.where(p.valid, z, 0.0)
    correction = -(r(moment * carried) * r((x - values) * root)).sum((1, 2))
    updates = {
        "running_second_moment": (used, _weight_of_batch(p, 0.02)),
        # A feature whose batch is not finite keeps its whole window.
        "window_second_moment": (seconds + 0 * batch, 1.0),
        "window_gradient_moment": (moments + 0 * product, 1.0),
    }
    y = p.scaled_and_shifted(r(through * ratio))
    return Formula(y, **_moved(p, updates), correction=correction)


_FORMULAS: Final[Mapping[str, Callable[[Problem], Formula]]] = {
    "ln": _layer_norm,
    "ln-simple": _layer_norm,
    "detach": _detach_norm,
    "adanorm": _ada_norm,
    "rms": _rms_norm,
    "gs": _group_scaling,
    "gn": _group_norm,
    "bn": _batch_norm,
    "rbn": _regularized_batch_norm,
    "brn": _batch_renorm,
    "mabn": _moving_average_norm,
    "pnv": _power_norm_v,
    "pn": _power_norm,
    "pn-only": _power_norm,
    "pn-static": _power_norm,
}
