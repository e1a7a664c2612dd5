"""Diagnosis of norms over channels = that of the same norms over the last dimension."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from diagnosis.models import BATCH_STATISTICS_NORMS, OPTIONS
from powernorm.diagnosis import NormMonitor, training_inference_discrepancy
from powernorm.norms import build_norm
from powernorm.ops.moments import Moments

C = 6
EVERY = (*BATCH_STATISTICS_NORMS, "ln", "adanorm", "gs")


def images(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2 + seed, C, 3, 4, generator=generator, dtype=torch.float64)
    return x * (1 + seed) + torch.arange(C).view(C, 1, 1)


def mask_of(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(len(x))
    return torch.rand(x.movedim(1, -1).shape[:-1], generator=generator) < 0.3


class Net(nn.Module):
    """A norm, a map of the channels, a norm: over channels, or the same with features last."""

    def __init__(self, name: str, dim: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {**OPTIONS.get(name, {}), "feature_dim": dim, "dtype": torch.float64}
        self.dim = dim
        self.lower = build_norm(name, C, **options)
        self.between = nn.Linear(C, C, dtype=torch.float64)
        self.upper = build_norm(name, C, **options)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.lower(x, mask)
        x = self.between(x.movedim(self.dim, -1)).tanh().movedim(-1, self.dim)
        y: Tensor = self.upper(x, mask)
        return y


def same(ours: Any, expected: Any, what: str) -> None:
    if isinstance(expected, float) and isinstance(ours, float):
        assert math.isclose(ours, expected, rel_tol=1e-9, abs_tol=1e-12), (what, ours, expected)
    else:
        assert ours == expected, what


@pytest.mark.parametrize("name", BATCH_STATISTICS_NORMS)
def test_discrepancy_of_a_net(name: str) -> None:
    batches = [(x, mask_of(x)) for x in map(images, range(3))]
    moved = [(x.movedim(1, -1), mask) for x, mask in batches]
    ours = training_inference_discrepancy(Net(name, 1), batches).to_rows()
    expected = training_inference_discrepancy(Net(name, -1), moved).to_rows()
    for row, other in zip(ours, expected, strict=True):
        for key, value in other.items():
            same(row[key], value, key)


@pytest.mark.parametrize("name", EVERY)
def test_diagnose(name: str) -> None:
    batches = [(x, mask_of(x)) for x in map(images, range(3))]
    moved = [(x.movedim(1, -1), mask) for x, mask in batches]
    ours = powernorm.diagnose(Net(name, 1), batches)
    expected = powernorm.diagnose(Net(name, -1), moved)
    assert len(ours.rows) == 2
    for layer, other in zip(ours.rows, expected.rows, strict=True):
        for key, value in other.to_record().items():
            same(layer.to_record()[key], value, key)


def rows_of(name: str, dim: int, masked: bool, scoped: bool) -> list[dict[str, Any]]:
    model = Net(name, dim)
    monitor = NormMonitor(model, 1)
    rows: list[dict[str, Any]] = []
    for step in range(3):
        x = images(step)
        mask = mask_of(x) if masked else None
        cotangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(step))
        monitor.start_step(step)
        x, cotangent = (t.movedim(1, dim) for t in (x, cotangent))
        with powernorm.padding_mask(mask if scoped else None):
            y = model(x.requires_grad_(), None if scoped else mask)
        (y * cotangent).sum().backward()
        rows += monitor.finish_step(step)
    monitor.detach()
    return rows


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(("masked", "scoped"), [(False, False), (True, False), (True, True)])
def test_monitor(name: str, masked: bool, scoped: bool) -> None:
    ours = rows_of(name, 1, masked, scoped)
    expected = rows_of(name, -1, masked, scoped)
    assert len(ours) == len(expected) == 6
    for row, other in zip(ours, expected, strict=True):
        for key, value in other.items():
            same(row[key], value, key)


@pytest.mark.parametrize("variant", ["paper", "released"])
def test_monitor_with_a_residual_and_hidden_padding(variant: str) -> None:
    def run(dim: int) -> list[dict[str, Any]]:
        norm = build_norm("bn", C, variant=variant, feature_dim=dim, dtype=torch.float64)
        monitor = NormMonitor(norm, 1)
        x, stream = (images(seed=1).movedim(1, dim).requires_grad_() for _ in range(2))
        mask = mask_of(images(1))
        monitor.start_step(0)
        y, total = norm(x, mask, stream)
        (y.square().sum() + total.sum()).backward()
        return list(monitor.finish_step(0))

    for row, other in zip(run(1), run(-1), strict=True):
        for key, value in other.items():
            same(row[key], value, key)


def test_torchs_batch_norm_over_images_is_diagnosed() -> None:
    model = nn.Sequential(nn.Conv2d(C, C, 3, padding=1), nn.BatchNorm2d(C), nn.ReLU()).double()
    batches = [images(seed) for seed in range(3)]
    report = powernorm.diagnose(model, batches)
    (layer,) = report.rows
    assert (layer.name, layer.norm, layer.uses_batch_statistics) == ("1", "bn", True)
    powernorm.swap(model, "bn")
    (ours,) = powernorm.diagnose(model, batches).rows
    assert ours.mean_tid == pytest.approx(layer.mean_tid, rel=1e-9)
    assert ours.var_tid == pytest.approx(layer.var_tid, rel=1e-9)
    with torch.no_grad():
        hidden = [model[0](x) for x in batches]
    found = [model[1].token_moments(x.movedim(1, -1)) for x in hidden]
    by_hand = [Moments.of(x.movedim(1, -1)) for x in hidden]
    for one, other in zip(found, by_hand, strict=True):
        torch.testing.assert_close(one.mean, other.mean)
