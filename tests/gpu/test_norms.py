"""Every norm by the Triton kernels against eager torch in float64 on the CPU."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor

import powernorm
from cases import CASES, Case, case_id, states, step
from covering import some_default
from gpu.kernel_cases import DEVICE
from powernorm.ops import use_backend

STEPS = 4
WITH_KERNELS = ("ln", "adanorm", "rms", "gs", "bn", "rbn", "pn", "pn-static")
FIRST = {case.name: case for case in reversed(CASES) if case.name in WITH_KERNELS}
"""A case of each norm that kernels compute in another way."""


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 50, 8, generator=generator, dtype=torch.float64) * (1 + seed)
    return x, torch.rand(3, 50, generator=generator) < 0.3


@pytest.mark.thinned(1)
@pytest.mark.parametrize("case", some_default(CASES, *FIRST.values()), ids=case_id)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_triton_gives_what_float64_gives(case: Case, dtype: torch.dtype) -> None:
    """Up to twice the error that eager torch makes in the same type."""
    norm = case.build().to(dtype)
    eager, exact = deepcopy(norm), deepcopy(norm).double()
    norm = norm.to(DEVICE)
    floor = 2e-5 if dtype == torch.float32 else 1e-10
    for seed in range(STEPS):
        x, mask = batch(seed)
        with use_backend("triton"):
            ours = step(norm, x.to(DEVICE, dtype), mask.to(DEVICE), seed)
        with use_backend("eager"):
            theirs = step(eager, x.to(dtype), mask, seed)
            wanted = step(exact, x, mask, seed)
        for values in zip(("y", "the gradient"), ours, theirs, wanted, strict=True):
            check(*values, floor)
    for name, value in states(exact).items():
        check(name, states(norm)[name], states(eager)[name], value, 10 * floor)


def check(name: str, ours: Tensor, theirs: Tensor, wanted: Tensor, floor: float) -> None:
    def error(values: Tensor) -> float:
        return float((values.cpu().double() - wanted.double()).abs().max())

    limit = 2 * error(theirs) + floor * (float(wanted.abs().max()) + 1)
    assert error(ours) <= limit, (name, error(ours), error(theirs), limit)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bn", "rbn", "pn", "pn-static", "adanorm", "rms"])
def test_a_gpu_takes_triton_by_itself(name: str) -> None:
    norm = powernorm.build_norm(name, 512).to(DEVICE)
    x = torch.randn(4, 30, 512, device=DEVICE, requires_grad=True)
    norm(x).square().sum().backward()
    choices = powernorm.ops.explain(x)[:4]
    assert {choice.backend for choice in choices} == {"triton"}, choices
