"""Folding of small graphs: operators that are followed, obstacles, and refusals."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import powernorm
from powernorm.errors import InputError
from refusals import refuses
from surgery.static_models import left_of, settle

C = 6


class Net(nn.Module):
    """Parts by name and a function of (parts, input)."""

    def __init__(self, run: Callable[[Net, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Together(nn.ModuleList):
    """Models that are traced at once, which is what costs."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return [part(x) for part in self]


def bn() -> nn.Module:
    return powernorm.BatchNorm(C, dtype=torch.float64)


def linear(bias: bool = True) -> nn.Linear:
    return nn.Linear(C, C, bias=bias, dtype=torch.float64)


def tokens(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 5, C)), dtype=torch.float64)


def folded(model: nn.Module, x: Tensor | None = None) -> dict[str, str]:
    """Fold a settled model, check its outputs, and give the action of each norm."""
    x = tokens() if x is None else x
    settle(model)
    expected = model(x).detach()
    report = powernorm.fold(model, x)
    gap = (model(x).detach() - expected).abs().max() / expected.abs().max()
    assert gap <= 1e-12
    return {row.name: left_of(row) for row in report.rows}


def reasons(model: nn.Module, x: Tensor | None = None) -> dict[str, str]:
    plan = powernorm.plan_fold(settle(model), tokens() if x is None else x)
    return {row.name: row.reason for row in plan.rows if row.reason}


def net(run: Callable[[Net, Tensor], Tensor], names: str, **parts: nn.Module) -> Net:
    """A model of parts: norms where a name begins with n, linears elsewhere, and others."""
    own = {name: bn() if name.startswith("n") else linear() for name in names.split()}
    return Net(run, **own, **parts)


FOLDING: dict[str, Callable[[], nn.Module]] = {
    "into the linear behind": lambda: nn.Sequential(bn(), linear()),
    "into a linear that gets a bias": lambda: nn.Sequential(bn(), linear(bias=False)),
    "into the linear before": lambda: nn.Sequential(linear(), bn(), nn.GELU()),
    "two norms in a row": lambda: nn.Sequential(linear(), bn(), bn(), linear()),
    "fan-out": lambda: net(
        lambda m, x: m.a(m.n(x)) * torch.sigmoid(m.b(m.n(x))), "n a", b=linear(False)
    ),
    "through dropout and identity": lambda: nn.Sequential(
        bn(), nn.Dropout(0.5), nn.Identity(), linear()
    ),
    "through reshapes": lambda: net(
        lambda m, x: m.a(m.n(x).reshape(-1, C)[None].transpose(0, 1).contiguous()), "n a"
    ),
    "through a choice of tokens": lambda: net(
        lambda m, x: m.a(m.n(x)[:, 1:].flip(1)) + m.a2(m.n(x)[:, 0])[:, None], "n a a2"
    ),
    "through tokens by index": lambda: net(
        lambda m, x: m.a(m.n(x)[torch.arange(2), torch.tensor([1, 3])]), "n a"
    ),
    "through concatenation": lambda: net(
        lambda m, x: m.a(torch.cat([m.n(x), m.n(2 * x)], dim=1)), "n a"
    ),
    "through a mean over tokens": lambda: net(lambda m, x: m.a(m.n(m.b(x)).mean(1)), "n a b"),
    "through a masked mean": lambda: net(
        lambda m, x: m.a((m.n(m.b(x)) * _weights(x)).sum(1) / _weights(x).sum(1)), "n a b"
    ),
    "through masked_fill": lambda: net(
        lambda m, x: m.a(m.n(m.b(x)).masked_fill(_weights(x) < 0.5, 0.0)), "n a b"
    ),
    "through numbers": lambda: net(lambda m, x: m.a(-(m.n(m.b(x)) * 3.0) / 2.0), "n a b"),
    "in place": lambda: net(lambda m, x: m.a(m.n(m.b(x).mul_(2.0)).add_(m.b2(x))), "n a b b2"),
    "pre-norm stream": lambda: net(
        lambda m, x: m.h(m.n2(_then(m.e(x), lambda s: s + m.a(m.n(s))))), "e n a n2 h"
    ),
    "post-norm stream": lambda: net(
        lambda m, x: m.h(
            _then(
                m.n(_then(m.e(x), lambda s: s + m.a(s))),
                lambda s: m.n2(s - m.b(torch.tanh(m.c(s)))),
            )
        ),
        "e n a n2 b c h",
    ),
    "post-norm stream that is the output": lambda: net(
        lambda m, x: m.n2(_then(m.n(_then(m.e(x), lambda s: s + m.a(s))), lambda s: s + m.b(s))),
        "e n a n2 b",
    ),
    "post-norm with layer scale": lambda: net(
        lambda m, x: m.h(m.n(_then(m.e(x), lambda s: s + m.a(s) * m.g.weight[0]))),
        "e n a h",
        g=nn.Linear(C, 1, bias=False, dtype=torch.float64),
    ),
    "DeepNorm's number on the stream": lambda: net(
        lambda m, x: m.h(
            _then(m.n(_then(m.e(x), lambda s: 1.5 * s + m.a(s))), lambda s: m.n2(1.5 * s + m.b(s)))
        ),
        "e n a n2 b h",
    ),
    "a scale of each head": lambda: net(
        lambda m, x: m.h(torch.tanh(x) + m.n(m.a(x) * m.g.weight[0].repeat_interleave(2))),
        "h n a",
        g=nn.Linear(C // 2, 1, bias=False, dtype=torch.float64),
    ),
    "scale of zero in front of a linear": lambda: nn.Sequential(
        prepared(lambda weight: weight[2].zero_()), linear()
    ),
    "torch's BatchNorm1d": lambda: nn.Sequential(
        nn.Conv1d(5, 5, 1, dtype=torch.float64), _settled_batch_norm(5), nn.ReLU()
    ),
}


def _weights(x: Tensor) -> Tensor:
    return (x[..., :1] > 0).double() + 0.25


def _then(value: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    return function(value)


def prepared(edit: Callable[[Tensor], object]) -> nn.Module:
    """A norm with statistics, whose γ is edited."""
    norm = settle(nn.ModuleList([bn()]))[0]
    with torch.no_grad():
        edit(norm.weight)
    norm.is_prepared = True
    return norm


def _settled_batch_norm(features: int) -> nn.Module:
    norm = nn.BatchNorm1d(features, dtype=torch.float64)
    norm(torch.randn(20, features, dtype=torch.float64) * 2 + 1)
    return norm


Results = dict[str, list[tuple[str, str]]]


def folded_together(models: Iterable[nn.Module], names: Iterable[str]) -> Results:
    """Fold models at once, check their outputs, and give what is left of their norms and why."""
    together, x = settle(Together(models)), tokens()
    expected = together(x)
    rows = powernorm.fold(together, x).rows
    found: Results = {}
    for index, name in enumerate(names):
        before, after = expected[index].detach(), together[index](x).detach()
        assert (after - before).abs().max() <= 1e-12 * before.abs().max(), name
        own_name = rf"\b{index}\.| in {index}\b(?!\.)"
        own = [row for row in rows if row.name.startswith(f"{index}.")]
        # The reasons as they are of the model alone.
        found[name] = [(left_of(row), re.sub(own_name, "", row.reason)) for row in own]
    return found


def test_folds() -> None:
    found = folded_together((build() for build in FOLDING.values()), FOLDING)
    assert [name for name, rows in found.items() if {left for left, _ in rows} != {"fold"}] == []


STANDING: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "input and output are the user's": (lambda: net(lambda m, x: m.n(x), "n"), "an output"),
    "in front of a non-linearity": (
        lambda: nn.Sequential(nn.GELU(), bn(), nn.GELU()),
        "gelu in 2 needs the original values",
    ),
    "behind a computed weight": (
        lambda: net(lambda m, x: F.linear(m.n(torch.tanh(x)), m.a.weight * 2), "n a"),
        "linear needs the original values",
    ),
    "its input and its output are added": (
        lambda: net(lambda m, x: m.a(_then(m.b(x), lambda s: s + m.n(s))), "n a b"),
        "added to each other",
    ),
    "the features are split": (
        lambda: net(
            lambda m, x: torch.tanh(m.n(torch.tanh(x)).unflatten(-1, (2, 3))).flatten(2), "n"
        ),
        "unflatten|view|reshape",
    ),
    "scale of zero in a stream": (
        lambda: net(
            lambda m, x: m.h(_then(m.n(m.e(x)), lambda s: s + m.a(s))),
            "e a h",
            n=prepared(lambda weight: weight[2].zero_()),
        ),
        r"scale is 0 in 1 of 6 features",
    ),
    "a weight that two places use": (
        lambda: net(lambda m, x: m.a(m.n(m.a(x))), "n a"),
        "a.weight is used several times",
    ),
    "a shift in front of zero padding": (
        lambda: net(
            lambda m, x: m.c(m.n(torch.tanh(x)).transpose(1, 2)),
            "n",
            c=nn.Conv1d(C, 3, 3, padding=1, dtype=torch.float64),
        ),
        "has nowhere to go: conv1d in c pads with zeros",
    ),
    "a linear without a place for a bias": (
        lambda: net(lambda m, x: F.linear(m.n(torch.tanh(x)), m.a.weight), "n", a=_BareLinear()),
        "has nowhere to go: linear has no place for a bias",
    ),
    "scales that leave float's range": (
        lambda: nn.Sequential(linear(), tiny(), tiny(), linear()),
        "leaves float's range",
    ),
}


class _BareLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(C, C, dtype=torch.float64))


def tiny() -> nn.Module:
    return prepared(lambda weight: weight[0].fill_(1e-25))


@pytest.fixture(scope="module")
def standing() -> Results:
    return folded_together((build() for build, _ in STANDING.values()), STANDING)


@pytest.mark.parametrize("name", STANDING)
def test_stays_as_a_multiply_add_and_says_why(name: str, standing: Results) -> None:
    ((left, reason),) = [row for row in standing[name] if row[1]]
    assert left == "multiply-add"
    assert re.search(STANDING[name][1], reason)


def test_norm_that_is_used_twice() -> None:
    def run(m: Net, x: Tensor) -> Tensor:
        return m.b(m.n(torch.tanh(m.a(m.n(x)))))

    assert folded(net(run, "n a b")) == {"n": "fold"}


def test_norm_that_is_used_twice_and_cannot_fold() -> None:
    def run(m: Net, x: Tensor) -> Tensor:
        return torch.tanh(m.n(torch.tanh(m.a(m.n(x)))))

    assert folded(net(run, "n a")) == {"n": "multiply-add"}


def test_torch_batch_norm_that_cannot_fold_is_a_multiply_add() -> None:
    model = nn.Sequential(nn.Tanh(), _settled_batch_norm(5), nn.Tanh())
    assert folded(nn.Sequential(bn(), linear(), model)) == {"0": "fold", "2.1": "multiply-add"}
    assert model[1].feature_dim == 1


COMPUTED: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "weight_norm": (parametrizations.weight_norm, "remove_parametrizations(module, 'weight')"),
    "orthogonal": (parametrizations.orthogonal, "remove_parametrizations(module, 'weight')"),
    "older weight_norm": (nn.utils.weight_norm, "remove_weight_norm(module, 'weight')"),
    "older spectral_norm": (nn.utils.spectral_norm, "remove_spectral_norm(module, 'weight')"),
    "prune": (
        lambda part: prune.random_unstructured(part, "weight", 0.5),
        "prune.remove(module, 'weight')",
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_computed_weights_are_named() -> None:
    models = [nn.Sequential(nn.Tanh(), bn(), change(linear())) for change, _ in COMPUTED.values()]
    for name, rows in folded_together(models, COMPUTED).items():
        ((left, reason),) = rows
        assert left == "multiply-add"
        assert "linear in 2 has a weight that is computed" in reason
        assert COMPUTED[name][1] in reason


def test_an_original_that_overflows_is_told() -> None:
    model = settle(nn.Sequential(linear(), bn())).float()
    x = torch.randn(2, 5, C)
    x[0] *= 1e20
    with torch.no_grad():
        model[0].weight.mul_(1e20)
        model[1].weight.mul_(1e-20)
    refuses(r"itself hold infinity or NaN in torch\.float32", powernorm.fold, model, x)
    assert powernorm.fold(model.double(), x.double()).rows[0].action == "fold"


def test_what_the_example_does_not_use_stays() -> None:
    model = net(lambda m, x: m.a(m.n(x)), "n a", unused=bn())
    assert "does not use it" in reasons(model)["unused"]
    assert folded(model) == {"n": "fold", "unused": "keep"}


def test_dynamic_norms_are_listed() -> None:
    layer = powernorm.PowerNorm(C, dtype=torch.float64, warmup_steps=0)
    model = nn.Sequential(bn(), linear(), layer, nn.LayerNorm(C, dtype=torch.float64))
    assert folded(model) == {"0": "fold", "2": "keep", "3": "keep"}


def test_released_variant_with_a_mask_stays() -> None:
    norm = powernorm.BatchNorm(C, variant="released", dtype=torch.float64)
    model = settle(nn.Sequential(norm, linear()))
    x = tokens()
    with powernorm.padding_mask(torch.arange(5).expand(2, 5) > 2):
        (row,) = powernorm.plan_fold(model, x).rows
    assert (row.action, "released" in row.reason) == ("keep", True)
    assert folded(model) == {"0": "fold"}


# Bad input


def test_training_mode_is_refused() -> None:
    model = nn.Sequential(bn(), linear())
    model(tokens())
    refuses(r"training mode.*model\.eval\(\)", powernorm.fold, model, tokens())
    settle(model)
    model[1].train()
    refuses(r"training mode \('1'\)", powernorm.fold, model, tokens())


def test_uncalibrated_statistics_are_refused() -> None:
    model = nn.Sequential(linear(), bn(), linear()).eval()
    refuses(r"'1' \(BatchNorm\).*calibrate", powernorm.fold, model, tokens())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_scales_are_refused(value: float) -> None:
    model = settle(nn.Sequential(bn(), linear()))
    with torch.no_grad():
        model[0].weight[1] = value
    refuses(r"scale of '0' .* not finite in 1 of 6", powernorm.fold, model, tokens())


def test_weights_that_do_not_fit_the_type_are_refused() -> None:
    model = settle(nn.Sequential(bn(), linear()))
    with torch.no_grad():
        model[0].weight.mul_(1e3)
        model[1].weight.fill_(1e3)
    model.half()
    before = model[1].weight.clone()
    with pytest.raises(InputError, match=r"1\.weight do not fit into torch\.float16"):
        powernorm.fold(model, tokens().half(), verify=False)
    assert torch.equal(model[1].weight, before)
    assert isinstance(model[0], powernorm.BatchNorm)


def test_no_static_norm() -> None:
    model = nn.Sequential(nn.LayerNorm(C), nn.Linear(C, C)).eval()
    with pytest.raises(InputError, match=r"no static norm to fold \(it holds LayerNorm\)"):
        powernorm.fold(model, torch.randn(2, C))


def test_a_norm_alone() -> None:
    norm = settle(nn.ModuleList([bn()]))[0]
    refuses("itself a norm", powernorm.fold, norm, tokens())


def test_example_inputs() -> None:
    model = settle(nn.Sequential(bn(), linear()))
    refuses(r"fails on the example inputs.*6 features", powernorm.fold, model, tokens(2, 5))
    refuses("example_inputs is a str", powernorm.fold, model, "tokens")


def test_a_model_that_cannot_be_traced() -> None:
    model = settle(net(lambda m, x: m.a(m.n(x)) if float(x.sum()) > 0 else x, "n a"))
    refuses(r"Net cannot be planned: torch\.export", powernorm.fold, model, tokens())


def test_verification_catches_what_the_graph_does_not_show() -> None:
    calls: list[None] = []

    def run(m: Net, x: Tensor) -> Tensor:
        calls.append(None)
        return m.a(m.n(x)) * len(calls)

    model = settle(net(run, "n a"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    refuses(r"does not give the original's outputs.*nothing", powernorm.fold, model, tokens())
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
