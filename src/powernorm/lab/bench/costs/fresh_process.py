"""A script of its own: prints by how much the process grows that opens an ONNX file and runs it.

It imports nothing but the engine, whose memory it is about. Arguments: openvino, fused or unfused;
the file; threads; batch; tokens; OpenVINO's name of the precision.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_NUM_CALLS = 3
_LINUX = Path("/proc/self/status")


def _openvino(path: str, threads: int, hint: str) -> Callable[[], Callable[[Any], Any]]:
    import openvino

    core = openvino.Core()
    hints = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": hint}
    return lambda: core.compile_model(path, "CPU", hints)


def _onnxruntime(path: str, threads: int, *, fused: bool) -> Callable[[], Callable[[Any], Any]]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads

    def load() -> Callable[[Any], Any]:
        session = onnxruntime.InferenceSession(
            path,
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=None if fused else ["SkipLayerNormFusion"],
        )
        name = session.get_inputs()[0].name
        return lambda x: session.run(None, {name: x})

    return load


def _reset_peak() -> None:
    # Linux: what importing the engine took for a moment is not the model's.
    if _LINUX.exists():
        Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    if _LINUX.exists():
        lines = _LINUX.read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Load, run three times, print bytes."""
    import numpy

    kind, path, threads, batch, tokens, hint = sys.argv[1:]
    x = numpy.zeros((int(batch), int(tokens)), "int64")
    if kind == "openvino":
        load = _openvino(path, int(threads), hint)
    else:
        load = _onnxruntime(path, int(threads), fused=kind == "fused")
    _reset_peak()
    before = _peak()
    call = load()
    for _ in range(_NUM_CALLS):
        call(x)
    print(_peak() - before)  # noqa: T201


if __name__ == "__main__":
    main()
