"""PowerNorm and MABN in units of the loss, whatever scales it: gradients and statistics."""

from __future__ import annotations

import copy
import io
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import powernorm
from powernorm.integrations.lightning import LossScaleFollower
from powernorm.norms.carrier import GradientMomentNorm
from refusals import refuses

NAMES = ("pn", "pn-only", "pn-static", "mabn")
MOMENTS = ("running_gradient_moment", "window_gradient_moment")


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    options = {"window": 2, "ratio_start": 3} if name == "mabn" else {}
    norm = powernorm.build_norm(name, 8, warmup_steps=2, **options)
    return nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 8), copy.deepcopy(norm))


def loss_of(model: nn.Module, step: int, parts: int = 1) -> list[torch.Tensor]:
    """The losses of the micro-batches of an update."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 6, 8, generator=generator)
    weights = torch.randn(8, 6, 8, generator=generator)
    return [
        (model(part) * w).sum()
        for part, w in zip(x.chunk(parts), weights.chunk(parts), strict=True)
    ]


def states(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def train_scaled(model: nn.Module, scaler: torch.amp.GradScaler, overflows: tuple[int, ...]) -> Any:
    """A plain loop with a GradScaler; gives the unscaled gradients of each update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    grads = []
    for step in range(8):
        (loss,) = loss_of(model, step)
        scaler.scale(loss * (float("inf") if step in overflows else 1.0)).backward()
        scaler.unscale_(optimizer)
        grads.append([p.grad.clone() for p in model.parameters()])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return grads


def make_scaler(**options: Any) -> torch.amp.GradScaler:
    settings = {"init_scale": 2.0**10, "growth_interval": 2} | options
    return torch.amp.GradScaler("cpu", **settings)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_followed_scaler_changes_nothing(name: str, compiled: bool) -> None:
    """Scales that grow are powers of two: gradients, weights and statistics to the last bit."""
    plain, scaled, alone = build(name), build(name), build(name)
    expected = train_scaled(plain, make_scaler(enabled=False), ())
    scaler = make_scaler()
    powernorm.set_loss_scale(scaled, scaler=scaler)
    run = torch.compile(scaled, backend="aot_eager") if compiled else scaled
    found = train_scaled(run, scaler, ())
    assert scaler.get_scale() == 2.0**14
    train_scaled(alone, make_scaler(), ())
    pairs = zip(plain.parameters(), alone.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)
    close = torch.testing.assert_close if compiled else _assert_equal
    for before, after in zip(expected, found, strict=True):
        for a, b in zip(before, after, strict=True):
            close(b, a)
    for key, value in plain.state_dict().items():
        close(scaled.state_dict()[key], value)


def _assert_equal(a: torch.Tensor, b: torch.Tensor) -> None:
    assert torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_an_update_that_overflows_leaves_the_moments(name: str) -> None:
    """The scale halves behind it; what the gradients' moments were they still are."""
    model, scaler = build(name), make_scaler(growth_interval=100)
    powernorm.set_loss_scale(model, scaler=scaler)
    train_scaled(model, scaler, ())
    moments = {n: b.clone() for n, b in model.named_buffers() if n.endswith(MOMENTS)}
    (loss,) = loss_of(model, 9)
    scaler.scale(loss * float("inf")).backward()
    for key, value in moments.items():
        assert torch.equal(model.get_buffer(key), value)
    assert int(model[1].num_nonfinite_batches) == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("parts", [1, 4])
def test_a_constant_factor_needs_no_help(name: str, parts: int) -> None:
    """Accumulation, a sum for a mean, the number of processes: a factor of every gradient."""
    plain, scaled = build(name), build(name)
    for step in range(6):
        for model, factor in ((plain, 1.0), (scaled, 1 / 8)):
            for loss in loss_of(model, step, parts):
                (loss * factor).backward()
        for a, b in zip(plain.parameters(), scaled.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad * 8)
    for key, value in plain.state_dict().items():
        factor = 8 if key.endswith(MOMENTS) else 1
        assert torch.equal(scaled.state_dict()[key] * factor, value)


@pytest.mark.parametrize("name", NAMES)
def test_a_factor_that_changes_in_mid_run(name: str) -> None:
    """As of another number of processes or micro-batches after a resume; recomputed as well."""
    plain, scaled = build(name), build(name)
    for step in range(8):
        factor = 1.0 if step < 4 else 1024.0
        powernorm.set_loss_scale(scaled, factor)
        for model in (plain, scaled):
            model.zero_grad()
        (expected,) = loss_of(plain, step)
        expected.backward()
        x = torch.randn(8, 6, 8, generator=torch.Generator().manual_seed(step)).requires_grad_()
        (weights,) = [torch.randn(8, 6, 8, generator=_after(step))]
        y = checkpoint(scaled, x, use_reentrant=False)
        ((y * weights).sum() * factor).backward()
        for a, b in zip(plain.parameters(), scaled.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad / factor)
    for key, value in plain.state_dict().items():
        assert torch.equal(scaled.state_dict()[key], value)


def _after(step: int) -> torch.Generator:
    """The generator of `loss_of` after its first draw."""
    generator = torch.Generator().manual_seed(step)
    torch.randn(8, 6, 8, generator=generator)
    return generator


def test_a_copy_follows_the_same_scaler_and_a_saved_model_none() -> None:
    model, scaler = build("pn"), make_scaler()
    powernorm.set_loss_scale(model, scaler=scaler)
    copied = copy.deepcopy(model)
    scaler.update(8.0)
    assert copied[1]._live_scale is model[1]._live_scale
    assert float(copied[1].to_loss(torch.ones(()))) == 8.0
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert float(loaded[1].to_loss(torch.ones(()))) == 1.0


def test_float16_without_a_followed_scaler_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GradientMomentNorm, "_has_warned_of_float16", False)
    model = build("pn")
    x = torch.randn(2, 3, 8)
    with torch.autocast("cpu", torch.float16):
        with pytest.warns(UserWarning, match="set_loss_scale"):
            model(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x)
            monkeypatch.setattr(GradientMomentNorm, "_has_warned_of_float16", False)
            powernorm.set_loss_scale(model)
            model(x)
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error")
        build("pn")(x)


def test_bad_input() -> None:
    model = build("pn")
    refuses("scale is inf", powernorm.set_loss_scale, model, float("inf"))
    refuses(r"scaler is 2\.0, expected a .*GradScaler", powernorm.set_loss_scale, model, scaler=2.0)
    refuses("model is 'x'", powernorm.set_loss_scale, "x")


def test_lightning_callback_counts_the_processes() -> None:
    norm = nn.Sequential(powernorm.build_norm("pn", 4))
    scaler = make_scaler(init_scale=4.0)
    trainer: Any = SimpleNamespace(world_size=2)
    LossScaleFollower(norm, scaler).on_train_start(trainer, trainer)
    assert float(norm[0].to_loss(torch.ones(()))) == 8.0
    scaler.update(16.0)
    assert float(norm[0].to_loss(torch.ones(()))) == 32.0
