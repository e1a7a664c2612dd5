"""Fitting static norms to a teacher: the best affine map per feature, over valid tokens."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import powernorm
from norms.processes import run_processes
from powernorm.norms import BatchStatisticsNorm
from refusals import refuses
from surgery.foreign_models import PADDED, padding, seeded, torch_encoder, vectors
from surgery.static_models import STATIC

C = 8


def data(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    scales = torch.linspace(0.5, 3.0, C, dtype=torch.float64)
    return [
        torch.randn(4, 5, C, generator=generator, dtype=torch.float64) * scales + 1
        for _ in range(count)
    ]


def teacher() -> nn.Module:
    torch.manual_seed(0)
    norms = [nn.LayerNorm(C, dtype=torch.float64) for _ in range(2)]
    with torch.no_grad():
        for norm in norms:
            norm.weight.uniform_(0.5, 2.0)
            norm.bias.uniform_(-1.0, 1.0)
    return nn.Sequential(norms[0], nn.Linear(C, C, dtype=torch.float64), nn.Tanh(), norms[1]).eval()


def student(original: nn.Module, to: str = "bn") -> nn.Module:
    model = copy.deepcopy(original)
    powernorm.swap(model, to=to, where="*")
    return model.eval()


def least_squares(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """a and c of `a x + c` for each feature, by a solver."""
    pairs = [
        torch.linalg.lstsq(
            torch.stack([x[:, i], torch.ones(len(x), dtype=x.dtype)], 1), y[:, i : i + 1]
        ).solution.flatten()
        for i in range(x.shape[1])
    ]
    return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])


@pytest.mark.parametrize("to", STATIC)
def test_is_least_squares_behind_fitted_norms(to: str) -> None:
    original = teacher()
    model = student(original, to)
    batches = data()
    report = powernorm.match_teacher(model, original, batches)
    x = torch.cat([batch.flatten(0, 1) for batch in batches])
    scale, shift = least_squares(x, original[0](x).detach())
    found = model[0].affine()
    assert torch.allclose(found[0].detach(), scale, rtol=1e-9)
    assert torch.allclose(found[1].detach(), shift, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        inner = model[:3](x)
        scale, shift = least_squares(inner, original(x))
    assert torch.allclose(model[3].affine()[0].detach(), scale, rtol=1e-9)
    assert torch.allclose(model[3].affine()[1].detach(), shift, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        left = (model(x) - original(x)).square().sum() / _spread(original(x))
    assert report.rows[1].explained == pytest.approx(1 - float(left), abs=1e-6)
    assert [row["name"] for row in report.to_rows()] == ["0", "3"]
    assert "explained" in str(report)


def _spread(y: Tensor) -> Tensor:
    return (y - y.mean(0)).square().sum()


def test_beats_keeping_gamma_and_beta_by_far() -> None:
    """The reason to have it: a swapped LayerNorm's γ belongs to features of unit variance."""
    original, batches = teacher(), data(8)
    fitted, calibrated = student(original), student(original)
    powernorm.match_teacher(fitted, original, batches)
    powernorm.calibrate(calibrated, batches)
    expected = torch.cat([original(x) for x in batches])

    def error(model: nn.Module) -> float:
        found = torch.cat([model(x) for x in batches])
        return float((found - expected).detach().square().mean())

    assert error(fitted) < 0.5 * error(calibrated)


def test_padding_does_not_count() -> None:
    original = seeded(torch_encoder)
    found = []
    for extra in (0, 4):
        model = student(original)
        powernorm.match_teacher(model, original, [PADDED["torch-encoder"](extra)])
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    assert padding(4).sum() > padding(0).sum() > 0
    assert vectors().abs().max() > 40  # padding that would be seen
    for name, value in found[0].items():
        assert torch.allclose(found[1][name], value, rtol=1e-4, atol=1e-5), name


def test_only_the_named_layers_change() -> None:
    original = teacher()
    model = student(original)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = powernorm.match_teacher(model, original, data(), names="3")
    assert [row.name for row in report.rows] == ["3"]
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {
        f"3.{name}"
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }


def test_a_layer_that_is_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(C, dtype=torch.float64)
            self.linear = nn.Linear(C, C, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(self.norm(x)))

    original = Twice().eval()
    model = student(original)
    report = powernorm.match_teacher(model, original, data(1))
    assert report.rows[0].tokens == 40


def test_progress_and_modes() -> None:
    original, seen = teacher().train(), []
    model = student(original).train()
    powernorm.match_teacher(
        model, original, data(), on_progress=lambda done, total: seen.append((done, total))
    )
    assert seen == [(1, 2), (2, 2)]
    assert all(module.training for module in (*model.modules(), *original.modules()))
    assert model[0].weight.requires_grad
    assert int(model[0].num_batches_tracked) == 1


def unchanged(model: nn.Module, original: nn.Module, batches: object, match: str) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [dict(m._forward_hooks) for m in original.modules()]
    refuses(match, powernorm.match_teacher, model, original, batches)
    now = model.state_dict()
    assert all(torch.equal(now[name], value) for name, value in before.items())
    assert [dict(m._forward_hooks) for m in original.modules()] == hooks


def test_bad_input() -> None:
    original = teacher()
    model = student(original)
    unchanged(model, original, (x for x in data()), "iterated over only once")
    unchanged(model, original, [], "batches is empty")
    unchanged(model, original, {"x": data()[0]}, r"a single batch into a list")
    unchanged(model, original[:3], data(), r"teacher has no module '3'")
    unchanged(student(original, "pn"), original, data(), "not static")
    bare = nn.Sequential(powernorm.BatchNorm(C, affine=False, dtype=torch.float64))
    unchanged(bare, original, data(), "no weight and bias")
    unchanged(
        model, original, [torch.full((2, 3, C), torch.nan, dtype=torch.float64)], "not finite"
    )


def test_one_layer_loses_no_data() -> None:
    """Its order is known, but a pass that looks for it would use up an iterator's first batch."""
    original = teacher()[:1]
    model = student(original)
    unchanged(model, original, iter(data()), "2 passes")
    assert powernorm.match_teacher(model, original, data()).rows[0].tokens == 60


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"model": None}, "model is None, expected a torch.nn.Module"),
        ({"teacher": None}, "teacher is None, expected a torch.nn.Module"),
        ({"batches": None}, "batches is None, expected"),
        ({"names": [3]}, "names has 3, expected globs"),
        ({"forward": 3}, "forward is 3, expected a function"),
        ({"on_progress": 3}, "on_progress is 3, expected a function"),
    ],
)
def test_arguments_of_no_such_type(arguments: dict[str, object], match: str) -> None:
    original = teacher()
    given = {"model": student(original), "teacher": original, "batches": data()} | arguments
    refuses(match, powernorm.match_teacher, **given)


def test_parameters_that_others_hold_too() -> None:
    original = teacher()
    model = student(original)
    unchanged(model, model, data(), "teacher is the model itself")
    model[3].weight = model[0].weight
    unchanged(model, original, data(), r"weight of '0' is shared with '3.weight'")
    model = student(original)
    model[3].bias = original[3].bias
    unchanged(model, original, data(), r"bias of '3' is the teacher's '3.bias' too")
    # Other objects around the same memory.
    model = student(original)
    values = {
        name: v for name, v in original.state_dict().items() if name in ("0.bias", "0.weight")
    }
    model.load_state_dict(values, strict=False, assign=True)
    assert model[0].bias is not original[0].bias
    unchanged(model, original, data(), r"weight of '0' is the teacher's")


@pytest.mark.parametrize("constant", [0.1, 7.7, 1e3])
def test_constant_feature_has_no_slope(constant: float) -> None:
    original = nn.Sequential(nn.LayerNorm(C))
    model = student(original)
    batches = [batch.float() for batch in data(5)]
    for batch in batches:  # as a sum that cancels leaves it in float32
        batch[..., 2] = constant * (1 + 1e-7 * batch[..., 2])
    powernorm.match_teacher(model, original, batches)
    assert model[0].weight[2] == 0
    assert model[0].weight.abs().max() < 100
    mean = torch.cat([original(x) for x in batches])[..., 2].mean()
    assert torch.allclose(model(batches[0])[..., 2], mean, atol=1e-5)


@pytest.mark.parametrize("compiled", ["teacher", "norm", "model"])
def test_compiled_models_go_by_their_plain_names(compiled: str) -> None:
    original = teacher()
    expected, model = student(original), student(original)
    powernorm.match_teacher(expected, original, data())
    taught, learning = original, model
    if compiled == "teacher":
        taught = torch.compile(original, backend="eager")  # type: ignore[assignment]
    elif compiled == "norm":
        taught = copy.deepcopy(original)
        taught[3] = torch.compile(taught[3], backend="eager")
    else:
        learning = torch.compile(model, backend="eager")  # type: ignore[assignment]
    report = powernorm.match_teacher(learning, taught, data())
    assert [row.name for row in report.rows] == ["0", "3"]
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def one_rank(rank: int) -> list[dict[str, Tensor]]:
    """Three processes with unequal numbers of batches; the last one has none."""
    original = teacher()
    shares = [data(3)[:2], data(3)[2:], []]
    states = []
    for size in (1, 4):
        model = student(original[:size])
        powernorm.match_teacher(model, original[:size], shares[rank])
        states.append(model.state_dict())
    return states


@pytest.mark.distributed
def test_processes_equal_one_process(tmp_path: Path) -> None:
    original = teacher()
    ranks = run_processes(one_rank, 3, tmp_path)
    for index, size in enumerate((1, 4)):
        model = student(original[:size])
        powernorm.match_teacher(model, original[:size], data(3))
        for states in ranks:
            for name, value in model.state_dict().items():
                torch.testing.assert_close(states[index][name], value, rtol=1e-9, atol=1e-11)


def test_teacher_of_another_shape() -> None:
    original = teacher()
    model = student(original)

    class Wider(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("0", nn.Linear(C, 2 * C, dtype=torch.float64))
            self.add_module("3", nn.Identity())

        def forward(self, x: Tensor) -> Tensor:
            return self.get_submodule("0")(x)

    unchanged(model, Wider(), data(), r"put out \(4, 5, 16\)")


def test_whole_path_to_a_folded_model() -> None:
    original = seeded(torch_encoder)
    inputs = PADDED["torch-encoder"](0)
    model = student(original)
    powernorm.match_teacher(model, original, [inputs])
    frozen = powernorm.freeze_statistics(model)
    assert len(frozen) == sum(isinstance(m, BatchStatisticsNorm) for m in model.modules())
    expected = model(**inputs).detach()
    powernorm.fold(model, inputs)
    assert torch.allclose(model(**inputs), expected, atol=1e-5)
