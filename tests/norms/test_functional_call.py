"""`torch.func.functional_call` in training: the buffers that it was given move, no others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import powernorm
from cases import BATCH_FORWARD, CASES, STATEFUL, Case, case_id, states, step


def call(norm: nn.Module, given: dict[str, Tensor], x: Tensor) -> Tensor:
    y: Tensor = torch.func.functional_call(norm, given, (x,))
    return y


@pytest.mark.parametrize("case", STATEFUL, ids=case_id)
def test_the_given_buffers_move(case: Case) -> None:
    """As the buffers of a layer of their own would, whatever is done with the layer meanwhile."""
    norm, other = case.build(), case.build()
    given, own = states(norm), states(norm)
    for number in range(5):
        x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(number))
        mine = x.clone().requires_grad_()
        y = call(norm, given, mine)
        if case not in BATCH_FORWARD:
            norm(x)  # a forward that nobody goes back through
        cotangent = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
        (y * cotangent).sum().backward()
        theirs = x.clone().requires_grad_()
        (other(theirs) * cotangent).sum().backward()
        torch.testing.assert_close(mine.grad, theirs.grad)
    for name, buffer in other.named_buffers():
        torch.testing.assert_close(given[name], buffer, msg=name)
    for name, buffer in norm.named_buffers():
        assert torch.equal(buffer, own[name]), name


def test_a_layer_that_is_used_twice_moves_once() -> None:
    norm, other = (powernorm.PowerNorm(8, warmup_steps=0) for _ in range(2))
    given = states(norm)
    x = torch.randn(3, 4, 8)
    loss = call(norm, given, x).sum() + call(norm, given, x + 1).sum()
    loss.backward()
    (other(x).sum() + other(x + 1).sum()).backward()
    assert int(given["num_batches_tracked"]) == 1
    torch.testing.assert_close(given["running_second_moment"], other.running_second_moment)


def test_given_parameters_alone_move_the_layers_buffers() -> None:
    norm, other = (powernorm.PowerNorm(8, warmup_steps=0) for _ in range(2))
    weights = {name: p.detach().clone().requires_grad_() for name, p in norm.named_parameters()}
    x = torch.randn(3, 4, 8)
    call(norm, weights, x).square().sum().backward()
    other(x).square().sum().backward()
    assert weights["weight"].grad is not None
    for mine, theirs in zip(norm.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_buffers_loaded_by_assignment_move() -> None:
    norm = powernorm.PowerNorm(8, warmup_steps=0)
    norm.load_state_dict(states(norm) | dict(norm.named_parameters()), assign=True)
    step(norm, torch.randn(3, 4, 8), None)
    assert int(norm.num_batches_tracked) == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_with_other_buffers_is_refused_by_name() -> None:
    """In one graph the update would reach the layer's own buffers; a break in it is exact."""
    norm = powernorm.PowerNorm(8, warmup_steps=0)
    given, own = states(norm), states(norm)
    x = torch.randn(3, 4, 8, requires_grad=True)
    with pytest.raises(Exception, match="other buffers than its own"):
        torch.compile(lambda: call(norm, given, x), fullgraph=True, backend="eager")()
    torch.compile(lambda: call(norm, given, x), backend="eager")().sum().backward()
    assert int(given["num_batches_tracked"]) == 1
    for name, buffer in norm.named_buffers():
        assert torch.equal(buffer, own[name]), name


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_deterministic_algorithms(case: Case) -> None:
    """Every norm has some, and gives the same to the last bit each time."""

    def train() -> list[Tensor]:
        norm = case.build()
        seen: list[Tensor] = []
        for number in range(3):
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(16, 32, 8, generator=generator)
            y, gradient = step(norm, x, torch.rand(16, 32, generator=generator) < 0.3)
            seen += [y, gradient]
        return [*seen, *(p.grad for p in norm.parameters()), *norm.buffers()]

    torch.use_deterministic_algorithms(True)
    try:
        for a, b in zip(train(), train(), strict=True):
            assert torch.equal(a, b)
    finally:
        torch.use_deterministic_algorithms(False)
