"""Theorems of the papers, checked on the layers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

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


FAMILY: dict[str, Callable[[Tensor], Tensor]] = {
    "1": torch.ones_like,
    "y": lambda y: y,
    "y2": torch.square,
    "y3": lambda y: y**3 / 2,
    "y4": lambda y: y**4 / 4,
    "y5": lambda y: y**5 / 8,
    "y6": lambda y: y**6 / 16,
    "tanh": torch.tanh,
    "sin": lambda y: torch.sin(2 * y),
    "bell": lambda y: torch.exp(-y.square()),
    "softplus": torch.nn.functional.softplus,
}
"""Differentiable functions of which φ may be any combination."""


def normalized_tokens(width: int, seed: int) -> Tensor:
    """(200, width): mean 0 and variance 1 in each; from flat to heavy tails, skewed both ways."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(200, width, generator=generator, dtype=torch.float64)
    x = x.sign() * x.abs() ** (0.5 + 2 * torch.rand(200, 1, generator=generator))
    x = x + torch.randn(200, 1, generator=generator) * x.square()
    return (x - x.mean(-1, keepdim=True)) / x.std(-1, unbiased=False, keepdim=True)


@given(seeds, st.integers(8, 33))
@settings(max_examples=20)
def test_which_scalings_of_a_token_have_a_constant_mean(seed: int, width: int) -> None:
    """Xu et al. 2019, Theorem 2, its conditions (1) and (2), for a token y of any one width H.

    (1) φ is differentiable; (2) (1/H) Σ φ(y_i) = C > 0 for all y. As (1/H) Σ y_i = 0 and
    (1/H) Σ y_i² = 1, these leave φ = a + b y + c y² with a + c = C, and nothing else.
    """
    y = normalized_tokens(width, seed)
    means = torch.stack([f(y).mean(-1) for f in FAMILY.values()], dim=-1)
    # φ = Σ_j p_j f_j has a constant mean where p is orthogonal to all rows.
    _, sizes, directions = torch.linalg.svd(means - means.mean(0))
    assert int((sizes < 1e-9 * sizes[0]).sum()) == 3
    assert directions[-3:, 3:].abs().max() < 1e-6


@given(st.floats(0.5, 3.0), st.floats(-0.5, 0.5), st.floats(0.01, 0.5))
def test_the_scaling_is_unique_where_its_bound_is_for_all_widths(
    scale: float, k: float, curvature: float
) -> None:
    """Xu et al. 2019, Theorem 2, its condition (3): |(1/H) Σ z_i| < M for z = φ(y) ⊙ y.

    Of what the other two leave it takes φ = C (1 - k y) alone, if one M is to do for all H: then
    (1/H) Σ z_i = -C k. With c y² it is -C k + c (1/H) Σ y_i³, which grows as √H in a token with
    one large feature. For a single H there is an M for these too, so that the solution is unique
    as a statement on all widths only.
    """
    for curved in (False, True):
        bounds = []
        for width in (16, 256, 4096, 65536):
            x = torch.zeros(width, dtype=torch.float64)
            x[0] = 1.0
            y = powernorm.SimpleLayerNorm(width, eps=1e-300)(x)
            c = curvature if curved else 0.0
            phi = scale * (1 - k * y) + c * (y.square() - 1)
            torch.testing.assert_close(phi.mean().item(), scale)
            bounds.append(abs(float((phi * y).mean() + scale * k)))
        if curved:
            assert all(b > 3.9 * a for a, b in pairwise(bounds))
        else:
            assert max(bounds) < 1e-9


def loss_above(seed: int) -> Callable[[Tensor], Tensor]:
    """A loss behind the norm: an activation, mixed features, a mean over tokens."""
    generator = torch.Generator().manual_seed(seed)
    into = torch.randn(8, 16, generator=generator, dtype=torch.float64)
    out = torch.randn(16, 5, generator=generator, dtype=torch.float64)
    return lambda y: torch.logsumexp((y @ into).tanh() @ out, dim=-1).mean()


def gradient_norms(
    x: Tensor, norm: torch.nn.Module, loss: Callable[[Tensor], Tensor], shift: bool
) -> tuple[Tensor, Tensor]:
    """(‖∂L/∂X_c‖, ‖∂L̂/∂X_c‖) by feature, with the norm and without it.

    Args:
        x: (tokens, C).
        norm: a PowerNormV.
        loss: L of the norm's output.
        shift: make the loss L̂ of the network without a norm one that meets Assumption 9,
            ∂L̂/∂X = ∂L/∂Y at this x; else it is the same function, L̂ = L(X).
    """
    leaf = x.clone().requires_grad_()
    y = norm(leaf)
    (grad,) = torch.autograd.grad(loss(y), leaf)
    (plain,) = torch.autograd.grad(loss(leaf + (y - leaf).detach() if shift else leaf), leaf)
    return grad.norm(dim=0), plain.norm(dim=0)


@given(seeds, st.floats(0.01, 100.0))
@settings(max_examples=40)
def test_power_norm_v_makes_the_loss_smoother(seed: int, spread: float) -> None:
    """Shen et al. 2020, Lemma 2: ‖∂L/∂X_c‖ ≤ ‖∂L̂/∂X_c‖ under Assumption 9, where γ_c ≤ ψ_B,c.

    Assumption 9: what arrives at the norm's output, ∂L/∂Y, is what would arrive at X in a network
    without the norm, ∂L̂/∂X. In general ‖∂L/∂X_c‖ ≤ (γ_c/ψ_B,c) ‖∂L̂/∂X_c‖, with equality only for
    a gradient orthogonal to X_c.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(24, 8, generator=generator, dtype=torch.float64) * spread + 0.3
    psi = x.square().mean(0).sqrt()
    norm = powernorm.PowerNormV(8, eps=1e-300, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(8, generator=generator, dtype=torch.float64) * 3)
    grad, plain = gradient_norms(x, norm, loss_above(seed), shift=True)
    gamma = norm.weight.detach()
    assert bool((grad <= gamma / psi * plain * (1 + 1e-9)).all())
    smoother = gamma <= psi
    assert bool((grad[smoother] <= plain[smoother] * (1 + 1e-9)).all())


def test_power_norm_v_need_not_be_smoother_without_its_assumptions() -> None:
    """Lemma 2 says nothing where γ > ψ_B, or where the norm changes what arrives from above.

    A loss that is flat far out (Assumption 9 does not hold) has a small gradient without the norm,
    which brings its input to where the loss is steep.
    """
    noise = torch.randn(24, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x, weights = 20 + noise, noise.roll(1, 0)
    norm = powernorm.PowerNormV(8, eps=1e-300, dtype=torch.float64)  # γ = 1, ψ_B about 20
    grad, plain = gradient_norms(x, norm, lambda y: (y.tanh() * weights).sum(), shift=False)
    assert bool((grad > 1.1 * plain).all())
    with torch.no_grad():
        norm.weight.fill_(60.0)
    grad, plain = gradient_norms(x, norm, lambda y: (y * weights).sum(), shift=True)
    assert bool((grad > 1.1 * plain).all())


def test_power_norm_v_gradient_norm() -> None:
    """Shen et al. 2020, Lemma 2, its equation, with eps = 0."""
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
