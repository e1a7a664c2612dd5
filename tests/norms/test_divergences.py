"""Divergences of Regularized BatchNorm: each is its formula, and so is its gradient."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

import powernorm
from powernorm.norms.descriptions import describe_norm, rebuild_norm
from powernorm.norms.divergences import Divergence
from refusals import refuses

KINDS: tuple[Divergence, ...] = get_args(Divergence)
every_kind = pytest.mark.parametrize("kind", KINDS)
WEIGHTS = {"mean_penalty": 0.7, "var_penalty": 0.3}
EPS = 1e-5


def tokens(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(shape[-1], generator=generator, dtype=torch.float64) + 0.2
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * spread + 0.4


def plain(kind: Divergence, batch: Tensor, norm: Any, before: dict[str, Tensor]) -> Tensor:
    """The penalty of (M, C) valid tokens by its definition, in autograd's plain torch."""
    released = norm.variant == "released"
    mean, var = batch.mean(0), batch.var(0, unbiased=False)
    target = batch.var(0, unbiased=not released)
    running_mean = torch.lerp(before["running_mean"], mean, norm.momentum).detach()
    running_var = torch.lerp(before["running_var"], target, norm.momentum).detach()

    def std(variance: Tensor) -> Tensor:
        return (variance.clamp(min=EPS) if released else variance + EPS).sqrt()

    if kind == "jeffreys":

        def jeffreys(mean: Tensor, other_mean: Tensor) -> Tensor:
            here, there = Normal(mean, std(var)), Normal(other_mean, std(running_var))
            return kl_divergence(here, there) + kl_divergence(there, here)

        spreads = jeffreys(running_mean, running_mean)
        terms = jeffreys(mean, running_mean) - spreads, spreads
    elif kind == "diff":
        terms = (running_mean - mean) ** 2, (running_var - var).abs()
    elif kind == "diff2":
        terms = (running_mean - mean) ** 2, (std(running_var) - std(var)) ** 2
    else:
        terms = (
            ((running_mean - mean) / std(running_var)) ** 2,
            (running_var - var).abs() / std(running_var) ** 2,
        )
    return norm.mean_penalty * terms[0].sum() + norm.var_penalty * terms[1].sum()


@every_kind
@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("masked", [False, True])
def test_value_and_gradient_are_those_of_the_formula(
    kind: Divergence, variant: str, masked: bool
) -> None:
    norm = powernorm.RegularizedBatchNorm(
        6,
        penalty=kind,
        variant=variant,
        momentum=0.1,
        start="torch",
        dtype=torch.float64,
        **WEIGHTS,
    )
    for t in range(4):
        x = (tokens(3, 5, 6, seed=t) * (1 + t)).requires_grad_()
        mask = torch.rand(3, 5, generator=torch.Generator().manual_seed(t)) < 0.4
        before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
        y = norm(x, mask if masked else None)
        value = norm.penalty()
        expected = plain(kind, x[~mask] if masked else x.flatten(0, 1), norm, before)
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
        (grad,) = torch.autograd.grad(value, x, retain_graph=True)
        (expected_grad,) = torch.autograd.grad(expected, x)
        torch.testing.assert_close(grad, expected_grad, rtol=1e-10, atol=1e-12)
        (y.square().sum() + value).backward()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "diff"])
def test_a_variance_below_a_floor_has_no_gradient(kind: Divergence) -> None:
    norm = powernorm.RegularizedBatchNorm(
        6, penalty=kind, variant="released", momentum=0.1, dtype=torch.float64, **WEIGHTS
    )
    x = (tokens(15, 6) * 1e-4).requires_grad_()
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    y = norm(x)
    (grad,) = torch.autograd.grad(norm.penalty(), x, retain_graph=True)
    (expected,) = torch.autograd.grad(plain(kind, x, norm, before), x)
    torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12)
    del y


def test_relative_difference_is_that_of_the_normalized_input() -> None:
    """So λ need not know the scale of a feature."""
    scale = torch.tensor([1e-2, 1.0, 1e2], dtype=torch.float64)
    values = []
    for factor in (torch.ones(3, dtype=torch.float64), scale):
        norm = powernorm.RegularizedBatchNorm(
            3, eps=1e-30, penalty="relative", dtype=torch.float64, **WEIGHTS
        )
        norm.running_var.copy_(factor.square())
        y = norm(tokens(20, 3).requires_grad_() * factor)
        values.append(norm.penalty().detach())
        del y
    torch.testing.assert_close(*values)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(kind: Divergence, dtype: torch.dtype) -> None:
    """Statistics and penalty are float32: large inputs do not overflow."""
    x = (tokens(40, 6) * 300).to(dtype)
    results = []
    for kept, type_ in ((dtype, None), (torch.float64, torch.float64)):
        norm = powernorm.RegularizedBatchNorm(6, penalty=kind, dtype=type_, **WEIGHTS)
        norm.running_var.fill_(90_000.0)
        own = x.to(kept).requires_grad_()
        y = norm(own)
        value = norm.penalty()
        (grad,) = torch.autograd.grad(value, own)
        results.append((value.detach().double(), grad.double()))
        del y
    assert results[0][1].isfinite().all()
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=0)
    scale = float(results[1][1].abs().max())
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-2, atol=1e-2 * scale)


@every_kind
def test_no_token_and_constant_features_leave_finite_gradients(kind: Divergence) -> None:
    norm = powernorm.RegularizedBatchNorm(6, penalty=kind, **WEIGHTS)
    x = torch.zeros(4, 6, requires_grad=True)
    y = norm(x, torch.ones(4, dtype=torch.bool))
    value = norm.penalty()
    (grad,) = torch.autograd.grad(value, x)
    assert value.item() == 0
    assert grad.abs().max() == 0
    y = norm(x)
    (grad,) = torch.autograd.grad(norm.penalty(), x)
    assert grad.isfinite().all()
    del y


@every_kind
def test_the_choice_goes_wherever_the_layer_goes(kind: Divergence, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
    powernorm.swap(model, to="rbn", penalty=kind, mean_penalty=2.0)
    norm = model[1]
    assert norm.divergence == copy.deepcopy(norm).divergence == kind
    name, options, source = describe_norm(norm)
    assert rebuild_norm(name, norm.num_features, options, source).divergence == kind
    assert (f"penalty='{kind}'" in repr(norm)) == (kind != "diff")
    powernorm.save(model, tmp_path / "saved")
    fresh = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
    loaded = powernorm.load(tmp_path / "saved", fresh)
    assert (loaded[1].divergence, loaded[1].mean_penalty) == (kind, 2.0)
    norm.load_state_dict(powernorm.RegularizedBatchNorm(6).state_dict())  # it is no state


@pytest.mark.parametrize("value", ["kl", 0.1, None])
def test_another_divergence_is_refused(value: Any) -> None:
    known = "'diff', 'diff2', 'relative', 'jeffreys'"
    with pytest.raises(powernorm.InputError, match=f"penalty is {value!r}, .*{known}.*factors"):
        powernorm.RegularizedBatchNorm(6, penalty=value)
    known = known.replace(",", " |")
    refuses(re.escape(f"expected {known}"), powernorm.build_norm, "rbn", 6, penalty=value)
