"""New norms that a training never calls are named, in one warning; correct models hear nothing."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import powernorm
from powernorm.inspection.mask_checks import MaskWarning
from powernorm.surgery.insertion import insert
from powernorm.surgery.planned_norms import PlannedNorms
from powernorm.surgery.swapping import swap

NOT_CALLED: Final = "norms that swap has added were not called"


class Net(nn.Module):
    """Two norms, the second of which a subclass uses in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.LayerNorm(8), nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def second(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.linear(self.first(x)))


class Reads(Net):
    def second(self, x: Tensor) -> Tensor:
        y = (x - x.mean(-1, keepdim=True)) * (x.var(-1, keepdim=True) + 1e-5).rsqrt()
        return y * self.norm.weight + self.norm.bias


class InTuple(Net):
    """Holds its norm where no plan looks."""

    def __init__(self) -> None:
        super().__init__()
        self.held = iter([]), {"deep": [[self.norm]]}

    def second(self, x: Tensor) -> Tensor:
        return self.held[1]["deep"][0][0](x)


class Skips(Net):
    """Calls its norm from the eighth forward on, as if a layer had been dropped before."""

    number = 0
    start = 8

    def second(self, x: Tensor) -> Tensor:
        self.number += 1
        return self.norm(x) if self.number >= self.start else x


class Never(Skips):
    start = 10**9


class ByForward(Net):
    def second(self, x: Tensor) -> Tensor:
        return self.norm.forward(x)


class Checkpointed(Net):
    def second(self, x: Tensor) -> Tensor:
        return checkpoint(self.norm, x, use_reentrant=False)


class CompiledInside(Net):
    @torch.compile(backend="eager")
    def second(self, x: Tensor) -> Tensor:
        return self.norm(x)


def train(model: Callable[[Tensor], Tensor], steps: int = 12) -> list[str]:
    """Return what is warned of in some steps, and the step of each."""
    said = []
    for step in range(steps):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(torch.randn(5, 3, 8)).square().sum().backward()
        said += [f"{step}: {one.message}" for one in caught if "has added" in str(one.message)]
    return said


def has_hooks(model: nn.Module) -> bool:
    tables = [
        table
        for module in model.modules()
        for table in (module._forward_hooks, module._forward_pre_hooks)
    ]
    hooks = [hook for table in tables for hook in table.values()]
    left = any(isinstance(getattr(hook, "__self__", None), PlannedNorms) for hook in hooks)
    return left or any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize("to", ["ln", "bn"])
@pytest.mark.parametrize("kind", [Reads, InTuple])
def test_used_by_another_way(kind: type[Net], to: str) -> None:
    """The training would be one of LayerNorm, and be reported as one of the new norm."""
    model = kind()
    swap(model, to)
    said = train(model)
    assert len(said) == 1, said
    assert said[0].startswith(f"1: {NOT_CALLED}, although")
    assert "were not called, although the model computes with what they replace: norm. " in said[0]
    assert not has_hooks(model)


def test_not_called_in_ten_forwards() -> None:
    model = Never()
    swap(model, "bn")
    said = train(model)
    assert [one.split(". ")[0] for one in said] == [
        f"9: {NOT_CALLED} in 10 training forwards: norm"
    ]
    assert not has_hooks(model)


@pytest.mark.parametrize("to", ["ln", "bn"])
@pytest.mark.parametrize("kind", [Net, Skips, Checkpointed, ByForward, CompiledInside])
def test_correct_models_hear_nothing(kind: type[Net], to: str) -> None:
    model = kind()
    swap(model, to)
    assert train(model) == []
    # Without them compiled code would be compiled again.
    assert has_hooks(model) == isinstance(model, CompiledInside)


def test_called_once_no_hook_is_left() -> None:
    """Each step would pay for what is known."""
    model = Net()
    swapped = swap(model, "bn")
    assert has_hooks(model)
    model(torch.randn(5, 3, 8))
    assert not has_hooks(model)
    swapped.undo()
    model = Net()
    swapped = swap(model, "bn")
    swapped.undo()
    assert not has_hooks(model)
    assert not has_hooks(Net())


@pytest.mark.thinned(1)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("to", ["ln", "rbn"])
def test_compiled_in_one_graph(to: str, backend: str) -> None:
    model = Net()
    swap(model, to)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert train(compiled) == []
    model = Net()
    swap(model, to)
    model.norm.compile(fullgraph=True, backend=backend)
    assert train(model) == []


def test_exported() -> None:
    model = Net().eval()
    swap(model, "bn")
    x = torch.randn(5, 3, 8)
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_fold_ends_the_watch(is_traced: bool) -> None:
    """A norm with hooks that a user attached is not folded; ours are neither in its way nor left.

    Compiled code keeps hooks that it has seen: those of one model say nothing of another's.
    """
    trained, model = Net(), Net().eval()
    x = torch.randn(5, 3, 8)
    swap(trained, "bn")
    trained(x)
    swap(model, "bn")
    model.load_state_dict(trained.state_dict())
    if is_traced:
        torch.compile(model, backend="eager")(x)
    report = powernorm.fold(model, x)
    assert "keep" not in {row.action for row in report.rows}
    assert not has_hooks(model)
    other = Net()
    swap(other, "bn")
    other(x)
    assert not has_hooks(other)


def kept_as(hold: Callable[[Net], None]) -> str:
    """Return why a norm is kept that a model holds in a second way."""
    model = Net()
    hold(model)
    row = powernorm.plan_swap(model, "bn").rows[1]
    assert row.action == "keep"
    return row.reason


def test_seen_in_the_plan_already() -> None:
    """A training need not begin to know of a second reference to a norm."""

    def in_closure(model: Net) -> None:
        norm = model.norm
        model.linear.forward = lambda x: norm(x)  # type: ignore[method-assign]

    def in_class(model: Net) -> None:
        norm = model.norm

        class Closes(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return norm(super().forward(x))

        model.linear = Closes(8, 8)

    def in_place(model: Net) -> None:
        model.linear.__dict__["after"] = model.norm

    def in_tuple(model: Net) -> None:
        model.linear._held = (("a", model.norm),)

    def in_method(model: Net) -> None:
        model.linear.after = model.norm.forward

    assert kept_as(in_closure).startswith("Linear also holds it in the plain forward, through")
    assert kept_as(in_class).startswith("Closes also holds it in the plain forward, through")
    assert kept_as(in_place).startswith("Linear also holds it in the plain after, through")
    assert kept_as(in_tuple).startswith("Linear also holds it in the plain _held, through")
    assert kept_as(in_method).startswith("Linear also holds it in the plain after, through")


def test_a_part_that_is_called_alone() -> None:
    model = nn.ModuleDict({"encoder": Net(), "decoder": Net()})
    swap(model, "bn", where="*")
    assert train(model["encoder"]) == []


def test_evaluation_is_silent() -> None:
    model = Never()
    swap(model, "ln")
    model.eval()
    assert train(model) == []


def test_several_forwards_before_one_backward() -> None:
    model = Net()
    swap(model, "ln")
    assert train(lambda x: model(x) + model(x)) == []
    model = Reads()
    swap(model, "ln")
    assert len(train(lambda x: model(x) + model(x))) == 1


@pytest.mark.parametrize("again", [copy.deepcopy, "pickle"])
def test_copies_are_watched(again: Any) -> None:
    """A copy is what many trainers train."""
    model = Never()
    swap(model, "bn")
    if again == "pickle":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    else:
        twin = again(model)
    assert len(train(twin)) == 1
    assert not has_hooks(twin)
    assert len(train(model)) == 1


def test_swapped_twice_only_the_last_counts() -> None:
    model = Net()
    swap(model, "bn")
    swap(model, "rms")
    assert train(model) == []
    assert not has_hooks(model)


def test_moved_after_the_swap() -> None:
    model = Net()
    swap(model, "ln")
    model.double()
    model(torch.randn(2, 3, 8, dtype=torch.float64)).sum().backward()


def test_inserted_behind_a_map_that_is_read() -> None:
    """F.linear(x, self.linear.weight) never runs the norm behind the map."""

    class Functional(Net):
        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.linear.weight, self.linear.bias)

    model = Functional()
    inserted = insert(model, where="linear")
    said = train(model)
    assert len(said) == 1
    assert "norms that insert has added were not called in 10 training forwards" in said[0]
    inserted.undo()
    model = Net()
    insert(model, where="linear")
    assert train(model) == []


def test_hooks_of_the_watch_are_no_hooks_of_a_user() -> None:
    model = Net()
    swap(model, "bn")
    assert {row.reason for row in powernorm.plan_swap(model, "rbn").rows} == {"no mask reaches"}


class Masked(nn.Module):
    """Takes a mask; a model may go around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        del padding_mask
        return self.norm(x)


def test_norms_that_run_outside_of_the_module_with_their_mask_are_named() -> None:
    around, inside, scoped = (nn.Sequential(Masked()).train() for _ in range(3))
    for model in (around, inside, scoped):
        swap(model, "bn")
    x = torch.randn(2, 3, 8)
    for _ in range(9):
        around[0].forward(x)
        around[0].norm(x[:, 0])  # a vector a sequence has no padding
    with pytest.warns(MaskWarning, match=r"norms 0\.norm ran outside .* the mask 0\.padding_mask"):
        around[0].forward(x)
    around[0].forward(x)  # once; warnings are errors
    inside(x)
    with powernorm.padding_mask(torch.zeros(2, 3, dtype=torch.bool)):
        scoped[0].norm(x)
    for _ in range(12):
        inside[0].norm(x)
        scoped[0].norm(x)
