"""PowerNorm's warm-up: a default that needs no schedule, and a warning if evaluation is far off."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import powernorm

NAMES = ("pn", "pn-only", "pn-static")


@pytest.fixture(autouse=True)
def _unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(powernorm.PowerNorm, "_has_warned_of_warmup", False)


def train(norm: Any, steps: int, start: int = 0) -> torch.Tensor:
    """Steps with inputs whose scale shrinks, as activations do early on; gives the last ψ_B²."""
    for t in range(start, start + steps):
        x = torch.randn(32, 4, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
        x = (x * (10 if t < 5 else 1)).requires_grad_()
        norm(x).square().sum().backward()
    return norm.scaled(x).square().mean(0)


@pytest.mark.parametrize("name", ["pn-only", "pn-static"])
def test_default_forgets_the_first_steps(name: str) -> None:
    """The average over all steps holds the first ones for good: 1 + 99 · 5/100 at step 100."""
    norm = powernorm.build_norm(name, 4, dtype=torch.float64)
    explicit = powernorm.build_norm(name, 4, dtype=torch.float64, warmup_steps=4000)
    train(norm, 100)
    train(explicit, 100)
    assert float(norm.running_second_moment.max()) < 1.5
    assert float(explicit.running_second_moment.min()) > 4


@pytest.mark.parametrize("name", NAMES)
def test_default_is_the_average_until_it_forgets(name: str) -> None:
    norm = powernorm.build_norm(name, 4, momentum=0.25, dtype=torch.float64)
    plain = powernorm.build_norm(name, 4, momentum=0.25, dtype=torch.float64, warmup_steps=100)
    for model in (norm, plain):
        train(model, 4)
    assert torch.equal(norm.running_second_moment, plain.running_second_moment)
    before = norm.running_second_moment.clone()
    batch = train(norm, 1, start=4)
    torch.testing.assert_close(norm.running_second_moment, before + 0.25 * (batch - before))


@pytest.mark.parametrize("name", NAMES)
def test_default_ends_where_it_forgets(name: str) -> None:
    norm = powernorm.build_norm(name, 4, momentum=0.25, dtype=torch.float64)
    x = torch.randn(32, 4, dtype=torch.float64) * 3
    train(norm, 3)
    scaled = norm.scaled(x)
    torch.testing.assert_close(norm(x), scaled / (scaled.square().mean(0) + norm.eps).sqrt())
    train(norm, 4, start=5)
    running = norm.running_second_moment.clone()
    if name != "pn-static":  # which keeps the running moment within its bounds
        torch.testing.assert_close(norm(x), norm.scaled(x) / (running + norm.eps).sqrt())
        torch.testing.assert_close(norm(x), norm.eval()(x))


def test_released_variant_has_the_same_default() -> None:
    norm = powernorm.PowerNorm(4, variant="released")
    assert norm.thresholds == powernorm.PowerNorm(4).thresholds == (10,)


def test_evaluation_in_a_long_warmup_warns_once() -> None:
    norm = powernorm.build_norm("pn", 4, warmup_steps=400, dtype=torch.float64)
    x = torch.randn(8, 4, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        norm.eval()(x)  # a new layer
        norm.train()
    train(norm, 30)
    norm.eval()
    with pytest.warns(UserWarning, match="after 30 of its 400 warm-up steps"):
        norm(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        norm(x)


def test_evaluation_without_a_schedule_and_behind_the_warmup_does_not_warn() -> None:
    x = torch.randn(8, 4, dtype=torch.float64)
    for options in ({}, {"warmup_steps": 20}):
        norm = powernorm.build_norm("pn", 4, dtype=torch.float64, **options)
        train(norm, 30)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            norm.eval()(x)


def test_default_compiles_and_keeps_its_stage_over_a_checkpoint() -> None:
    def build() -> Any:
        return powernorm.build_norm("pn", 4, momentum=0.5, dtype=torch.float64)

    torch._dynamo.reset()
    plain, compiled = build(), build()
    run = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    for t in range(6):
        if t == 4:
            resumed = build()
            resumed.load_state_dict(compiled.state_dict())
            assert resumed.stage == compiled.stage == 1
        for norm in (plain, run):
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
            norm(x.requires_grad_()).square().sum().backward()
    torch.testing.assert_close(plain.running_second_moment, compiled.running_second_moment)
