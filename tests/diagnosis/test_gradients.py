"""The monitor's gradient columns against autograd in float64, through one norm and whole models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import powernorm
from diagnosis.models import BATCH_STATISTICS_NORMS, OPTIONS, Masked, batches
from powernorm.diagnosis import NormMonitor, NormRow
from powernorm.norms import BatchStatisticsNorm, build_norm

FEATURES = 6
COLUMNS = (
    "gradient_norm",
    "mean_gradient_norm",
    "var_gradient_norm",
    "token_gradient_mean",
    "token_gradient_var",
)

CASES: list[tuple[str, dict[str, Any]]] = [
    *((norm, OPTIONS.get(norm, {})) for norm in BATCH_STATISTICS_NORMS),
    ("bn", {"groups": 2}),
    ("bn", {"affine": False}),
    ("bn", {"variant": "released", "eps": 0.8}),
    ("pnv", {"groups": 3}),
    ("pnv", {"variant": "released", "eps": 3.0}),
    ("pn", {"warmup_steps": 0, "groups": None}),
    ("pn-static", {"warmup_steps": 0, "max_ratio": 1.05}),
    ("un", {"warmup_steps": 0, "window": [2, 1], "ratio_start": 0}),
    ("un", {"warmup_steps": 2, "window": 2, "ratio_start": None, "filter_outliers": True}),
    ("mabn", {"warmup_steps": 0, "window": 3, "ratio_start": 0, "groups": 2}),
    ("brn", {"warmup_steps": 0, "ramp_steps": 0, "max_r": 1.25}),
]


def layer_of(norm: str, options: dict[str, Any]) -> BatchStatisticsNorm:
    torch.manual_seed(1)
    layer = build_norm(norm, FEATURES, dtype=torch.float64, **options)
    assert isinstance(layer, BatchStatisticsNorm)
    if layer.weight is not None:
        with torch.no_grad():
            layer.weight.normal_()
            layer.bias.normal_()
    return layer


def draw(seed: int, padding: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Input, mask, and the gradient of the output, which looks at padding as well."""
    generator = torch.Generator().manual_seed(seed)
    shape = (3, 5, FEATURES)
    scale = torch.rand(FEATURES, generator=generator, dtype=torch.float64) + 0.5
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * scale + 2 * scale
    mask = torch.zeros(shape[:2], dtype=torch.bool)
    mask[1, 3:] = True
    cotangent = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x, mask if padding else None, cotangent


def normalized(layer: BatchStatisticsNorm, x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the batch norm's own input, (tokens, C), a leaf."""
    t = x.detach().clone()
    if mask is not None and layer.floor:
        t[mask] = 0
    if layer.groups is not None:
        parts = t.unflatten(-1, (layer.groups, -1))
        t = (parts / (parts.square().mean(-1, keepdim=True) + layer.eps).sqrt()).flatten(-2)
    return t.reshape(-1, FEATURES).requires_grad_()


def parts_by_autograd(
    layer: BatchStatisticsNorm, x: Tensor, mask: Tensor | None, cotangent: Tensor
) -> tuple[Tensor, Tensor]:
    """g_μ and g_σ² of BatchNorm and its kin: the gradient less that with the statistic detached."""
    t = normalized(layer, x, mask)
    valid = torch.ones(len(t), dtype=torch.bool) if mask is None else ~mask.reshape(-1)
    gamma = torch.ones(FEATURES, dtype=torch.float64) if layer.weight is None else layer.weight
    # Of PRepBN, the share of the gradient that reaches RepBN.
    gamma = gamma.detach() * (1 - getattr(layer, "share", 0.0))

    def gradient(detach_mean: bool, detach_var: bool) -> Tensor:
        mean = t[valid].mean(0) if layer.centered else torch.zeros(FEATURES, dtype=torch.float64)
        var = (t[valid] - mean).square().mean(0)
        mean = mean.detach() if detach_mean else mean
        var = var.detach() if detach_var else var
        root = (var.clamp(min=layer.eps) if layer.floor else var + layer.eps).sqrt()
        y = gamma * (t - mean) / root
        if hasattr(layer, "max_r") and layer.num_batches_tracked:  # nothing to correct to before
            ratio = root.detach() / (layer.running_var + layer.eps).sqrt()
            y = y * ratio.clamp(1 / layer.max_r, layer.max_r)
        return torch.autograd.grad(y, t, cotangent.reshape(-1, FEATURES))[0]

    whole = gradient(False, False)
    if not layer.centered:
        return torch.tensor(float("nan")), (whole - gradient(True, True)).norm()
    return (whole - gradient(True, False)).norm(), (whole - gradient(False, True)).norm()


def surrogate_by_autograd(
    layer: BatchStatisticsNorm, x: Tensor, mask: Tensor | None, cotangent: Tensor
) -> Tensor:
    """Return the part that the layer's backward subtracts, from a twin without GroupScaling."""
    twin = copy.deepcopy(layer)
    twin.groups = None
    t = normalized(layer, x, mask)
    flat = None if mask is None else mask.reshape(-1)
    y = twin(t, flat)
    y.backward(cotangent.reshape(-1, FEATURES))
    slope = (y.detach() - twin.bias.detach()) / t.detach()
    if isinstance(layer, powernorm.UnifiedNorm) and layer.acting_in(layer.stage).ratio:
        root = layer.weight.detach() / slope  # its r is not in the forward
        slope = slope * (root / (layer.running_second_moment + layer.eps).sqrt()).clamp(0.2, 5.0)
    return (slope * cotangent.reshape(-1, FEATURES) - t.grad).norm()


def observed(layer: nn.Module, call: Callable[[], Tensor], cotangent: Tensor) -> NormRow:
    monitor = NormMonitor(layer, 1)
    monitor.start_step(0)
    call().backward(cotangent)
    (row,) = monitor.finish_step(0)
    monitor.detach()
    return row


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize(("norm", "options"), CASES, ids=lambda value: str(value))
def test_parts_of_one_norm(norm: str, options: dict[str, Any], padding: bool) -> None:
    layer = layer_of(norm, options)
    for seed in range(4):  # past the warm-ups, with state that has moved
        x, mask, cotangent = draw(seed, padding)
        before = copy.deepcopy(layer)
        x.requires_grad_()
        row = observed(layer, lambda x=x, mask=mask: layer(x, mask), cotangent)
        if norm.startswith("pn-") or norm in ("pn", "mabn", "un"):
            var = surrogate_by_autograd(before, x, mask, cotangent)
        else:
            mean, var = parts_by_autograd(before, x, mask, cotangent)
            if layer.centered:
                assert row["mean_gradient_norm"] == pytest.approx(mean.item(), rel=1e-9)
        assert row["var_gradient_norm"] == pytest.approx(var.item(), rel=1e-9, abs=1e-12)
        if not layer.centered:
            assert row["mean_gradient_norm"] is None
        assert row["gradient_norm"] == pytest.approx(x.grad.norm().item(), rel=1e-9)
        tokens = x.numel() // FEATURES if mask is None else int((~mask).sum())
        means, variances = x.grad.mean(-1), x.grad.var(-1, correction=0)
        assert row["token_gradient_mean"] == pytest.approx(means.sum().item() / tokens, rel=1e-9)
        assert row["token_gradient_var"] == pytest.approx(variances.sum().item() / tokens, rel=1e-9)


class Loud(nn.Module):
    """Two calls of one norm, between layers."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(FEATURES, FEATURES, dtype=torch.float64)
        self.norm = layer_of(norm, {})
        self.second = nn.Linear(FEATURES, FEATURES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm(self.first(x))
        return x + self.norm(self.second(x))


def test_shared_norm_and_micro_batches_add_up_as_one_matrix() -> None:
    model = Loud("bn")
    monitor = NormMonitor(model, 1)
    squares = dict.fromkeys(("gradient_norm", "mean_gradient_norm", "var_gradient_norm"), 0.0)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        entry = [args[0]]
        y.register_hook(entry.append)
        args[0].register_hook(entry.append)
        seen.append(entry)  # type: ignore[arg-type]

    handle = model.norm.register_forward_hook(keep)
    monitor.start_step(0)
    for seed in range(2):
        model(draw(seed, False)[0]).square().sum().backward()
    (row,) = monitor.finish_step(0)
    handle.remove()
    assert len(seen) == 4
    for x, grad_y, grad_x in seen:
        mean, var = parts_by_autograd(model.norm, x.detach(), None, grad_y)
        for name, value in zip(squares, (grad_x.norm(), mean, var), strict=True):
            squares[name] += value.item() ** 2
    for name, value in squares.items():
        assert row[name] == pytest.approx(value**0.5, rel=1e-9)


@pytest.mark.parametrize("order", ["as they came", "reversed"])
def test_backwards_find_their_forwards(order: str) -> None:
    layer = layer_of("bn", {})
    monitor = NormMonitor(layer, 1)
    monitor.start_step(0)
    data = [draw(seed, False) for seed in range(3)]
    outputs = [(layer(x.requires_grad_()), cotangent) for x, _, cotangent in data]
    for y, cotangent in outputs if order == "as they came" else reversed(outputs):
        y.backward(cotangent)
    (row,) = monitor.finish_step(0)
    parts = [parts_by_autograd(layer, x, None, cotangent)[1].item() for x, _, cotangent in data]
    assert row["var_gradient_norm"] == pytest.approx(sum(p**2 for p in parts) ** 0.5, rel=1e-9)


def run(model: nn.Module, call: Callable[..., Tensor], monitor: NormMonitor) -> list[NormRow]:
    """Three steps, the odd one not observed; the rows of the last."""
    for step, batch in enumerate(batches(3)):
        monitor.start_step(step)
        call(*batch).square().sum().backward()
        rows = monitor.finish_step(step)
        assert bool(rows) == (step % 2 == 0)
        for parameter in model.parameters():
            parameter.grad = None
    return rows


def same(rows: list[NormRow], others: list[NormRow]) -> None:
    assert len(rows) == len(others) == 2
    for one, other in zip(rows, others, strict=True):
        for name in (*COLUMNS, "mean_tid", "var_tid", "nonfinite_input", "first_nonfinite"):
            expected = None if one[name] is None else pytest.approx(one[name], rel=1e-8, abs=1e-12)
            assert other[name] == expected, name


@contextmanager
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


NORMS = ("bn", "mabn", "pn", "rbn", "ln")
RUNS = [
    *((norm, "checkpoint") for norm in NORMS),
    *((norm, "aot_eager") for norm in ("mabn", "ln")),
    *(pytest.param(norm, "inductor", marks=pytest.mark.slow) for norm in ("pn", "bn", "rbn", "ln")),
]


@pytest.mark.thinned(1)
@pytest.mark.parametrize(("norm", "mode"), RUNS)
def test_every_way_to_run_shows_the_same(norm: str, mode: str) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Masked(norm)
        model.dropout.p = 0.0
        models.append(model)
    eager, other = models
    monitors = [NormMonitor(model, 2) for model in models]

    def call(x: Tensor, mask: Tensor | None) -> Tensor:
        return eager(x.requires_grad_(), mask)

    def other_call(x: Tensor, mask: Tensor | None) -> Tensor:
        x.requires_grad_()
        if mode in ("aot_eager", "inductor"):
            return compiled(x, mask)
        # The mask of a scope, which is closed when the forward is repeated.
        with powernorm.padding_mask(mask):
            return checkpoint(other, x, use_reentrant=False)

    with fresh_compiler():
        if mode in ("aot_eager", "inductor"):
            compiled = torch.compile(other, backend=mode, fullgraph=True)
        expected = run(eager, call, monitors[0])
        same(expected, run(other, other_call, monitors[1]))
    torch.testing.assert_close([*eager.buffers()], [*other.buffers()])


class CheckpointedInside(nn.Module):
    """Its norms are within a checkpointed region of a compiled model."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.inner = Masked(norm)
        self.inner.dropout.p = 0.0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, mask, use_reentrant=False)
        return y


@pytest.mark.slow
@pytest.mark.skipif(
    torch.__version__ < (2, 12), reason="torch 2.11 compiles no hook inside a checkpointed region"
)
def test_compiled_and_checkpointed_at_once() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(CheckpointedInside("pn"))
    eager, other = models
    monitors = [NormMonitor(model, 2) for model in models]
    with fresh_compiler():
        compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
        expected = run(eager, lambda x, m: eager(x.requires_grad_(), m), monitors[0])
        same(expected, run(other, lambda x, m: compiled(x.requires_grad_(), m), monitors[1]))
