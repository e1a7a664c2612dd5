"""Calls that a layer has prepared: whatever changes between two steps, they are as any other.

A prepared call hands addresses to C, so that a change which nobody looks at is a wrong result, or
somebody else's memory. Each test prepares a layer's call, changes something, and compares the next
step with that of a copy, which has nothing prepared.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import powernorm
from cases import CASES, Case, case_id
from powernorm.errors import InputError
from powernorm.ops import eager
from powernorm.ops.dispatch import missing_reason, use_functions
from refusals import refuses

pytestmark = pytest.mark.skipif(bool(missing_reason("cpu")), reason="no CPU kernels")

C = 8
UNPREPARED = (
    *("dyt", "derf", "dyisru", "seednorm", "scalenorm", "biasnorm", "gatednorm", "none"),
    *("brn", "mabn", "un", "prepbn", "taper"),
)
"""Norms without kernels, or with a computation before each call."""
PREPARING = tuple(
    case
    for case in CASES
    if case.name not in UNPREPARED and case.options.get("variant") != "released"
)
BATCH = ("bn", "pnv", "rbn", "pn")
KINDS = ("bn", "rbn", "pn", "rms", "ln")
"""One of each kind of call: updated in the forward, with a penalty, by a carrier, of a token."""

Use = Callable[[nn.Module], Any]


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, C, generator=torch.Generator().manual_seed(seed))


def prepared(name: str, **options: Any) -> nn.Module:
    """A layer whose next call is prepared, in a state that is not the first."""
    layer = Case(name, options).build(C)
    layer(values(5).requires_grad_()).backward(values(5, seed=1))
    layer.zero_grad()
    assert layer._prepared is not None
    return layer


def step(layer: nn.Module, x: Tensor | None = None, mask: Tensor | None = None) -> list[Any]:
    """A step's output and gradients."""
    x = values(6, seed=2) if x is None else x
    x = x.detach().requires_grad_()
    y = layer(x, mask)
    y.backward(torch.linspace(-1, 2, y.numel()).view(y.shape).to(y.dtype))
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


def assert_same(layer: nn.Module, use: Use = step) -> None:
    """Compare a use of a layer with that of a copy, which has nothing prepared."""
    other = copy.deepcopy(layer)
    results = use(layer), use(other)
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close([*layer.buffers()], [*other.buffers()])


def next_is_prepared(layer: nn.Module, **given: Any) -> bool:
    """Is the next step a prepared call?"""
    x = values(6).requires_grad_()
    y = layer(x, **given)  # kept: torch 2.11 forgets the name of a node whose result is gone
    node = y.grad_fn
    while node is not None and "Step" not in node.name() and "Function" not in node.name():
        node = node.next_functions[0][0]
    return node is not None and "Step" in node.name()


@contextmanager
def seen_operators() -> Iterator[set[str]]:
    """The library's operators that a dispatch mode sees."""
    seen = set()

    class Observer(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func.namespace == "powernorm":
                seen.add(func._opname)
            return func(*args, **(kwargs or {}))

    with Observer():
        yield seen


@contextmanager
def served_functions() -> Iterator[set[str]]:
    """The functions that a backend of a user's serves."""
    served = set()

    class Functions:
        def __getattr__(self, name: str) -> Any:
            served.add(name)
            return getattr(eager, name)

    with use_functions(Functions()):
        yield served


# Without a change.


@pytest.mark.parametrize("case", PREPARING, ids=case_id)
def test_the_second_call_is_prepared_and_as_the_first(case: Case) -> None:
    layer = case.build(C)
    step(layer)
    layer.zero_grad()
    assert next_is_prepared(layer)
    assert_same(layer)


@pytest.mark.parametrize("case", PREPARING, ids=case_id)
def test_shapes_and_masks_change_from_step_to_step(case: Case) -> None:
    layer, other = case.build(C), case.build(C)
    for number, shape in enumerate(((5,), (2, 3), (1,), (0,), (), (2, 2, 5), (300,), (2, 0))):
        for mask in (None, torch.arange(values(*shape).numel() // C).view(shape) % 3 == 1):
            other.__dict__["_prepared"] = None
            x = values(*shape, seed=number)
            for one, two in zip(step(layer, x, mask), step(other, x, mask), strict=True):
                torch.testing.assert_close(one, two, equal_nan=True)
            layer.zero_grad()
            other.zero_grad()
    torch.testing.assert_close([*layer.buffers()], [*other.buffers()])


# Inputs and masks.

INPUTS: dict[str, Callable[[], Tensor]] = {
    "float64": lambda: values(6, seed=2).double(),
    "bfloat16": lambda: values(6, seed=2).bfloat16(),
    "strided": lambda: values(6, 2, seed=2)[:, 0],
    "transposed": lambda: values(6, 2, seed=2).transpose(0, 1),
    "negative view": lambda: torch._neg_view(values(6, seed=2)),
    "zeros without memory": lambda: torch._efficientzerotensor((6, C)),
}


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", KINDS)
def test_another_input(name: str, kind: str) -> None:
    assert_same(prepared(name), lambda layer: step(layer, INPUTS[kind]()))


@pytest.mark.parametrize("kind", ["strided", "transposed"])
@pytest.mark.parametrize("name", [*KINDS, "gs", "gn", "adanorm"])
def test_the_first_input_is_strided(name: str, kind: str) -> None:
    # What is prepared must not hold the strides of the first input.
    layer = Case(name).build(C)
    step(layer, INPUTS[kind]())
    layer.zero_grad()
    assert_same(layer)


@pytest.mark.parametrize("name", ["bn", "rbn", "pn"])
def test_statistics_of_another_type_are_not_kept_by_address(name: str) -> None:
    # The kernels get a copy, which is gone by the next step.
    layer = Case(name, {"warmup_steps": 0} if name == "pn" else {}).build(C)
    step(layer, values(6).double())
    assert layer._prepared is None
    layer.zero_grad()
    assert_same(layer, lambda layer: step(layer, values(6).double()))


@pytest.mark.parametrize("name", ["bn", "rbn", "pn"])
def test_strided_mask(name: str) -> None:
    mask = torch.tensor([[True, False], [False, True], [True, True]] * 2)[:, 0]
    assert_same(prepared(name), lambda layer: step(layer, None, mask))


@pytest.mark.parametrize(
    "mask",
    [torch.zeros(5, dtype=torch.bool), torch.zeros(6), torch.zeros(6, 1, dtype=torch.bool)],
    ids=("short", "float", "long"),
)
@pytest.mark.parametrize("name", ["bn", "rbn", "pn", "rms"])
def test_wrong_mask(name: str, mask: Tensor) -> None:
    layer = prepared(name)
    refuses("padding_mask has", layer, values(6), mask)
    refuses("padding_mask is on", layer, values(6), torch.zeros(6, dtype=torch.bool, device="meta"))


@pytest.mark.parametrize("name", KINDS)
def test_wrong_features(name: str) -> None:
    layer = prepared(name)
    for x in (torch.zeros(3, C - 1), torch.zeros(4, 2 * C), torch.zeros(())):
        refuses("built for", layer, x)


@pytest.mark.parametrize("name", BATCH)
def test_mask_of_a_scope(name: str) -> None:
    def use(layer: nn.Module) -> list[Any]:
        with powernorm.padding_mask(torch.arange(6) > 2):
            return step(layer)

    assert_same(prepared(name), use)


class Tagged(Tensor):
    """A tensor of a kind of its own, which sees what is done to it."""

    seen: ClassVar[set[str]] = set()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        cls.seen.add(str(func))
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("name", KINDS)
def test_tensors_of_another_kind(name: str) -> None:
    layer = prepared(name)
    weight = nn.Parameter(torch.ones(C)).as_subclass(Tagged)
    for given, x in ({}, values(6).as_subclass(Tagged)), ({"weight": weight}, values(6)):
        Tagged.seen.clear()
        torch.func.functional_call(layer, given, (x,))
        assert any("powernorm." in operator for operator in Tagged.seen)


# Parameters.

PARAMETERS: dict[str, Callable[[], Tensor]] = {
    "new": lambda: torch.linspace(1, 2, C),
    "float64": lambda: torch.linspace(1, 2, C).double(),
    "bfloat16": lambda: torch.linspace(1, 2, C).bfloat16(),
    "strided": lambda: torch.linspace(1, 2, 2 * C)[::2],
    "negative view": lambda: torch._neg_view(torch.linspace(1, 2, C)),
    "zeros without memory": lambda: torch._efficientzerotensor((C,)),
}


@pytest.mark.parametrize("which", ["weight", "bias"])
@pytest.mark.parametrize("kind", PARAMETERS)
@pytest.mark.parametrize("name", ["bn", "rbn", "pn", "ln"])
def test_other_parameter_in_a_call(name: str, kind: str, which: str) -> None:
    def use(layer: nn.Module) -> list[Any]:
        given = PARAMETERS[kind]().requires_grad_()
        x = values(6, seed=2).requires_grad_()
        y = torch.func.functional_call(layer, {which: given}, (x,))
        y.backward(values(6, seed=3))
        # Written out: a kernel that cannot read these would agree with itself.
        other = getattr(layer, "bias" if which == "weight" else "weight").detach()
        plain = given.detach().resolve_neg() * 1.0
        own = (y.detach() - other) if which == "weight" else y.detach() - plain
        scale = plain if which == "weight" else other
        return [y.detach(), x.grad, given.grad, (own / scale).nan_to_num()]

    assert_same(prepared(name), use)
    layer = prepared(name)
    x = values(6, seed=2)
    expected = copy.deepcopy(layer)
    with torch.no_grad():
        getattr(expected, which).copy_(PARAMETERS[kind]())
    got = torch.func.functional_call(layer, {which: PARAMETERS[kind]()}, (x,))
    torch.testing.assert_close(got, expected(x), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", KINDS)
def test_wrong_number_of_parameters(name: str) -> None:
    layer = prepared(name)
    for size in (1, 2 * C):
        with pytest.raises((InputError, RuntimeError)):
            torch.func.functional_call(layer, {"weight": torch.ones(size)}, (values(6),))


@pytest.mark.parametrize("name", KINDS)
def test_changed_parameters(name: str) -> None:
    def other_memory(layer: nn.Module) -> None:
        layer.weight.data = torch.linspace(1, 2, C)

    def constant(layer: nn.Module) -> None:
        for parameter in layer.parameters():
            parameter.requires_grad_(False)

    def none(layer: nn.Module) -> None:
        layer.weight = None

    def bias_alone(layer: nn.Module) -> None:
        layer.weight, layer.bias = None, nn.Parameter(torch.ones(C))

    for change in (other_memory, constant, none, bias_alone):
        layer = prepared(name)
        change(layer)
        assert_same(layer)


@pytest.mark.parametrize("name", KINDS)
def test_memory_of_weights_replaced_before_the_backward(name: str) -> None:
    def use(layer: nn.Module) -> list[Any]:
        x = values(6, seed=2).requires_grad_()
        y = layer(x)
        layer.weight.data = torch.linspace(1, 2, C).bfloat16()  # as `layer.bfloat16()` does
        y.backward(values(6, seed=3))
        return [x.grad, layer.weight.grad]

    assert_same(prepared(name), use)


@pytest.mark.parametrize("name", ["bn", "rbn", "pn", "ln"])
def test_bias_was_narrow_when_the_call_was_prepared(name: str) -> None:
    layer = Case(name).build(C)
    layer.bias.data = layer.bias.data.bfloat16()
    step(layer)
    layer.zero_grad()
    layer.bias.data = layer.bias.data.float()

    def strided(layer: nn.Module) -> list[Any]:
        layer(values(6).requires_grad_()).backward(torch.full((C, 6), 0.1234567).mT)
        return [layer.bias.grad]

    assert_same(layer, strided)


# Settings and state.

SETTINGS = (
    *((name, "eps", 0.3) for name in (*BATCH, "rms", "ln", "gn", "gs", "adanorm", "detach")),
    *((name, "groups", 2) for name in (*BATCH, "gn", "gs")),
    *((name, "momentum", 0.7) for name in BATCH),
    *((name, "variant", "released") for name in (*BATCH, "adanorm", "ln-simple", "detach")),
    ("bn", "momentum", None),
    ("rbn", "mean_penalty", 3.0),
    ("pn", "backward_momentum", 0.9),
    ("pn", "decay", "floored"),
    ("pn", "max_ratio", 1.0),
    ("adanorm", "k", 0.3),
    ("adanorm", "scale", 3.0),
    ("detach", "detach_mean", False),
    ("detach", "detach_std", False),
)


@pytest.mark.parametrize(("name", "setting", "value"), SETTINGS)
def test_changed_setting(name: str, setting: str, value: Any) -> None:
    options = {"warmup_steps": 0} if name == "pn" else {}
    layer = prepared(name, **options)
    setattr(layer, setting, value)

    def use(layer: nn.Module) -> list[Any]:
        results = step(layer, 3 * values(6, seed=2), torch.arange(6) > 3)
        return [*results, layer.penalty().detach()] if name == "rbn" else results

    assert_same(layer, step if name == "rbn" else use)
    layer.zero_grad()
    assert_same(layer, step)


@pytest.mark.parametrize("name", BATCH)
def test_replaced_buffers(name: str) -> None:
    def moved(layer: nn.Module, change: Callable[[str, Tensor], None]) -> None:
        for key, buffer in list(layer.named_buffers()):
            if buffer.ndim:
                change(key, torch.linspace(1, 3, C))

    def assigned(layer: nn.Module) -> None:
        moved(layer, lambda key, new: setattr(layer, key, new))

    def of_data(layer: nn.Module) -> None:
        moved(layer, lambda key, new: setattr(getattr(layer, key), "data", new))

    def loaded(layer: nn.Module) -> None:
        state = {key: value.clone() for key, value in layer.state_dict().items()}
        layer.load_state_dict(state, assign=True)

    changes = (assigned, of_data, loaded, nn.Module.double, nn.Module.share_memory)
    for change in changes:
        layer = prepared(name, **({"warmup_steps": 0} if name == "pn" else {}))
        change(layer)
        dtype = layer.weight.dtype
        # All padding: batch norms then normalize by the running statistics.
        for mask in (None, torch.ones(6, dtype=torch.bool)):
            assert_same(layer, lambda layer, m=mask, d=dtype: step(layer, values(6).to(d), m))
            layer.zero_grad()


@pytest.mark.parametrize("name", ["bn", "pnv", "rbn", "pn"])
def test_buffers_of_a_call_at_the_same_address(name: str) -> None:
    layer = Case(name, {"warmup_steps": 0} if name == "pn" else {}).build(C)
    memory = {
        key: torch.linspace(1, 5, 2 * C) if buffer.ndim else buffer.clone()
        for key, buffer in layer.named_buffers()
    }
    mask = torch.ones(6, dtype=torch.bool)

    def call(layer: nn.Module, part: slice) -> Tensor:
        buffers = {key: value[part] if value.ndim else value for key, value in memory.items()}
        return torch.func.functional_call(layer, buffers, (values(6).requires_grad_(), mask))

    call(layer, slice(C))
    expected = call(copy.deepcopy(layer), slice(None, None, 2))
    torch.testing.assert_close(call(layer, slice(None, None, 2)), expected)
    call(layer, slice(C))
    refuses("expected 8 values", call, layer, slice(C - 1))


@pytest.mark.parametrize("name", ["bn", "pnv", "rbn", "pn"])
def test_other_strides_at_the_same_address(name: str) -> None:
    layer = Case(name, {"warmup_steps": 0} if name == "pn" else {}).build(C)
    memory = torch.linspace(1, 5, 2 * C)
    key = "running_mean" if name in ("bn", "rbn") else "running_second_moment"
    layer.get_buffer(key).data = memory[:C]
    for _ in range(2):
        step(layer, values(6))
    expected = copy.deepcopy(layer)
    layer.get_buffer(key).data = memory[::2]
    expected.get_buffer(key).copy_(memory[::2])
    between = memory[1::2].clone()
    for one in (layer, expected):
        step(one, values(6))
    torch.testing.assert_close(memory[::2], expected.get_buffer(key))
    assert torch.equal(memory[1::2], between)


@pytest.mark.parametrize("name", BATCH)
def test_statistics_of_several_batches_or_processes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = prepared(name)

    def held(layer: nn.Module) -> list[Any]:
        with powernorm.training_step(layer):
            return [*step(layer), *step(layer, values(4))]

    assert_same(layer, held)
    assert layer.call_settings() is not None
    monkeypatch.setattr(type(layer), "group_name", "several processes")
    assert layer.call_settings() is None


def test_scale_of_the_loss() -> None:
    layer = prepared("pn", warmup_steps=0)
    layer.set_loss_scale(8.0, None)
    assert_same(layer)


@pytest.mark.parametrize("name", ["bn", "pn", "rms"])
def test_pickles_hold_nothing_prepared(name: str) -> None:
    layer = prepared(name)
    data = pickle.dumps(layer)
    # Who reads it names the classes that may be read.
    assert b"kernels" not in data
    for other in (pickle.loads(data), copy.copy(layer), copy.deepcopy(layer)):
        assert other._prepared is None
    assert_same(layer)


# What surrounds a call.


@pytest.mark.parametrize("name", ["pn", "rbn"])
def test_a_repetition_prepares_nothing(name: str) -> None:
    # It reads copies, of what the statistics were, which go with the graph.
    layer = Case(name, {"warmup_steps": 0} if name == "pn" else {}).build(C)
    x = values(6).requires_grad_()
    checkpoint(layer, x, use_reentrant=False).backward(values(6, seed=1))
    assert layer._prepared is None
    layer.zero_grad()
    assert_same(layer)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("watched", [seen_operators, served_functions])
def test_modes_and_other_backends_see_the_call(name: str, watched: Any) -> None:
    layer = prepared(name)
    x = values(6).requires_grad_()
    with watched() as seen:
        y = layer(x)
    assert seen
    y = layer(x)
    with watched() as seen:
        y.backward(values(6))
    assert seen


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", BATCH)
def test_transforms_are_refused(name: str) -> None:
    layer, x = prepared(name), values(6)
    refuses(r"torch\.func", torch.func.grad(lambda x: layer(x).sum()), x)
    with forward_ad.dual_level(), pytest.raises(InputError, match=r"torch\.func"):
        layer(forward_ad.make_dual(x, x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_transforms_of_a_token_norm() -> None:
    assert_same(prepared("rms"), lambda layer: [*torch.func.jvp(layer, (values(6),), (values(6),))])
    assert_same(prepared("rms"), lambda layer: [torch.func.vmap(layer)(values(2, 3))])


@pytest.mark.filterwarnings("ignore")  # of the tracer
def test_traced_call() -> None:
    traced = torch.jit.trace(prepared("rms"), values(6), check_trace=False)
    torch.testing.assert_close(traced(values(3)), prepared("rms")(values(3)))
    # Torch's own operators, not the function of a prepared call.
    assert "aten::rsqrt" in str(traced.inlined_graph)


@pytest.mark.parametrize("name", KINDS)
def test_without_gradients(name: str) -> None:
    layer = prepared(name)
    with torch.no_grad():
        assert not layer(values(6).requires_grad_()).requires_grad
    with torch.inference_mode():
        assert layer(values(6)).is_inference()
    assert_same(layer)


# Gradients.

GRADIENTS: dict[str, Callable[[Tensor], None]] = {
    "expanded": lambda y: y.sum().backward(),
    "strided": lambda y: y.backward(torch.linspace(-1, 1, 6 * C).view(C, 6).mT),
    "negative view": lambda y: y.backward(torch._neg_view(values(6, seed=3))),
    "zeros without memory": lambda y: y.backward(torch._efficientzerotensor((6, C))),
    "twice": lambda y: [y.backward(values(6, seed=s), retain_graph=True) for s in (3, 4)],
}


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("name", KINDS)
def test_gradient_that_arrives(name: str, kind: str) -> None:
    def use(layer: nn.Module) -> list[Any]:
        x = values(6, seed=2).requires_grad_()
        GRADIENTS[kind](layer(x))
        return [x.grad, layer.weight.grad]

    assert_same(prepared(name), use)


@pytest.mark.parametrize("name", ["bn", "pn", "rms", "ln"])
def test_gradient_of_another_kind(name: str) -> None:
    y = prepared(name)(values(6).requires_grad_())
    Tagged.seen.clear()
    y.backward(values(6, seed=3).as_subclass(Tagged))
    assert any("powernorm." in operator for operator in Tagged.seen)


@pytest.mark.parametrize("name", KINDS)
def test_memory_of_the_input_replaced_before_the_backward(name: str) -> None:
    def use(layer: nn.Module) -> list[Any]:
        x = values(6, seed=2).requires_grad_()
        y = layer(x)
        x.data = values(C, seed=4)[:, :6].mT
        y.backward(values(6, seed=3))
        return [layer.weight.grad]

    assert_same(prepared(name), use)


@pytest.mark.parametrize("name", ["rms", "ln", "gn", "adanorm"])
def test_second_derivative(name: str) -> None:
    def use(layer: nn.Module) -> list[Any]:
        x = values(6, seed=2).requires_grad_()
        first = torch.autograd.grad(layer(x), x, values(6, seed=3), create_graph=True)[0]
        first.square().sum().backward()
        return [x.grad]

    assert_same(prepared(name), use)


@pytest.mark.parametrize("kind", ["sum", "alone", "twice", "gradient"])
def test_penalty(kind: str) -> None:
    def use(layer: nn.Module) -> list[Any]:
        x = values(6, seed=2).requires_grad_()
        y = layer(x)
        again = layer(2 * x) if kind == "twice" else y
        penalty = layer.penalty()
        if kind == "gradient":
            return [penalty.detach(), *torch.autograd.grad(penalty, x)]
        loss = penalty if kind == "alone" else penalty + y.square().mean() + again.mean()
        loss.backward()
        return [penalty.detach(), x.grad]

    assert_same(prepared("rbn"), use)


@pytest.mark.parametrize("kind", ["strided", "negative view", "zeros without memory"])
def test_gradient_of_statistics(kind: str) -> None:
    # As a loss of the statistics themselves leaves it.
    def use(layer: nn.Module) -> list[Any]:
        x = values(6, seed=2).requires_grad_()
        y, penalty = layer(x), layer.penalty()
        node = y.grad_fn.next_functions[0][0]  # behind the one that owns what is pending
        given = torch.linspace(-1, 1, 6 * C).view(6, C)
        given = {
            "strided": given.view(C, 6).mT,
            "negative view": torch._neg_view(given),
            "zeros without memory": torch._efficientzerotensor((6, C)),
        }[kind]
        node.register_prehook(lambda grads: (*grads[:-1], given))
        ((y * values(6, seed=3)).sum() + penalty).backward()
        return [x.grad]

    assert_same(prepared("rbn"), use)


def test_anomaly_mode_looks_at_gradients_that_are_needed() -> None:
    # ∂L/∂x is not a number, and nobody asks for it.
    layer = prepared("ln")
    layer.weight.data.fill_(float("inf"))
    y = layer(values(6))
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        y.backward(torch.ones(6, C))
    assert layer.bias.grad.isfinite().all()


@pytest.mark.parametrize("name", ["bn", "pnv"])
def test_writes_to_buffers_count_as_versions(name: str) -> None:
    # Autograd and checkpoints see by them that a buffer has changed in place.
    layer = prepared(name)
    before = [buffer._version for buffer in layer.buffers()]
    assert next_is_prepared(layer)
    after = [buffer._version for buffer in layer.buffers()]
    assert all(one < two for one, two in zip(before, after, strict=True))
