"""No temporary of the size of the input beyond the output, the saved input and the gradient."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import powernorm
from cases import CASES, ONE_EACH, Case, case_id
from covering import some_default

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


KEPT = {
    **dict.fromkeys(("ln", "ln-simple", "detach", "adanorm", "rms", "gs", "gn"), (2, 0)),
    **dict.fromkeys(("dyt", "derf", "dyisru"), (FEATURES, 0)),
    **dict.fromkeys(("seednorm", "gatednorm"), (FEATURES + 2, 0)),
    **dict.fromkeys(("none", "scalenorm", "biasnorm"), (0, 0)),
    **dict.fromkeys(("rbn", "brn"), (0, 14)),
    **dict.fromkeys(("bn", "pnv", "repbn"), (0, 6)),
    "prepbn": (2, 14),
    "taper": (2, 12),
    "mabn": (0, 7),
    "un": (0, 10),
    "pn": (1, 7),
    **dict.fromkeys(("pn-only", "pn-static"), (0, 7)),
}
"""Numbers per token and per feature that docs/layers.md says are kept besides the input."""


@pytest.mark.parametrize("name", powernorm.NORMS)
def test_kept_for_the_backward(name: str) -> None:
    """A tensor more of the input's size is what makes a large batch not fit."""
    norm = powernorm.build_norm(name, FEATURES)
    x = torch.randn(TOKENS, FEATURES, requires_grad=True) * 1.0
    mask = torch.rand(TOKENS) < 0.25
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        norm(x, mask)
    for given in (x, mask, *norm.parameters()):
        kept.pop(given.data_ptr(), None)
    by_token, by_feature = KEPT[name]
    documented = by_token * TOKENS + by_feature * FEATURES
    assert documented * 4 <= sum(kept.values()) <= (documented + 4) * 4


def trained(case: Case) -> nn.Module:
    norm = case.build()
    x = torch.randn(3, 5, 8, requires_grad=True)
    for _ in range(3):
        with powernorm.padding_mask(torch.zeros(3, 5, dtype=torch.bool)):
            norm(x).sum().backward()
    norm.load_state_dict(copy.deepcopy(norm).state_dict())
    norm(x)  # a forward that nobody goes back through
    norm.double().eval()(x.double())
    return norm


@pytest.mark.parametrize("case", some_default(CASES, *ONE_EACH), ids=case_id)
def test_a_layer_goes_with_its_last_name(case: Case) -> None:
    """It is part of no cycle of references, which would keep its memory until a collection."""
    trained(case)  # what torch keeps from the first time on
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        norm = trained(case)
        held = [weakref.ref(one) for one in (norm, *norm.parameters(), *norm.buffers())]
        del norm
        assert not any(one() is not None for one in held)
    finally:
        if is_enabled:
            gc.enable()
