"""Norms in `benchmarks/bench.py`: rivals, right before fast, time, memory."""

from __future__ import annotations

import gc
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from powernorm.norms import build_norm
from powernorm.ops import eager
from powernorm.ops.dispatch import use_functions
from speed import timing, training_step
from speed.norms import COPY, make_step, measure
from speed.providers import BASELINE, NORMS, Case, Provider, check_providers, providers
from speed.timing import Memory, Step, measure_memory, nothing

TOKENS, FEATURES = 256, 24
MATRIX, BY_TOKEN, BY_FEATURE = TOKENS * FEATURES * 4, TOKENS * 4, FEATURES * 4
CASE = Case(TOKENS, FEATURES)
DIRECTIONS = ("forward", "forward+backward", "evaluation")


def test_who_competes() -> None:
    names = [provider.name for provider in providers(("pn", "bn"), all_backends=True)]
    assert names[:3] == [BASELINE, "torch RMSNorm", "torch BatchNorm1d"]
    ours = [
        f"{norm} ({backend})" for backend in ("cpu", "eager", "compiled") for norm in ("pn", "bn")
    ]
    assert names[3:] == [*ours, "compiled LayerNorm"]
    assert len(providers(all_backends=False)) == 3 + len(NORMS)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gate_lets_right_ones_pass(dtype: str, direction: str) -> None:
    found = [one for one in providers(all_backends=True) if one.backend != "compiled"]
    for padding in (0.0, 0.25):
        check_providers(found, Case(130, 68, dtype, padding, direction))


WRONG = {
    "power_norm": "the output",
    "power_norm_backward": "the input's gradient",
    "update_running_stats": "running_second_moment",
}


@pytest.mark.parametrize("name", WRONG)
def test_gate_stops_a_wrong_one(name: str) -> None:
    """One value in a thousand off by a thousandth; or state that does not move."""

    def wrong(*args: Any) -> Any:
        if name == "update_running_stats":
            return None
        results = getattr(eager, name)(*args)
        results[0].view(-1)[::1000] += 1e-3
        return results

    names = {known: getattr(eager, known) for known in eager.__all__}
    broken = SimpleNamespace(**names | {name: wrong})
    build = partial(build_norm, "pn", warmup_steps=0)
    provider = Provider("pn (wrong)", "pn", "cpu", build, True, partial(use_functions, broken))
    message = rf"pn \(wrong\) is wrong on 130×68 .*: {WRONG[name]} is off by"
    with pytest.raises(powernorm.InputError, match=message):
        check_providers([provider], Case(130, 68))


def test_gate_looks_at_other_libraries_too() -> None:
    provider = Provider(BASELINE, "ln", "torch", partial(nn.LayerNorm, eps=1e-2))
    with pytest.raises(powernorm.InputError, match="torch LayerNorm is wrong"):
        check_providers([provider], Case(130, 68))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_competitor_gets_a_row(direction: str) -> None:
    case = Case(16, 8, padding=0.25, direction=direction)
    found = providers(("pn", "rms"), all_backends=False)
    rows = measure(case, found, seconds=0.0)
    assert [row["provider"] for row in rows] == [COPY, *(p.name for p in found)]
    assert all(row["num_samples"] == 10 and row["median_us"] > 0 for row in rows)
    assert next(row["ratio"] for row in rows if row["provider"] == BASELINE) == 1.0


def test_what_is_timed_runs_and_learns_nothing_else() -> None:
    """A step calls the module in the mode that the case names, with its mask."""
    seen: list[tuple[bool, bool, int]] = []

    class Spy(nn.Module):
        def __init__(self, features: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(features))

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            padding = 0 if mask is None else int(mask.sum())
            seen.append((self.training, x.requires_grad, padding))
            return x * self.weight

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 4, generator=generator)
    for direction in ("evaluation", "forward", "forward+backward"):
        case = Case(100, 4, padding=0.25, direction=direction)
        make_step(Provider("spy", "spy", "cpu", Spy, True), case, x, generator)()
    assert [(training, grad) for training, grad, _ in seen] == [
        (False, False),
        (True, False),
        (True, True),
    ]
    assert all(10 < padding < 40 for *_, padding in seen)


def test_slower_code_is_seen_to_be_slower_and_not_profiled() -> None:
    """A profiler that is on makes small norms many times slower."""
    profiled: list[bool] = []

    class Slow(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            profiled.append(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]
            time.sleep(0.002)
            return super().forward(x)

    found = [torch_norm(BASELINE, nn.LayerNorm), torch_norm("slow", Slow)]
    rows = measure(Case(16, 8), found, seconds=0.0)
    assert rows[2]["median_us"] >= 2000
    assert rows[2]["ratio"] > 5
    assert profiled[-1]
    assert not any(profiled[:-1])


# ---- memory ------------------------------------------------------------------------------------


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


def torch_norm(name: str, build: type[nn.Module]) -> Provider:
    return Provider(name, "ln", "torch", build)


def memory_of(build: type[nn.Module], case: Case = CASE) -> Memory:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(case.tokens, case.features)
    step = make_step(torch_norm("it", build), case, x, generator)
    step()
    return measure_memory({"it": step})["it"]


def test_layer_norm_takes_what_arithmetic_says() -> None:
    """Output, mean and 1/σ; then the gradients of x, γ and β, and each thread's sums of both."""
    memory = memory_of(nn.LayerNorm)
    assert memory.kept == MATRIX + 2 * BY_TOKEN
    sums = 2 * torch.get_num_threads() * BY_FEATURE
    assert memory.peak == 2 * MATRIX + 2 * BY_TOKEN + 2 * BY_FEATURE + sums


@pytest.mark.parametrize("direction", ["forward", "evaluation"])
def test_nothing_is_kept_without_a_backward(direction: str) -> None:
    memory = memory_of(nn.LayerNorm, CASE._replace(direction=direction))
    assert memory == Memory(MATRIX + 2 * BY_TOKEN, None)


def test_one_more_matrix_is_seen() -> None:
    plain, hoarding, wasteful = map(memory_of, (nn.LayerNorm, HoardingNorm, WastefulNorm))
    assert plain.kept is not None
    assert hoarding == Memory(plain.peak + MATRIX, plain.kept + MATRIX)
    assert wasteful == Memory(plain.peak + MATRIX, plain.kept)


@pytest.mark.slow
def test_every_run_gives_the_same_bytes() -> None:
    """Rows of two runs can be compared to the byte, so that a change of memory is seen."""
    found = providers(all_backends=False)
    first, again = (
        [
            (row["provider"], row["peak_bytes"], row["kept_bytes"])
            for row in measure(CASE._replace(padding=0.25), found, seconds=0.0)
        ]
        for _ in range(2)
    )
    assert first == again
    assert [provider for provider, *_ in first] == [COPY, *(p.name for p in found)]
    assert first[0] == (COPY, 0, None)
    assert all(peak > kept >= MATRIX for _, peak, kept in first[1:])


@pytest.mark.slow
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


# ---- a whole training step ---------------------------------------------------------------------


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> training_step.Batch:
    monkeypatch.setattr(training_step, "SENTENCES", 3)
    monkeypatch.setattr(training_step, "LENGTH", 8)
    return training_step.make_batch(0)


def test_batches_are_padded_on_the_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_step, "SENTENCES", 500)
    batch = training_step.make_batch(0)
    assert batch.source.shape == (500, 32)
    assert batch.target.shape == (500, 33)
    for mask in (batch.source_padding, batch.target_padding):
        assert (mask.int().diff(dim=1) >= 0).all()
    assert abs(float(batch.source_padding.float().mean()) - training_step.PADDING) < 0.02


def test_padding_of_the_source_does_not_matter(batch: training_step.Batch) -> None:
    """The mask reaches the norms of the encoder, whose statistics would show it."""
    torch.manual_seed(0)
    model = training_step.TranslationModel(lambda features: build_norm("bn", features))
    assert sum(isinstance(m, powernorm.BatchNorm) for m in model.modules()) == 13
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.MultiheadAttention):
            module.train(False)
    other = batch.source.masked_fill(batch.source_padding, 7)
    assert not torch.equal(other, batch.source)
    torch.testing.assert_close(model(batch._replace(source=other)), model(batch), rtol=1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.usefixtures("batch")
def test_steps_are_measured_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_step, "STEP_NORMS", ("rbn", "pn"))
    monkeypatch.setattr(timing, "ROUNDS", 2)
    (rows,) = training_step.measure_steps(0.0, (), lambda _: None)
    assert [row["norm"] for row in rows] == [BASELINE, "torch BatchNorm1d", "rbn", "pn"]
    assert [row["backend"] for row in rows] == ["torch", "torch", "step", "step"]
    assert (rows[0]["ratio"], rows[0]["peak_ratio"]) == (1.0, 1.0)
    assert all(row["peak_bytes"] > row["kept_bytes"] > 0 for row in rows)
    known = {tuple(rows[0][field] for field in training_step.VIEW.case)}
    assert list(training_step.measure_steps(0.0, known, lambda _: None)) == []


@pytest.mark.slow
def test_memory_of_a_training_step(batch: training_step.Batch) -> None:
    """A copy in each norm; and gradients, without which a step's peak would be too small."""
    steps: dict[str, Step] = {
        "plain": training_step.make_training_step(nn.LayerNorm, batch),
        "hoarding": training_step.make_training_step(HoardingNorm, batch),
    }
    for step in steps.values():
        step()
    found = measure_memory(steps)
    plain, hoarding = found["plain"].kept, found["hoarding"].kept
    assert plain is not None
    assert hoarding == plain + 13 * 3 * 8 * 512 * 4
    assert measure_memory({"plain": steps["plain"]})["plain"] == found["plain"]
    model = training_step.TranslationModel(None)
    assert found["plain"].peak > sum(p.numel() * 4 for p in model.parameters())


def test_torch_batch_norm_is_over_all_tokens() -> None:
    x = torch.randn(3, 8, 16)
    wanted = nn.BatchNorm1d(16)(x.view(24, 16)).view(3, 8, 16)
    torch.testing.assert_close(training_step.TokenBatchNorm(16)(x), wanted, rtol=0, atol=0)
