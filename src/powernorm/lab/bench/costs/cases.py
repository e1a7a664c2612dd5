"""What is measured: encoders, engines, precisions and threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from powernorm.lab.bench.inference.cases import SIZES, Size
from powernorm.runs import placement_words

Engine = Literal["torch", "inductor", "onnxruntime", "openvino"]
Precision = Literal["float32", "bfloat16", "int8 dynamic", "int8 static", "int8 static, all"]
"""Static: the matrix products, or all operators that onnxruntime's quantizer knows."""
Rival = Literal["LayerNorm", "RMSNorm", "DyT", "folded"]

COST_PRESETS: Final = ("removal", "removal-quick")
RIVALS: Final[tuple[Rival, ...]] = ("LayerNorm", "RMSNorm", "DyT", "folded")
BASELINE: Final = RIVALS[0]
BATCH: Final = 1
TOKENS: Final = 128
THREADS: Final = (1, 2)
QUICK_FEATURES: Final = 384
"""Width of the encoders that inductor compiles, and of those of the quick preset: compiling takes
longer than all that is timed."""

WAYS: Final[tuple[tuple[Engine, Precision], ...]] = (
    ("torch", "float32"),
    ("torch", "bfloat16"),
    ("torch", "int8 dynamic"),
    ("inductor", "float32"),
    ("inductor", "bfloat16"),
    ("onnxruntime", "float32"),
    ("onnxruntime", "int8 dynamic"),
    ("onnxruntime", "int8 static"),
    ("onnxruntime", "int8 static, all"),
    ("openvino", "float32"),
    ("openvino", "bfloat16"),
    ("openvino", "int8 static"),
    ("openvino", "int8 static, all"),
)
"""onnxruntime has no kernels in bfloat16 for processors, and OpenVINO none for onnxruntime's
dynamic quantization."""


@dataclass(frozen=True)
class CostCase:
    """One comparison of all rivals.

    Attributes:
        size: the architecture.
        engine: who runs the models.
        precision: what they are computed in.
        threads: of the engine.
        batch: sequences at a time.
        tokens: of each sequence.
    """

    size: Size
    engine: Engine
    precision: Precision
    threads: int
    batch: int = BATCH
    tokens: int = TOKENS

    @property
    def label(self) -> str:
        """A short name."""
        size = self.size
        return (
            f"{size.layers} layers × {size.features}, {placement_words(size.placement)}, "
            f"{self.engine} {self.precision}, {self.threads} threads"
        )


def cost_cases(*, quick: bool = False) -> list[CostCase]:
    """Return what is measured, encoder after encoder.

    Args:
        quick: the narrow encoders on one thread, without inductor.
    """
    return [
        CostCase(size, engine, precision, threads)
        for size in sorted(SIZES, key=lambda size: size.features)
        for engine, precision in WAYS
        for threads in THREADS
        if _is_measured(size, engine, threads, quick=quick)
    ]


def _is_measured(size: Size, engine: Engine, threads: int, *, quick: bool) -> bool:
    is_narrow = size.features == QUICK_FEATURES
    if quick:
        return is_narrow and threads == 1 and engine != "inductor"
    return is_narrow or engine != "inductor"
