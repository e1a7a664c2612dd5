"""Each op on each backend against the float64 reference, and how far eager torch is from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from powernorm.ops import eager
from powernorm.ops.batch_norm import BatchNormArgs, BatchNormBackwardArgs
from powernorm.ops.power_norm import PowerNormArgs, PowerNormBackwardArgs
from powernorm.ops.static_norm import StaticNormArgs, StaticNormBackwardArgs
from powernorm.ops.token_norm import TokenNormArgs, TokenNormBackwardArgs

FLOOR = 8
"""Units in the last place of the largest value that any backend may be off, whatever eager does."""


@dataclass(frozen=True)
class Problem:
    """Inputs of one comparison."""

    tokens: int = 37
    features: int = 17
    dtype: torch.dtype = torch.float32
    masked: str = "some"
    groups: int = 0
    residual: bool = False
    offset: float = 0.0
    poisoned: bool = False
    strided: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def acc(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(17 * self.tokens + self.features)


@dataclass(frozen=True)
class Inputs:
    """Inputs of the ops, as tensors."""

    x: Tensor
    residual: Tensor | None
    mask: Tensor | None
    weight: Tensor
    bias: Tensor
    mean: Tensor
    var: Tensor
    grad_y: Tensor
    grad_total: Tensor | None

    def wide(self) -> Inputs:
        """The same numbers in float64."""
        changed = {
            name: value.double()
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        return replace(self, **changed)


def make(problem: Problem) -> Inputs:
    generator = problem.generator()
    tokens, features = problem.tokens, problem.features

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def matrix(offset: float = 0.0) -> Tensor:
        if problem.strided:
            return (noise(tokens, 2 * features) + offset).to(problem.dtype)[:, :features]
        return (noise(tokens, features) + offset).to(problem.dtype)

    mask = {
        "none": None,
        "some": torch.rand(tokens, generator=generator) < 0.4,
        "all": torch.ones(tokens, dtype=torch.bool),
        "first": torch.arange(tokens) == 0,
        "all but last": torch.arange(tokens) < tokens - 1,
    }[problem.masked]
    x, grad_y = matrix(problem.offset), matrix()
    if problem.poisoned and mask is not None:
        x[mask], grad_y[mask] = float("nan"), 0.0
        x[mask.nonzero()[::2, 0]] = float("inf")
    return Inputs(
        x,
        matrix() if problem.residual else None,
        mask,
        (noise(features) * 0.3 + 1).to(problem.acc),
        noise(features).to(problem.acc),
        (noise(features) + problem.offset).to(problem.acc),
        (noise(features).square() + 0.5).to(problem.acc),
        grad_y,
        matrix() if problem.residual else None,
    )


Results = dict[str, Tensor]


def _named(prefix: str, values: Any) -> Results:
    pairs = values._asdict().items()
    return {f"{prefix} {n}": v for n, v in pairs if v is not None and v.numel()}


def batch_norm(module: ModuleType, problem: Problem, i: Inputs) -> Results:
    options = {"centered": True, "floor": False, "limits": False, "statistics": False}
    options |= problem.options
    limits = torch.tensor([1.2, 0.3], dtype=i.weight.dtype) if options["limits"] else None
    mean = i.mean if options["centered"] else None
    settings = {"eps": 1e-5, "floor": options["floor"], "group_name": ""}
    affine = {"padding_mask": i.mask, "weight": i.weight}
    state = {"running_mean": mean, "running_var": i.var, "carrier": None, "limits": limits}
    args = BatchNormArgs(
        i.x, i.residual, **affine, bias=i.bias, **state, groups=problem.groups, **settings
    )
    out = module.batch_norm(args)
    grads = torch.stack([i.bias, i.weight] + [i.bias * 0] * 4) if options["statistics"] else None
    inputs = i.x if out.total is None else out.total
    known = {"scales": out.scales, "statistics": out.statistics, "centered": options["centered"]}
    back = module.batch_norm_backward(
        BatchNormBackwardArgs(i.grad_y, i.grad_total, grads, inputs, **affine, **known, **settings)
    )
    return _named("forward", out) | _named("backward", back)


def power_norm(module: ModuleType, problem: Problem, i: Inputs) -> Results:
    options = {"use_batch": False, "max_ratio": 0.0, "released": False} | problem.options
    affine = {"padding_mask": i.mask, "weight": i.weight}
    state = {"second_moment": i.var, "gradient_moment": i.mean * 0.1, "carrier": None}
    settings = {"groups": problem.groups, "eps": 1e-5, "group_name": "", **options}
    args = PowerNormArgs(i.x, i.residual, **affine, bias=i.bias, **state, **settings)
    out = module.power_norm(args)
    inputs = i.x if out.total is None else out.total
    known = {"scales": out.scales, "statistics": out.statistics, "sums": out.sums}
    back = module.power_norm_backward(
        PowerNormBackwardArgs(
            i.grad_y, i.grad_total, inputs, **affine, **known, released=options["released"]
        )
    )
    return _named("forward", out) | _named("backward", back)


def token_norm(module: ModuleType, problem: Problem, i: Inputs) -> Results:
    options = dict(problem.options)
    affine = options.pop("affine", True)
    weight, bias = (i.weight, i.bias) if affine else (None, None)
    args = TokenNormArgs(i.x, i.residual, weight, bias, groups=problem.groups or 1, **options)
    out = module.token_norm(args)
    inputs = i.x if out.total is None else out.total
    settings = {name: getattr(args, name) for name in _TOKEN_SETTINGS}
    back = module.token_norm_backward(
        TokenNormBackwardArgs(
            i.grad_y, i.grad_total, inputs, weight, out.statistics, **settings, affine=affine
        )
    )
    return _named("forward", out) | _named("backward", back)


_TOKEN_SETTINGS = ("centered", "released", "scale", "k", "detach_mean", "detach_std")


def static_norm(module: ModuleType, problem: Problem, i: Inputs) -> Results:
    options = {"centered": True, "floor": False} | problem.options
    mean = i.mean if options["centered"] else None
    settings = (problem.groups, 1e-5, options["floor"])
    out = module.static_norm(
        StaticNormArgs(i.x, i.residual, i.weight, i.bias, mean, i.var, *settings)
    )
    inputs = i.x if out.total is None else out.total
    back = module.static_norm_backward(
        StaticNormBackwardArgs(i.grad_y, i.grad_total, inputs, i.weight, out.scales, out.statistics)
    )
    return _named("forward", out) | _named("backward", back)


OPS: dict[str, Callable[[ModuleType, Problem, Inputs], Results]] = {
    "batch_norm": batch_norm,
    "power_norm": power_norm,
    "token_norm": token_norm,
    "static_norm": static_norm,
}

OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "batch_norm": (
        {},
        {"centered": False},
        {"floor": True},
        {"limits": True},
        {"statistics": True},
    ),
    "power_norm": ({}, {"use_batch": True}, {"max_ratio": 1.1}, {"released": True}),
    "token_norm": (
        {},
        {"affine": False},
        {"centered": False},
        {"scale": 2.0, "k": 0.1},
        {"scale": 2.0, "k": 0.1, "affine": False},
        {"released": True},
        {"detach_mean": True, "affine": False},
        {"detach_std": True},
    ),
    "static_norm": ({}, {"centered": False}, {"floor": True}),
}


def every_option() -> Iterator[tuple[str, dict[str, Any]]]:
    for op, options in OPTIONS.items():
        for option in options:
            yield op, option


def option_id(value: object) -> str:
    if isinstance(value, dict):
        return ",".join(f"{k}={v}" for k, v in value.items()) or "default"
    return str(value)


def check(module: ModuleType, op: str, problem: Problem) -> None:
    """At most twice the error of eager torch, for every output."""
    inputs = make(problem)
    ours = OPS[op](module, problem, inputs)
    theirs = OPS[op](eager, problem, inputs)
    exact = OPS[op](eager, problem, inputs.wide())
    assert ours.keys() == theirs.keys()
    for name, reference in exact.items():
        got, eagerly = ours[name], theirs[name]
        assert got.shape == eagerly.shape, name
        assert got.dtype == eagerly.dtype, name
        assert got.is_contiguous(), name
        wanted = reference.isfinite()
        assert torch.equal(got.double().isfinite(), wanted), f"{name}: not finite elsewhere"
        if not wanted.any():
            continue
        error = _error(got, reference, wanted)
        allowed = _error(eagerly, reference, wanted)
        # Of the number format that carries the value: outputs of x's type are rounded to it.
        eps = torch.finfo(got.dtype if got.dtype != torch.float64 else problem.acc).eps
        limit = 2 * allowed + FLOOR * eps * _size(name, exact, inputs)
        assert error <= limit, f"{name}: {error:.2e}, eager {allowed:.2e}, limit {limit:.2e}"


def _error(got: Tensor, reference: Tensor, wanted: Tensor) -> float:
    return float((got.double() - reference)[wanted].abs().max())


def _size(name: str, exact: Results, inputs: Inputs) -> float:
    """Return the magnitude of the terms that were added up, which may cancel."""
    value = exact[name]
    size = 1.0 + float(value[value.isfinite()].abs().max())
    if name == "backward x":
        # Gradient over spread: of a feature or token without spread, 1/sqrt(eps) times it.
        statistics = exact["forward statistics"]
        steepest = float(
            statistics[: 3 if len(statistics) > 3 else None].nan_to_num(0, 0, 0).abs().max()
        )
        size += steepest * float(inputs.grad_y.nan_to_num().abs().max())
    # Sums over tokens: of a block of 64 in the accumulator of the type, further on in double.
    return size * (4 if name.split()[1] in ("sums", "carried", "weight", "bias") else 1)
