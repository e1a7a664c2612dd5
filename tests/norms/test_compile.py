"""Compiled by inductor = eager, over several steps, with and without activation checkpointing.

The obvious implementations of running statistics give silently wrong gradients here, so every
stateful norm is tested under inductor itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import powernorm
from cases import CASES, Case, case_id

STEPS = 6
COMPILED = tuple(
    case
    for case in CASES
    if case.stateful and case.options.get("variant") != "released" and "affine" not in case.options
)


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


@pytest.mark.parametrize("case", COMPILED, ids=case_id)
def test_stateful_norm(case: Case) -> None:
    check([case, case], False)


@pytest.mark.parametrize("case", COMPILED, ids=case_id)
def test_stateful_norm_checkpointed(case: Case, request: pytest.FixtureRequest) -> None:
    if case.name == "rbn":
        request.getfixturevalue("side_effects_once")
    check([case, case], True)


def test_penalty_in_a_compiled_and_checkpointed_region_raises_without_the_switch() -> None:
    net = build([Case("rbn")], True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="skip_fwd_side_effects_in_bwd"):
        train(net, torch.compile(net, fullgraph=True))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_all_token_norms_in_one_graph(checkpointed: bool) -> None:
    check([case for case in CASES if not case.stateful], checkpointed)


def test_mask_of_the_scope_reaches_a_compiled_norm() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = powernorm.BatchNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.norm(x)
            return y

    eager, net = Plain(), Plain()
    compiled = torch.compile(net, fullgraph=True)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(2, 5, 8, generator=generator)
        mask = torch.rand(2, 5, generator=generator) < 0.4
        with powernorm.padding_mask(mask):
            torch.testing.assert_close(compiled(x), eager(x))
    torch.testing.assert_close(net.norm.running_var, eager.norm.running_var)


@pytest.mark.parametrize("name", ["bn", "pnv", "pn"])
def test_accumulated_statistics(name: str) -> None:
    options = {"warmup_steps": 1} if name == "pn" else {}
    eager, net = (powernorm.build_norm(name, 8, **options) for _ in range(2))
    compiled = torch.compile(net, fullgraph=True)
    for t in range(3):
        for norm, call in ((eager, eager), (net, compiled)):
            with powernorm.accumulated_statistics(norm):
                for part in range(2):
                    generator = torch.Generator().manual_seed(10 * t + part)
                    call(torch.randn(2, 5, 8, generator=generator)).square().sum().backward()
    assert int(net.num_batches_tracked) == 3
    for (key, ours), expected in zip(net.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(ours, expected, msg=key)


def test_eager_checkpoint_around_a_compiled_batch_norm_moves_statistics_once() -> None:
    norm = powernorm.BatchNorm(8)
    compiled = torch.compile(norm, fullgraph=True)
    x = torch.randn(2, 5, 8, requires_grad=True)
    checkpoint(compiled, x, use_reentrant=False).sum().backward()
    assert int(norm.num_batches_tracked) == 1


@pytest.mark.parametrize("case", COMPILED, ids=case_id)
def test_export(case: Case) -> None:
    norm = case.build().eval()
    x = torch.randn(2, 5, 8)
    program: Any = torch.export.export(norm, (x,))
    torch.testing.assert_close(program.module()(x), norm(x))
