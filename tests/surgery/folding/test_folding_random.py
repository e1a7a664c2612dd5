"""Random models with numbers as arguments, written buffers and branches: equal on other calls."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import powernorm
from covering import some_default
from surgery.static_models import settle

C, LENGTH, CHAINS = 6, 17, 5
Step = Callable[["_Random", int, Tensor, Any], Tensor]
# Each takes the model, its own position, the stream and a number.
# ruff: noqa: ARG005


def _written(model: _Random, i: int, h: Tensor, number: Any) -> Tensor:
    del number
    y = h + model.states[i % 3].value
    model.states[i % 3].value.mul_(0.5).add_(h.mean((0, 1)))
    return y


def _set(model: _Random, i: int, h: Tensor, number: Any) -> Tensor:
    del number
    state = model.states[i % 3]
    y = model.linears[i](h) + state.value
    state.value = h.mean((0, 1))
    return y


STEPS: dict[str, Step] = {
    "norm": lambda m, i, h, _: m.norms[i](h),
    "linear": lambda m, i, h, _: m.linears[i](h),
    "pre-norm": lambda m, i, h, _: h + m.linears[i](torch.tanh(m.linears[i - 1](m.norms[i](h)))),
    "post-norm": lambda m, i, h, _: m.norms[i](h + m.linears[i](torch.tanh(h))),
    "tanh": lambda m, i, h, _: torch.tanh(h),
    "parameter": lambda m, i, h, _: h + m.linears[i].bias,
    "added": lambda m, i, h, number: h + number,
    "doubled and added": lambda m, i, h, number: h - (2 * number),
    "alpha": lambda m, i, h, number: torch.add(h, h.flip(1), alpha=number + 1),
    "scaled": lambda m, i, h, number: h * (number + 1.5),
    "filled": lambda m, i, h, number: h.masked_fill(torch.arange(h.shape[1])[:, None] < 2, number),
    "pool": lambda m, i, h, number: F.avg_pool1d(h.mT, 3, 1, min(abs(int(number)), 1)).mT,
    "padded": lambda m, i, h, number: F.pad(h, (0, 0, 1, 0), value=number)[:, :-1],
    "convolution": lambda m, i, h, number: m.conv(h, min(abs(int(number)), 1)),
    "branch": lambda m, i, h, number: torch.relu(h) if number > 0.5 else h,
    "branch below": lambda m, i, h, number: m.linears[i](h) if number < -0.5 else h,
    "branch to a norm": lambda m, i, h, number: m.norms[i](h) if number > 0.5 else h,
    "written": _written,
    "set": _set,
    "size": lambda m, i, h, _: h + (len(h) - 2),
}


class _State(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros(C, dtype=torch.float64))


class _Conv(nn.Conv1d):
    def forward(self, h: Tensor, padding: int) -> Tensor:  # type: ignore[override]
        return F.conv1d(h.mT, self.weight, self.bias, padding=padding).mT


class _Random(nn.Module):
    def __init__(self, steps: list[tuple[str, int]]) -> None:
        super().__init__()
        self.steps = steps
        double: Any = {"dtype": torch.float64}
        self.norms = nn.ModuleList(powernorm.BatchNorm(C, **double) for _ in steps)
        self.linears = nn.ModuleList(nn.Linear(C, C, **double) for _ in steps)
        self.states = nn.ModuleList(_State() for _ in range(3))
        self.conv = _Conv(C, C, 3, **double)

    def forward(self, x: Tensor, first: Any = 0.0, more: Any = None) -> Tensor:
        numbers = (first, 0 if more is None else more["second"])
        for i, (name, which) in enumerate(self.steps):
            x = STEPS[name](self, i, x, numbers[which])
        return x


class _Many(nn.Module):
    """Several in one, which are traced at once."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.chains = nn.ModuleList(_Random(_steps(random.Random(seed + i))) for i in range(CHAINS))
        settle(self, seed)

    def forward(self, x: Tensor, first: Any = 0.0, more: Any = None) -> list[Tensor]:
        return [chain(x, first, more) for chain in self.chains]


def _steps(chance: random.Random) -> list[tuple[str, int]]:
    steps = [(chance.choice(list(STEPS)), chance.randrange(2)) for _ in range(chance.randint(1, 5))]
    norm = chance.choice(["norm", "pre-norm", "post-norm"])
    return [*steps[:2], (norm, 0), *steps[2:], *[("linear", 0)] * chance.randrange(2)]


def _check(seed: int) -> Counter[str]:
    """Fold chains, compare them on other calls in turn, and count what became of the norms."""
    model = _Many(seed)
    original = deepcopy(model)
    x = torch.randn(2, LENGTH, C, dtype=torch.float64)
    report = powernorm.fold(model, (x, 0.0, {"second": 0}))
    assert all(row.reason or row.action == "fold" for row in report.rows)
    numbers = [(0.0, 0), (1.0, 1), (-1.0, -1), (0.0, 1), (1.0, 0), (0.0, -1), (-1.0, 0), (1.0, -1)]
    with torch.no_grad():
        for i, (first, second) in enumerate(numbers):
            other = torch.randn(2 + i % 3, LENGTH + i % 2, C, dtype=torch.float64)
            call = (other, first, {"second": second})
            pairs = zip(original(*call), model(*call), model.chains, strict=True)
            for k, (one, two, chain) in enumerate(pairs):
                gap = (one - two).abs().max() / one.abs().max().clamp(min=1e-30)
                assert gap < 1e-9, (seed + k, chain.steps, call[1:])
    return Counter(row.action for row in report.rows if "does not use it" not in row.reason)


@pytest.mark.parametrize("number", some_default([1, 2], 1))
def test_random_models_are_equal_on_other_calls(number: int) -> None:
    found = sum((_check(seed) for seed in range(0, number * CHAINS, CHAINS)), Counter[str]())
    assert found["fold"] >= number


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", [1000, *(pytest.param(one, marks=pytest.mark.whole) for one in range(1050, 1500, 50))]
)
def test_many_random_models_are_equal_on_other_calls(first: int) -> None:
    for seed in range(first, first + 50, CHAINS):
        _check(seed)
