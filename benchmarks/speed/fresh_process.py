"""Opens an ONNX file by OpenVINO or onnxruntime; as a script it prints what that takes.

It imports nothing but the engine, whose memory it is about, and runs on Linux alone. Arguments:
openvino, fused or unfused; the file; threads; batch; tokens; OpenVINO's name of the precision.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_NUM_CALLS = 3

Load = Callable[[], Callable[[Any], Any]]
"""Opens the file; what it returns runs the model and returns its output."""


def opener(kind: str, path: str, threads: int, hint: str) -> Load:
    """Return what opens a file, its engine imported already."""
    return (
        _openvino(path, threads, hint) if kind == "openvino" else _onnxruntime(kind, path, threads)
    )


def _openvino(path: str, threads: int, hint: str) -> Load:
    import openvino

    core = openvino.Core()
    hints = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": hint,
        "PERFORMANCE_HINT": "LATENCY",
    }

    def load() -> Callable[[Any], Any]:
        compiled = core.compile_model(path, "CPU", hints)
        return lambda x: compiled(x)[0]

    return load


def _onnxruntime(kind: str, path: str, threads: int) -> Load:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Spinning threads would take the cores of whatever runs next.
    options.add_session_config_entry("session.force_spinning_stop", "1")

    def load() -> Callable[[Any], Any]:
        session = onnxruntime.InferenceSession(
            path,
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=None if kind == "fused" else ["SkipLayerNormFusion"],
        )
        name = session.get_inputs()[0].name
        return lambda x: session.run(None, {name: x})[0]

    return load


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def main() -> None:
    """Load, run three times, print by how many bytes the process grew."""
    import numpy

    kind, path, threads, batch, tokens, hint = sys.argv[1:]
    x = numpy.zeros((int(batch), int(tokens)), "int64")
    load = opener(kind, path, int(threads), hint)
    # What importing the engine took for a moment is not the model's.
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak()
    call = load()
    for _ in range(_NUM_CALLS):
        call(x)
    print(_peak() - before)


if __name__ == "__main__":
    main()
