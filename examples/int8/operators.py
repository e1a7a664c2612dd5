"""Operators of an ONNX graph by what they compute: reductions, square roots, divisions, casts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from onnx import ModelProto, TensorProto, inliner, shape_inference


class _Parts(NamedTuple):
    """Inner computation of one operator."""

    reductions: int = 0
    square_roots: int = 0
    divisions: int = 0
    exponentials: int = 0


_LAYER_NORM: Final = _Parts(reductions=2, square_roots=1, divisions=1)
_RMS_NORM: Final = _Parts(reductions=1, square_roots=1, divisions=1)
_SOFTMAX: Final = _Parts(reductions=2, divisions=1, exponentials=1)
_PARTS: Final[Mapping[str, _Parts]] = {
    # The definitions in ONNX, and for operators fused by onnxruntime those of the replaced ones.
    **dict.fromkeys(
        ("LayerNormalization", "SkipLayerNormalization", "EmbedLayerNormalization"), _LAYER_NORM
    ),
    **dict.fromkeys(("InstanceNormalization", "GroupNormalization", "GroupNorm"), _LAYER_NORM),
    **dict.fromkeys(
        ("RMSNormalization", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"),
        _RMS_NORM,
    ),
    "LpNormalization": _RMS_NORM,
    **dict.fromkeys(
        ("Softmax", "QLinearSoftmax", "Attention", "MultiHeadAttention", "GroupQueryAttention"),
        _SOFTMAX,
    ),
    "LogSoftmax": _Parts(reductions=2, exponentials=1),
    **dict.fromkeys(
        ("ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceMax", "ReduceMin", "ReduceProd"),
        _Parts(reductions=1),
    ),
    **dict.fromkeys(("ReduceL1", "QLinearReduceMean", "CumSum"), _Parts(reductions=1)),
    "ReduceL2": _Parts(reductions=1, square_roots=1),
    "Sqrt": _Parts(square_roots=1),
    **dict.fromkeys(("Div", "Reciprocal"), _Parts(divisions=1)),
    **dict.fromkeys(
        ("Exp", "Erf", "Tanh", "Sigmoid", "Gelu", "BiasGelu", "FastGelu", "QuickGelu"),
        _Parts(exponentials=1),
    ),
    **dict.fromkeys(("QLinearSigmoid", "Swish"), _Parts(exponentials=1)),
}
_NORMS: Final = frozenset(
    name for name, parts in _PARTS.items() if parts in (_LAYER_NORM, _RMS_NORM)
)
_MOVES: Final = frozenset(
    [
        *("Reshape", "Transpose", "Gather", "GatherElements", "GatherND", "Slice", "Concat"),
        *("Unsqueeze", "Squeeze", "Expand", "Shape", "Identity", "Constant", "Split", "Flatten"),
        *("ConstantOfShape", "Tile", "Pad", "ScatterND", "ScatterElements", "Range", "Size"),
    ]
)
"""Operators that compute nothing."""
_QUANTIZE: Final = frozenset(["QuantizeLinear", "DynamicQuantizeLinear"])
_DEQUANTIZE: Final = "DequantizeLinear"
_INTEGER: Final = frozenset(
    [
        *("MatMulInteger", "ConvInteger", "QGemm", "QAttention", "QEmbedLayerNormalization"),
        *("MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QOrderedMatMul"),
    ]
)
"""Integer operators besides those whose names begin with QLinear."""


@dataclass(frozen=True)
class OperatorCounts:
    """Operators of a graph.

    Attributes:
        operators: number of all operators.
        norms: LayerNorms, RMSNorms and similar norms that are one operator.
        reductions: sums, means, largest and smallest values over an axis, also those inside norms
            and softmax; so the next three.
        square_roots: square roots of whole tensors.
        divisions: divisions and reciprocals.
        exponentials: exp, erf, tanh and sigmoid.
        casts: changes of type.
        quantize: float to integer with a scale.
        dequantize: integer to float with a scale.
        integer: operators that compute in integers.
        floating: operators in floating point, except casts and changes of scale.
        by_type: number of occurrences of each operator.
    """

    operators: int
    norms: int
    reductions: int
    square_roots: int
    divisions: int
    exponentials: int
    casts: int
    quantize: int
    dequantize: int
    integer: int
    floating: int
    by_type: Mapping[str, int]


def count_operators(model: ModelProto) -> OperatorCounts:
    """Return the number of operators of each kind in a graph, including those of its functions.

    Args:
        model: a graph as exported, as quantized, or as rewritten by onnxruntime.
    """
    inlined = inliner.inline_local_functions(model) if model.functions else model
    graph = inlined.graph
    found = Counter(node.op_type for node in graph.node)
    parts = [_PARTS[name] for name in found.elements() if name in _PARTS]
    known = shape_inference.infer_shapes(inlined).graph
    floats = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}
    # Values without a type belong to onnxruntime's own operators, all of which compute.
    others = {
        value.name
        for value in (*known.value_info, *known.output)
        if value.type.tensor_type.elem_type not in (*floats, TensorProto.DOUBLE, 0)
    }
    floating = sum(
        _computes(node.op_type) and not _is_integer(node.op_type) and node.output[0] not in others
        for node in graph.node
    )
    return OperatorCounts(
        operators=found.total(),
        norms=sum(found[name] for name in _NORMS),
        reductions=sum(part.reductions for part in parts),
        square_roots=sum(part.square_roots for part in parts),
        divisions=sum(part.divisions for part in parts),
        exponentials=sum(part.exponentials for part in parts),
        casts=found["Cast"] + found["CastLike"],
        quantize=sum(found[name] for name in _QUANTIZE),
        dequantize=found[_DEQUANTIZE],
        integer=sum(count for name, count in found.items() if _is_integer(name)),
        floating=floating,
        by_type=dict(found.most_common()),
    )


def _is_integer(name: str) -> bool:
    return name in _INTEGER or name.startswith("QLinear")


def _computes(name: str) -> bool:
    """Return whether an operator is more than a move, a cast or a change of scale."""
    return name not in _MOVES | _QUANTIZE | {_DEQUANTIZE, "Cast", "CastLike"}
