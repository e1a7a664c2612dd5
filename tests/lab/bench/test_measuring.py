"""Measuring itself: who competes, the correctness gate, the training step."""

from __future__ import annotations

import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from powernorm.lab.bench import steps
from powernorm.lab.bench.cases import GRIDS, Case, Direction
from powernorm.lab.bench.gate import check_providers
from powernorm.lab.bench.measuring import make_step, measure
from powernorm.lab.bench.providers import BASELINE, COPY, NORMS, Provider, providers
from powernorm.norms import build_norm
from powernorm.ops import eager
from powernorm.ops.dispatch import use_functions


def test_who_competes() -> None:
    found = providers(("pn", "bn"), with_eager=True, with_compiled=True)
    names = [provider.name for provider in found]
    assert names[:3] == [BASELINE, "torch RMSNorm", "torch BatchNorm1d"]
    ours = [
        f"{norm} ({backend})" for backend in ("cpu", "eager", "compiled") for norm in ("pn", "bn")
    ]
    assert names[3:] == [*ours, "compiled LayerNorm"]
    with pytest.raises(powernorm.InputError, match=r"norm 'softmax' has no benchmark.*pn-only"):
        providers(("softmax",), with_eager=False, with_compiled=False)


@pytest.mark.parametrize("direction", ["forward", "forward+backward", "evaluation"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_gate_lets_right_ones_pass(dtype: str, direction: Direction) -> None:
    found = providers(tuple(NORMS), with_eager=True, with_compiled=False)
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


@pytest.mark.parametrize("direction", ["forward", "forward+backward", "evaluation"])
def test_every_competitor_gets_a_row(direction: Direction) -> None:
    case = Case(16, 8, padding=0.25, direction=direction)
    found = providers(("pn", "rms"), with_eager=False, with_compiled=False)
    rows = measure(case, found, seconds=0.0)
    assert [row.provider for row in rows] == [COPY, *(p.name for p in found)]
    assert all(row.num_samples == 10 and row.median_us > 0 for row in rows)
    assert next(row.ratio for row in rows if row.provider == BASELINE) == 1.0


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


def test_slower_code_is_seen_to_be_slower() -> None:
    class Slow(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.002)
            return super().forward(x)

    found = [
        Provider(BASELINE, "ln", "torch", nn.LayerNorm),
        Provider("slow", "slow", "torch", Slow),
    ]
    rows = measure(Case(16, 8), found, seconds=0.0)
    assert rows[2].median_us >= 2000
    assert rows[2].ratio > 5


def test_cases_have_names_of_their_own() -> None:
    for cases in GRIDS.values():
        assert len({case.label for case in cases}) == len(cases)


# ---- a whole training step ---------------------------------------------------------------------


def small_batch(monkeypatch: pytest.MonkeyPatch) -> steps.Batch:
    monkeypatch.setattr(steps, "SENTENCES", 3)
    monkeypatch.setattr(steps, "LENGTH", 8)
    return steps.make_batch(0)


def test_batches_are_padded_on_the_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "SENTENCES", 500)
    batch = steps.make_batch(0)
    assert batch.source.shape == (500, 32)
    assert batch.target.shape == (500, 33)
    for mask in (batch.source_padding, batch.target_padding):
        assert (mask.int().diff(dim=1) >= 0).all()
    assert abs(float(batch.source_padding.float().mean()) - steps.PADDING) < 0.02


def test_padding_of_the_source_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask reaches the norms of the encoder, whose statistics would show it."""
    batch = small_batch(monkeypatch)
    torch.manual_seed(0)
    model = steps.TranslationModel(lambda features: build_norm("bn", features))
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.MultiheadAttention):
            module.train(False)
    other = batch.source.masked_fill(batch.source_padding, 7)
    assert not torch.equal(other, batch.source)
    loss = model(batch)
    swapped = steps.Batch(other, batch.target, batch.source_padding, batch.target_padding)
    torch.testing.assert_close(model(swapped), loss, rtol=1e-5, atol=0)


def test_steps_are_measured_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    small_batch(monkeypatch)
    rounds: list[int] = []
    rows = steps.measure_steps(("rbn", "pn"), rounds=2, on_round=rounds.append)
    assert [row.norm for row in rows] == [BASELINE, "torch BatchNorm1d", "rbn", "pn"]
    assert rows[0].ratio == 1.0
    assert all(row.num_samples == 2 for row in rows)
    assert rows[0].peak_ratio == 1.0
    assert all(row.peak_bytes and row.kept_bytes and row.peak_ratio for row in rows)
    assert rounds == [1, 2]


def test_only_the_encoder_is_exchanged() -> None:
    model = steps.TranslationModel(lambda features: build_norm("pn", features))
    assert sum(isinstance(m, powernorm.PowerNorm) for m in model.modules()) == 13
    assert not any(isinstance(m, powernorm.PowerNorm) for m in model.body.decoder.modules())
