"""Compiled by inductor = eager, over several steps, with and without activation checkpointing.

The obvious implementations of running statistics give silently wrong gradients here, so every
stateful norm is tested under inductor itself.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import powernorm
from cases import CASES, KEEPING_STATE, Case, case_id
from covering import some_default
from powernorm.norms import NORMS
from refusals import refuses

STEPS = 6
COMPILED = tuple(
    case
    for case in CASES
    if case in KEEPING_STATE
    and case.options.get("variant") != "released"
    and "affine" not in case.options
)


def first_of_each_name() -> list[Case]:
    return list({case.name: case for case in reversed(CASES)}.values())


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(8, 8), norm, nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        y: Tensor = self.out(torch.tanh(self.norm(self.into(x), mask)))
        return x + y


class Net(nn.Module):
    def __init__(self, norms: list[nn.Module], checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(norm) for norm in norms)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, mask, use_reentrant=False)
            else:
                x = block(x, mask)
        return x


def train(net: nn.Module, call: Callable[..., Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for t in range(STEPS):
        x = torch.randn(3, 5, 8, generator=generator, dtype=torch.float64) * (1 + t)
        mask = torch.rand(3, 5, generator=generator) < 0.3
        optimizer.zero_grad()
        y = call(x, mask)
        loss = (y * torch.randn(y.shape, generator=generator, dtype=torch.float64)).square().mean()
        loss = loss + powernorm.penalty(net, reduction="token_sum")
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(net.state_dict())


def build(cases: list[Case], checkpointed: bool) -> Net:
    torch.manual_seed(0)
    return Net([case.build() for case in cases], checkpointed).double()


def check(cases: list[Case], checkpointed: bool) -> None:
    eager = build(cases, False)
    expected, expected_state = train(eager, eager)
    net = build(cases, checkpointed)
    losses, state = train(net, torch.compile(net, fullgraph=True))
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-10)
    for name, value in expected_state.items():
        torch.testing.assert_close(state[name], value, rtol=1e-7, atol=1e-8, msg=name)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def side_effects_once() -> Iterator[None]:
    # A compiled, checkpointed region may not keep anything for later (here the penalty) unless
    # this switch of torch's is on; torch's error names it.
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        yield


@pytest.mark.slow
def test_norms_of_each_mechanism_in_one_graph() -> None:
    """State that moves in the forward, in the backward, and by the step of a schedule."""
    names = ("rbn", "pn", "taper")
    check([case for case in first_of_each_name() if case.name in names], False)


@pytest.mark.slow
def test_all_stateful_norms_in_one_graph() -> None:
    check([case for case in first_of_each_name() if case in KEEPING_STATE], False)


@pytest.mark.slow
@pytest.mark.usefixtures("side_effects_once")
def test_norms_of_each_mechanism_checkpointed() -> None:
    """State that moves in the forward, that the penalty reads, and that moves in the backward."""
    check([case for case in first_of_each_name() if case.name in ("bn", "rbn", "pn")], True)


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED, ids=case_id)
def test_stateful_norm(case: Case) -> None:
    check([case, case], False)


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED, ids=case_id)
def test_stateful_norm_checkpointed(case: Case, request: pytest.FixtureRequest) -> None:
    if case.name == "rbn":
        request.getfixturevalue("side_effects_once")
    check([case, case], True)


def test_penalty_in_a_compiled_and_checkpointed_region_raises_without_the_switch() -> None:
    net = build([Case("rbn")], True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="skip_fwd_side_effects_in_bwd"):
        train(net, torch.compile(net, fullgraph=True))


@pytest.mark.slow
def test_some_token_norms_in_one_graph() -> None:
    """A norm over all features, one over groups, one without a statistic."""
    check([case for case in first_of_each_name() if case.name in ("ln", "gn", "dyt")], True)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_all_token_norms_in_one_graph(checkpointed: bool) -> None:
    check([case for case in CASES if case not in KEEPING_STATE], checkpointed)


class Images(nn.Module):
    """A convolutional net with a norm of each case over its channels."""

    def __init__(self, cases: list[Case]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(case.build(feature_dim=1) for case in cases)
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in cases)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            x = x + torch.tanh(norm(convolution(x), mask))
        return x


def train_on_images(
    net: nn.Module, call: Callable[..., Tensor], layout: torch.memory_format
) -> Any:
    # So many blocks would amplify a rounding error a million times at ten times this rate.
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(4):
        x = torch.randn(2, 8, 3, 4, generator=generator, dtype=torch.float64)
        mask = torch.rand(2, 3, 4, generator=generator) < 0.3
        optimizer.zero_grad()
        y = call(x.contiguous(memory_format=layout), mask)
        loss = (y * torch.randn(y.shape, generator=generator, dtype=torch.float64)).square().mean()
        (loss + powernorm.penalty(net, reduction="token_sum")).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(net.state_dict())


LAYOUTS_OF_IMAGES = (torch.contiguous_format, torch.channels_last)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (torch.channels_last, ("ln", "pn")),
        (torch.channels_last, NORMS),
        pytest.param(torch.contiguous_format, NORMS, marks=pytest.mark.whole),
    ],
    ids=["channels last, some", "channels last", "contiguous"],
)
def test_norms_over_channels_in_one_graph(
    layout: torch.memory_format, names: Collection[str]
) -> None:
    cases = [case for case in first_of_each_name() if case.name in names]
    eager, net = Images(cases).double(), Images(cases).double()
    expected, expected_state = train_on_images(eager, eager, layout)
    losses, state = train_on_images(net, torch.compile(net, fullgraph=True), layout)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-10)
    for name, value in expected_state.items():
        torch.testing.assert_close(state[name], value, rtol=1e-7, atol=1e-8, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", some_default(["bn", "ln"], "bn"))
def test_output_over_channels_lies_as_the_input(name: str) -> None:
    compiled = torch.compile(powernorm.build_norm(name, 8, feature_dim=1), fullgraph=True)
    for layout in LAYOUTS_OF_IMAGES:
        x = torch.randn(2, 8, 3, 4).contiguous(memory_format=layout)
        assert compiled(x).stride() == x.stride()


@pytest.mark.slow
@pytest.mark.parametrize("order", [(3, 2, 1, 0), (1, 0, 2, 3)])
def test_permuted_input_of_any_size(order: tuple[int, ...]) -> None:
    """Images that are neither contiguous nor channels last, as a transpose leaves them."""
    norm = powernorm.build_norm("ln", 8, feature_dim=1)
    compiled = torch.compile(norm, fullgraph=True, dynamic=True)
    places = [order.index(dim) for dim in range(4)]
    for size in (2, 5):
        shape = (size, 8, size + 2, 4)
        x = torch.randn([shape[dim] for dim in order]).permute(places).requires_grad_()
        cotangent = torch.randn(shape)
        y, expected = compiled(x), norm(x)
        assert y.stride() == expected.stride() == x.stride()
        torch.testing.assert_close(y, expected)
        gradients = [torch.autograd.grad(out, x, cotangent)[0] for out in (y, expected)]
        torch.testing.assert_close(*gradients)


@pytest.mark.slow
def test_layers_of_many_classes_compiled_one_by_one() -> None:
    """Each class has code of its own, or they would use up each other's recompilations."""
    codes = {type(case.build()).forward.__code__.co_qualname for case in CASES}
    classes = {type(case.build()) for case in CASES}
    assert len({id(kind.forward.__code__) for kind in classes}) == len(classes) == len(codes)
    x = torch.randn(2, 8, 3)
    for case in first_of_each_name():
        norm = case.build(feature_dim=1).eval()
        compiled = torch.compile(norm, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), norm(x))


by_backend = pytest.mark.parametrize(
    "backend", some_default(["aot_eager", "inductor"], "aot_eager")
)


@by_backend
@pytest.mark.parametrize("name", ["bn", "pnv", "pn"])
def test_training_step(name: str, backend: str) -> None:
    options = {"warmup_steps": 1} if name == "pn" else {}
    eager, net = (powernorm.build_norm(name, 8, **options) for _ in range(2))
    compiled = torch.compile(net, fullgraph=True, backend=backend)
    for t in range(3):
        for norm, call in ((eager, eager), (net, compiled)):
            with powernorm.training_step(norm):
                for part in range(2):
                    generator = torch.Generator().manual_seed(10 * t + part)
                    call(torch.randn(2, 5, 8, generator=generator)).square().sum().backward()
    assert int(net.num_batches_tracked) == 3
    for (key, ours), expected in zip(net.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(ours, expected, msg=key)


@by_backend
def test_eager_checkpoint_around_a_compiled_batch_norm_moves_statistics_once(backend: str) -> None:
    norm = powernorm.BatchNorm(8)
    compiled = torch.compile(norm, fullgraph=True, backend=backend)
    x = torch.randn(2, 5, 8, requires_grad=True)
    checkpoint(compiled, x, use_reentrant=False).sum().backward()
    assert int(norm.num_batches_tracked) == 1


@pytest.mark.parametrize("name", ["rbn", "pn"])
def test_reentrant_checkpoint_around_a_compiled_norm_raises(name: str) -> None:
    """Each use would be a step of its own, in silence."""
    norm = powernorm.build_norm(name, 8)
    compiled = torch.compile(norm, backend="aot_eager")
    x = torch.randn(2, 5, 8, requires_grad=True)
    y = checkpoint(compiled, checkpoint(compiled, x, use_reentrant=True), use_reentrant=True)
    refuses("use_reentrant=False", y.square().sum().backward)
    assert int(norm.num_batches_tracked) == 0


class Penalized(nn.Module):
    """A model that gives its loss, the penalty in it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into = nn.Linear(8, 8)
        self.norm = powernorm.RegularizedBatchNorm(8, mean_penalty=1.0, var_penalty=0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.into(x)) + self.norm(self.into(2 * x))
        return y.square().mean() + powernorm.penalty(self, num_tokens=5)


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.slow
def test_a_step_with_its_penalty_in_one_graph() -> None:
    eager, net = Penalized(), Penalized()
    compiled = torch.compile(net, fullgraph=True)
    for t in range(3):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(t))
        expected, loss = eager(x), compiled(x)
        torch.testing.assert_close(loss, expected)
        expected.backward()
        loss.backward()
    torch.testing.assert_close(gradients(net), gradients(eager))
    torch.testing.assert_close(dict(net.named_buffers()), dict(eager.named_buffers()))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own
def test_a_compiled_loss_behind_an_eager_norm() -> None:
    eager, net = (powernorm.RegularizedBatchNorm(8, mean_penalty=1.0) for _ in range(2))
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def loss_of(norm: powernorm.RegularizedBatchNorm, y: Tensor) -> Tensor:
        return y.square().mean() + norm.penalty()

    compiled = torch.compile(loss_of, fullgraph=True, backend=counter)
    for t in range(4):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(t))
        own, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        loss_of(eager, eager(own)).backward()
        compiled(net, net(other)).backward()
        torch.testing.assert_close(other.grad, own.grad)
        assert not net.has_penalty
    assert counter.frame_count == 1


@pytest.mark.thinned(1)
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_forwards_before_their_backwards(asks: bool, order: tuple[int, int], backend: str) -> None:
    eager, net = (powernorm.RegularizedBatchNorm(8, mean_penalty=1.0) for _ in range(2))
    xs = [torch.randn(5, 8, generator=torch.Generator().manual_seed(t)) for t in range(2)]
    results = []
    for norm, call in ((eager, eager), (net, torch.compile(net, backend=backend))):
        inputs = [x.clone().requires_grad_() for x in xs]
        losses = []
        for x in inputs:
            loss = call(x).square().mean()
            losses.append(loss + norm.penalty() if asks else loss)
        for index in order:
            losses[index].backward()
        results.append(([x.grad for x in inputs], dict(norm.named_buffers())))
        assert not norm.has_penalty
    torch.testing.assert_close(*results)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, False])
def test_compiled_forwards_without_a_backward_do_not_pile_up(dynamic: bool | None) -> None:
    model = nn.Sequential(nn.Linear(8, 8), powernorm.RegularizedBatchNorm(8))
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, dynamic=dynamic)
    graphs: weakref.WeakSet[Any] = weakref.WeakSet()
    for _ in range(64):
        graphs.add(compiled(torch.randn(5, 8)).grad_fn)
    assert powernorm.penalty(model, "token_sum").requires_grad  # the uses of one step
    for _ in range(90):
        graphs.add(compiled(torch.randn(5, 8)).grad_fn)
    gc.collect()
    assert len(graphs) == 65
    refuses(r"more than 64 compiled .*forget_penalty", powernorm.penalty, model, "token_sum")
    model.train()
    loss = compiled(torch.randn(5, 8)).sum() + powernorm.penalty(model, "token_sum")
    loss.backward()
    assert not model[1].has_penalty
    assert counter.frame_count <= 4  # not once for every number of forwards


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own
def test_eager_checkpoint_around_a_compiled_norm_counts_its_penalty_once() -> None:
    eager, net = (powernorm.RegularizedBatchNorm(8, mean_penalty=1.0) for _ in range(2))
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for t in range(3):
        results = []
        for norm, call in ((eager, eager), (net, compiled)):
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(t)).requires_grad_()
            y = checkpoint(lambda x, call=call: call(x.tanh()).tanh(), x, use_reentrant=False)
            loss = y.square().sum() + norm.penalty()
            loss.backward()
            assert not norm.has_penalty
            results.append((loss, x.grad))
        torch.testing.assert_close(*results)
