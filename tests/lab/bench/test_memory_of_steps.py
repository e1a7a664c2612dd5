"""Memory beside speed: what arithmetic says, whoever takes it, and nothing of it while timing."""

from __future__ import annotations

import gc
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from powernorm.lab.bench import steps
from powernorm.lab.bench.cases import Case, Direction
from powernorm.lab.bench.measuring import make_step, measure
from powernorm.lab.bench.memory import Memory, Step, measure_memory, nothing
from powernorm.lab.bench.printing import print_case, print_steps
from powernorm.lab.bench.providers import COPY, NORMS, Provider, providers
from powernorm.lab.bench.rows import Row, make_row, read_any_rows, read_rows, write_rows

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
TOKENS, FEATURES = 256, 24
MATRIX, BY_TOKEN, BY_FEATURE = TOKENS * FEATURES * 4, TOKENS * 4, FEATURES * 4
CASE = Case(TOKENS, FEATURES)


class HoardingNorm(nn.LayerNorm):
    """Keeps a copy of its input until its backward is over."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        assert y.grad_fn is not None
        y.grad_fn.metadata["copy"] = x.detach().clone()
        return y


class WastefulNorm(nn.LayerNorm):
    """Needs one more matrix in the backward, and keeps none for it."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.register_hook(lambda grad: grad * 2)
        return y


def memory_of(provider: Provider, case: Case = CASE) -> Memory:
    generator = torch.Generator().manual_seed(0)
    step = make_step(provider, case, torch.randn(case.tokens, case.features), generator)
    step()
    return measure_memory({"it": step})["it"]


def torch_norm(build: type[nn.Module]) -> Provider:
    return Provider(build.__name__, "ln", "torch", build)


def test_layer_norm_takes_what_arithmetic_says() -> None:
    """Output, mean and 1/σ; then the gradients of x, γ and β, and each thread's sums of both."""
    memory = memory_of(torch_norm(nn.LayerNorm))
    assert memory.kept == MATRIX + 2 * BY_TOKEN
    sums = 2 * torch.get_num_threads() * BY_FEATURE
    assert memory.peak == 2 * MATRIX + 2 * BY_TOKEN + 2 * BY_FEATURE + sums


@pytest.mark.parametrize("direction", ["forward", "evaluation"])
def test_nothing_is_kept_without_a_backward(direction: Direction) -> None:
    memory = memory_of(torch_norm(nn.LayerNorm), replace(CASE, direction=direction))
    assert memory == Memory(MATRIX + 2 * BY_TOKEN, None)


def test_a_copy_that_a_norm_keeps_is_seen() -> None:
    plain, hoarding = memory_of(torch_norm(nn.LayerNorm)), memory_of(torch_norm(HoardingNorm))
    assert plain.kept is not None
    assert hoarding == Memory(plain.peak + MATRIX, plain.kept + MATRIX)


def test_a_matrix_in_the_backward_alone_is_seen() -> None:
    plain, wasteful = memory_of(torch_norm(nn.LayerNorm)), memory_of(torch_norm(WastefulNorm))
    assert wasteful.kept == plain.kept
    assert wasteful.peak == plain.peak + MATRIX


@pytest.mark.parametrize("padding", [0.0, 0.25])
def test_every_run_gives_the_same_bytes(padding: float) -> None:
    """Rows of two runs can be compared to the byte, so that a change of memory is seen."""
    found = providers(tuple(NORMS), with_eager=True, with_compiled=False)
    first, again = (
        [
            (row.provider, row.peak_bytes, row.kept_bytes)
            for row in measure(replace(CASE, padding=padding), found, seconds=0.0)
        ]
        for _ in range(2)
    )
    assert first == again
    assert [provider for provider, *_ in first] == [COPY, *(p.name for p in found)]
    assert first[0] == (COPY, 0, None)
    assert all(peak > kept >= MATRIX for _, peak, kept in first[1:])


def test_what_was_left_over_before_is_not_subtracted() -> None:
    """A cycle that Python collects in the middle of a step would hide as much of its peak."""

    def leaving(_: object = nothing) -> None:
        cycle: list[object] = [torch.empty(1000)]
        cycle.append(cycle)

    def collecting(_: object = nothing) -> None:
        gc.collect()
        torch.empty(100)

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        measure_memory({"leaving": leaving})
        found = measure_memory({"collecting": collecting})
        assert not gc.isenabled()
    finally:
        if was_enabled:
            gc.enable()
    assert found["collecting"] == Memory(400, None)


def test_nothing_is_profiled_while_it_is_timed() -> None:
    """A profiler that is on makes small norms many times slower."""
    profiled: list[bool] = []

    class Spy(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            profiled.append(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]
            return super().forward(x)

    measure(CASE, [torch_norm(nn.LayerNorm), torch_norm(Spy)], seconds=0.0)
    assert profiled[-1]
    assert not any(profiled[:-1])
    assert len(profiled) > 10


# ---- rows and tables ---------------------------------------------------------------------------


def made_row(name: str, memory: Memory | None, case: Case = CASE) -> Row:
    return make_row(
        case,
        name,
        "pn",
        "cpu",
        [1.23456] * 4,
        [0.1] * 4,
        [0.1] * 4,
        memory=memory,
        baseline_memory=Memory(8_000_000, 3_000_000),
    )


def shown(rows: list[Row], *, whole_steps: bool = False) -> list[str]:
    console = Console(width=100, color_system=None)
    with console.capture() as captured:
        (print_steps if whole_steps else print_case)(console, rows)
    return captured.get().splitlines()


def test_memory_comes_back_as_written(tmp_path: Path) -> None:
    rows = [made_row("a", Memory(10_000_000, 4_000_000)), made_row("b", Memory(4_000_000, None))]
    assert [(r.peak_bytes, r.kept_bytes, r.peak_ratio) for r in rows] == [
        (10_000_000, 4_000_000, 1.25),
        (4_000_000, None, 0.5),
    ]
    write_rows(tmp_path / "rows.jsonl", {}, rows)
    assert read_rows(tmp_path / "rows.jsonl") == ({}, rows)


@pytest.mark.parametrize("name", ["cpu-1", "cpu-2", "cpu-3", "rivals", "step", "inference"])
def test_stored_rows_load(name: str) -> None:
    _, rows = read_any_rows(RESULTS / f"{name}.jsonl")
    assert rows


def test_rows_from_before_memory_was_measured(tmp_path: Path) -> None:
    """They load, and their tables have no empty columns."""
    new = made_row("a", Memory(10_000_000, 4_000_000))
    fields = ("peak_bytes", "kept_bytes", "peak_ratio")
    record = {name: value for name, value in asdict(new).items() if name not in fields}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"machine": {}}) + "\n" + json.dumps(record) + "\n")
    _, (old,) = read_rows(path)
    assert old == replace(new, peak_bytes=None, kept_bytes=None, peak_ratio=None)
    for whole_steps in (False, True):
        assert "MB" not in "".join(shown([old], whole_steps=whole_steps))
        assert "MB" in "".join(shown([old, new], whole_steps=whole_steps))


@pytest.mark.parametrize("whole_steps", [False, True])
def test_tables_fit_into_100_columns(whole_steps: bool) -> None:
    """The longest names, and figures of the largest cases."""
    rows = [
        made_row("pn-static (compiled)", Memory(678_901_234, 567_890_123), Case(131072, 1024)),
        made_row("torch LayerNorm", Memory(10_000, 4_000)),
    ]
    text = "\n".join(shown(rows, whole_steps=whole_steps))
    assert "…" not in text
    assert "678.90  84.863   567.89" in text
    assert "0.01   0.001     0.00" in text


# ---- a whole training step ---------------------------------------------------------------------


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> steps.Batch:
    monkeypatch.setattr(steps, "SENTENCES", 3)
    monkeypatch.setattr(steps, "LENGTH", 8)
    return steps.make_batch(0)


def test_a_copy_in_each_norm_of_a_training_step_is_seen(batch: steps.Batch) -> None:
    training: dict[str, Step] = {
        "plain": steps.make_training_step(nn.LayerNorm, batch),
        "hoarding": steps.make_training_step(HoardingNorm, batch),
    }
    for step in training.values():
        step()
    found = measure_memory(training)
    plain, hoarding = found["plain"].kept, found["hoarding"].kept
    assert plain is not None
    assert hoarding == plain + 13 * 3 * 8 * 512 * 4


def test_gradients_are_memory_of_the_step(batch: steps.Batch) -> None:
    """With those of the step before still there, a step's peak would be too small by them."""
    step = steps.make_training_step(None, batch)
    step()
    weights = sum(p.numel() * 4 for p in steps.TranslationModel(None).parameters())
    first, again = (measure_memory({"it": step})["it"] for _ in range(2))
    assert first == again
    assert first.peak > weights


def test_torch_batch_norm_is_over_all_tokens() -> None:
    x = torch.randn(3, 8, 16)
    wanted = nn.BatchNorm1d(16)(x.view(24, 16)).view(3, 8, 16)
    torch.testing.assert_close(steps.TokenBatchNorm(16)(x), wanted, rtol=0, atol=0)
