"""Running a rival by torch, inductor, onnxruntime or OpenVINO."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.integrations.onnx_runtime import OnnxSession
from powernorm.lab.bench.cases import DTYPES
from powernorm.lab.bench.costs.cases import CostCase, Engine, Rival
from powernorm.lab.bench.costs.encoders import OnnxFiles

Run = Callable[[], Tensor]
"""One call of a model on its input."""
Key = tuple[Rival, str]
"""A rival and the setting that it runs in."""

_NORMS: Final = ("LayerNorm", "RMSNorm")
"""What onnxruntime's fusion is about; the graphs of the others stay the same."""


def missing_engines() -> list[Engine]:
    """Return the engines that are not installed."""
    return [] if find_spec("openvino") else ["openvino"]


def cost_runs(
    models: Mapping[Rival, nn.Module], files: OnnxFiles, case: CostCase, tokens: Tensor
) -> dict[Key, Run]:
    """Return what is timed, by rival and setting.

    Args:
        models: float32, in evaluation mode; they stay as they are.
        files: of the same.
        case: says how they run.
        tokens: the input.

    Raises:
        InputError: a model cannot be exported, quantized or run.
    """
    if case.engine in ("torch", "inductor"):
        return {(rival, ""): _torch_run(model, case, tokens) for rival, model in models.items()}
    if case.engine == "openvino":
        return {
            (rival, ""): _openvino_run(files.path(rival, case), case, tokens) for rival in models
        }
    return {
        (rival, setting): _onnxruntime_run(
            files.path(rival, case), case, tokens, fused=setting == "fused"
        )
        for rival in models
        for setting in (("fused", "unfused") if rival in _NORMS else ("fused",))
    }


def _torch_run(model: nn.Module, case: CostCase, tokens: Tensor) -> Run:
    made = deepcopy(model)
    if case.precision == "int8 dynamic":
        with warnings.catch_warnings():
            # torch names other packages that shall do this some day.
            warnings.simplefilter("ignore")
            made = torch.ao.quantization.quantize_dynamic(made, {nn.Linear}, dtype=torch.qint8)
    else:
        made = made.to(DTYPES[case.precision])
    called: Callable[[Tensor], Tensor] = made
    if case.engine == "inductor":
        called = torch.compile(made, fullgraph=True, dynamic=False)

    def run() -> Tensor:
        with torch.no_grad():
            return called(tokens)

    return run


def _onnxruntime_run(path: Path, case: CostCase, tokens: Tensor, *, fused: bool) -> Run:
    session = OnnxSession(path, threads=case.threads, skip_fusion=fused)
    feed = session.feed(tokens)
    return lambda: session.run(feed)[0]


def _openvino_run(path: Path, case: CostCase, tokens: Tensor) -> Run:
    import openvino

    hints = {
        "INFERENCE_NUM_THREADS": case.threads,
        "INFERENCE_PRECISION_HINT": _hint(case),
        "PERFORMANCE_HINT": "LATENCY",
    }
    try:
        compiled = openvino.Core().compile_model(path, "CPU", hints)
    except RuntimeError as error:
        reason = str(error).strip().rpartition("\n")[2]
        raise InputError(f"OpenVINO does not run {case.label}: {reason}") from error
    values = tokens.numpy()
    return lambda: torch.from_numpy(cast(Any, compiled(values)[0]))


def fresh_peak(path: Path, case: CostCase, setting: str) -> int:
    """Return by how many bytes a fresh process grows that opens a file and runs it three times.

    Raises:
        InputError: it fails.
    """
    script = Path(__file__).with_name("fresh_process.py")
    given = [setting or case.engine, path, case.threads, case.batch, case.tokens, _hint(case)]
    command = [sys.executable, "-I", str(script), *map(str, given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise InputError(f"{case.label} fails in a process of its own: {reason}")
    return int(done.stdout)


def _hint(case: CostCase) -> str:
    """Return OpenVINO's name of a precision; what is quantized has float32 around it."""
    return "bf16" if case.precision == "bfloat16" else "f32"
