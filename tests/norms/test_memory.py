"""No temporary of the size of the input beyond the output, the saved input and the gradient."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import powernorm

NORMS = ("ln-simple", "adanorm", "rms", "gs", "bn", "rbn", "pnv", "pn", "pn-only", "pn-static")
TOKENS, FEATURES = 512, 64


def large_allocations(run: profile) -> int:
    """How many blocks of at least the size of the input were asked for."""
    size = TOKENS * FEATURES * 4
    events = run.profiler.kineto_results.events()
    return sum(e.name() == "[memory]" and e.nbytes() >= size for e in events)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.11
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("masked", [False, True])
def test_allocations_of_a_step(name: str, masked: bool) -> None:
    norm = powernorm.build_norm(name, FEATURES)
    x = torch.randn(TOKENS, FEATURES, requires_grad=True)
    cotangent = torch.randn(TOKENS, FEATURES)
    mask = torch.rand(TOKENS) < 0.25 if masked else None
    norm(x, mask).backward(cotangent)
    x.grad = None
    settings = {"activities": [ProfilerActivity.CPU], "profile_memory": True}
    with profile(**settings) as forward:
        y = norm(x, mask)
    with profile(**settings) as backward:
        y.backward(cotangent)
    assert large_allocations(forward) == 1
    assert large_allocations(backward) == 1


def test_the_measure_sees_temporaries() -> None:
    norm = powernorm.RMSNorm(FEATURES)
    with (
        powernorm.ops.use_backend("eager"),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run,
    ):
        norm(torch.randn(TOKENS, FEATURES))
    assert large_allocations(run) > 2
