"""`powernorm doctor --kernels` passes where kernels are right, and sees each kind of wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from powernorm.norms import kernel_check
from powernorm.norms.kernel_check import Case, Outcome, check_case, run_cases, takes
from powernorm.ops import eager
from powernorm.ops.dispatch import missing_reason

needs_kernels = pytest.mark.skipif(bool(missing_reason("cpu")), reason="no C++ kernels here")


def case_of(norm: str, dtype: torch.dtype = torch.float32, mask: str = "some") -> Case:
    """The first case of a norm in training."""
    return next(
        case
        for case in kernel_check.select_cases()
        if (case.setting.norm, case.dtype, case.input.mask) == (norm, dtype, mask)
        and case.setting.training
    )


def on_cpu(case: Case) -> Outcome:
    (outcome,) = check_case(case, ["cpu"])
    return outcome


@needs_kernels
def test_right_kernels_pass() -> None:
    """An input of every setting: a user with right kernels would be told they are wrong."""
    cases = [case for case in kernel_check.select_cases() if takes("cpu", case)]
    settings: dict[str, list[Case]] = {}
    for case in cases:
        settings.setdefault(str(case.setting), []).append(case)
    found = [on_cpu(of[17 * place % len(of)]) for place, of in enumerate(settings.values())]
    assert len(found) > 40
    assert len({outcome.case.input for outcome in found}) >= 8
    assert [outcome for outcome in found if outcome.problems] == []
    assert 0 < max(outcome.error for outcome in found) < 1


def test_types_without_kernels_are_left_out() -> None:
    case = case_of("bn", torch.float16)
    assert not takes("cpu", case)
    assert takes("cpu", case._replace(dtype=torch.bfloat16))
    # With a float32 stream the sum is what is normalized.
    assert takes("cpu", case._replace(input=case.input._replace(residual="float32")))


def test_the_interpreter_gets_small_inputs_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    taken = [case for case in kernel_check.select_cases() if takes("triton", case)]
    assert {case.dtype for case in taken} == {torch.float32}
    assert max(torch.Size(case.input.shape).numel() for case in taken) == 336


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
        ("bn", "batch_norm_backward", scaled_gradient, "gradient of x", "is allowed"),
        ("pn", "power_norm_backward", scaled_gradient, "gradient of x", "is allowed"),
        ("rms", "token_norm_backward", scaled_gradient, "gradient of x", "is allowed"),
        ("bn", "batch_norm", without_mask, "y", "is allowed"),
        ("bn", "batch_norm", without_mask, "running_mean", "is allowed"),
        ("brn", "batch_norm_backward", without_mask, "gradient of x", "is allowed"),
        ("pnv", "batch_norm", without_update, "num_batches_tracked", "has an error of 1, "),
        ("rbn", "update_running_stats", doing_nothing, "running_var", "is allowed"),
        (
            "pn-only",
            "update_running_stats",
            doing_nothing,
            "running_gradient_moment",
            "is allowed",
        ),
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

    case = case_of(norm)
    assert on_cpu(case).problems == {}
    monkeypatch.setattr(cpu, function, broken(getattr(cpu, function)))
    outcome = on_cpu(case)
    assert message in outcome.problems[wrong]


def test_an_eager_torch_that_computes_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but float64 is there to compare it with."""
    right = eager.batch_norm

    def wrong(args: Any, *update: Any) -> Any:
        result = right(args, *update)
        if args.x.dtype == torch.float32:
            result[0].mul_(1.0001)
        return result

    case = case_of("pnv")
    (found,) = run_cases([case], ["eager"])
    assert found.problems == {}
    monkeypatch.setattr(eager, "batch_norm", wrong)
    (found,) = run_cases([case], ["eager"])
    assert "is allowed" in found.problems["y"]


@needs_kernels
def test_nan_in_padding_that_gets_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from powernorm.ops.kernels import cpu

    case = case_of("pnv", mask="NaN")
    assert on_cpu(case).problems == {}
    monkeypatch.setattr(cpu, "batch_norm", without_mask(cpu.batch_norm))
    assert "differs from the reference in which values are finite" in on_cpu(case).problems["y"]


@needs_kernels
@pytest.mark.parametrize(("dtype", "factor"), [(torch.float64, 1e-12), (torch.bfloat16, 0.1)])
def test_what_is_allowed_goes_with_the_type(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, factor: float
) -> None:
    from powernorm.ops.kernels import cpu

    case, right = case_of("bn", dtype), cpu.batch_norm

    def wrong(*args: Any) -> Any:
        result = right(*args)
        result[0].mul_(1 + factor)
        return result

    assert on_cpu(case).problems == {}
    monkeypatch.setattr(cpu, "batch_norm", wrong)
    assert "y" in on_cpu(case).problems
