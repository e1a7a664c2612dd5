"""A swap to the same kind of norm preserves the computation of torch's norm with any options."""

from __future__ import annotations

import copy
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import powernorm
from powernorm.surgery.swapping import plan_swap, swap

SHAPES: Final = {nn.BatchNorm1d: (9, 6, 4), nn.BatchNorm2d: (5, 6, 3, 3)}
TOKENS: Final = (5, 7, 6)
OPTIONS: Final[list[dict[str, Any]]] = [
    {},
    {"momentum": None},
    {"momentum": 0.03},
    {"eps": 0.3},
    {"affine": False},
    {"affine": False, "momentum": None, "eps": 0.2},
    {"dtype": torch.float64},
    {"dtype": torch.float64, "affine": False},
]


def seen(norm: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> nn.Module:
    """Return a norm of some batches with γ and β that are not 1 and 0."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        norm.train()(torch.randn(*shape, generator=generator, dtype=dtype) * 2 + 1)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter += torch.linspace(-0.5, 0.5, parameter.numel(), dtype=parameter.dtype)
    return norm


def results(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Return what a model gives in evaluation, in a training step and in evaluation after it."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    before = model.eval()(x)
    y = model.train()(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=dtype).reshape(y.shape)
    found = [before, y]
    if y.requires_grad:
        (y * weights).sum().backward()
        found += [p.grad for p in model.parameters() if p.grad is not None]
    return [*found, model.eval()(x)]


def settings(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    parameters = model.named_parameters()
    return {name: (p.shape, p.dtype, p.requires_grad) for name, p in parameters}


def check(old: nn.Module, to: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    model = nn.Sequential(old)
    twin = copy.deepcopy(model)
    swap(model, to)
    assert isinstance(model[0], powernorm.Norm)
    assert settings(model) == settings(twin)
    for mine, torchs in zip(results(model, shape, dtype), results(twin, shape, dtype), strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", [(), ("weight",), ("bias",)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", list(SHAPES))
def test_batch_norms(
    kind: type[nn.Module], options: dict[str, Any], frozen: tuple[str, ...]
) -> None:
    """A fine-tuning that continues with other statistics or settings loses what was trained."""
    dtype = options.get("dtype", torch.float32)
    norm = seen(kind(6, **options), SHAPES[kind], dtype)
    for name in frozen:
        if getattr(norm, name) is not None:
            getattr(norm, name).requires_grad_(False)
    check(norm, "bn", SHAPES[kind], dtype)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_synchronized_batch_norms(options: dict[str, Any]) -> None:
    """It trains on GPUs only; evaluation and state are the same here."""
    dtype = options.get("dtype", torch.float32)
    old = nn.SyncBatchNorm.convert_sync_batchnorm(seen(nn.BatchNorm1d(6, **options), (9, 6), dtype))
    model = nn.Sequential(old).eval()
    x = torch.randn(9, 6, dtype=dtype)
    before, state = model(x), model.state_dict()
    swap(model, "bn")
    torch.testing.assert_close(model(x), before)
    assert (model[0].momentum, model[0].eps) == (old.momentum, old.eps)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in state.items())


@pytest.mark.parametrize(
    ("to", "old"),
    [
        ("ln", nn.LayerNorm(6)),
        ("ln", nn.LayerNorm(6, eps=0.1, bias=False)),
        ("ln", nn.LayerNorm(6, elementwise_affine=False)),
        ("ln", nn.LayerNorm(6, dtype=torch.float64)),
        ("rms", nn.RMSNorm(6)),
        ("rms", nn.RMSNorm(6, eps=0.1)),
        ("rms", nn.RMSNorm(6, eps=None, dtype=torch.float64)),
        ("rms", nn.RMSNorm(6, elementwise_affine=False)),
    ],
    ids=str,
)
def test_norms_of_tokens(to: str, old: nn.Module) -> None:
    dtype = next((p.dtype for p in old.parameters()), torch.float32)
    check(seen(old, TOKENS, dtype), to, TOKENS, dtype)


@pytest.mark.parametrize("to", ["bn", "rbn", "gn"])
@pytest.mark.parametrize("old", [nn.GroupNorm(2, 6, affine=False), nn.BatchNorm2d(6, affine=False)])
def test_what_has_no_scale_gets_none(old: nn.Module, to: str) -> None:
    """Modulation computes γ and β outside: a second pair would train beside it."""
    model = nn.Sequential(nn.Conv2d(3, 6, 1), copy.deepcopy(old))
    swap(model, to, where="1")
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias"]


def test_no_statistics_are_remarked_upon() -> None:
    """Evaluation by statistics of 0 and 1 would be garbage, in silence."""
    old = nn.BatchNorm1d(6, eps=0.3, momentum=0.2, affine=False, track_running_stats=False)
    model = nn.Sequential(old)
    plan = plan_swap(model, "bn")
    reason = "no mask reaches; evaluates by batch statistics; the new norm has none yet: calibrate"
    assert [(row.action, row.reason) for row in plan.rows] == [("swap", reason)]
    plan.apply()
    assert (model[0].eps, model[0].momentum, model[0].weight) == (0.3, 0.2, None)
    assert plan_swap(nn.Sequential(old), "ln").rows[0].reason == ""


def test_untracked_statistics_are_remarked_upon() -> None:
    old = nn.BatchNorm1d(6)
    old.track_running_stats = False
    row = plan_swap(nn.Sequential(old), "bn").rows[0]
    assert row.reason == "no mask reaches; does not track its statistics: the new norm is frozen"


def test_hooks_are_named() -> None:
    """A hook on state dicts that is gone is missed at the next checkpoint only."""
    norm = nn.LayerNorm(6)
    handles = [norm.register_forward_hook(lambda *_: None)]
    assert plan_swap(nn.Sequential(norm), "bn").rows[0].reason == "no mask reaches; 1 hook stays"
    handles.append(norm.register_full_backward_hook(lambda *_: None))
    handles.append(norm.register_state_dict_post_hook(lambda *_: None))
    reason = "no mask reaches; 2 hooks stay; 1 hook of state dicts or parts will be lost"
    assert plan_swap(nn.Sequential(norm), "bn").rows[0].reason == reason
