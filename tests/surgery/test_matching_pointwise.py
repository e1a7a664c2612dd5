"""Fitting DyT, Derf and DyISRU to a teacher: slope, γ and β by least squares over valid tokens."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

import powernorm
from norms.processes import run_processes
from powernorm.inspection.batches import Forward
from powernorm.inspection.mask_owners import _owners_on
from powernorm.norms.pointwise import SaturatingNorm
from surgery.foreign_models import PADDED, seeded, torch_encoder
from surgery.test_matching import C, data, student, teacher, unchanged

POINTWISE = ("dyt", "derf", "dyisru")
FUNCTIONS = {
    "dyt": torch.tanh,
    "derf": torch.erf,
    "dyisru": lambda z: math.sqrt(C) * z / (1 + z**2).sqrt(),
}


class Saturated(nn.Module):
    """A teacher that computes `γ f(slope x) + β` in plain torch."""

    def __init__(self, to: str, slope: float) -> None:
        super().__init__()
        self.to, self.slope = to, slope
        self.scale, self.shift = (torch.linspace(low, 2.0, C).double() for low in (-1.0, 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * FUNCTIONS[self.to](self.slope * x) + self.shift


@pytest.mark.parametrize("slope", [0.003, 0.7, 40.0])
@pytest.mark.parametrize("to", POINTWISE)
def test_recovers_the_layer_that_made_the_data(to: str, slope: float) -> None:
    original = nn.Sequential(Saturated(to, slope))
    model = nn.Sequential(powernorm.build_norm(to, C, dtype=torch.float64))
    inputs = [batch * 0.7 / slope for batch in data()]  # the scale is not known before
    report = powernorm.match_teacher(model, original, inputs)
    layer = model[0]
    assert isinstance(layer, SaturatingNorm)
    assert float(layer.slope.detach()) == pytest.approx(slope, rel=0.018)
    assert torch.allclose(layer.weight, original[0].scale, rtol=0.03)
    assert torch.allclose(layer.bias, original[0].shift, atol=0.01)
    row = report.rows[0]
    assert row.kind == to
    assert row.tokens == 60
    assert row.explained > 0.9999 > row.explained_affine
    with torch.no_grad():
        y, found = original(inputs[0]), model(inputs[0])
    assert torch.allclose(y, found, atol=0.06)


@pytest.mark.parametrize("to", POINTWISE)
def test_is_the_best_of_all_slopes(to: str) -> None:
    """Against a search over all slopes whose γ and β come from a solver."""
    original, batches = teacher()[:1], data(8)
    x = torch.cat([batch.flatten(0, 1) for batch in batches])
    y = original(x).detach()
    spread = (y - y.mean(0)).square().sum()

    def lost(octave: float) -> float:
        z = FUNCTIONS[to](2**octave * x)
        total = 0.0
        for i in range(C):
            columns = torch.stack([z[:, i], torch.ones(len(x)).double()], 1)
            solved = torch.linalg.lstsq(columns, y[:, i : i + 1], driver="gelsd").solution
            total += float((columns @ solved - y[:, i : i + 1]).square().sum())
        return total / float(spread)

    best = minimize_scalar(lost, bounds=(-6, 4), method="bounded", options={"xatol": 1e-4})
    model = student(original, to)
    row = powernorm.match_teacher(model, original, batches).rows[0]
    assert math.log2(float(model[0].slope.detach())) == pytest.approx(best.x, abs=0.04)
    assert row.explained == pytest.approx(1 - best.fun, abs=1e-5)
    with torch.no_grad():
        left = (model(x) - y).square().sum() / spread
    assert row.explained == pytest.approx(1 - float(left), abs=1e-6)
    static = student(original, "bn")
    affine = powernorm.match_teacher(static, original, batches).rows[0]
    assert affine.explained == affine.explained_affine
    assert row.explained > row.explained_affine == pytest.approx(affine.explained, abs=1e-12)


def test_a_linear_teacher_takes_no_huge_weight() -> None:
    """DyT is linear where α is near 0, and γ would be 1/α."""
    original = nn.Sequential(nn.Linear(C, C, dtype=torch.float64))
    with torch.no_grad():
        original[0].weight.copy_(torch.eye(C))
    model = nn.Sequential(powernorm.DynamicTanh(C, dtype=torch.float64))
    assert powernorm.match_teacher(model, original, data()).rows[0].explained > 0.9999
    assert model[0].weight.abs().max() < 2000


def test_the_shift_of_derf_stays() -> None:
    original = nn.Sequential(Saturated("derf", 0.7))
    model = nn.Sequential(powernorm.Derf(C, shift=0.3, dtype=torch.float64))
    row = powernorm.match_teacher(model, original, data()).rows[0]
    assert float(model[0].shift.detach()) == 0.3
    with torch.no_grad():
        x = torch.cat([batch.flatten(0, 1) for batch in data()])
        y = original(x)
        left = (model(x) - y).square().sum() / (y - y.mean(0)).square().sum()
    assert row.explained == pytest.approx(1 - float(left), abs=1e-6)


@pytest.mark.parametrize("scoped", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_padding_does_not_count(mixed: bool, scoped: bool) -> None:
    """Also of static norms beside pointwise ones, which alone make the model pass its mask on."""
    original = seeded(torch_encoder)
    found = []
    for extra in (0, 4):
        model = copy.deepcopy(original)
        powernorm.swap(model, to="dyt", where="*norm1" if mixed else "*")
        if mixed:
            powernorm.swap(model, to="bn", where=lambda name, _: not name.endswith("norm1"))
        inputs = PADDED["torch-encoder"](extra)
        given = padded_scope(inputs) if scoped else None
        report = powernorm.match_teacher(model, original, [inputs], given)
        owners = [owner for module in model.modules() for owner in _owners_on(module)]
        assert not any(use.observed for owner in owners for use in owner.uses)  # released
        assert {row.tokens for row in report.rows} == {8}
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    for name, value in found[0].items():
        assert torch.allclose(found[1][name], value, rtol=1e-4, atol=1e-5), name


def padded_scope(inputs: dict[str, Tensor]) -> Forward:
    """Run a model with a user's scope around it."""
    (mask,) = (value for value in inputs.values() if value.dtype == torch.bool)

    def run(model: nn.Module, batch: dict[str, Tensor]) -> object:
        with powernorm.padding_mask(mask):
            return model(**batch)

    return run


def test_static_and_pointwise_in_one_model() -> None:
    original, seen = teacher(), []
    model = copy.deepcopy(original)
    powernorm.swap(model, to="bn", where=lambda name, _: name == "0")
    powernorm.swap(model, to="derf", where=lambda name, _: name == "3")
    alone = student(original)
    report = powernorm.match_teacher(
        model, original, data(), on_progress=lambda done, total: seen.append((done, total))
    )
    powernorm.match_teacher(alone, original, data(), names="0")
    assert [(row.name, row.kind) for row in report.rows] == [("0", "bn"), ("3", "derf")]
    assert seen == [(1, 3), (2, 3), (3, 3)]
    for name, value in alone[0].state_dict().items():
        assert torch.equal(model[0].state_dict()[name], value), name
    # The later layer was fitted to what the fitted model gives it.
    with torch.no_grad():
        x = torch.cat(data())
        left = (model(x) - original(x)).square().sum()
        y = original(x).flatten(0, 1)
    spread = (y - y.mean(0)).square().sum()
    assert report.rows[1].explained == pytest.approx(1 - float(left / spread), abs=1e-6)


def test_a_norm_that_the_teacher_has_too_stays() -> None:
    original = nn.Sequential(powernorm.DynamicTanh(C, dtype=torch.float64), teacher()[0])
    model = copy.deepcopy(original)
    powernorm.swap(model, to="dyt", where=lambda name, _: name == "1")
    before = model[0].alpha.clone()
    report = powernorm.match_teacher(model, original, data())
    assert [row.name for row in report.rows] == ["1"]
    assert torch.equal(model[0].alpha, before)


def test_bad_input() -> None:
    original = teacher()
    model = student(original, "dyt")
    unchanged(model, original, iter(data()), "5 passes")
    unchanged(model, original, [], "batches is empty")
    unchanged(
        model, original, [torch.full((2, 3, C), torch.nan, dtype=torch.float64)], "not finite"
    )
    bare = nn.Sequential(powernorm.DynamicTanh(C, affine=False, dtype=torch.float64))
    unchanged(bare, original, data(), "no weight and bias")
    unchanged(copy.deepcopy(original), original, data(), "no static or pointwise layer to match")
    model[3].alpha = model[0].alpha
    unchanged(model, original, data(), r"alpha of '0' is shared with '3.alpha'")


def one_rank(rank: int) -> list[dict[str, Tensor]]:
    """Three processes with unequal numbers of batches; the last one has none."""
    shares = [data(3)[:2], data(3)[2:], []]
    states = []
    for to in ("dyt", "dyisru"):
        original = teacher()
        model = student(original, to)
        powernorm.match_teacher(model, original, shares[rank])
        states.append(model.state_dict())
    return states


@pytest.mark.distributed
def test_processes_equal_one_process(tmp_path: Path) -> None:
    ranks = run_processes(one_rank, 3, tmp_path)
    for index, to in enumerate(("dyt", "dyisru")):
        original = teacher()
        model = student(original, to)
        powernorm.match_teacher(model, original, data(3))
        for states in ranks:
            for name, value in model.state_dict().items():
                torch.testing.assert_close(states[index][name], value, rtol=1e-9, atol=1e-11)
