"""onnxruntime: sessions of files, their optimized graphs, and its quantizer."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import onnx
import onnxruntime
import torch
from onnxruntime import quantization
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import Tensor

from int8.scales import even_scales
from powernorm import InputError

StaticOperators = Literal["matmul", "all"]
"""Operators that static quantization computes in integers: matrix products, or all supported."""

_QUIET: Final = 4
"""Level of onnxruntime's log: errors become exceptions anyway."""


class OnnxSession:
    """A model that onnxruntime runs on the CPU.

    Args:
        path: path of the file.
        optimized: path to write the optimized graph to.

    Attributes:
        input_shapes: shapes by name; dimensions that may vary have names.

    Raises:
        InputError: onnxruntime does not accept the file.
    """

    def __init__(self, path: Path, optimized: Path | None = None) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _QUIET
        # Spinning threads would keep cores from the following work.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        if optimized is not None:
            options.optimized_model_filepath = str(optimized)
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # errors of onnxruntime have no common base
            raise InputError(f"onnxruntime does not run {path}: {_first_line(error)}") from error
        self.input_shapes: dict[str, list[int | str]] = {
            value.name: value.shape for value in self._session.get_inputs()
        }

    def feed(self, inputs: Sequence[Tensor]) -> dict[str, Any]:
        """Return a model's inputs in onnxruntime's form, by name."""
        return {name: value.numpy() for name, value in zip(self.input_shapes, inputs, strict=True)}

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs for a model's inputs.

        Raises:
            InputError: an operator fails on them.
        """
        try:
            return [torch.from_numpy(value) for value in self._session.run(None, self.feed(inputs))]
        except Exception as error:  # errors of onnxruntime have no common base
            raise InputError(f"onnxruntime fails: {_first_line(error)}") from error


def read_graph(path: Path) -> onnx.ModelProto:
    """Return the graph of a file, without weights in separate files."""
    return onnx.load(path, load_external_data=False)


def optimized_graph(path: Path) -> onnx.ModelProto:
    """Return the graph that onnxruntime makes of a file for the CPU of this machine.

    Raises:
        InputError: as `OnnxSession`.
    """
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "optimized.onnx"
        OnnxSession(path, written)
        return read_graph(written)


def quantize_dynamic(source: Path, out: Path) -> None:
    """Quantize weights to int8, and activations at run time, each tensor by its own range.

    Weights of matrix products get a scale for each output feature, tables of embeddings one;
    features of unlike scale are evened out first (`even_scales`).

    Args:
        source: an exported model.
        out: the file to write.

    Raises:
        InputError: onnxruntime does not take the model.
    """
    with _prepared(source) as (prepared, _):
        quantization.quantize_dynamic(
            prepared, out, per_channel=True, weight_type=quantization.QuantType.QInt8
        )


def quantize_static(
    source: Path,
    out: Path,
    batches: Sequence[Sequence[Tensor]],
    operators: StaticOperators = "matmul",
) -> None:
    """Quantize weights and activations to int8, activations by the ranges in batches.

    Features of unlike scale are evened out first (`even_scales`).

    Args:
        source: an exported model.
        out: the file to write, with operators in floating point between quantize and dequantize
            nodes, which onnxruntime replaces by integer operators.
        batches: inputs of the model.
        operators: operators to quantize.

    Raises:
        InputError: there are no batches, or onnxruntime does not take the model.
    """
    if not batches:
        raise InputError("batches is empty, but its values determine the ranges: give some")
    with _prepared(source) as (prepared, excluded):
        quantization.quantize_static(
            prepared,
            out,
            _Reader(OnnxSession(prepared), batches),
            op_types_to_quantize=["MatMul", "Gemm"] if operators == "matmul" else None,
            nodes_to_exclude=excluded,
            per_channel=True,
            # The type that x86 processors multiply fastest.
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
        )


class _Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
    """Batches in the form that onnxruntime's calibration needs."""

    def __init__(self, session: OnnxSession, batches: Sequence[Sequence[Tensor]]) -> None:
        self._feeds = map(session.feed, batches)

    def get_next(self) -> dict[str, Any] | None:
        """Return the next batch, None after the last."""
        return next(self._feeds, None)


@contextmanager
def _prepared(source: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield a prepared copy of a model, and the operators that must not be quantized.

    Errors are converted to readable ones.
    """
    before = logging.root.manager.disable
    # It warns by the root logger, for each bias and each weight of a norm.
    logging.disable(logging.WARNING)
    try:
        with tempfile.TemporaryDirectory() as folder:
            even, prepared = (Path(folder) / f"{name}.onnx" for name in ("even", "prepared"))
            model = onnx.load(source)
            # Before the next step fuses products with their biases, which have no such scales.
            excluded = even_scales(model)
            _forget_shapes_of_weights(model)
            onnx.save(model, even)
            # The exporter has written the shapes, and symbols of other kinds than it knows.
            quant_pre_process(str(even), str(prepared), skip_symbolic_shape=True)
            yield prepared, excluded
    except InputError:
        raise
    except Exception as error:  # the quantizer may raise anything
        raise InputError(
            f"onnxruntime cannot quantize the model: {type(error).__name__}: {_first_line(error)}"
        ) from error
    finally:
        logging.disable(before)


def _forget_shapes_of_weights(model: onnx.ModelProto) -> None:
    """Drop the exporter's shapes of weights, which the quantizer may transpose."""
    weights = {tensor.name for tensor in model.graph.initializer}
    kept = [value for value in model.graph.value_info if value.name not in weights]
    del model.graph.value_info[:]
    model.graph.value_info.extend(kept)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
