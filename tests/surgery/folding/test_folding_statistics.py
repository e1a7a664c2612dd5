"""Weights and biases of LayerNorm and RMSNorm in the weights behind them, their statistics left."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import powernorm
from refusals import refuses
from surgery.foreign_models import torch_layer

WIDTH = 8
VOCABULARY = 20


def drawn(model: nn.Module, seed: int = 3) -> nn.Module:
    """The model in float64 and evaluation, no weight or bias of a norm at its start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                noise = torch.rand(parameter.shape, generator=generator)
                parameter.copy_(noise.to(parameter.dtype) + 0.5)
    return model.double().eval()


class Residual(nn.Module):
    """A pre-norm sub-layer."""

    def __init__(self, norm: nn.Module, *layers: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.layers(self.norm(x))
        return y


def decoder(norm: Callable[[int], nn.Module] = nn.LayerNorm, **options: Any) -> nn.Sequential:
    """Embedding, two pre-norm sub-layers, a final norm and a head."""
    blocks = [
        Residual(norm(WIDTH), nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH, **options))
        for _ in range(2)
    ]
    embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
    return nn.Sequential(embedding, *blocks, norm(WIDTH), head)


IDS = torch.randint(VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(0))


def vectors() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 5, WIDTH, generator=generator, dtype=torch.float64)


def folded(model: nn.Module, inputs: Any, **options: Any) -> Any:
    """The report of a fold that has changed no output."""
    with torch.no_grad():
        expected = model(inputs)
        report = powernorm.fold(model, inputs, keep="statistics", **options)
        torch.testing.assert_close(model(inputs), expected, rtol=1e-12, atol=1e-12)
    return report


def kept(report: Any) -> dict[str, str]:
    return {row.name: row.reason for row in report.rows if row.action == "keep"}


def is_neutral(norm: nn.Module) -> bool:
    weight, bias = norm.weight, getattr(norm, "bias", None)
    return bool((weight == 1).all()) and (bias is None or not bool(bias.any()))


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, powernorm.LayerNorm, powernorm.RMSNorm])
def test_what_is_left_is_a_statistic(norm: Callable[[int], nn.Module]) -> None:
    model = drawn(decoder(norm))
    before = {name: (type(one), one) for name, one in model.named_modules()}
    tensors = dict(model.named_parameters())
    report = folded(model, IDS)
    assert [row.action for row in report.rows] == ["fold"] * 3
    assert report.rows[0].into == ("1.layers.0.weight",)
    assert all(is_neutral(model.get_submodule(row.name)) for row in report.rows)
    parts = sum(len(list(model.get_submodule(row.name).parameters())) for row in report.rows)
    assert report.plan.num_neutral == parts * WIDTH
    assert report.is_stock
    assert {name: (type(one), one) for name, one in model.named_modules()} == before
    report.undo()
    assert all(one is tensors[name] for name, one in model.named_parameters())


def test_layers_without_a_bias_leave_the_norms_bias() -> None:
    model = drawn(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4, bias=False)))
    expected = (model[0].bias / model[0].weight).detach()
    (row,) = folded(model, vectors()).rows
    assert row.action == "fold"
    assert (
        row.reason
        == "its bias stays: its shift has nowhere to go: linear in 1 has no place for a bias"
    )
    assert model[1].bias is None
    assert bool((model[0].weight == 1).all())
    torch.testing.assert_close(model[0].bias.detach(), expected)


def test_a_bias_that_stays_behind_a_weight_of_zero() -> None:
    model = drawn(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4, bias=False)))
    with torch.no_grad():
        model[0].weight[2] = 0
    (reason,) = kept(folded(model, vectors())).values()
    assert "its scale is 0 in 1 of 8 features" in reason


def test_weights_of_zero_fold() -> None:
    model = drawn(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)))
    with torch.no_grad():
        model[0].weight[2] = 0
    assert not kept(folded(model, vectors()))
    assert is_neutral(model[0])


class OnePlus(nn.Module):
    """RMSNorm as Gemma has it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.eps = 1e-6
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (1 + self.weight)


def test_a_class_that_adds_1_to_its_weight() -> None:
    model = drawn(decoder(OnePlus))
    report = folded(model, IDS)
    assert [row.action for row in report.rows] == ["fold"] * 3
    assert not bool(model[1].norm.weight.any())
    assert report.plan.num_neutral == 3 * WIDTH


class Rotary(nn.Module):
    """A norm in front of a rotation by position."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.RMSNorm(WIDTH)
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.arange(WIDTH)
        q = self.q_norm(x)
        return self.out(q * angles.cos() + q.flip(-1) * angles.sin())


class TiedHead(nn.Module):
    """A language model whose embedding is its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.block = Residual(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.block(self.embedding(ids))))
        return logits


class Functional(nn.Module):
    """Calls the function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.layer = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(functional.rms_norm(x, (WIDTH,), self.weight))


class SharedWeight(nn.Module):
    """Two norms with one weight, and one whose weight is also a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.RMSNorm(WIDTH) for _ in range(3))
        self.second.weight = self.first.weight
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layers[0](self.first(x)) + self.layers[1](self.second(x))
        return self.layers[2](self.third(x)) + self.third.weight


def hooked() -> nn.Module:
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4))
    model[0].register_forward_hook(lambda *_: None)
    return model


class Doubling(nn.Module):
    """Works in place on what its norm returns: a new tensor, as the statistic stays."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y *= 2
        return x + self.layer(y)


def test_an_operator_in_place_behind_a_statistic() -> None:
    model = drawn(nn.Sequential(nn.Linear(WIDTH, WIDTH), Doubling(), nn.Linear(WIDTH, 2)))
    assert not kept(folded(model, vectors()))
    assert is_neutral(model[1].norm)


STAYING: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], dict[str, str]]] = {
    "post-norm": (
        lambda: nn.Sequential(torch_layer(), nn.Linear(WIDTH, 2)),
        vectors,
        {"0.norm1": "the statistic of 0.norm2 needs it (post-norm, or a norm on a sub-"},
    ),
    "an output": (
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)),
        vectors,
        {"1": "it is an output of the model"},
    ),
    "rotary positions": (
        Rotary,
        vectors,
        {"q_norm": "a weight per feature does not commute with a rotation by position"},
    ),
    "a tied head": (
        TiedHead,
        lambda: IDS,
        {"norm": "is tied: embedding.weight, head.weight (fold with tied='untie' to separate"},
    ),
    "a norm on a sub-layer's output": (
        lambda: nn.Sequential(
            Residual(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH)),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2),
        ),
        vectors,
        {"0.layers.1": "the statistic of 0.norm needs it (post-norm, or a norm on a sub-"},
    ),
    "shared weights": (
        SharedWeight,
        vectors,
        {
            "first": "first.weight is also in use as second.weight",
            "second": "second.weight is also in use as first.weight",
            "third": "third.weight is also in use as add",
        },
    ),
    "a function": (
        lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Functional()),
        vectors,
        {"2.norm_call0": "make it a module by powernorm.modularize"},
    ),
    "no weight": (
        lambda: nn.Sequential(
            nn.LayerNorm(WIDTH, elementwise_affine=False),
            Residual(nn.LayerNorm(WIDTH)),
            nn.Linear(WIDTH, 2),
        ),
        vectors,
        {"0": "it has neither weight nor bias", "1.norm": ""},
    ),
}


@pytest.mark.parametrize("name", STAYING)
def test_norms_that_stay_say_why(name: str) -> None:
    build, inputs, expected = STAYING[name]
    report = folded(drawn(build()), inputs())
    found = kept(report)
    for norm, reason in expected.items():
        assert reason in found.pop(norm, "")
    assert not found


def test_a_tied_head_is_parted_on_request() -> None:
    model = drawn(TiedHead())
    report = folded(model, IDS, tied="untie")
    assert not kept(report)
    assert model.head.weight is not model.embedding.weight
    assert not report.is_stock
    report.undo()
    assert model.head.weight is model.embedding.weight


def test_static_norms_fold_too() -> None:
    model = drawn(
        nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            powernorm.BatchNorm(WIDTH),
            nn.GELU(),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2, bias=False),
        )
    )
    powernorm.calibrate(model, [vectors()])
    report = folded(model.eval(), vectors())
    assert [row.action for row in report.rows] == ["fold", "fold"]
    # The result is no model of its own class any more: it may have new biases.
    assert model[4].bias is not None
    assert is_neutral(model[3])


def test_a_norm_that_changed_since_the_plan() -> None:
    model = drawn(decoder())
    plan = powernorm.plan_fold(model, IDS, keep="statistics")
    with torch.no_grad():
        model[3].weight.mul_(2)
    refuses("norm '3' has changed since the fold was planned", plan.apply)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "all"}, "keep is 'all', expected 'nothing' or 'statistics'"),
        ({"keep": "statistics", "tied": "both"}, "tied is 'both', expected 'untie' or 'keep'"),
        ({"centering": "weights"}, "give keep=statistics, too"),
        ({"keep": "nothing"}, "keep='statistics' folds the weights of LayerNorm and RMSNorm"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    refuses(message, powernorm.fold, drawn(decoder()), IDS, **options)


# Centering


def test_layernorm_becomes_rmsnorm(tmp_path: Path) -> None:
    model = drawn(decoder())
    original = copy.deepcopy(model)
    report = folded(model, IDS, centering="weights")
    assert [(row.action, row.into[0]) for row in report.rows] == [("simplify", "rms")] * 3
    norms = [model.get_submodule(row.name) for row in report.rows]
    assert all(type(norm) is powernorm.RMSNorm and norm.weight is None for norm in norms)
    # All that writes to the stream has mean 0.
    assert float(model[0].weight.detach().mean(1).abs().max()) < 1e-15
    assert float(model[1].layers[2].weight.detach().mean(0).abs().max()) < 1e-15
    assert not report.is_stock
    powernorm.save(model, tmp_path / "saved")
    loaded = powernorm.load(tmp_path / "saved", drawn(decoder()))
    assert torch.equal(loaded(IDS), model(IDS))
    report.undo()
    assert torch.equal(model(IDS), original(IDS))


def test_weights_that_stay_go_into_rmsnorm() -> None:
    model = drawn(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH, bias=False)))
    (row,) = folded(model, vectors(), centering="weights").rows
    assert row.action == "simplify"
    assert "it is an output of the model" in row.reason
    assert type(model[1]) is powernorm.RMSNorm


class LayerScale(nn.Module):
    """A factor per feature on a sub-layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


UNCENTERED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], str]] = {
    "inputs": (
        lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)),
        vectors,
        "it is an input or a constant of the model",
    ),
    "another reader": (
        lambda: nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            Residual(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)),
            nn.Linear(WIDTH, 2),
        ),
        vectors,
        "linear in 2 reads it without a LayerNorm",
    ),
    "an RMSNorm": (
        lambda: nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            Residual(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)),
            nn.RMSNorm(WIDTH),
            nn.Linear(WIDTH, 2),
        ),
        vectors,
        "the statistic of 2, which does not center, reads it",
    ),
    "LayerScale": (
        lambda: nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            Residual(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), LayerScale()),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2),
        ),
        vectors,
        "mul in 1.layers.1 scales its features one by one",
    ),
    "a tied embedding": (TiedHead, lambda: IDS, "embedding.weight is tied"),
}


@pytest.mark.parametrize("name", UNCENTERED)
def test_streams_that_are_not_centered_say_why(name: str) -> None:
    build, inputs, reason = UNCENTERED[name]
    model = drawn(build())
    report = folded(model, inputs(), centering="weights")
    rows = [row for row in report.rows if row.kind == "layer"]
    assert all("it stays a LayerNorm" in row.reason and reason in row.reason for row in rows)
    assert not any(isinstance(one, powernorm.RMSNorm) for one in model.modules())
