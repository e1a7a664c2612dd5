"""What the papers prove, checked on the layers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import powernorm

seeds = st.integers(0, 2**31)
widths = st.integers(2, 33)


def gradients(norm: torch.nn.Module, x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """(∂ℓ/∂y, ∂ℓ/∂x) for a random cotangent."""
    generator = torch.Generator().manual_seed(seed)
    x = x.clone().requires_grad_()
    g = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    norm(x).backward(g)
    return g, x.grad


@given(seeds, widths, st.booleans(), st.booleans())
@settings(max_examples=60)
def test_detached_statistics(seed: int, width: int, mean: bool, std: bool) -> None:
    """Xu et al. 2019, Theorem 1: mean and variance of the gradient of every token."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(7, width, generator=generator, dtype=torch.float64) * 3 + 1
    norm = powernorm.DetachNorm(width, mean, std, eps=1e-30)
    g, grad = gradients(norm, x, seed + 1)
    sigma = x.std(-1, unbiased=False)
    expected_mean = g.mean(-1) / sigma if mean else torch.zeros(7, dtype=torch.float64)
    bound = g.var(-1, unbiased=False) / sigma**2
    variance = grad.var(-1, unbiased=False)
    scale = float((g.abs().amax(-1) / sigma).max())
    torch.testing.assert_close(grad.mean(-1), expected_mean, rtol=1e-8, atol=1e-12 * scale)
    if std:
        torch.testing.assert_close(variance, bound, rtol=1e-8, atol=1e-12)
    else:
        assert bool((variance <= bound * (1 + 1e-9) + 1e-12).all())


@given(seeds, widths, st.floats(0.5, 3.0), st.floats(0.01, 0.2))
@settings(max_examples=40)
def test_adanorm_means(seed: int, width: int, scale: float, k: float) -> None:
    """Xu et al. 2019, Theorem 2: mean φ(y) = C, mean z = -C k."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, width, generator=generator, dtype=torch.float64)
    z = powernorm.AdaNorm(width, scale, k, eps=1e-30)(x)
    torch.testing.assert_close(z.mean(-1), torch.full((5,), -scale * k, dtype=torch.float64))
    y = powernorm.SimpleLayerNorm(width, eps=1e-30)(x)
    torch.testing.assert_close((z / y).mean(-1), torch.full((5,), scale, dtype=torch.float64))


def test_adanorm_needs_few_values_beyond_its_bound() -> None:
    """Xu et al. 2019, eq. 7: |y| > 1/k for fewer than 1 % of normal values at k = 0.1."""
    y = powernorm.SimpleLayerNorm(512)(torch.randn(256, 512))
    assert float((y.abs() > 10).float().mean()) < 0.01


def test_power_norm_v_gradient_norm() -> None:
    """Shen et al. 2020, Lemma 2, with eps = 0."""
    torch.manual_seed(0)
    x = torch.randn(64, 8, dtype=torch.float64) * 2 + 1
    norm = powernorm.PowerNormV(8, eps=1e-300, dtype=torch.float64)
    torch.nn.init.uniform_(norm.weight, 0.5, 2.0)
    g, grad = gradients(norm, x, 1)
    psi2 = x.square().mean(0)
    normalized = x / psi2.sqrt()
    inner = (g * normalized / 64**0.5).sum(0)
    expected = norm.weight.detach() ** 2 / psi2 * (g.square().sum(0) - inner**2)
    torch.testing.assert_close(grad.square().sum(0), expected)


def test_batch_norm_gradient_parts() -> None:
    """Shen et al. 2020, eq. 3: direct part, part through μ, part through σ²."""
    torch.manual_seed(0)
    x = torch.randn(32, 4, dtype=torch.float64)
    norm = powernorm.BatchNorm(4, eps=1e-300, dtype=torch.float64)
    g, grad = gradients(norm, x, 1)
    sigma = x.std(0, unbiased=False)
    normalized = (x - x.mean(0)) / sigma
    expected = (g - g.mean(0) - normalized * (g * normalized).mean(0)) / sigma
    torch.testing.assert_close(grad, expected)


def adversarial(kind: str, steps: int) -> list[Tensor]:
    """Long sequences that break running statistics: scale jumps, heavy tails, constants."""
    generator = torch.Generator().manual_seed(5)
    result = []
    for t in range(steps):
        x = torch.randn(64, 8, generator=generator, dtype=torch.float64)
        if kind == "spikes" and t % 20 == 19:
            x = x * 100
        elif kind == "jumps":
            x = x * 100 ** (t // 50 % 2)
        elif kind == "heavy":
            x = x / torch.rand(64, 1, generator=generator, dtype=torch.float64)
        elif kind == "constant":
            x[:, 3] = 7.0
            x[:, 4] = 0.0
        elif kind == "growing":
            x = x * 1.05**t
        result.append(x)
    return result


def rms(values: Tensor) -> Tensor:
    return values.square().mean(0).sqrt()


def gradients_and_bounds(
    norm: powernorm.PowerNorm, batches: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """By step and feature: ψ rms(∂L/∂X_c), what bounds it, and rms(γ ∂L/∂Y_c); (steps, C) each.

    With g = γ ∂L/∂Y, ∂L/∂X = (g - ν x̂)/ψ (eq. 12) and |Λ| ≤ rms(g) √Γ (Cauchy and Schwarz). So
    eq. 13 gives |ν| ≤ N with N ← max(0, 1 - mΓ) N + m rms(g) √Γ, unless it flips ν's sign, which
    only the plain layer does; and ψ rms(∂L/∂X) ≤ rms(g) + N √Γ with the N before the step.
    """
    torch.nn.init.uniform_(norm.weight, 0.5, 2.0, generator=torch.Generator().manual_seed(0))
    nu = torch.zeros(8, dtype=torch.float64)
    rows = []
    for t, x in enumerate(batches):
        psi2, batch2 = norm.running_second_moment.clone(), x.square().mean(0)
        if norm.max_ratio is not None:
            psi2 = psi2.clamp(batch2 / norm.max_ratio**2, batch2 * norm.max_ratio**2)
        psi = (psi2 + norm.eps).sqrt()
        # Half along the input, as a loss does that wants it smaller.
        cotangent = (
            torch.randn(x.shape, generator=torch.Generator().manual_seed(t), dtype=x.dtype)
            + x.sign()
        )
        x = x.requires_grad_()
        norm(x).backward(cotangent)
        root, g = rms(x.detach()) / psi, rms(norm.weight.detach() * cotangent)
        rows.append(torch.stack([psi * rms(x.grad), g + nu * root, g]))
        m = norm.backward_momentum
        nu = (1 - m * root.square()).clamp(min=0) * nu + m * g * root
    gradient, bound, g = torch.stack(rows, dim=1)
    return gradient, bound, g


KINDS = ("spikes", "jumps", "heavy", "constant", "growing")


@pytest.mark.parametrize("kind", KINDS)
def test_stabilized_power_norm_is_bounded(kind: str) -> None:
    """Shen et al. 2020, Theorem 4, where plain PowerNorm does not have it: for any input at all.

    `max_ratio` r keeps 1/r ≤ √Γ ≤ r. If G bounds rms(g), then N ≤ r G, because
    (1 - mΓ) r G + m G √Γ ≤ r G and m G √Γ ≤ r G; and all gradients are bounded by (1 + r²) G/ψ.
    """
    norm = powernorm.build_norm("pn-static", 8, warmup_steps=0, dtype=torch.float64)
    gradient, bound, g = gradients_and_bounds(norm, adversarial(kind, 300))
    assert bool((gradient <= bound * (1 + 1e-9)).all())
    assert bool((bound <= g.amax(0) * (1 + 5.001**2)).all())


@pytest.mark.parametrize("kind", KINDS)
def test_floored_power_norm_is_bounded_by_its_input(kind: str) -> None:
    """The same without `max_ratio`: by how far batches are from the running ψ."""
    norm = powernorm.PowerNorm(8, groups=None, warmup_steps=0, decay="floored", dtype=torch.float64)
    gradient, bound, _ = gradients_and_bounds(norm, adversarial(kind, 300))
    assert bool((gradient <= bound * (1 + 1e-9)).all())


def test_plain_power_norm_breaks_down_on_a_spike() -> None:
    """The reason for the stabilized mode: one 100-fold batch in 20."""
    plain = powernorm.build_norm("pn-only", 8, warmup_steps=0, dtype=torch.float64)
    gradient, bound, g = gradients_and_bounds(plain, adversarial("spikes", 300))
    assert bool((gradient > 1e9 * torch.maximum(bound, g)).any(0).all())


def test_plain_power_norm_is_bounded_on_bounded_input() -> None:
    """Where mΓ ≤ 1 the plain layer is the floored one."""
    plain = powernorm.build_norm("pn-only", 8, warmup_steps=0, dtype=torch.float64)
    batches = [x.clamp(-2, 2) for x in adversarial("none", 300)]
    gradient, bound, _ = gradients_and_bounds(plain, batches)
    assert bool((gradient <= bound * (1 + 1e-9)).all())


def test_the_bounds_change_nothing_while_they_are_idle() -> None:
    """On well-behaved input the stabilized layer is the plain one to the last bit."""
    layers = [
        powernorm.PowerNorm(8, groups=None, warmup_steps=2, **options)
        for options in ({}, {"decay": "floored"}, {"max_ratio": 5.0})
    ]
    for t in range(20):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(t))
        outputs = []
        for layer in layers:
            own = x.clone().requires_grad_()
            y = layer(own)
            y.backward(torch.ones_like(y) * x.sign())
            outputs.append((y, own.grad))
        for y, grad in outputs[1:]:
            assert torch.equal(y, outputs[0][0])
            assert torch.equal(grad, outputs[0][1])


def test_max_ratio_bounds_what_the_forward_sees() -> None:
    norm = powernorm.PowerNorm(8, groups=None, warmup_steps=0, max_ratio=5.0)
    x = torch.randn(64, 8) * 1000
    assert float(norm(x).detach().square().mean(0).sqrt().max()) <= 5.001
    assert float(norm(x / 1e6).detach().square().mean(0).sqrt().min()) <= 0.2
