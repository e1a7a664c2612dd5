"""Compilation, recomputation, loss scaling and synchronization in a training on Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import powernorm
from covering import some_default
from gpu.kernel_cases import DEVICE
from powernorm.ops import use_backend

STEPS = 5
NORMS: dict[str, dict[str, Any]] = {
    "bn": {},
    "rbn": {},
    "brn": {"warmup_steps": 2, "ramp_steps": 4},
    "mabn": {"warmup_steps": 2},
    "pnv": {"groups": 4},
    "pn": {"warmup_steps": 2, "groups": 4},
    "pn-static": {"warmup_steps": 2},
    "adanorm": {},
    "rms": {},
}


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.out = norm, nn.Linear(32, 32)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.out(torch.relu(self.norm(x, mask)))


class Net(nn.Module):
    def __init__(self, name: str, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        norms = (powernorm.build_norm(name, 32, **NORMS[name]) for _ in range(2))
        self.blocks = nn.ModuleList(Block(norm) for norm in norms)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = (
                checkpoint(block, x, mask, use_reentrant=False)
                if self.checkpointed
                else block(x, mask)
            )
        return x


def batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for step in range(STEPS):
        x, wanted = (torch.randn(3, 8, 32, generator=generator) for _ in range(2))
        mask = torch.arange(8) >= torch.randint(3, 9, (3, 1), generator=generator)
        found.append(((x * (1 + step)).to(DEVICE), mask.to(DEVICE), wanted.to(DEVICE)))
    return found


def train(
    net: Net, call: Callable[..., Tensor], scaler: torch.amp.GradScaler | None = None
) -> list[float]:
    """Losses of some steps of SGD, with float16 autocast where there is a scaler."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    scope = nullcontext() if scaler is None else torch.autocast(DEVICE, torch.float16)
    for x, mask, wanted in batches():
        with scope:
            y = call(x, mask)
        errors = (y.float() - wanted).square().mean(-1)
        loss = errors.masked_fill(mask, 0.0).sum() / (~mask).sum()
        losses.append(loss.detach())
        loss = loss + powernorm.penalty(net, reduction="mean", num_tokens=int((~mask).sum()))
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return [float(loss) for loss in losses]


def check_same(ours: Net, theirs: Net, losses: list[list[float]], tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(losses[0], losses[1], rtol=tolerance, atol=tolerance)
    for name, wanted in theirs.state_dict().items():
        torch.testing.assert_close(
            ours.state_dict()[name],
            wanted,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda s, n=name: f"{n}: {s}",
        )


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_compiled(name: str, checkpointed: bool) -> None:
    torch.compiler.reset()
    plain, net = Net(name).to(DEVICE), Net(name, checkpointed).to(DEVICE)
    # Without it a compiled, checkpointed region cannot keep a penalty for later.
    once = torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)
    with once, use_backend("triton"):
        losses = [train(net, torch.compile(net, fullgraph=True)), train(plain, plain)]
    check_same(net, plain, losses)


@pytest.mark.parametrize("name", some_default(NORMS))
def test_checkpointed(name: str) -> None:
    plain, net = Net(name).to(DEVICE), Net(name, checkpointed=True).to(DEVICE)
    with use_backend("triton"):
        losses = [train(net, net), train(plain, plain)]
    check_same(net, plain, losses)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NORMS)
def test_graphs_of_cuda(name: str) -> None:
    """Compiled with `mode="reduce-overhead"`, which records launches and repeats them."""
    torch.compiler.reset()
    plain, net = Net(name).to(DEVICE), Net(name).to(DEVICE)
    with use_backend("triton"):
        losses = [train(net, torch.compile(net, mode="reduce-overhead")), train(plain, plain)]
    check_same(net, plain, losses)


@pytest.mark.slow
@pytest.mark.parametrize("name", NORMS)
def test_loss_scaling(name: str) -> None:
    """A scale that changes nothing but the scale, and one that overflows at first."""
    plain, scaled, overflowing = (Net(name).to(DEVICE) for _ in range(3))
    with use_backend("triton"):
        results = []
        for net, scale in ((plain, 1.0), (scaled, 1024.0), (overflowing, 2.0**40)):
            scaler = torch.amp.GradScaler(DEVICE, init_scale=scale, backoff_factor=2.0**-20)
            powernorm.set_loss_scale(net, scaler=scaler)
            results.append(train(net, net, scaler))
    check_same(scaled, plain, results[:2], 2e-2)
    assert all(value.isfinite().all() for value in overflowing.state_dict().values())
    for block, first in zip(overflowing.blocks, Net(name).to(DEVICE).blocks, strict=True):
        assert not block.out.weight.equal(first.out.weight)


@pytest.mark.gpu
def test_no_synchronization_with_the_host() -> None:
    """After the warm-up a step launches kernels and waits for nothing, mask or not."""
    x, mask, _ = batches()[0]
    x.requires_grad_()
    nets = [Net(name).to(DEVICE) for name in NORMS]
    for net in nets:
        train(net, net)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for net in nets:
            loss = net(x, mask).sum() + powernorm.penalty(net, reduction="mean", num_tokens=30)
            loss.backward()
            for norm in (block.norm for block in net.blocks):
                norm(x).sum().backward()
                norm.eval()(x, mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
