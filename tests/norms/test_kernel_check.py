"""`powernorm doctor --kernels` passes where kernels are right, and sees each kind of wrong one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm.norms.kernel_check import checking, running
from powernorm.norms.kernel_check.cases import LARGEST, SETTINGS, Case, select_cases
from powernorm.norms.kernel_check.checking import Outcome, check_case, reference, why_not
from powernorm.ops.dispatch import missing_reason

CPU = torch.device("cpu")
SMALL = 2000
needs_kernels = pytest.mark.skipif(bool(missing_reason("cpu")), reason="no C++ kernels here")


@cache
def cases() -> list[Case]:
    return select_cases(0)


def small_case(norm: str, **wanted: Any) -> Case:
    """The first small case of a norm in training with gradients of everything, and these values."""
    usual = {"padding": "out of it", "mask": "random", "dtype": "float32", "values": "normal"}
    found = next(
        case
        for case in cases()
        if case.setting.norm == norm and case.setting.training and not case.setting.is_released
    )
    plain = {"width": 17, "tokens": 64, "groups": int(norm == "pn"), "residual": "none"}
    layout = {"layout": "batch", "arriving": "dense", "affine": "same"}
    return replace(found, **{**usual, **plain, **layout, **wanted})


def on_cpu(case: Case) -> Outcome:
    return check_case(reference(case), "cpu", CPU)


@pytest.mark.parametrize("backend", ["eager", pytest.param("cpu", marks=needs_kernels)])
def test_right_kernels_pass(backend: Any) -> None:
    """A small case of every setting: a user with right kernels would be told they are wrong."""
    found = []
    for place, setting in enumerate(SETTINGS):
        fitting = [
            case
            for case in cases()
            if case.setting == setting
            and 0 < case.tokens * case.width <= SMALL
            and not why_not(case, backend, CPU)
        ]
        found.append(check_case(reference(fitting[place % len(fitting)]), backend, CPU))
    assert len(found) == len(SETTINGS)
    assert {outcome.case.dtype for outcome in found} >= {"float32", "float64", "bfloat16"}
    assert [outcome.facts() for outcome in found if outcome.problems] == []


def test_the_selection_depends_on_the_seed_alone_and_holds_every_pair() -> None:
    assert select_cases(0) == cases()
    assert select_cases(1) != cases()
    assert [case.index for case in cases()] == list(range(len(cases())))
    kinds = ("float32", "bfloat16", "float16", "float64")
    small = [case for case in cases() if case.tokens * case.width <= LARGEST]
    pairs = {(str(case.setting), case.dtype) for case in small}
    assert len(pairs) == len(SETTINGS) * len(kinds)
    for first, second in (("mask", "dtype"), ("layout", "width"), ("values", "tokens")):
        values = [{getattr(case, name) for case in small} for name in (first, second)]
        held = {(getattr(case, first), getattr(case, second)) for case in small}
        possible = {(a, b) for a in values[0] for b in values[1]}
        assert held >= possible - {("one NaN", 0)}


Break = Callable[[Callable[..., Any]], Callable[..., Any]]


def scaled_gradient(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*args: Any) -> Any:
        result = right(*args)
        result[0].mul_(1.001)
        return result

    return wrong


def without_mask(right: Callable[..., Any]) -> Callable[..., Any]:
    def hidden(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype == torch.bool:
            return torch.zeros_like(value)
        if isinstance(value, tuple):
            parts = map(hidden, value)
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return value

    return lambda *args: right(*map(hidden, args))


def without_update(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda args, *_: right(args)


def doing_nothing(right: Callable[..., Any]) -> Callable[..., Any]:
    del right
    return lambda *_: None


def another_each_time(right: Callable[..., Any]) -> Callable[..., Any]:
    calls = []

    def wrong(*args: Any) -> Any:
        result = right(*args)
        calls.append(None)
        result[0].mul_(1 + len(calls) % 2 * 2**-22)
        return result

    return wrong


def raising(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*args: Any) -> Any:
        right(*args)
        raise RuntimeError("misaligned address")

    return wrong


@needs_kernels
@pytest.mark.parametrize(
    ("norm", "function", "broken", "wrong", "message"),
    [
        ("bn", "batch_norm_backward", scaled_gradient, "gradient of x", "rounding errors off"),
        ("pn", "power_norm_backward", scaled_gradient, "gradient of x", "rounding errors off"),
        ("rms", "token_norm_backward", scaled_gradient, "gradient of x", "rounding errors off"),
        ("bn", "batch_norm", without_mask, "y", "rounding errors off"),
        ("bn", "batch_norm", without_mask, "running_mean", "rounding errors off"),
        ("brn", "batch_norm_backward", without_mask, "gradient of x", "rounding errors off"),
        ("pnv", "batch_norm", without_update, "num_batches_tracked", "is 3, expected 4"),
        ("rbn", "update_running_stats", doing_nothing, "running_var", "rounding errors off"),
        ("pn-only", "update_running_stats", doing_nothing, "running_gradient_moment", "off"),
        ("adanorm", "token_norm", another_each_time, "y", "differs between two equal calls"),
        ("pnv", "batch_norm", raising, "call", "raises RuntimeError: misaligned address"),
    ],
)
def test_a_wrong_kernel_is_seen(
    monkeypatch: pytest.MonkeyPatch,
    norm: str,
    function: str,
    broken: Break,
    wrong: str,
    message: str,
) -> None:
    from powernorm.ops.kernels import cpu

    case = small_case(norm)
    assert on_cpu(case).problems == {}
    monkeypatch.setattr(cpu, function, broken(getattr(cpu, function)))
    outcome = on_cpu(case)
    assert message in outcome.problems[wrong]
    assert outcome.facts()["problems"] == outcome.problems


@needs_kernels
def test_nan_in_padding_that_gets_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from powernorm.ops.kernels import cpu

    case = small_case("pnv", padding="NaN")
    assert on_cpu(case).problems == {}
    monkeypatch.setattr(cpu, "batch_norm", without_mask(cpu.batch_norm))
    assert "not finite" in on_cpu(case).problems["y"]


@needs_kernels
@pytest.mark.parametrize(("dtype", "factor"), [("float64", 1e-12), ("bfloat16", 0.2)])
def test_what_is_allowed_goes_with_the_type(
    monkeypatch: pytest.MonkeyPatch, dtype: str, factor: float
) -> None:
    from powernorm.ops.kernels import cpu

    case, right = small_case("bn", dtype=dtype), cpu.batch_norm

    def wrong(*args: Any) -> Any:
        result = right(*args)
        result[0].mul_(1 + factor)
        return result

    assert on_cpu(case).problems == {}
    monkeypatch.setattr(cpu, "batch_norm", wrong)
    assert "y" in on_cpu(case).problems


def test_a_statistic_that_gets_lost_in_the_formula_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other way round: kernels are right and the formula differs in a single constant."""
    case = small_case("pn-static")
    assert check_case(reference(case), "eager", CPU).problems == {}
    from powernorm.norms.kernel_check import formulas

    presets = {"pn-static": {"max_ratio": 5.0, "backward_momentum": 0.00101}}
    monkeypatch.setattr(formulas, "_PRESETS", presets)
    found = check_case(reference(case), "eager", CPU).problems
    assert set(found) == {"running_gradient_moment"}


def test_all_backends_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    case = small_case("bn")
    monkeypatch.setattr(running, "select_cases", lambda _: [case, replace(case, index=1)])
    report, chosen = running.start_report(0)
    seen: list[int] = []
    running.check_kernels(report, chosen, seen.append)
    assert seen == [1, 2]
    assert report.outcomes == []
    checked = [machine for machine in report.machines if not machine.missing]
    assert next(machine.cases for machine in checked if not machine.interpreted) == 2
    assert report.rows["eager", "bn", "float32"].cases == 2
    assert 0 < report.rows["eager", "bn", "float32"].error <= checking.ALLOWED
    with pytest.raises(InputError, match="case is 2, expected a number from 0 to 1"):
        running.start_report(0, 2)
