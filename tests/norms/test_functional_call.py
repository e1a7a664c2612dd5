"""`torch.func.functional_call` in training: the buffers that it was given move, no others.

Ensembles, which stack the buffers of their members, evaluate.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import powernorm
from cases import BATCH_FORWARD, CASES, KEEPING_STATE, STATEFUL, Case, case_id, states, step
from powernorm.errors import InputError
from refusals import refuses


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
    torch.testing.assert_close([*norm.buffers()], [*other.buffers()])


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


def as_ensemble(models: list[nn.Module], x: Tensor) -> Tensor:
    """Return the outputs of models on one input, by one call."""
    base = copy.deepcopy(models[0]).to("meta")
    stacked = torch.func.stack_module_state(models)
    calls = torch.func.vmap(
        lambda given, x: torch.func.functional_call(base, given, (x,)), (0, None)
    )
    y: Tensor = calls(stacked, x)
    return y


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_ensembles(case: Case) -> None:
    """Members in different stages evaluate as they do alone; what has a state is not trained."""
    models: list[nn.Module] = [nn.Sequential(nn.Linear(8, 8), case.build()) for _ in range(3)]
    for number, model in enumerate(models):
        for _ in range(3 * number):
            model(torch.randn(3, 4, 8)).sum().backward()
    # In float64: the variance of two features may be next to none, and its rounding shows.
    for model in models:
        model.double()
    x = torch.randn(5, 8, dtype=torch.float64)
    if case in KEEPING_STATE:
        refuses(r"norm\.eval\(\).*one after the other", as_ensemble, models, x)
    for model in models:
        model.train(case not in KEEPING_STATE)
    torch.testing.assert_close(as_ensemble(models, x), torch.stack([model(x) for model in models]))


def test_a_layer_goes_on_after_an_ensemble() -> None:
    norms: list[nn.Module] = [powernorm.TaperNorm(8, start_step=1, end_step=2) for _ in range(2)]
    x = torch.randn(5, 8)
    norms[1](x).sum().backward()
    with pytest.raises(InputError):
        as_ensemble(norms, x)
    expected = copy.deepcopy(norms[1])
    torch.testing.assert_close(norms[1](x), expected(x))
