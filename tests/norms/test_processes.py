"""Data-parallel training with unequal and empty ranks equals one process on all the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import powernorm
from cases import CASES, KEEPING_STATE, Case
from covering import some_default
from norms.processes import run_processes

STEPS = 5
LENGTHS = {2: (3, 0), 3: (1, 4, 2)}
"""Rows of the batch on each rank; rank 1 of two has tokens, all of them padding."""


def batches(world_size: int) -> list[list[tuple[Tensor, Tensor, Tensor]]]:
    """By step and rank: (x, mask, cotangent)."""
    generator = torch.Generator().manual_seed(3)
    result = []
    for step in range(STEPS):
        ranks = []
        for rows in LENGTHS[world_size]:
            x = torch.randn(max(rows, 1), 5, 8, generator=generator) * (1 + step) + 0.5
            mask = torch.rand(max(rows, 1), 5, generator=generator) < 0.3
            if rows == 0:
                mask[:] = True
            cotangent = torch.randn(x.shape, generator=generator)
            ranks.append((x, mask, cotangent))
        result.append(ranks)
    return result


def train(
    norm: torch.nn.Module, data: list[tuple[Tensor, Tensor, Tensor]], compiled: bool
) -> dict[str, Any]:
    call = torch.compile(norm, fullgraph=True) if compiled else norm
    outputs, gradients = [], []
    for x, mask, cotangent in data:
        x = x.clone().requires_grad_()
        y = call(x, mask)
        loss = (y * cotangent).sum()
        if isinstance(norm, powernorm.RegularizedBatchNorm):
            # Every process adds the same penalty: together one.
            shares = dist.get_world_size() if dist.is_initialized() else 1
            loss = loss + norm.penalty() / shares
        loss.backward()
        outputs.append(y.detach())
        gradients.append(x.grad)
    return {
        "y": outputs,
        "grad_x": gradients,
        "grads": [p.grad for p in norm.parameters()],
        "state": norm.state_dict(),
    }


def one_rank(rank: int, world_size: int, cases: list[Case], compiled: bool) -> list[Any]:
    data = [ranks[rank] for ranks in batches(world_size)]
    return [train(case.build(), data, compiled) for case in cases]


def whole(case: Case, world_size: int) -> dict[str, Any]:
    data = [
        tuple(torch.cat(parts) for parts in zip(*ranks, strict=True))
        for ranks in batches(world_size)
    ]
    return train(case.build(), data, False)  # type: ignore[arg-type]


def compare(case: Case, expected: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    def close(a: Tensor, b: Tensor, what: str) -> None:
        torch.testing.assert_close(
            a, b, rtol=2e-5, atol=2e-5, msg=lambda m: f"{case.id} {what} {m}"
        )

    for step in range(STEPS):
        for key in ("y", "grad_x"):
            close(torch.cat([r[key][step] for r in ranks]), expected[key][step], f"{key} {step}")
    for index, gradient in enumerate(expected["grads"]):
        close(sum(r["grads"][index] for r in ranks), gradient, f"parameter {index}")
    for rank in ranks:
        for name, value in expected["state"].items():
            close(rank["state"][name], value, name)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", some_default([2, 3], 3))
def test_equals_one_process(world_size: int, tmp_path: Path) -> None:
    cases = list(KEEPING_STATE)
    ranks = run_processes(one_rank, world_size, tmp_path, world_size, cases, False)
    for index, case in enumerate(cases):
        compare(case, whole(case, world_size), [rank[index] for rank in ranks])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "names",
    [("bn", "pn"), ("brn", "mabn", "un", "prepbn", "taper", "pn-static", "pnv", "rbn")],
    ids=", ".join,
)
def test_compiled_equals_one_process(tmp_path: Path, names: tuple[str, ...]) -> None:
    cases = [next(c for c in CASES if c.name == name) for name in names]
    ranks = run_processes(one_rank, 2, tmp_path, 2, cases, True)
    for index, case in enumerate(cases):
        compare(case, whole(case, 2), [rank[index] for rank in ranks])


def far_tokens(rank: int) -> Tensor:
    """Mean 1e9 and spread 1, another mean and number on each rank; the last has none."""
    generator = torch.Generator().manual_seed(rank)
    number = (40, 7, 0)[rank]
    return torch.randn(number, 8, generator=generator, dtype=torch.float64) + 1e9 + rank


def far_from_zero(rank: int, held: bool) -> list[dict[str, Tensor]]:
    norms = [
        powernorm.build_norm(name, 8, momentum=1.0, dtype=torch.float64)
        for name in ("bn", "rbn", "brn")
    ]
    x = far_tokens(rank)
    with powernorm.training_step(nn.ModuleList(norms if held else [])):
        for norm in norms:
            for part in x.tensor_split(3) if held else [x]:
                norm(part.clone().requires_grad_()).sum().backward()
    calibrated = powernorm.BatchNorm(8, dtype=torch.float64)
    powernorm.calibrate(nn.Sequential(calibrated), [x])
    return [norm.state_dict() for norm in (*norms, calibrated)]


@pytest.mark.distributed
@pytest.mark.parametrize("held", [False, True])
def test_variance_far_from_zero(tmp_path: Path, held: bool) -> None:
    """Processes exchange means and deviations: of sums of squares nothing would be left."""
    tokens = torch.cat([far_tokens(rank) for rank in range(3)])
    for states in run_processes(far_from_zero, 3, tmp_path, held):
        for state in states:
            torch.testing.assert_close(state["running_mean"], tokens.mean(0), rtol=1e-15, atol=0)
            torch.testing.assert_close(state["running_var"], tokens.var(0), rtol=1e-6, atol=0)


def unsynchronized(rank: int) -> dict[str, Tensor]:
    norm = powernorm.BatchNorm(8, sync=False)
    x, mask, _ = batches(3)[0][rank]
    norm(x, mask)
    return norm.state_dict()


@pytest.mark.distributed
def test_sync_false_keeps_statistics_local(tmp_path: Path) -> None:
    ranks = run_processes(unsynchronized, 3, tmp_path)
    for rank, state in enumerate(ranks):
        alone = powernorm.BatchNorm(8)
        x, mask, _ = batches(3)[0][rank]
        alone(x, mask)
        torch.testing.assert_close(state["running_mean"], alone.running_mean)
        torch.testing.assert_close(state["running_var"], alone.running_var)
    assert not torch.allclose(ranks[0]["running_mean"], ranks[1]["running_mean"])


def wrapped(rank: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), powernorm.PowerNorm(8, warmup_steps=1), torch.nn.Linear(8, 2)
    )
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for ranks in batches(2):
        x = ranks[rank][0]
        optimizer.zero_grad()
        parallel(x).square().sum().backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.distributed
def test_inside_distributed_data_parallel(tmp_path: Path) -> None:
    first, second = run_processes(wrapped, 2, tmp_path)
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], msg=name)
    assert int(first["1.num_batches_tracked"]) == STEPS
    assert float(first["1.running_gradient_moment"].abs().max()) > 0
