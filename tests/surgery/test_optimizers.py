"""Optimizers built before a swap train the new parameters, or a warning says that they do not."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from covering import some_default
from powernorm.surgery.insertion import insert, plan_insert
from powernorm.surgery.swapping import plan_swap, swap
from refusals import refuses


class OffsetNorm(nn.Module):
    """RMSNorm whose γ is 1 + weight, as Gemma's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + self.weight)


def net(norm: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), norm or nn.RMSNorm(8), nn.Linear(8, 8))


def step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[str]:
    """Return what a training step warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.randn(4, 3, 8)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [str(one.message) for one in caught if "steps without" in str(one.message)]


def num_hooks() -> int:
    gc.collect()  # hooks of other models end with them
    return len(_global_optimizer_pre_hooks)


def names_in(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [[names.get(id(p), "?") for p in group["params"]] for group in optimizer.param_groups]


def grouped(model: nn.Sequential, **options: Any) -> torch.optim.AdamW:
    """Matrices decay; vectors do not."""
    decayed = [(name, p) for name, p in model.named_parameters() if p.ndim > 1]
    others = [(name, p) for name, p in model.named_parameters() if p.ndim == 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, **options)


def test_a_new_shift_joins_the_group_of_its_scale() -> None:
    """It would stay 0 for the whole training, or decay with the matrices."""
    model = net()
    optimizer = grouped(model)
    swapped = swap(model, "bn", optimizer=optimizer)
    vectors = ["0.bias", "1.weight", "2.bias", "1.bias"]
    assert names_in(optimizer, model) == [["0.weight", "2.weight"], vectors]
    assert optimizer.param_groups[1]["param_names"] == vectors
    before = model[1].bias.detach().clone()
    assert step(model, optimizer) == []
    assert not torch.equal(model[1].bias, before)
    swapped.undo()
    assert names_in(optimizer, model)[1] == ["0.bias", "1.weight", "2.bias"]
    assert len(optimizer.state) == 5
    assert step(model, optimizer) == []


def test_a_scale_takes_over_place_and_state() -> None:
    """γ and 1 + weight have the same gradient; a cold start of the moments is a jump."""
    model = net(OffsetNorm())
    optimizer = grouped(model)
    step(model, optimizer)
    old = model[1].weight
    state = optimizer.state[old]
    swapped = swap(model, "rms", optimizer=[optimizer])
    assert model[1].weight is not old
    assert optimizer.state[model[1].weight] is state
    assert old not in optimizer.state
    assert names_in(optimizer, model)[1] == ["0.bias", "1.weight", "2.bias"]
    step(model, optimizer)
    assert int(state["step"]) == 2
    swapped.undo()
    assert optimizer.state[old] is state
    assert optimizer.param_groups[1]["params"][1] is old


def test_the_next_step_is_the_one_that_would_have_been() -> None:
    models = [net(OffsetNorm()) for _ in range(2)]
    optimizers = [grouped(model, lr=0.1) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        torch.manual_seed(1)
        step(model, optimizer)
    swap(models[1], "rms", optimizer=optimizers[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        torch.manual_seed(2)
        step(model, optimizer)
    torch.testing.assert_close(models[1][1].weight, 1 + models[0][1].weight)


def test_what_no_longer_is_there_leaves() -> None:
    """Weight decay and state of a parameter that nobody reads cost memory."""
    model = net(nn.LayerNorm(8))
    optimizer = grouped(model)
    step(model, optimizer)
    old = model[1].bias
    swapped = swap(model, "rms", optimizer=optimizer)
    assert old not in optimizer.state
    assert names_in(optimizer, model)[1] == ["0.bias", "1.weight", "2.bias"]
    swapped.undo()
    assert "exp_avg" in optimizer.state[old]
    assert names_in(optimizer, model)[1] == ["0.bias", "1.weight", "1.bias", "2.bias"]


def test_two_optimizers() -> None:
    """The vectors' one gets what an insertion brings: Muon takes matrices alone."""
    model = net()
    matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim > 1], 0.1)
    vectors = torch.optim.AdamW([p for p in model.parameters() if p.ndim == 1])
    inserted = plan_insert(model, "bn", where="0").apply(optimizer=[matrices, vectors])
    assert names_in(matrices, model) == [["0.weight", "2.weight"]]
    added = ["0.inserted_norm.weight", "0.inserted_norm.bias"]
    assert names_in(vectors, model) == [["0.bias", "1.weight", "2.bias", *added]]
    assert step(model, matrices, vectors) == []
    inserted.undo()
    assert names_in(vectors, model) == [["0.bias", "1.weight", "2.bias"]]


def test_what_is_frozen_stays_out() -> None:
    model = net()
    model[1].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    swap(model, "bn", optimizer=optimizer)
    assert names_in(optimizer, model) == [["0.weight", "0.bias", "2.weight", "2.bias"]]


def test_what_is_frozen_for_now_keeps_its_place() -> None:
    """It may be thawed later, as Lightning's BaseFinetuning does."""
    model = net(OffsetNorm())
    optimizer = grouped(model)
    model[1].weight.requires_grad_(False)
    swap(model, "rms", optimizer=optimizer)
    assert names_in(optimizer, model)[1] == ["0.bias", "1.weight", "2.bias"]


def test_wrong_optimizers_change_nothing() -> None:
    model = net()
    refuses("is or holds a str", swap, model, "bn", optimizer=["adam"])
    other = torch.optim.SGD(net().parameters(), 0.1)
    refuses("SGD has no parameter of Sequential", plan_swap(model, "bn").apply, optimizer=other)
    assert type(model[1]) is nn.RMSNorm


@pytest.mark.parametrize("verb", some_default(["swap", "insert"], "swap"))
def test_an_optimizer_that_misses_them_is_named_once(verb: str) -> None:
    """β and the whole inserted norm would never learn, in silence."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    swap(model, "bn") if verb == "swap" else insert(model, where="0")
    before = num_hooks()
    (said,) = step(model, optimizer)
    listed = "1.bias" if verb == "swap" else "0.inserted_norm.weight, 0.inserted_norm.bias"
    assert said == (
        f"SGD steps without parameters that {verb} has added: {listed}. They keep their initial "
        f"values: build the optimizer after {verb}, or pass it to {verb} as optimizer="
    )
    assert step(model, optimizer) == []
    assert num_hooks() == before - 1


def test_an_optimizer_built_afterwards_is_silent() -> None:
    count = num_hooks()
    model = net()
    swap(model, "bn")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert [step(model, optimizer) for _ in range(3)] == [[], [], []]
    assert num_hooks() == count
    swap(net(nn.LayerNorm(8)), "rbn")  # no new parameter
    assert num_hooks() == count


def test_several_optimizers_are_waited_for() -> None:
    model = net()
    swap(model, "bn")
    first = torch.optim.SGD([p for p in model.parameters() if p.ndim > 1], 0.1)
    second = torch.optim.Adam([p for p in model.parameters() if p.ndim == 1])
    assert step(model, first, second) == []
    assert step(model, first, second) == []
    model = net()
    partial = torch.optim.SGD(model[0].parameters(), 0.1)
    swap(model, "bn")
    assert step(model, partial) == []
    assert len(step(model, partial)) == 1


def test_others_say_nothing() -> None:
    """Optimizers of other models, of copies and of parameters that a wrapper has replaced."""
    model, other = net(), net()
    swap(model, "bn")
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    for one in (other, twin):
        optimizer = torch.optim.SGD(one.parameters(), 0.1)
        assert [step(one, optimizer) for _ in range(3)] == [[], [], []]


@pytest.mark.slow
def test_the_hook_ends_with_the_model_and_with_undo() -> None:
    count = num_hooks()
    model = net()
    swapped = swap(model, "bn")
    assert num_hooks() == count + 1
    swapped.undo()
    assert num_hooks() == count
    swap(model, "bn")
    del model, swapped
    assert num_hooks() == count


def test_compiled_steps_are_left_alone() -> None:
    gc.collect()  # a dead model that takes its hook along during the trace would end it
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    swap(model, "bn")
    model(torch.randn(4, 3, 8)).square().mean().backward()
    torch.compile(optimizer.step, backend="eager")()
