"""Norms without golden data against a few lines of their definition, or against torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import powernorm
from cases import step


def batch(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 8, generator=generator, dtype=torch.float64) * (1 + seed) + seed


@pytest.mark.parametrize("warmup", [0, 2])
def test_batch_renorm(warmup: int) -> None:
    """Ioffe 2017, Algorithm 1, with bounds that grow after the warm-up."""
    norm = powernorm.BatchRenorm(
        8, max_r=3.0, max_d=5.0, warmup_steps=warmup, ramp_steps=4, dtype=torch.float64
    )
    mean, var = torch.zeros(8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    for t in range(8):
        x = batch(t)
        share = min(max((t + 1 - warmup) / 4, 0), 1)
        max_r, max_d = 1 + share * 2, share * 5
        own_mean, own_std = x.mean(0), (x.var(0, unbiased=False) + 1e-5).sqrt()
        std = (var + 1e-5).sqrt()
        r = (own_std / std).clamp(1 / max_r, max_r)
        d = ((own_mean - mean) / std).clamp(-max_d, max_d)
        normalized = (x - own_mean) / own_std
        g = torch.randn(16, 8, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
        y, grad = step(norm, x, None, seed=t)
        torch.testing.assert_close(y, normalized * r + d)
        scaled = g * r
        expected = scaled - scaled.mean(0) - normalized * (scaled * normalized).mean(0)
        torch.testing.assert_close(grad, expected / own_std)
        mean, var = 0.9 * mean + 0.1 * own_mean, 0.9 * var + 0.1 * x.var(0)
        torch.testing.assert_close(norm.running_mean, mean)
        torch.testing.assert_close(norm.running_var, var)


def test_mabn_with_its_ratio() -> None:
    """Yan et al. 2020 beyond the golden run: windows full and r active."""
    norm = powernorm.MovingAverageBatchNorm(
        8, window=2, warmup_steps=0, ratio_start=3, dtype=torch.float64
    )
    running = torch.ones(8, dtype=torch.float64)
    squares: list[torch.Tensor] = []
    moments: list[torch.Tensor] = []
    for t in range(7):
        x = batch(t % 3)
        squares.append(x.square().mean(0))
        own = t < 2
        used = squares[-1] if own else (squares[-1] + squares[-2]) / 2
        ratio = torch.ones_like(used)
        if t >= 3:
            ratio = ((used + 1e-5).sqrt() / (running + 1e-5).sqrt()).clamp(0.2, 5)
        z = x / (used + 1e-5).sqrt()
        g = torch.randn(16, 8, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
        moments.append((g * ratio * z).mean(0))
        moment = moments[-1] if own else (moments[-1] + moments[-2]) / 2
        y, grad = step(norm, x, None, seed=t)
        torch.testing.assert_close(y, z * ratio)
        torch.testing.assert_close(grad, (g * ratio - z * moment) / (used + 1e-5).sqrt())
        running = 0.98 * running + 0.02 * used
        torch.testing.assert_close(norm.running_second_moment, running)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (powernorm.LayerNorm(8), nn.LayerNorm(8)),
        (powernorm.RMSNorm(8, eps=1e-6), nn.RMSNorm(8, eps=1e-6)),
        (powernorm.GroupNorm(8, 4), nn.GroupNorm(4, 8)),
        (powernorm.SimpleLayerNorm(8), nn.LayerNorm(8, elementwise_affine=False)),
    ],
)
def test_same_as_torch(ours: nn.Module, theirs: nn.Module) -> None:
    x = batch(1).float()
    torch.testing.assert_close(ours(x), theirs(x))


def test_dynamic_tanh() -> None:
    norm = powernorm.DynamicTanh(8, 0.7)
    x = batch(0).float()
    torch.testing.assert_close(norm(x), torch.tanh(0.7 * x))


def test_group_scaling() -> None:
    x = batch(0)
    y = powernorm.GroupScaling(8, 2)(x)
    expected = (
        x.reshape(16, 2, 4) / (x.reshape(16, 2, 4).square().mean(-1, keepdim=True) + 1e-5).sqrt()
    )
    torch.testing.assert_close(y, expected.reshape(16, 8))


@pytest.mark.parametrize("name", ["ln-simple", "adanorm", "detach"])
def test_released_token_norms_of_a_constant_token(name: str) -> None:
    """All features equal, as of a padding embedding: the gradient is finite."""
    options = {"detach_std": False} if name == "detach" else {}
    norm = powernorm.build_norm(name, 4, variant="released", **options)
    x = torch.zeros(2, 4, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad.isfinite().all()


def test_floor_of_the_decay_is_zero() -> None:
    """1 - m Γ below 0 leaves ν = m Λ, of this batch alone."""
    norm = powernorm.PowerNorm(8, groups=None, warmup_steps=0, decay="floored", dtype=torch.float64)
    with torch.no_grad():
        norm.running_gradient_moment.fill_(7.0)
    x = batch(0) * 100
    g = torch.randn(16, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    step(norm, x, None, seed=0)
    normalized = x / (1 + 1e-5) ** 0.5
    assert (normalized.square().mean(0) > 10).all()
    torch.testing.assert_close(norm.running_gradient_moment, 0.1 * (g * normalized).mean(0))
