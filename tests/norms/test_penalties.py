"""Terms that forwards keep for the penalty: none keeps their graph, and none outlives it."""

from __future__ import annotations

import ast
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import powernorm


class _Below(torch.autograd.Function):
    """A node below the norm that can be watched: it is there as long as the graph is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, nodes: weakref.WeakSet[Any]) -> Tensor:
        nodes.add(ctx)
        return x * 2

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 2, None


class Watched(nn.Module):
    """A small model with the norm in its middle, and the nodes of its graphs that are alive."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(4, 4), nn.Linear(4, 2)
        self.norm = powernorm.RegularizedBatchNorm(4, mean_penalty=1.0, var_penalty=0.5)
        self.nodes: weakref.WeakSet[Any] = weakref.WeakSet()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.norm(_Below.apply(self.into(x), self.nodes)))
        return y


def batch(seed: int = 0) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def without_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_forwards_that_nobody_goes_back_from_leave_no_graph(asks: bool, checkpointed: bool) -> None:
    model = Watched()
    for t in range(150):
        x = batch(t)
        y = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
        if asks:
            assert (y.sum() + model.norm.penalty()).requires_grad
        assert len(model.nodes) <= 2
        del y
        assert not model.nodes


@pytest.mark.parametrize("asks", [False, True])
def test_steps_by_autograd_grad_leave_no_graph(asks: bool) -> None:
    model = Watched()
    parameters = list(model.parameters())
    for t in range(300):
        loss = model(batch(t)).square().mean()
        if asks:
            loss = loss + model.norm.penalty()
        torch.autograd.grad(loss, parameters)
        del loss
        assert not model.nodes


def test_a_backward_leaves_no_graph_to_the_layer() -> None:
    model = Watched()
    loss = model(batch()).sum() + model.norm.penalty()
    loss.backward()
    assert not model.norm.has_penalty
    del loss
    assert not model.nodes


def test_a_penalty_that_is_kept_keeps_its_graph() -> None:
    model = Watched()
    y = model(batch())
    penalty = model.norm.penalty()
    (expected,) = torch.autograd.grad(penalty, [model.into.weight], retain_graph=True)
    del y
    assert model.nodes
    (later,) = torch.autograd.grad(model.norm.penalty() + penalty, [model.into.weight])
    torch.testing.assert_close(later, 2 * expected)


def test_a_forward_whose_result_is_dropped_takes_no_part() -> None:
    """A loop that skips a batch, or looks at its loss alone, in training mode."""
    model, twin = Watched(), Watched()
    with torch.no_grad():
        twin.load_state_dict(model.state_dict())
    model(torch.full((6, 4), torch.nan))
    model(batch(1)).detach().mean().item()
    gradients = []
    for one in (model, twin):
        loss = one(batch(2)).square().mean() + one.norm.penalty()
        loss.backward()
        gradients.append([parameter.grad for parameter in one.parameters()])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_where_all_are_dropped_the_last_one_has_a_value_and_no_gradient() -> None:
    model = Watched()
    expected = []
    for t in range(2):
        y = model(batch(t))
        expected.append(model.norm.penalty().item())
    del y
    for t in range(2):
        model(batch(t))
    value = model.norm.penalty()
    assert value.item() == expected[1]
    assert not value.requires_grad
    assert model.norm.penalty().item() == expected[1]


def test_each_forward_ends_with_its_own_backward() -> None:
    model = Watched()
    losses = [model(batch(t)).square().mean() for t in range(3)]
    losses[1].backward()
    both = model.norm.penalty()
    alone = []
    for t in (0, 2):
        one = Watched()
        one(batch(t))
        alone.append(one.norm.penalty())
    torch.testing.assert_close(both.detach(), sum(alone))
    (losses[0] + losses[2] + both).backward()
    assert not model.norm.has_penalty


def test_a_gradient_of_the_penalty_alone_ends_the_forward() -> None:
    model = Watched()
    y = model(batch())
    model.norm.penalty().backward(retain_graph=True)
    assert not model.norm.has_penalty
    y.sum().backward()


@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize("residual", [False, True])
def test_works_in_place_behind_the_layer(backend: Any, residual: bool) -> None:
    def gradient(apply: Callable[[Tensor], Tensor]) -> Tensor:
        norm = powernorm.RegularizedBatchNorm(4)
        x = batch().requires_grad_()
        y = norm(x, None, torch.ones(6, 4))[0] if residual else norm(x)
        (apply(y).square().sum() + norm.penalty()).backward()
        assert x.grad is not None
        return x.grad

    if backend is None:
        torch.testing.assert_close(gradient(nn.ReLU(inplace=True)), gradient(nn.ReLU()))
        return
    with powernorm.ops.use_backend(backend):
        torch.testing.assert_close(gradient(nn.ReLU(inplace=True)), gradient(nn.ReLU()))


def test_autograd_is_asked_for_nothing_private() -> None:
    """Private behavior of torch on which the terms depend: what its graph's nodes keep alive."""
    package = Path(powernorm.__file__).parent
    names = {"next_functions", "_raw_saved_tensors"}
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                of_node = isinstance(node.value, ast.Attribute) and node.value.attr == "grad_fn"
                private = node.attr in names or (of_node and node.attr.startswith("_"))
                assert not private, f"{file}:{node.lineno}"
