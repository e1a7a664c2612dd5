"""Every norm on a CUDA device: the Triton kernels behind the layers, against the CPU in float64."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

import powernorm
from cases import CASES, Case, case_id, states, step

pytestmark = pytest.mark.gpu
STEPS = 4


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 50, 8, generator=generator, dtype=torch.float64) * (1 + seed)
    return x, torch.rand(3, 50, generator=generator) < 0.3


@pytest.mark.parametrize("case", CASES, ids=case_id)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gpu_gives_what_the_cpu_gives(case: Case, dtype: torch.dtype) -> None:
    norm = case.build().to("cuda", dtype)
    exact = deepcopy(norm).cpu().double()
    tolerance = 2e-5 if dtype == torch.float32 else 1e-10
    for seed in range(STEPS):
        x, mask = batch(seed)
        y, grad = step(norm, x.to("cuda", dtype), mask.cuda(), seed)
        wanted_y, wanted_grad = step(exact, x, mask, seed)
        for ours, wanted in ((y, wanted_y), (grad, wanted_grad)):
            scale = float(wanted.abs().max()) + 1
            torch.testing.assert_close(ours.cpu().double(), wanted, rtol=0, atol=tolerance * scale)
    for name, wanted in states(exact).items():
        ours = states(norm)[name].cpu().to(wanted.dtype)
        torch.testing.assert_close(ours, wanted, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("name", ["bn", "rbn", "pn", "pn-static", "adanorm", "rms"])
def test_triton_serves_it_compiled_and_not(name: str) -> None:
    norm = powernorm.build_norm(name, 512).cuda()
    x = torch.randn(4, 30, 512, device="cuda", requires_grad=True)
    assert {choice.backend for choice in powernorm.ops.explain(x)[:4]} == {"triton"}
    copied = deepcopy(norm)
    compiled = torch.compile(copied, fullgraph=True)
    grads = []
    for layer in (norm, compiled):
        x.grad = None
        layer(x).square().sum().backward()
        grads.append(x.grad.clone())
    torch.testing.assert_close(grads[0], grads[1])
    for name, buffer in norm.named_buffers():
        torch.testing.assert_close(dict(copied.named_buffers())[name], buffer)


def test_no_synchronization_with_the_host() -> None:
    """After the warm-up a step launches kernels and waits for nothing, mask or not."""
    norms = [powernorm.build_norm(name, 64).cuda() for name in ("bn", "rbn", "pnv", "adanorm")]
    norms += [powernorm.build_norm(name, 64, warmup_steps=0).cuda() for name in ("pn", "pn-static")]
    x = torch.randn(4, 30, 64, device="cuda", requires_grad=True)
    mask = torch.rand(4, 30, device="cuda") < 0.3
    for norm in norms:
        norm(x, mask).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for norm in norms:
            norm(x, mask).sum().backward()
            norm(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
