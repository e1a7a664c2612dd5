"""The monitor in whole models: of other libraries, swapped, on two processes, for a long time."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import powernorm
from diagnosis.models import Masked, batches
from norms.processes import run_processes
from powernorm.diagnosis import NormMonitor, NormRow
from powernorm.norms import BatchNorm, build_norm
from powernorm_lab.models.choices import TransformerShape
from powernorm_lab.tasks.lm.model import LanguageModel
from surgery.foreign_models import FAMILIES, PADDED


def step(model: nn.Module, inputs: dict[str, Any], monitor: NormMonitor) -> list[NormRow]:
    monitor.start_step(0)
    output = model(**inputs)
    value = output if isinstance(output, Tensor) else output[0]
    value.float().square().mean().backward()
    return monitor.finish_step(0)


def has_gradients(row: NormRow) -> bool:
    names = ("gradient_norm", "token_gradient_mean", "token_gradient_var")
    return all(isinstance(row[name], float) for name in names)


@pytest.mark.parametrize("family", ["torch-encoder", "bert", "gpt2"])
def test_models_of_other_libraries_before_and_after_a_swap(family: str) -> None:
    model, _ = FAMILIES[family]()
    inputs = PADDED[family](2)
    model.train()
    monitor = NormMonitor(model, 1)
    rows = step(model, inputs, monitor)
    monitor.detach()
    assert len(rows) >= 4
    assert {row["norm"] for row in rows} == {"ln"}
    assert all(has_gradients(row) and row["var_tid"] is None for row in rows)
    # A LayerNorm's input gradient has mean 0 in every token (Xu et al. 2019, Theorem 1).
    assert all(abs(row["token_gradient_mean"]) < 1e-7 for row in rows)
    names = [row["layer"] for row in rows]

    powernorm.swap(model, to="bn")
    model.train()
    monitor = NormMonitor(model, 1)
    rows = step(model, inputs, monitor)
    monitor.detach()
    swapped = [row for row in rows if row["norm"] == "bn"]
    assert len(swapped) >= 4
    assert {row["layer"] for row in rows} <= set(names)
    for row in swapped:
        assert row["var_tid"] is not None
        assert row["var_gradient_norm"] is not None
        assert has_gradients(row)
        assert row["first_nonfinite"] == row["nonfinite_input"] == 0


def language_model(norm: str) -> LanguageModel:
    return LanguageModel(
        30,
        lambda features: build_norm(norm, features),
        TransformerShape(num_features=16, num_heads=2, feedforward_features=32),
        max_length=8,
    )


@pytest.mark.parametrize("norm", ["ln", "adanorm", "rms", "none", "bn", "pn"])
def test_nothing_waits_for_the_device_but_the_report(norm: str) -> None:
    """One look at values, and that on one tensor."""

    class Looks(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = func._schema.name
            looks = name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")
            # The number of a watch is an integer on the host.
            if looks and args[0].is_floating_point():
                self.seen.append(name)
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    model = language_model(norm)
    monitor = NormMonitor(model, 1)
    tokens = torch.randint(30, (4, 8))
    for number in range(2):
        monitor.start_step(number)
        with Looks() as looks:
            model(tokens).square().mean().backward()
        plain = list(looks.seen)
        assert monitor.finish_step(number)
        monitor.detach()
        with Looks() as looks:
            model(tokens).square().mean().backward()
        assert plain == looks.seen
        monitor = NormMonitor(model, 1)


def test_one_transfer_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    transfers = []
    original = Tensor.cpu

    def cpu(tensor: Tensor) -> Tensor:
        transfers.append(tensor.shape)
        return original(tensor)

    monkeypatch.setattr(Tensor, "cpu", cpu)
    model = language_model("bn")
    monitor = NormMonitor(model, 1)
    monitor.start_step(0)
    for _ in range(2):
        model(torch.randint(30, (4, 8))).square().mean().backward()
    assert len(monitor.finish_step(0)) == 5
    assert len(transfers) == 1


@pytest.mark.parametrize("norm", ["ln", "rbn", "pn"])
def test_training_is_the_same_with_a_monitor(norm: str) -> None:
    states = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = language_model(norm)
        monitor = NormMonitor(model, 2) if watched else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(4):
            tokens = torch.randint(30, (4, 8))
            if monitor is not None:
                monitor.start_step(number)
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()
            if monitor is not None:
                monitor.finish_step(number)
        states.append((model.state_dict(), torch.get_rng_state()))
    assert torch.equal(states[0][1], states[1][1])
    for name, tensor in states[0][0].items():
        assert torch.equal(tensor, states[1][0][name]), name


@pytest.mark.slow
@pytest.mark.parametrize("steps", [2_800, pytest.param(9_800, marks=pytest.mark.slow)])
def test_memory_stays_the_same_over_many_steps(steps: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), BatchNorm(2), nn.LayerNorm(2))
    monitor = NormMonitor(model, 10)
    x = torch.randn(3, 2)

    def train(first: int, number: int) -> int:
        for index in range(first, first + number):
            monitor.start_step(index)
            model(x).square().sum().backward()
            assert len(monitor.finish_step(index)) == (2 if index % 10 == 0 else 0)
        gc.collect()
        return len(gc.get_objects())

    train(0, 100)
    before = train(100, 100)
    after = train(200, steps)
    assert after - before < 200  # what pytest and torch keep for themselves
    assert monitor._records == []


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = BatchNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_layers_that_are_compiled_one_by_one_share_their_code() -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(*[Layer() for _ in range(10)])
    monitor = NormMonitor(model, 2)
    for layer in model:
        layer.compile(backend="aot_eager", fullgraph=True)
    for number in range(4):
        monitor.start_step(number)
        model(torch.randn(5, 4, requires_grad=True)).square().sum().backward()
        assert len(monitor.finish_step(number)) == (0 if number % 2 else 10)
    # Observed and not, each with an input that is a leaf and one that is none, at most.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4
    torch.compiler.reset()


def test_observers_end_with_their_hooks() -> None:
    from powernorm.diagnosis.observer_ops import _observers

    gc.collect()
    before = len(_observers)
    model = Masked("bn")
    monitor = NormMonitor(model, 1)
    assert len(_observers) == before + 2
    monitor.detach()
    del monitor
    gc.collect()
    assert len(_observers) == before


def one_rank(rank: int, world_size: int, wrapped: bool) -> list[NormRow]:
    return [
        row for norm in ("bn", "pn", "ln") for row in ranks_rows(rank, world_size, norm, wrapped)
    ]


def ranks_rows(rank: int, world_size: int, norm: str, wrapped: bool) -> list[NormRow]:
    torch.manual_seed(0)
    model: nn.Module = Masked(norm)
    model.dropout.p = 0.0
    # Before wrapping, so that the layers have the names that they have alone.
    monitor = NormMonitor(model, 1)
    rows: list[NormRow] = []
    run = DistributedDataParallel(model) if wrapped else model
    for number, (x, mask) in enumerate(batches(3)):
        if mask is None:
            mask = torch.zeros(x.shape[:-1], dtype=torch.bool)
        x, mask = x[rank::world_size], mask[rank::world_size]
        if not len(x):  # a rank without sequences still calls every norm
            x, mask = torch.zeros(1, 1, 6, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
        monitor.start_step(number)
        y = run(x.requires_grad_(), mask)
        (y * (~mask).unsqueeze(-1)).square().sum().backward()
        rows = monitor.finish_step(number)
    return rows


@pytest.mark.distributed
def test_two_processes_see_what_one_does(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    alone = one_rank(0, 1, False)
    ranks = run_processes(one_rank, 2, tmp_path, 2, True)
    # Norms of tokens share nothing: each process sees its own part of the gradient.
    own = [[row.pop("gradient_norm") ** 2 for row in rows if row["norm"] == "ln"] for rows in ranks]
    together = [row["gradient_norm"] ** 2 for row in alone if row["norm"] == "ln"]
    assert [sum(parts) for parts in zip(*own, strict=True)] == pytest.approx(together)
    for rows in ranks:
        for row, expected in zip(rows, alone, strict=True):
            if row["norm"] == "ln":
                continue
            for name, value in expected.items():
                if value is None or isinstance(value, str):
                    assert row[name] == value
                else:
                    assert row[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
