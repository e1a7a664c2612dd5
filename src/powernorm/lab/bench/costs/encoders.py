"""The rivals as encoders of the same size, and as files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn

import powernorm
from powernorm.integrations.onnx import export
from powernorm.integrations.onnx_runtime import StaticOperators, quantize_dynamic, quantize_static
from powernorm.lab.bench.costs.cases import RIVALS, CostCase, Rival
from powernorm.lab.bench.inference.cases import Size
from powernorm.lab.bench.inference.encoders import Encoder, build_encoders, random_tokens

_NUM_CALIBRATION = 8
_SEED = 100
"""Of the tokens that ranges are measured on; those that are timed are others."""


def build_rivals(size: Size) -> dict[Rival, nn.Module]:
    """Return the encoders of one size: the weights of all are equal, as far as they have the same.

    The folded one is of BatchNorms with statistics of random tokens.

    Raises:
        InputError: a norm did not fold without a rest.
    """
    found = build_encoders(size)
    dyt = Encoder(size, powernorm.DynamicTanh).eval()
    # All but α, which starts at 0.5.
    dyt.load_state_dict(found["LayerNorm"].state_dict(), strict=False)
    return {rival: dyt if rival == "DyT" else found[rival] for rival in RIVALS}


class OnnxFiles:
    """ONNX files of the rivals of one size, each made when it is first asked for.

    Args:
        models: the rivals.
        folder: where the files go.
    """

    def __init__(self, models: Mapping[Rival, nn.Module], folder: Path) -> None:
        self._models = models
        self._folder = folder

    def path(self, rival: Rival, case: CostCase) -> Path:
        """Return the file of a rival.

        Raises:
            InputError: it cannot be exported or quantized.
        """
        inputs = (case.batch, case.tokens)
        float_file = self._folder / f"{rival} {inputs}.onnx"
        if not float_file.exists():
            export(self._models[rival], random_tokens(*inputs)).save(float_file)
        if not case.precision.startswith("int8"):
            return float_file
        file = self._folder / f"{rival} {inputs} {case.precision}.onnx"
        if file.exists():
            return file
        if case.precision == "int8 dynamic":
            quantize_dynamic(float_file, file)
        else:
            seeds = range(_SEED, _SEED + _NUM_CALIBRATION)
            batches = [random_tokens(*inputs, seed) for seed in seeds]
            operators: StaticOperators = "all" if case.precision.endswith("all") else "matmul"
            quantize_static(float_file, file, batches, operators)
        return file
