"""The modules of examples/int8, which the benchmarks in integers use. They need onnxruntime."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from int8.operators import count_operators
from int8.runtime import optimized_graph, quantize_dynamic, quantize_static, read_graph

__all__ = [
    "count_operators",
    "optimized_graph",
    "quantize_dynamic",
    "quantize_static",
    "read_graph",
]
