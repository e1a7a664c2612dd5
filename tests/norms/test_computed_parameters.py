"""Pruned and parametrized norms, and plain tensors in place of parameters, as torch's own do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import powernorm
from powernorm.norms import NORMS

NAMES: Final = [
    (name, slot)
    for name in NORMS
    for slot in ("weight", "bias")
    if getattr(powernorm.build_norm(name, 8), slot, None) is not None
]


class _Halved(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value * 0.5


def _prune(norm: nn.Module, slot: str) -> None:
    prune.random_unstructured(norm, slot, 0.5)


def _parametrize(norm: nn.Module, slot: str) -> None:
    parametrize.register_parametrization(norm, slot, _Halved())


def _replace(norm: nn.Module, slot: str) -> None:
    value = getattr(norm, slot).detach() * 0.7
    delattr(norm, slot)
    setattr(norm, slot, value.requires_grad_())


def _norm(name: str) -> nn.Module:
    norm = powernorm.build_norm(name, 8)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter += torch.linspace(0.1, 0.5, parameter.numel()).reshape(parameter.shape)
    return norm


def _outputs(norm: nn.Module) -> list[Tensor]:
    """Return outputs and gradients of four training calls (prepared ones too) and evaluation."""
    found = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(6, 5, 8, generator=generator).requires_grad_()
        y = norm.train()(x)
        (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum().backward()
        assert x.grad is not None
        found += [y.detach(), x.grad]
    return [*found, norm.eval()(x.detach())]


@pytest.mark.parametrize("change", [_prune, _parametrize, _replace])
@pytest.mark.parametrize(("name", "slot"), NAMES)
def test_the_effective_value_is_what_counts(
    name: str, slot: str, change: Callable[[nn.Module, str], None]
) -> None:
    """A norm that cannot be pruned ends a sparse training of the model around it."""
    norm, plain = _norm(name), _norm(name)
    change(norm, slot)
    norm(torch.randn(3, 8))  # the pruned value is computed before a call
    norm.load_state_dict(norm.state_dict())
    moved = dict(norm.named_buffers())
    with torch.no_grad():
        for key, buffer in plain.named_buffers():
            moved[key].copy_(buffer)
        getattr(plain, slot).copy_(getattr(norm, slot))
    torch.testing.assert_close(_outputs(norm), _outputs(plain))


@pytest.mark.parametrize("name", ["ln", "rbn", "pn"])
def test_the_original_learns(name: str) -> None:
    norm = _norm(name)
    _parametrize(norm, "weight")
    for _ in range(3):
        norm.zero_grad()
        norm(torch.randn(6, 5, 8)).square().sum().backward()
        grad = norm.parametrizations["weight"].original.grad  # type: ignore[union-attr, index]
        assert isinstance(grad, Tensor)
        assert grad.abs().min() > 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", ["ln", "rbn"])
def test_compiled_in_one_graph(name: str) -> None:
    norm = _norm(name)
    _prune(norm, "weight")
    x = torch.randn(6, 5, 8)
    compiled = torch.compile(norm.eval(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), norm(x))
