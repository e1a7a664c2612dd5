"""Swapping and folding norms over channels: convolutions, a residual network, mixed models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import powernorm
from covering import some_default
from powernorm.norms import NORMS, Norm
from powernorm.surgery.folding.structure import FeatureAffine
from surgery.folding.test_folding_operators import channels, check, left_by_name, unshifted
from surgery.static_models import STATIC, left_of, settle

C = 6


def images(size: int = 8, channels: int = 3, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, channels, size, size, generator=generator, dtype=torch.float64)


class Block(nn.Module):
    """A ResNet's basic block: conv-norm-relu-conv-norm and a shortcut."""

    def __init__(self, before: int, after: int, stride: int, norm: Callable[[int], nn.Module]):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = norm(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = norm(after)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            conv = nn.Conv2d(before, after, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, norm(after))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return self.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, C, 3, padding=1, bias=False)
        self.norm = norm(C)
        self.blocks = nn.Sequential(Block(C, C, 1, norm), Block(C, 2 * C, 2, norm))
        self.head = nn.Linear(2 * C, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)), inplace=True)
        y: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return y


def trained(model: nn.Module) -> nn.Module:
    """A net of torch's norms with statistics of data."""
    for seed in range(3):
        model.train()(images(seed=seed))
    with torch.no_grad():
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.weight.uniform_(0.5, 1.5)
                norm.bias.uniform_(-0.5, 0.5)
    return model.eval()


def ours(name: str = "bn", **options: Any) -> Callable[[int], nn.Module]:
    return lambda features: powernorm.build_norm(name, features, feature_dim=1, **options)


@pytest.mark.parametrize("to", ["bn", "rbn", "brn"])
def test_a_swap_of_torchs_batch_norms_changes_nothing_in_evaluation(to: str) -> None:
    model = trained(ResNet())
    old, x = model.norm, images(seed=9)
    before = model(x)
    swap = powernorm.swap(model, to=to)
    assert len(swap.norms) == 6
    assert all(norm.feature_dim == 1 for norm in swap.norms.values())
    assert model.norm.weight is old.weight
    assert torch.equal(model.norm.running_mean, old.running_mean)
    assert int(model.norm.num_batches_tracked) >= 1
    torch.testing.assert_close(model(x), before, rtol=1e-6, atol=1e-6)
    model.train()(x).square().mean().backward()
    model.eval()
    swap.undo()
    assert model.norm is old
    torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("to", NORMS)
def test_a_swap_to_any_norm_trains(to: str) -> None:
    model = ResNet()
    swap = powernorm.swap(model, to=to)
    y = model(images())
    y.square().mean().backward()
    assert y.isfinite().all()
    assert model.stem.weight.grad.isfinite().all()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    swap.undo()
    assert sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == 6
    for key, value in model.state_dict().items():
        if key in state and not key.endswith(("running_mean", "running_var", "tracked")):
            assert torch.equal(value, state[key]), key


class ChannelsFirst(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d(C), (4, C)),
        (nn.BatchNorm1d(C), (4, C, 5)),
        (nn.BatchNorm3d(C), (4, C, 2, 3, 2)),
        (nn.GroupNorm(2, C), (4, C, 5, 3)),
        (nn.InstanceNorm2d(C, affine=True), (4, C, 5, 3)),
        (ChannelsFirst(C), (4, C, 5, 3)),
    ],
)
def test_other_norms_over_channels(norm: nn.Module, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(norm)
    x = torch.randn(shape)
    plan = powernorm.plan_swap(model, "pnv")
    assert [(row.num_features, row.action) for row in plan.rows] == [(C, "swap")]
    swap = plan.apply()
    new = swap.norms["0"]
    assert (new.feature_dim, new.weight) == (1, norm.weight)
    assert model(x).shape == shape
    swap.undo()
    assert model[0] is norm


def test_a_layer_norm_over_channels_becomes_ours_and_keeps_its_eps() -> None:
    model = nn.Sequential(ChannelsFirst(C, eps=0.02))
    x = torch.randn(4, C, 5, 3)
    before = model(x)
    powernorm.swap(model, "ln")
    torch.testing.assert_close(model(x), before)


def test_our_own_keep_their_dimension() -> None:
    model = nn.Sequential(nn.Conv2d(3, C, 3), powernorm.BatchNorm(C, feature_dim=1)).double()
    model(images())
    swap = powernorm.swap(model, "rbn")
    assert swap.norms["1"].feature_dim == 1
    assert model(images()).shape == (2, C, 6, 6)


class Mixed(nn.Module):
    """Convolutions in front of a Transformer, as for speech."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.front = nn.Conv1d(3, 8, 3, stride=2), nn.BatchNorm1d(8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.encoder(self.front(self.conv(x)).transpose(1, 2))
        return y


def test_norms_over_channels_beside_others_are_left_unless_they_are_named() -> None:
    model = Mixed()
    plan = powernorm.plan_swap(model, "rbn")
    rows = {row.name: row for row in plan.rows}
    assert rows["encoder.norm1"].action == rows["encoder.norm2"].action == "swap"
    assert "name it in where=" in rows["front"].reason
    assert [row.name for row in diagnosed(model)] == ["front", "encoder.norm1", "encoder.norm2"]
    powernorm.swap(model, "rbn", where="*")
    assert model.front.feature_dim == 1
    assert model.encoder.norm1.feature_dim == -1
    assert model(torch.randn(2, 3, 9)).shape == (2, 4, 8)


def diagnosed(model: nn.Module) -> Any:
    return powernorm.diagnose(model, [torch.randn(2, 3, 9) for _ in range(3)]).rows


def folded(model: nn.Module, x: Tensor) -> powernorm.FoldReport:
    expected = model(x).detach()
    report = powernorm.fold(model, x)
    gap = (model(x).detach() - expected).abs().max() / expected.abs().max()
    assert gap <= 1e-12
    return report


@pytest.mark.parametrize("name", some_default(STATIC, "bn", "pn-only"))
def test_a_residual_network_folds_wholly(name: str) -> None:
    model = settle(ResNet(ours(name)))
    report = folded(model, images())
    assert {row.action for row in report.rows} == {"fold"}
    assert len(report.rows) == 6
    assert not [m for m in model.modules() if isinstance(m, Norm | FeatureAffine)]
    into = {row.name: row.into for row in report.rows}
    assert into["blocks.0.norm1"] == ("blocks.0.conv1.weight",)
    report.undo()
    assert sum(isinstance(m, Norm) for m in model.modules()) == 6


def test_swapped_calibrated_and_folded_channels_last() -> None:
    model = ResNet()
    powernorm.swap(model, "pn-only")
    x = images().contiguous(memory_format=torch.channels_last)
    model = model.to(memory_format=torch.channels_last)
    powernorm.calibrate(model, [x, images(seed=1)])
    assert {row.action for row in folded(model.eval(), x).rows} == {"fold"}


def test_exact_or_left_with_the_reason() -> None:
    cases: dict[str, tuple[tuple[nn.Module, ...], str]] = {
        # Zeros at the border are no longer what the norm would have made of them.
        "zeros": ((nn.ReLU(), channels(), nn.Conv2d(C, 4, 3, padding=1)), "multiply-add"),
        "same": ((nn.ReLU(), channels(), nn.Conv2d(C, 4, 3, padding="same")), "multiply-add"),
        "unshifted": (
            (nn.ReLU(), unshifted(channels()), nn.Conv2d(C, 4, 3, padding=1)),
            "fold",
        ),
        "first": ((nn.Conv2d(C, C, 3, padding=1), channels(), nn.ReLU()), "fold"),
        "flat": (
            (nn.ReLU(), channels(), nn.Flatten(), nn.Linear(36 * C, 4)),
            "multiply-add",
        ),
        "no weights": ((nn.ReLU(), channels(), nn.AvgPool2d(2), nn.ReLU()), "multiply-add"),
    }
    models = {name: nn.Sequential(*parts).double() for name, (parts, _) in cases.items()}
    assert check(models, images(6, C)) == left_by_name(cases)


@pytest.mark.parametrize("dim", [1, -3, -2])
@pytest.mark.parametrize("residual", [False, True])
def test_what_is_left_goes_along_the_dimension(dim: int, residual: bool, tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = powernorm.BatchNorm(C, feature_dim=dim, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            if not residual:
                y: Tensor = self.norm(torch.tanh(x))
                return y.exp()
            y, stream = self.norm(torch.tanh(x), None, x)
            return y.exp() + stream.sin()

    fresh = Odd()
    model = settle(copy.deepcopy(fresh))
    x = images(C, C)
    expected = model(x).detach()
    report = folded(model, x)
    assert [left_of(row) for row in report.rows] == ["multiply-add"]
    assert f"feature_dim={dim}" in repr(model.norm)
    powernorm.save(model, tmp_path)
    loaded = powernorm.load(tmp_path, fresh)
    torch.testing.assert_close(loaded(x), expected)


def test_a_teacher_over_channels_is_matched() -> None:
    model = nn.Sequential(nn.Conv2d(3, C, 3), nn.GroupNorm(1, C), nn.Conv2d(C, 2, 1)).double()
    teacher = copy.deepcopy(model)
    powernorm.swap(model, "bn")
    batches = [images(seed=seed) for seed in range(3)]
    report = powernorm.match_teacher(model, teacher, batches)
    assert report.rows[0].tokens == 3 * 2 * 36
    assert report.rows[0].explained > 0.5
