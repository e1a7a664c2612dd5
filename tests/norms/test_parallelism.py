"""Sequence, tensor and context parallelism: batch statistics are those of all tokens, once each."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from cases import CASES
from norms.processes import run_processes
from powernorm import InputError

STEPS = 3
BATCH, LENGTH = 4, 5
"""An odd length: the processes hold different numbers of tokens."""
MODEL_LENGTH = LENGTH if torch.__version__ >= (2, 12) else 4
"""Linear layers of torch 2.11 fail where processes hold different numbers."""
Step = tuple[Tensor, Tensor, Tensor, Tensor]


def batches(length: int = LENGTH) -> list[Step]:
    """By step: (x, mask, residual, cotangent)."""
    generator = torch.Generator().manual_seed(2)
    result = []
    for step in range(STEPS):
        x, residual, cotangent = (
            torch.randn(BATCH, length, 8, generator=generator) for _ in range(3)
        )
        mask = torch.rand(BATCH, length, generator=generator) < 0.3
        result.append((x * (1 + step) + 0.5, mask, residual, cotangent))
    return result


def train(
    norm: nn.Module,
    data: list[Step],
    call: Callable[[nn.Module, Step], tuple[Tensor, Tensor, Tensor]],
    shares: int = 1,
) -> dict[str, Any]:
    """Train by `call`, which gives (loss, y, x); tensors are whole ones afterwards."""
    seen: dict[str, Any] = {"y": [], "grad_x": []}
    for step in data:
        loss, y, x = call(norm, step)
        if isinstance(norm, powernorm.RegularizedBatchNorm):
            loss = loss + norm.penalty() / shares
        loss.backward()
        seen["y"].append(whole(y.detach()))
        seen["grad_x"].append(whole(x.grad))
    seen["grads"] = [whole(p.grad) for p in norm.parameters()]
    seen["state"] = {name: whole(buffer) for name, buffer in norm.named_buffers()}
    return seen


def whole(x: Any) -> Tensor:
    tensor: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return tensor.clone()


def one_process(norm: nn.Module, step: Step) -> tuple[Tensor, Tensor, Tensor]:
    x, mask, residual, cotangent = step
    x = x.clone().requires_grad_()
    y, total = norm(x, mask, residual)
    return ((y + total) * cotangent).sum(), y, x


def compare(case: str, got: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(
        got, expected, rtol=2e-5, atol=2e-5, msg=lambda text: f"{case}: {text}"
    )


def mesh_of(**sizes: int) -> Any:
    from torch.distributed.tensor import init_device_mesh

    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def divide(x: Tensor, mesh: Any, *placements: Any) -> Any:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x, mesh, placements, src_data_rank=None)


def sequence_parallel(norm: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    parallelize_module(nn.Sequential(norm), mesh, {"0": SequenceParallel()})
    return norm


def replicated(norm: nn.Module, mesh: Any) -> nn.Module:
    """The same parameters and buffers in every process; what is fed stays as it is."""
    from torch.distributed.tensor import distribute_module

    return distribute_module(norm, mesh)


def distributed(mesh: Any, *placements: Any, mask_by: str = "argument") -> Any:
    def call(norm: nn.Module, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        x, residual, cotangent = (divide(step[i], mesh, *placements) for i in (0, 2, 3))
        mask, x = step[1], x.requires_grad_()
        if mask_by == "scope":
            with powernorm.padding_mask(mask):
                y, total = norm(x, residual=residual)
        else:
            y, total = norm(x, padding_mask=mask, residual=residual)
        assert y.placements == total.placements == placements
        return ((y + total) * cotangent).sum().full_tensor(), y, x

    return call


# ---- two processes -----------------------------------------------------------------------------


def on_two(rank: int) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard

    mesh = mesh_of(tp=2)
    by_sequence, both = distributed(mesh, Shard(1)), distributed(mesh, Replicate())
    in_scope = distributed(mesh, Shard(1), mask_by="scope")
    data = batches()
    results: dict[str, Any] = {"sequence": [], "replicated": [], "context": []}
    for case in DIVIDED:
        results["sequence"].append(
            train(sequence_parallel(case.build(), mesh), data, by_sequence, 2)
        )
        if case.name in ("rms", "detach"):
            norm = replicated(case.build(), mesh)
            results["replicated"].append(train(norm, data, both))
    bn = sequence_parallel(powernorm.BatchNorm(8), mesh)
    results["scope"] = train(bn, data, in_scope)
    results["is distributed"] = {
        name: hasattr(one, "placements") for name, one in bn.named_buffers()
    }
    for case in CONTEXT:
        results["context"].append(
            train(case.build(), [part(one, rank) for one in data], one_process, 2)
        )
    results["model"] = train_model(mesh)
    results["evaluated"] = whole(bn.eval()(divide(data[0][0], mesh, Shard(1))).detach())
    results["refused"] = refusals(mesh)
    return results


DIVIDED = tuple({case.name: case for case in CASES}.values())
"""The last case of each norm: the longer ones to set up."""
CONTEXT = tuple(case for case in CASES if case.name in ("bn", "pn", "rbn"))


def part(step: Step, rank: int) -> Step:
    """This process's half of every sequence."""
    at = slice(0, 3) if rank == 0 else slice(3, LENGTH)
    x, mask, residual, cotangent = (one[:, at] for one in step)
    return x, mask, residual, cotangent


class Block(nn.Module):
    """A pre-norm feed-forward block as tensor parallelism divides it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return y


def train_model(mesh: Any) -> dict[str, Tensor]:
    """A swapped block, divided by the plan of torch's tutorial if there is a mesh."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.manual_seed(3)
    model = Block()
    powernorm.swap(model, "bn")
    if mesh is not None:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for x, mask, _, cotangent in batches(MODEL_LENGTH):
        if mesh is not None:
            x, cotangent = (divide(one, mesh, Shard(1)) for one in (x, cotangent))
        with powernorm.padding_mask(mask):
            y = model(x)
        optimizer.zero_grad()
        (y * cotangent).sum().backward()
        optimizer.step()
    return {name: whole(one) for name, one in model.state_dict().items()}


def refusals(mesh: Any) -> dict[str, str]:
    """By what is wrong: the message."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    x = torch.zeros(2, 4, 8)
    mask = torch.zeros(2, 4, dtype=torch.bool)
    rows = divide(x, mesh, Shard(0))
    bn, rms = powernorm.BatchNorm(8, affine=False), powernorm.RMSNorm(8)
    calls: dict[str, Callable[[], Any]] = {
        "features": lambda: bn(divide(x, mesh, Shard(2))),
        "sum": lambda: rms(DTensor.from_local(x, mesh, [Partial()])),
        "copies": lambda: bn(divide(x, mesh, Replicate())),
        "ordinary weights": lambda: rms(rows),
        "residual": lambda: bn(rows, None, x),
        "mask": lambda: bn(rows, mask[:, :3]),
        "divided mask": lambda: bn(rows, divide(mask, mesh, Shard(1))),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except InputError as error:
            messages[name] = str(error)
    # What is like these and works.
    powernorm.BatchNorm(8, affine=False, sync=False)(divide(x, mesh, Replicate()))
    bn.eval()(divide(x, mesh, Replicate()))
    rms(divide(x, mesh, Replicate()))
    bn.train()(rows, divide(mask, mesh, Shard(0)))
    bn(rows, mask[:1])
    return messages


REFUSED = {
    "features": r"BatchNorm .* features are sharded \(S\(2\) over the mesh dimension 'tp'.*redistr",
    "sum": r"RMSNorm .* P\(sum\) over .* redistribute it to Shard\(1\) or Replicate\(\)",
    "copies": r"replicated over the mesh dimension 'tp' \(2 processes\).*\[0, 1\].*process_group=",
    "ordinary weights": r"ordinary parameter.*parallelize_module, such as SequenceParallel\(\)",
    "residual": r"residual is an ordinary tensor, expected .*Shard\(dim=0\).*: redistribute it",
    "mask": r"padding_mask has shape \(2, 3\), expected \(2, 4\).* or \(1, 4\)",
    "divided mask": r"padding_mask has the placements \(Shard\(dim=1\),\).*to \(Shard\(dim=0\),\)",
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_processes(on_two, 2, tmp_path_factory.mktemp("two"))


@pytest.mark.distributed
@pytest.mark.parametrize("index", range(len(DIVIDED)), ids=[case.id for case in DIVIDED])
def test_sequence_parallel(two: list[dict[str, Any]], index: int) -> None:
    """SequenceParallel() of torch: parameters and buffers are distributed tensors, too."""
    case = DIVIDED[index]
    expected = train(case.build(), batches(), one_process)
    for rank in two:
        compare(case.id, rank["sequence"][index], expected)


@pytest.mark.distributed
def test_replicated_input_of_token_norms(two: list[dict[str, Any]]) -> None:
    for rank in two:
        token_norms = [case for case in DIVIDED if case.name in ("rms", "detach")]
        for case, got in zip(token_norms, rank["replicated"], strict=True):
            compare(case.id, got, train(case.build(), batches(), one_process))


@pytest.mark.distributed
def test_mask_of_a_scope_is_divided(two: list[dict[str, Any]]) -> None:
    norm = powernorm.BatchNorm(8)
    expected = train(norm, batches(), one_process)
    evaluated = norm.eval()(batches()[0][0])
    for rank in two:
        compare("scope", rank["scope"], expected)
        torch.testing.assert_close(rank["evaluated"], evaluated)
        assert all(rank["is distributed"].values())  # as the checkpoints of torch expect


@pytest.mark.distributed
def test_tensor_and_sequence_parallel_model(two: list[dict[str, Any]]) -> None:
    expected = train_model(None)
    for rank in two:
        torch.testing.assert_close(rank["model"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.distributed
def test_context_parallel(two: list[dict[str, Any]]) -> None:
    """Each process has a part of every sequence, as ordinary tensors, and its own padding."""
    for index, case in enumerate(CONTEXT):
        expected = train(case.build(), batches(), one_process)
        parts = [rank["context"][index] for rank in two]
        for key in ("y", "grad_x"):
            for step in range(STEPS):
                got = torch.cat([one[key][step] for one in parts], dim=1)
                compare(case.id, {key: got}, {key: expected[key][step]})
        grads = [sum(some) for some in zip(*(one["grads"] for one in parts), strict=True)]
        compare(case.id, {"grads": grads}, {"grads": expected["grads"]})
        for one in parts:
            compare(case.id, one["state"], expected["state"])


@pytest.mark.distributed
@pytest.mark.parametrize("what", REFUSED)
def test_refused_by_name(two: list[dict[str, Any]], what: str) -> None:
    for rank in two:
        assert re.search(REFUSED[what], rank["refused"][what])


# ---- two groups of two -------------------------------------------------------------------------

GROUPED = tuple(case for case in CASES if case.id in ("bn", "pnv", "pn-warmup_steps=0"))


def on_four(_: int) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard

    mesh = mesh_of(dp=2, tp=2)
    tp, dp = mesh["tp"], mesh["dp"].get_group()
    data = batches()
    rows = slice(0, 2) if mesh.get_coordinate()[0] == 0 else slice(2, BATCH)
    own = [tuple(one[rows] for one in step) for step in data]
    results: dict[str, Any] = {"rows": [rows.start, rows.stop]}
    for name, build, call, given in (
        # Each data-parallel group has its rows; its processes divide the sequences.
        ("dp rows", lambda c: sequence_parallel(c.build(), tp), distributed(tp, Shard(1)), own),
        (
            "both",
            lambda c: replicated(c.build(), mesh),
            distributed(mesh, Shard(0), Shard(1)),
            data,
        ),
        (
            "replicated",
            lambda c: replicated(c.build(process_group=dp), mesh),
            distributed(mesh, Shard(0), Replicate()),
            data,
        ),
        # Megatron's tensor parallelism: ordinary tensors, the same on both processes of a group.
        ("tensor", lambda c: c.build(process_group=dp), one_process, own),
        ("tensor, default group", lambda c: c.build(), one_process, own),
    ):
        results[name] = [train(build(case), given, call) for case in GROUPED]  # type: ignore[no-untyped-call, arg-type]
    return results


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_processes(on_four, 4, tmp_path_factory.mktemp("four"))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["both", "replicated"])
def test_mesh_of_two_dimensions(four: list[dict[str, Any]], name: str) -> None:
    for index, case in enumerate(GROUPED):
        expected = train(case.build(), batches(), one_process)
        for rank in four:
            compare(f"{name} {case.id}", rank[name][index], expected)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["dp rows", "tensor"])
def test_data_parallel_groups(four: list[dict[str, Any]], name: str) -> None:
    """Ranks 0 and 2 are the first of the two groups."""
    for index, case in enumerate(GROUPED):
        expected = train(case.build(), batches(), one_process)
        for first, second in ((0, 2), (1, 3)):
            parts = [four[first][name][index], four[second][name][index]]
            for key in ("y", "grad_x"):
                got = [torch.cat(some) for some in zip(*(one[key] for one in parts), strict=True)]
                compare(f"{name} {case.id}", {key: got}, {key: expected[key]})
            grads = [sum(some) for some in zip(*(one["grads"] for one in parts), strict=True)]
            compare(f"{name} {case.id}", {"grads": grads}, {"grads": expected["grads"]})
            for one in parts:
                compare(f"{name} {case.id}", one["state"], expected["state"])


@pytest.mark.distributed
def test_copies_in_the_default_group_change_the_unbiased_variance_alone(
    four: list[dict[str, Any]],
) -> None:
    """Tensor parallelism without process_group works as docs/distributed.md describes it."""
    tokens = [int((~mask).sum()) for _, mask, _, _ in batches()]
    for index, case in enumerate(GROUPED):
        norm = case.build()
        expected = train(norm, batches(), one_process)
        got = four[0]["tensor, default group"][index]
        state = dict(expected["state"])
        if case.name == "bn":
            assert not torch.allclose(got["state"]["running_var"], state["running_var"], rtol=1e-4)
            var = torch.ones(8)
            pairs = zip(batches(), tokens, strict=True)
            for number, ((x, mask, residual, _), count) in enumerate(pairs, 1):
                biased = (x + residual)[~mask].var(0, correction=0)
                var += max(1 / number, 0.1) * (biased * 2 * count / (2 * count - 1) - var)
            state["running_var"] = var
        compare(case.id, got["state"], state)
        start, stop = four[0]["rows"]
        for y, all_rows in zip(got["y"], expected["y"], strict=True):
            compare(case.id, {"y": y}, {"y": all_rows[start:stop]})
