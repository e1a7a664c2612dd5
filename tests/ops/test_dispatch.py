"""The backend of an op: its choice, how to show it and how to force it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import powernorm
from powernorm.ops import dispatch, eager, explain, use_backend
from powernorm.ops.kernels import cpu
from refusals import refuses


def test_cpu_kernels_serve_what_they_can() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.zeros(2, 3, dtype=dtype)
        assert dispatch.functions_for(x) is cpu
        choices = explain(x)
        assert [c.op for c in choices] == [*dispatch.OPS, *dispatch.EAGER_OPS]
        assert [c.backend for c in choices] == ["cpu"] * 4 + ["eager"] * 2
    assert dispatch.functions_for(torch.zeros(2, 3, dtype=torch.float16)) is eager


def test_explain_gives_reasons() -> None:
    (choice,) = explain(torch.zeros(2, 3, dtype=torch.float16), "power_norm")
    assert choice.backend == "eager"
    assert "float16" in choice.others["cpu"]
    assert choice.others["triton"]
    assert "power_norm: eager" in str(choice)
    assert "not cpu" in str(choice)
    (choice,) = explain(torch.zeros(2, 3))[:1]
    assert choice.others["eager"] == "cpu is faster"
    refuses(r"op is 'softmax', expected one of batch_norm", explain, torch.zeros(2, 3), "softmax")


def test_a_forced_backend_serves_or_raises() -> None:
    x = torch.zeros(2, 3)
    with use_backend("eager"):
        assert dispatch.functions_for(x) is eager
        assert {c.backend for c in explain(x)} == {"eager"}
        with use_backend("cpu"):
            assert dispatch.functions_for(x) is cpu
            refuses(r"'cpu' was asked for.*float16", powernorm.AdaNorm(3), x.half())
            assert "cannot serve" in explain(x.half(), "token_norm")[0].reason
        with use_backend(None):
            assert dispatch.functions_for(x) is cpu
        assert dispatch.functions_for(x) is eager
    assert dispatch.functions_for(x) is cpu


def test_the_scope_ends_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), use_backend("eager"):
        raise ZeroDivisionError
    assert dispatch.functions_for(torch.zeros(2, 3)) is cpu


def test_unknown_backend() -> None:
    with (
        pytest.raises(powernorm.InputError, match=r"'mps', expected one of eager, cpu, triton"),
        use_backend("mps"),  # type: ignore[arg-type]
    ):
        pass


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


PRINT_BACKEND = (
    "import torch, powernorm; print(powernorm.ops.explain(torch.zeros(2, 3), 'power_norm')[0])"
)


def test_environment_forces_a_backend() -> None:
    done = run_python(PRINT_BACKEND, POWERNORM_BACKEND="eager")
    assert done.stdout.startswith("power_norm: eager (forced"), done.stderr
    wrong = run_python(PRINT_BACKEND, POWERNORM_BACKEND="gpu")
    assert "backend is 'gpu', expected one of eager, cpu, triton" in wrong.stderr
