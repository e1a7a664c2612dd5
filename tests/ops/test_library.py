"""The registered ops: torch's own checks, and statistics where float32 is at its limit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import powernorm
from powernorm.ops import Moments, use_backend

OPS = torch.ops.powernorm


def features(value: float | None = None, *leading: int) -> Tensor:
    shape = (*leading, 8)
    return torch.rand(shape) + 0.5 if value is None else torch.full(shape, value)


def samples() -> dict[str, tuple[object, tuple[object, ...]]]:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8, requires_grad=True)
    residual = torch.randn(2, 5, 8, requires_grad=True)
    mask = torch.rand(2, 5) < 0.3
    weight, bias = features().requires_grad_(), features().requires_grad_()
    carrier4 = torch.zeros(4, 8, dtype=torch.float64, requires_grad=True)
    carrier3 = torch.zeros(3, 8, dtype=torch.float64, requires_grad=True)
    carrier5 = torch.zeros(5, 8, dtype=torch.float64, requires_grad=True)
    limits = torch.tensor([3.0, 5.0])
    plain, bare = (x, None, mask, weight, bias), (x, None, None, None, None)
    added = (x, residual, mask, weight, bias)
    mean, var = features(), features()
    token, added_token = (x, None, weight, bias), (x, residual, None, None)
    batch, power, moving = OPS.batch_norm, OPS.power_norm, OPS.moving_average_norm
    windows = (features(), features(None, 3), features(None, 3))
    return {
        "bn": (batch.default, (*plain, mean, var, carrier4, None, 0, 1e-5, False, "")),
        "bn groups residual": (
            batch.default,
            (*added, mean, var, carrier4, None, 4, 1e-5, False, ""),
        ),
        "pnv": (batch.default, (*bare, None, var, None, None, 0, 1e-5, True, "")),
        "brn": (batch.default, (*plain, mean, var, carrier4, limits, 0, 1e-5, False, "")),
        "pn": (power.default, (*plain, mean, var, carrier5, 0, 1e-5, False, 0.0, False, "")),
        "pn groups residual": (
            power.default,
            (*added, mean, var, carrier5, 2, 1e-5, False, 5.0, False, ""),
        ),
        "pn warm-up": (power.default, (*bare, mean, var, None, 0, 1e-5, True, 0.0, True, "")),
        "ln": (OPS.token_norm.default, (*token, 1, True, 1e-5, False, 1.0, 0.0, False, False)),
        "adanorm": (
            OPS.token_norm.default,
            (*added_token, 1, True, 1e-5, True, 2.0, 0.1, False, False),
        ),
        "detach": (OPS.token_norm.default, (*token, 2, False, 1e-5, False, 1.0, 0.0, True, True)),
        "static": (OPS.static_norm.default, (*token, mean, var, 0, 1e-5, False)),
        "static groups residual": (
            OPS.static_norm.default,
            (*added_token, None, var, 4, 1e-5, True),
        ),
        "mabn": (
            moving.default,
            (*plain, *windows, carrier3, 0, 1e-5, False, True, ""),
        ),
        "mabn groups residual": (
            moving.default,
            (*added, *windows, carrier3, 2, 1e-5, False, True, ""),
        ),
        "snapshot": (OPS.snapshot.default, (features(),)),
        "unless repeated": (OPS.unless_repeated.default, (features(),)),
    }


# torch 2.14 looks at the gradients of its own test tensors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.thinned(1)
@pytest.mark.parametrize("backend", ["eager", "cpu"])
@pytest.mark.parametrize("name", samples())
def test_opcheck(name: str, backend: str) -> None:
    op, args = samples()[name]
    with use_backend(backend):
        torch.library.opcheck(op, args)


@pytest.mark.parametrize("name", ["rbn", "pn", "pn-static", "adanorm", "rms"])
def test_export(name: str) -> None:
    """A trained layer exports for inference and gives the same numbers, at any length."""
    norm = powernorm.build_norm(name, 8)
    x = torch.randn(2, 6, 8)
    if hasattr(norm, "running_var"):
        norm(x).sum().backward()
    norm.eval()
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(
        nn.Sequential(norm), (x,), dynamic_shapes=({1: length},), strict=True
    )
    other = torch.randn(2, 11, 8)
    torch.testing.assert_close(program.module()(other), norm(other))


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
@pytest.mark.parametrize("width", [1, 3, 17, 513])
def test_statistics_of_offset_data(offset: float, width: int) -> None:
    """Mean 1e4 and std 1 in float32: a one-pass sum of squares would lose the variance."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4096, width, generator=generator, dtype=torch.float64) + offset
    norm = powernorm.BatchNorm(width, momentum=1.0)
    rounded = x.float().double()
    y = norm(x.float())
    torch.testing.assert_close(norm.running_var.double(), rounded.var(0), rtol=1e-5, atol=0)
    expected = (rounded - rounded.mean(0)) / rounded.std(0, unbiased=False)
    theirs = torch.nn.functional.batch_norm(x.float(), None, None, training=True)
    error = (y.double() - expected).abs().max()
    reference_error = (theirs.double() - expected).abs().max()
    assert error <= 2 * reference_error + 1e-5


rows = st.lists(st.integers(0, 6), min_size=1, max_size=5)


@given(rows, st.integers(0, 2**31), st.sampled_from([0.0, 100.0, 1e9]))
@settings(max_examples=50)
def test_moments_merge_in_any_order(sizes: list[int], seed: int, offset: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in sizes]
    parts = [part + offset for part in parts]
    masks = [torch.rand(n, generator=generator) < 0.4 for n in sizes]
    moments = [Moments.of(x, m) for x, m in zip(parts, masks, strict=True)]
    left = Moments.zero(3)
    for m in moments:
        left = left.merge(m)
    right = Moments.zero(3)
    for m in reversed(moments):
        right = m.merge(right)
    valid = torch.cat([x[~m] for x, m in zip(parts, masks, strict=True)])
    assert float(left.count) == len(valid)
    for name in ("mean", "var", "second_moment"):
        torch.testing.assert_close(getattr(left, name), getattr(right, name), rtol=1e-6, atol=1e-6)
    if len(valid):
        torch.testing.assert_close(left.mean, valid.mean(0))
        torch.testing.assert_close(left.second_moment, valid.square().mean(0))
        torch.testing.assert_close(left.var, valid.var(0, unbiased=False), rtol=1e-6, atol=1e-6)


def test_moments_over_leading_dimensions_are_those_of_the_sums() -> None:
    """Rows of sums give the moments of several calls of a layer."""
    x = torch.randn(2, 5, 3, dtype=torch.float64) + 10
    sums = torch.stack([x.sum(1), x.square().sum(1)])
    moments = Moments.from_sums(torch.full((2, 1), 5.0, dtype=torch.float64), *sums)
    torch.testing.assert_close(moments.mean, x.mean(1))
    torch.testing.assert_close(moments.var, x.var(1, correction=0))
