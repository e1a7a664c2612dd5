"""Tests of the Triton kernels: on a GPU where there is one, else by Triton's interpreter.

They need torch, triton, numpy, pytest and hypothesis, and nothing else, so that they run where
nothing can be installed. `tools/gpu.sh` runs them in several processes, each a part of the tests
(`POWERNORM_GPU_PART`, such as 3/8), and keeps one JSON line a test (`POWERNORM_GPU_ROWS`).
"""

from __future__ import annotations

import json
import os
import random
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if find_spec("triton") is None:
    DEVICE = ""
    collect_ignore_glob = ["test_*.py"]
else:
    from gpu.kernel_cases import DEVICE

_BEGIN = time.monotonic()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the part of the tests that this process runs."""
    part, _, parts = os.environ.get("POWERNORM_GPU_PART", "1/1").partition("/")
    if int(parts) > 1:
        # Where time ends early, something of everything has run.
        random.Random(0).shuffle(items)
        items[:] = items[int(part) - 1 :: int(parts)]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write a row for a test that is over, or that could not begin."""
    path = os.environ.get("POWERNORM_GPU_ROWS")
    if path and (report.when == "call" or report.outcome != "passed"):
        row: dict[str, Any] = {"test": report.nodeid, "outcome": report.outcome}
        row |= {"seconds": round(report.duration, 2), "at": round(time.monotonic() - _BEGIN, 1)}
        if report.failed:
            row["message"] = str(report.longrepr)[-2000:]
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


@pytest.fixture(autouse=True)
def interpret_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: the interpreter, which cuts float32 to bfloat16 off where a GPU rounds."""
    if DEVICE == "cuda":
        return
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def rounding_cast(builder: Any, source: Any, target: Any) -> Any:
        if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
            return cast(builder, source, target)
        values = torch.from_numpy(np.ascontiguousarray(source.data))
        return TensorHandle(values.bfloat16().view(torch.uint16).numpy(), target.scalar)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", rounding_cast)
