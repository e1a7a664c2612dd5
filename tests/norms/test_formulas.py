"""Norms without golden data against a few lines of their definition, or against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import powernorm
from cases import step
from refusals import refuses


def batch(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 8, generator=generator, dtype=torch.float64) * (1 + seed) + seed


def shaken(norm: nn.Module) -> dict[str, np.ndarray]:
    """The parameters of a layer that are those of no start, as arrays."""
    with torch.no_grad():
        for seed, parameter in enumerate(norm.parameters()):
            generator = torch.Generator().manual_seed(seed)
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return {name: one.detach().numpy() for name, one in norm.named_parameters()}


def test_bias_norm() -> None:
    """Yao et al. 2023, equation 4, written out for each token."""
    norm = powernorm.BiasNorm(8, eps=1e-3, dtype=torch.float64)
    p, x = shaken(norm), batch(1).numpy()
    expected = [
        row * np.exp(p["log_scale"]) / np.sqrt(sum((row - p["center"]) ** 2) / 8 + 1e-3)
        for row in x
    ]
    np.testing.assert_allclose(norm(batch(1)).detach().numpy(), expected, rtol=1e-12)


def test_gated_norm() -> None:
    """Qiu et al. 2026, section 3.4, written out for each token."""
    norm = powernorm.GatedRMSNorm(8, rank=3, eps=1e-3, dtype=torch.float64)
    p, x = shaken(norm), batch(1).numpy()

    def gated(row: np.ndarray) -> np.ndarray:
        z = p["weight"] * row / np.sqrt((row**2).mean() + 1e-3)
        hidden = p["down"].dot(z)
        return z / (1 + np.exp(-p["up"].dot(hidden / (1 + np.exp(-hidden)))))

    got = norm(batch(1)).detach().numpy()
    np.testing.assert_allclose(got, [gated(row) for row in x], rtol=1e-12)


@pytest.mark.parametrize("warmup", [0, 2])
def test_batch_renorm(warmup: int) -> None:
    """Ioffe 2017, Algorithm 1, with bounds that grow after the warm-up."""
    norm = powernorm.BatchRenorm(
        8,
        max_r=3.0,
        max_d=5.0,
        warmup_steps=warmup,
        ramp_steps=4,
        start="torch",
        dtype=torch.float64,
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
        8, window=2, warmup_steps=0, ratio_start=3, start="torch", dtype=torch.float64
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


def test_dyisru_is_rms_norm_by_the_other_features() -> None:
    x = batch(0)
    rms = nn.functional.rms_norm(x, (8,), eps=1e-300)
    for feature in range(8):
        for token in (0, 5):
            others = float(x[token].square().sum() - x[token, feature] ** 2)
            norm = powernorm.DyISRU(8, spread=others, dtype=torch.float64)
            torch.testing.assert_close(norm(x)[token, feature], rms[token, feature])


def test_dyisru_takes_large_values() -> None:
    """No square of the input overflows on the way to a result near √C."""
    x = torch.tensor([[1e30, -1e30]], requires_grad=True)
    y = powernorm.DyISRU(2)(x)
    y.sum().backward()
    torch.testing.assert_close(y, torch.tensor([[1.0, -1.0]]) * 2**0.5)
    assert x.grad.isfinite().all()


def test_shares_of_progressive_rep_batch_norm() -> None:
    norm = powernorm.ProgressiveRepBatchNorm(1, decay_steps=4, warmup_steps=1, start_ratio=0.8)
    shares = []
    for _ in range(7):
        shares.append(norm.share)
        norm(torch.randn(3, 1)).sum().backward()
    assert shares == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0])


def test_progressive_rep_batch_norm_counts_updates_of_several_micro_batches() -> None:
    """By `accumulation`, or inside `training_step`."""
    norms = [
        powernorm.ProgressiveRepBatchNorm(1, decay_steps=4, accumulation=2),
        powernorm.ProgressiveRepBatchNorm(1, decay_steps=4),
    ]
    for _ in range(3):
        for part in torch.randn(2, 3, 1):
            norms[0](part).sum().backward()
        with powernorm.training_step(norms[1]):
            for part in torch.randn(2, 3, 1):
                norms[1](part).sum().backward()
    assert [norm.share for norm in norms] == [0.25, 0.25]


def test_a_progressive_rep_batch_norm_in_its_warm_up_does_not_fold() -> None:
    """RepBN has seen nothing yet."""
    norm = powernorm.ProgressiveRepBatchNorm(4, warmup_steps=2)
    model = nn.Sequential(norm, nn.Linear(4, 4))
    model(torch.randn(3, 4)).sum().backward()
    refuses("share of LayerNorm is 1", powernorm.fold, model.eval(), torch.randn(3, 4))


@pytest.mark.parametrize(("square", "is_out"), [(100.0, True), (4.0, False)])
def test_outliers_of_unified_norm_by_hand(square: float, is_out: bool) -> None:
    norm = powernorm.UnifiedNorm(
        1, eps=1e-12, warmup_steps=1, filter_outliers=True, dtype=torch.float64
    )
    with torch.no_grad():
        norm.window_second_moment.copy_(torch.tensor([[1.0], [4.0], [1.0], [4.0]]))
        norm.num_batches_tracked.fill_(8)
    norm(torch.tensor([[square**0.5]], dtype=torch.float64)).sum().backward()
    assert bool(norm.num_skipped_batches) == is_out
    assert norm.window_second_moment[-1].item() == pytest.approx(1.0 if is_out else square)
