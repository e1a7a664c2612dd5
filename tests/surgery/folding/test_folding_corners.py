"""Models on which folding could go wrong in silence: memory, shapes, sharing, types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import powernorm
from powernorm.surgery.folding.structure import FeatureAffine
from refusals import refuses
from surgery.folding.test_folding_graphs import C, Net, bn, linear, tokens
from surgery.static_models import left_of, settle


def actions(report: powernorm.surgery.FoldReport) -> dict[str, str]:
    return {row.name: left_of(row) for row in report.rows}


def agree(model: nn.Module, expected: Tensor, *inputs: object) -> None:
    found = model(*inputs).detach()
    assert (found - expected).abs().max() <= 1e-11 * expected.abs().max()


def tanh_first(run: Callable[[Net, Tensor], Tensor]) -> Callable[[Net, Tensor], Tensor]:
    return lambda m, x: run(m, torch.tanh(x))


# Memory: a folded norm gives its input itself.


def _scaled_in_place(m: Net, x: Tensor) -> Tensor:
    y = m.n(x)
    y *= 2
    return m.a(y)


def _added_in_place(m: Net, x: Tensor) -> Tensor:
    y = m.n(x)
    y += 1
    return x + m.a(y)


def _part_in_place(m: Net, x: Tensor) -> Tensor:
    y = m.n(x)
    y[:, 0] = 0
    return x + m.a(y)


def _stream_in_place(m: Net, x: Tensor) -> Tensor:
    x = m.b(x)
    y = m.n(x)
    x += 1
    return x + m.a(y)


def _residual_in_place(m: Net, x: Tensor) -> Tensor:
    y, stream = m.n(m.b(x), None, x)
    y *= 2
    return stream + m.a(y)


@pytest.mark.parametrize(
    "run",
    [_scaled_in_place, _added_in_place, _part_in_place, _stream_in_place, _residual_in_place],
)
def test_operators_in_place(run: Callable[[Net, Tensor], Tensor]) -> None:
    model = settle(Net(run, n=bn(), a=linear(), b=linear()))
    x = tokens()
    kept, expected = x.clone(), model(x.clone()).detach()
    report = powernorm.fold(model, x)
    assert actions(report) == {"n": "multiply-add"}
    assert "in place" in report.rows[0].reason
    assert torch.equal(x, kept)
    agree(model, expected, x.clone())


def test_operator_in_place_that_does_no_harm() -> None:
    def run(m: Net, x: Tensor) -> Tensor:
        stream = m.b(x)
        stream += m.a(m.n(stream))  # nothing reads the norm's output afterwards
        return m.c(stream)

    model = settle(Net(run, n=bn(), a=linear(), b=linear(), c=linear()))
    expected = model(x := tokens()).detach()
    assert actions(powernorm.fold(model, x)) == {"n": "fold"}
    agree(model, expected, x)


def test_a_model_that_works_on_its_own_input() -> None:
    model = settle(Net(lambda m, x: m.a(m.n(x.mul_(2))), n=bn(), a=linear()))
    x = tokens()
    kept = x.clone()
    powernorm.fold(model, x)
    assert torch.equal(x, kept)


def test_buffers_that_the_forward_moves() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n, self.a = bn(), linear()
            self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.a(self.n(x)) + self.calls

    model = settle(Counting())
    assert actions(powernorm.fold(model, tokens())) == {"n": "fold"}
    assert model.calls == 0


# Numbers that were made from a shape or an argument.


def test_numbers_from_shapes() -> None:
    model = settle(
        Net(lambda m, x: m.a(m.n(m.b(x)) * (1 / x.shape[1])), n=bn(), a=linear(), b=linear())
    )
    longer = tokens(2, 9, C)
    expected = model(longer).detach()
    assert actions(powernorm.fold(model, tokens())) == {"n": "fold"}
    agree(model, expected, longer)


def test_numbers_from_arguments() -> None:
    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n, self.a = bn(), linear()

        def forward(self, x: Tensor, temperature: float = 2.0) -> Tensor:
            return self.a(self.n(torch.tanh(x)) / temperature)

    model, x = settle(Tempered()), tokens()
    expected = model(x, 4.0).detach()
    powernorm.fold(model, x)
    agree(model, expected, x, 4.0)


# Who reads which weight.


class OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


FUNCTIONAL: dict[str, tuple[Callable[[Net, Tensor], Tensor], Callable[[], nn.Module]]] = {
    "by a function": (
        lambda m, x: F.linear(m.n(x), m.a.weight), lambda: linear(bias=False),
    ),
    "by a subclass": (
        lambda m, x: m.a(m.n(x)), lambda: OwnForward(C, C, bias=False, dtype=torch.float64),
    ),
    "once by the module, once by a function": (
        lambda m, x: m.a(m.n(x)) + F.linear(m.n(x), m.a.weight), lambda: linear(bias=False),
    ),
    "some rows": (
        lambda m, x: F.linear(m.n(x), m.a.weight[:3]), lambda: linear(bias=False),
    ),
    "also as a value": (
        lambda m, x: m.a(m.n(x)) + torch.tanh(m.p(m.a.weight)).sum(0), linear,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_weights_that_are_read_otherwise(name: str) -> None:
    run, build = FUNCTIONAL[name]
    model = settle(Net(tanh_first(run), n=bn(), a=build(), p=linear()))
    expected = model(x := tokens()).detach()
    report = powernorm.fold(model, x, verify=False)
    assert actions(report) == {"n": "multiply-add"}
    agree(model, expected, x)


def test_tied_biases_of_different_weights() -> None:
    model = Net(
        lambda m, x: torch.tanh(m.a(m.n(torch.tanh(x)))) + m.b(m.n(torch.tanh(x))),
        n=bn(), a=linear(), b=linear(),
    )  # fmt: skip
    model.b.bias = model.a.bias
    settle(model)
    expected = model(x := tokens()).detach()
    powernorm.fold(model, x, verify=False)
    agree(model, expected, x)


def test_norms_with_ways_of_their_own_are_left_alone() -> None:
    model = settle(nn.Sequential(bn(), linear(), bn(), linear()))
    original = model[0].forward
    model[0].forward = lambda x, *rest: original(x, *rest) * 2
    model[2].register_forward_hook(lambda _module, _args, output: output * 3)
    expected = model(x := tokens()).detach()
    report = powernorm.fold(model, x)
    assert actions(report) == {"0": "keep", "2": "keep"}
    assert "hooks or a forward of its own" in report.rows[0].reason
    agree(model, expected, x)


# Shapes.


def test_sizes_that_depend_on_values() -> None:
    model = settle(Net(lambda m, x: m.a(m.n(torch.tanh(x))[x[..., 0] > 0]), n=bn(), a=linear()))
    expected = model(x := tokens()).detach()
    powernorm.fold(model, x)
    agree(model, expected, x)


def test_rolling_through_everything() -> None:
    model = settle(Net(lambda m, x: m.a(torch.roll(m.n(torch.tanh(x)), 1)), n=bn(), a=linear()))
    expected = model(x := tokens()).detach()
    assert actions(powernorm.fold(model, x)) == {"n": "multiply-add"}
    agree(model, expected, x)


@pytest.mark.parametrize("channels", [C, 4])
def test_convolution_without_a_batch(channels: int) -> None:
    convolution = nn.Conv1d(channels, 3, 1, dtype=torch.float64)
    model = settle(Net(lambda m, x: m.a(m.n(torch.tanh(x))), n=bn(), a=convolution))
    expected = model(x := tokens(channels, C)).detach()
    powernorm.fold(model, x, verify=False)
    agree(model, expected, x)


def test_named_tuples_as_arguments() -> None:
    class Pair(NamedTuple):
        left: Tensor
        right: Tensor

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n, self.a = bn(), linear()

        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return self.a(self.n(pair[0])) + pair[1]

    assert actions(powernorm.fold(settle(Model()), (Pair(tokens(), tokens()),))) == {"n": "fold"}


# Types and scales.


def test_a_norm_in_float32_inside_a_wider_model() -> None:
    def run(m: Net, x: Tensor) -> Tensor:
        return m.a(m.n((m.e(x) + m.b(m.e(x))).float()).type_as(x))

    model = settle(Net(run, n=bn(), a=linear(), b=linear(), e=linear()))
    report = powernorm.fold(model, tokens())
    assert actions(report) == {"n": "fold"}
    assert report.errors[0].tolerance > 1e-9


def test_a_multiply_add_keeps_the_type() -> None:
    model = nn.Sequential(nn.GELU(), powernorm.BatchNorm(C), nn.GELU(), nn.Linear(C, C)).bfloat16()
    model[1].float()
    settle(model)
    x = tokens().bfloat16()
    expected = model(x).detach()
    powernorm.fold(model, x)
    assert isinstance(model[1], FeatureAffine)
    assert model(x).dtype == expected.dtype == torch.bfloat16


def test_zero_scale_beside_a_multiply_add() -> None:
    model = Net(
        lambda m, x: m.a(torch.cat([m.n(torch.tanh(x)), m.k(torch.sin(x))], 1)),
        n=bn(), k=bn(), a=linear(),
    )  # fmt: skip
    settle(model)
    with torch.no_grad():
        model.n.weight[2] = 0
    expected = model(x := tokens()).detach()
    powernorm.fold(model, x, verify=False)
    agree(model, expected, x)


def test_a_norm_without_parameters_in_a_model_without_parameters() -> None:
    norm = powernorm.BatchNorm(C, affine=False, dtype=torch.float64)
    model = settle(nn.Sequential(nn.Tanh(), norm, nn.Tanh()))
    expected = model(x := tokens()).detach()
    assert actions(powernorm.fold(model, x)) == {"1": "multiply-add"}
    agree(model, expected, x)


def test_active_dropout_draws_the_same() -> None:
    model = settle(
        Net(lambda m, x: m.a(F.dropout(m.n(torch.tanh(x)), 0.5, True)), n=bn(), a=linear())
    )
    report = powernorm.fold(model, tokens())
    assert report.errors[0].relative <= 1e-9


def test_long_streams_without_a_place_for_a_shift() -> None:
    """The search for one has to end, in depth and in breadth."""

    def run(m: Net, x: Tensor) -> Tensor:
        s = m.n(torch.tanh(x))
        for _ in range(25):
            s = s + s.mean(1, keepdim=True)
        return torch.tanh(s)

    model = settle(Net(run, n=bn()))
    assert actions(powernorm.fold(model, tokens())) == {"n": "multiply-add"}


# What is refused.


class Answer:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


def test_outputs_of_unknown_classes_count() -> None:
    def run(m: Net, x: Tensor) -> object:
        stream = m.n(m.b(x))
        return m.a(stream), Answer(stream)

    model = settle(Net(run, n=bn(), a=linear(), b=linear()))
    expected = model(x := tokens())[1].hidden.detach()
    powernorm.fold(model, x)
    assert torch.allclose(model(x)[1].hidden, expected, rtol=1e-12)


def test_outputs_that_cannot_be_compared() -> None:
    model = settle(Net(lambda m, x: m.a(m.n(x)).argmax(-1), n=bn(), a=linear()))
    refuses(r"no floating point tensor.*verify=False", powernorm.fold, model, tokens())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_part_in_torchscript_is_named() -> None:
    part = torch.jit.trace(nn.BatchNorm1d(C).eval(), torch.randn(2, C))
    model = settle(nn.Sequential(part, powernorm.BatchNorm(C)))
    refuses(r"'0' is TorchScript.*before torch\.jit", powernorm.fold, model, torch.randn(2, C))
    rows = powernorm.plan_swap(model, "bn", example_inputs=torch.randn(2, C)).rows
    assert [row.action for row in rows] == ["keep", "swap"]


class Quantized(Tensor):
    """A weight that torch.export traces as the two tensors in it, as those of torchao."""

    def __new__(cls, whole: Tensor, scale: Tensor) -> Quantized:
        return Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype)  # type: ignore[attr-defined]

    def __init__(self, whole: Tensor, scale: Tensor) -> None:
        self.whole, self.scale = whole, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, *_: object) -> Quantized:
        return cls(inner["whole"], inner["scale"])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        if func.__name__ in (
            "detach.default",
            "alias.default",
            "clone.default",
            "_to_copy.default",
        ):
            return cls(*(func(one, *args[1:], **kwargs) for one in (args[0].whole, args[0].scale)))
        plain = tree_map_only(cls, lambda one: one.whole * one.scale, args)
        return func(*plain, **kwargs)


def test_a_quantized_weight_keeps_the_norm_next_to_it() -> None:
    model = settle(Net(lambda m, x: m.b(m.n(m.a(x))), a=linear(), n=bn(), b=linear()).float())
    scale = torch.full((C, 1), 0.1)
    model.b.weight = nn.Parameter(
        Quantized((model.b.weight / scale).round().detach(), scale), requires_grad=False
    )
    x = tokens().float()
    expected = model(x)
    (row,) = powernorm.fold(model, x).rows
    assert row.action == "fold"
    assert set(row.into) == {"a.weight"}
    torch.testing.assert_close(model(x), expected)


def test_meta_models() -> None:
    with torch.device("meta"):
        model = nn.Sequential(powernorm.BatchNorm(C), nn.Linear(C, C)).eval()
    refuses("meta device", powernorm.fold, model, torch.randn(2, C))


def test_a_plan_of_another_model() -> None:
    model = settle(nn.Sequential(bn(), linear()))
    plan = powernorm.plan_fold(model, tokens())
    model.train()
    refuses("training mode", plan.apply)
    model.eval()
    model[1] = nn.Identity().eval()
    refuses("have changed since the fold was planned", plan.apply, verify=False)
    assert isinstance(model[0], powernorm.BatchNorm)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_examples_that_compare_nothing_are_refused(value: float | None) -> None:
    model = nn.Sequential(powernorm.BatchNorm(4), nn.Linear(4, 4))
    model(torch.randn(8, 4))
    x = torch.empty(0, 4) if value is None else torch.full((2, 4), value)
    refuses("nothing was compared: the outputs of Sequential", powernorm.fold, model.eval(), x)
    assert len(list(model[0].parameters())) == 2
