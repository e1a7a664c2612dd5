"""Functional norms that running a model shows: wherever they are called, and nothing else."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import powernorm
from inspection.functional_models import GPT, norm
from powernorm import InputError
from powernorm.inspection import find_norms
from refusals import refuses

WIDTH = 8
TOKENS = torch.arange(14).view(2, 7)


class Calls(nn.Module):
    """Calls a function on its input."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def test_every_call_behind_a_helper_is_a_row() -> None:
    """Else "0 norms" is said of a model that normalizes ten times."""
    model = GPT()
    assert find_norms(model) == ()
    found = find_norms(model, TOKENS)
    assert [one.names[0] for one in found] == [
        "norm_call0",
        "norm_call1",
        *(
            f"transformer.h.{layer}.{name}"
            for layer in range(2)
            for name in ("norm_call0", "norm_call1", "attn.qk_norm0", "attn.qk_norm1")
        ),
    ]
    assert {(one.type_name, one.kind) for one in found} == {("F.rms_norm", "rms")}
    reason = found[2].reason
    places = r"functional_models.py:\d+ through functional_models.py:\d+"
    assert re.fullmatch(f"calls rms_norm at {places}: make it .* by powernorm.modularize", reason)


def test_a_plan_names_the_calls_and_which_norms_were_looked_for() -> None:
    """Else a user takes "1 of 1 norms change" for all of the norms."""
    model = nn.Sequential(nn.LayerNorm(WIDTH), Calls(norm))
    x = torch.randn(2, 3, WIDTH)
    unseen = str(powernorm.plan_swap(model))
    assert "1 of 1 norms change" in unseen
    assert "functional norms behind helpers are only seen with example_inputs" in unseen
    seen = powernorm.plan_swap(model, example_inputs=x)
    assert [(row.name, row.action) for row in seen.rows] == [
        ("0", "swap"),
        ("1.norm_call0", "keep"),
    ]
    assert "1 of 2 norms change" in str(seen)
    assert "example_inputs" not in str(seen)
    none = powernorm.plan_swap(model[:1], example_inputs=(x,))
    assert "none seen in the example call; arithmetic is not looked at" in str(none)


def test_a_fold_names_the_calls_behind_helpers() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), Calls(norm))
    model(torch.randn(16, 8))
    rows = {row.name: row for row in powernorm.plan_fold(model.eval(), torch.randn(4, 8)).rows}
    assert {name: row.action for name, row in rows.items()} == {"1": "fold", "2.norm_call0": "keep"}
    assert "make it a module by powernorm.modularize" in rows["2.norm_call0"].reason


def test_calls_can_be_selected_and_alone_are_planned_not_swapped() -> None:
    """Else a model with functional norms alone has no table that says so."""
    plan = powernorm.plan_swap(GPT(), where="*.attn.*", example_inputs=TOKENS)
    assert {row.action for row in plan.rows} == {"keep"}
    assert {row.role for row in plan.rows if ".attn." in row.name} == {"attention"}
    assert plan.rows[0].reason == "not selected"
    refuses(r"none of the selected norms can change.*modularize", plan.apply)
    refuses(r"no norms at all, but may call .* with example_inputs", powernorm.plan_swap, GPT())


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x: torch.rms_norm(x, (WIDTH,)), "rms"),
        (lambda x: torch.layer_norm(x, (WIDTH,)), "layer"),
        (lambda x: torch.native_layer_norm(x, (WIDTH,), None, None, 1e-5)[0], "layer"),
        (lambda x: F.group_norm(x, 2), "channel"),
        (lambda x: F.instance_norm(x), "channel"),
        (lambda x: F.batch_norm(x, None, None, training=True), "batch"),
    ],
)
def test_functions_of_torch_itself_count(function: Callable[[Tensor], Tensor], kind: str) -> None:
    (found,) = find_norms(Calls(function), torch.randn(2, 4, WIDTH))
    assert (found.names, found.kind) == (("norm_call0",), kind)


def test_modules_that_are_norms_are_not_listed_a_second_time() -> None:
    """Else each LayerNorm has a second row for the function that it calls."""

    class RMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return F.rms_norm(x, (WIDTH,), self.weight, 1e-6)

    norms = (nn.LayerNorm(WIDTH), RMSNorm(), nn.BatchNorm1d(WIDTH), powernorm.LayerNorm(WIDTH))
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8)
    model = nn.Sequential(*norms, layer)
    x = torch.randn(3, WIDTH)
    assert [one.names for one in find_norms(model, x)] == [one.names for one in find_norms(model)]


def test_looking_changes_nothing() -> None:
    """Else a plan moves running statistics, draws random numbers or leaves something behind."""
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(), Calls(norm)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = [set(vars(module)) for module in model.modules()]
    state = torch.get_rng_state()
    find_norms(model, torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state)
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())


def test_inputs_that_the_model_does_not_take_are_an_error_and_leave_no_trace() -> None:
    model = GPT()
    with pytest.raises(InputError, match="GPT fails on the example inputs: IndexError"):
        powernorm.plan_swap(model, example_inputs=torch.tensor([[99]]))
    assert not any("forward" in vars(module) for module in model.modules())
    refuses("example_inputs is a int", find_norms, model, 3)


def test_shared_modules_have_all_their_names() -> None:
    shared = Calls(norm)
    (found,) = find_norms(nn.Sequential(shared, shared), torch.randn(2, WIDTH))
    assert found.names == ("0.norm_call0", "1.norm_call0")


def test_a_code_path_that_the_example_leaves_out_is_still_read() -> None:
    """Else giving example inputs hides a call that was seen without them."""

    class Branch(nn.Module):
        def forward(self, x: Tensor, short: bool = True) -> Tensor:
            return x if short else F.rms_norm(x, (WIDTH,))

    (found,) = find_norms(Branch(), torch.randn(2, WIDTH))
    assert found.names == ("forward",)
