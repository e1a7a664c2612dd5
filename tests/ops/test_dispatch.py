"""Which backend serves what, how to see it and how to force it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import powernorm
from powernorm.ops import dispatch, eager, explain, use_backend
from powernorm.ops.kernels.cpu import functions


def test_cpu_kernels_serve_what_they_can() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.zeros(2, 3, dtype=dtype)
        assert dispatch.functions_for(x) is functions
        choices = explain(x)
        assert [c.op for c in choices] == [*dispatch.OPS, "moving_average_norm"]
        assert [c.backend for c in choices] == ["cpu"] * 4 + ["eager"]
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
    with pytest.raises(powernorm.InputError, match=r"op is 'softmax', expected one of batch_norm"):
        explain(torch.zeros(2, 3), "softmax")


def test_a_forced_backend_serves_or_raises() -> None:
    x = torch.zeros(2, 3)
    with use_backend("eager"):
        assert dispatch.functions_for(x) is eager
        assert {c.backend for c in explain(x)} == {"eager"}
        with use_backend("cpu"):
            assert dispatch.functions_for(x) is functions
            with pytest.raises(powernorm.InputError, match=r"'cpu' was asked for.*float16"):
                powernorm.AdaNorm(3)(x.half())
            assert "cannot serve" in explain(x.half(), "token_norm")[0].reason
        with use_backend(None):
            assert dispatch.functions_for(x) is functions
        assert dispatch.functions_for(x) is eager
    assert dispatch.functions_for(x) is functions


def test_the_scope_ends_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), use_backend("eager"):
        raise ZeroDivisionError
    assert dispatch.functions_for(torch.zeros(2, 3)) is functions


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


def test_without_the_library_eager_serves_and_says_why(tmp_path: object) -> None:
    done = run_python(PRINT_BACKEND, POWERNORM_CPU_LIBRARY=f"{tmp_path}/nothing.so")
    assert done.stdout.startswith("power_norm: eager"), done.stderr
    assert "never built" in done.stdout
    forced = run_python(
        "import torch, powernorm\nwith powernorm.ops.use_backend('cpu'): pass",
        POWERNORM_CPU_LIBRARY=f"{tmp_path}/nothing.so",
    )
    assert "backend 'cpu' is not available here" in forced.stderr


def test_a_file_that_is_no_library(tmp_path: object) -> None:
    path = f"{tmp_path}/broken.so"
    with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write("not a library")
    done = run_python(PRINT_BACKEND, POWERNORM_CPU_LIBRARY=path)
    assert "broken.so cannot be loaded" in done.stdout, done.stderr


def test_the_kernels_share_torchs_threads() -> None:
    """One OpenMP runtime in the process, and no thread more than torch's own."""
    done = run_python(
        "import torch, powernorm, os\n"
        "torch.set_num_threads(2)\n"
        "x = torch.randn(4096, 512)\n"
        "torch.nn.functional.layer_norm(x, (512,))\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "with powernorm.ops.use_backend('cpu'): powernorm.AdaNorm(512)(x)\n"
        "after = len(os.listdir('/proc/self/task'))\n"
        "maps = open('/proc/self/maps').read().split()\n"
        "runtimes = {m for m in maps if 'libgomp' in m or 'libomp' in m or 'libiomp' in m}\n"
        "print(before, after, len(runtimes))",
        OMP_NUM_THREADS="2",
    )
    before, after, runtimes = map(int, done.stdout.split())
    assert after == before, done.stderr
    assert runtimes == 1
