"""The operators whose weights can absorb a scale and a shift per feature."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, fx

from powernorm.surgery.axes import Place, integers, operator_name, shape_of
from powernorm.surgery.tracing import Trace

Kind = Literal["linear", "convolution", "embedding", "value", "diagonal"]


@dataclass(frozen=True)
class TensorPart:
    """Rows of a parameter or buffer, as an operator sees it.

    Args:
        name: name of the parameter or buffer.
        rows: range of its first dimension.
        transposed: whether the operator sees the transposed matrix.
    """

    name: str
    rows: tuple[int, int]
    transposed: bool = False


@dataclass(frozen=True)
class Operation:
    """An operator that is affine in its input, with its weights in the model.

    `linear`: y = W x + b; `convolution`: the same over a window; `embedding`: a row of the table;
    `value`: the parameter itself; `diagonal`: y = w ⊙ x.
    """

    node: fx.Node
    kind: Kind
    path: str
    """Name of the module that calls it."""
    reads: Place | None
    """Features of its input, None for an embedding and a value."""
    writes: Place
    """Features of its output."""
    weight: TensorPart
    bias: TensorPart | None = None
    padded: bool = False
    """Whether a convolution pads its input with zeros."""


_SPATIAL = {"conv1d": 1, "conv2d": 2, "conv3d": 3}
_WEIGHT_AT = {"linear": 1, "mm": 1, "matmul": 1, "addmm": 2}


def operation_of(node: fx.Node, trace: Trace) -> Operation | None:
    """Return the operation of a node, None if it is none or its weight is computed."""
    if node.op != "call_function":
        return None
    name = operator_name(node)
    if name in _WEIGHT_AT:
        return _linear(node, trace, name)
    if name in _SPATIAL:
        return _convolution(node, trace)
    if name == "embedding":
        table = part_of(node.args[0], trace)
        if table is not None and not table.transposed:
            return Operation(node, "embedding", trace.path_of(node), None, _last(node), table)
    return None


def _linear(node: fx.Node, trace: Trace, name: str) -> Operation | None:
    weight = part_of(node.args[_WEIGHT_AT[name]], trace)
    if weight is None or len(shape_of(_node(node.args[_WEIGHT_AT[name]]))) != 2:
        return None
    if name != "linear":
        # x @ W keeps the inputs in rows, linear keeps the outputs there.
        weight = replace(weight, transposed=not weight.transposed)
    given: Any = None
    if name == "addmm":
        if node.kwargs.get("beta", 1) != 1 or node.kwargs.get("alpha", 1) != 1:
            return None
        given = node.args[0]
    elif name == "linear":
        given = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    bias = part_of(given, trace)
    if given is not None and (bias is None or len(shape_of(_node(given))) != 1):
        return None
    read = _last(_node(node.args[1 if name == "addmm" else 0]))
    return Operation(node, "linear", trace.path_of(node), read, _last(node), weight, bias)


def _convolution(node: fx.Node, trace: Trace) -> Operation | None:
    defaults: list[Any] = [None, None, None, 1, 0, 1, 1]
    arguments = [*node.args, *defaults[len(node.args) :]]
    x, kernel, given, _stride, padding, _dilation, groups = arguments
    weight, bias = part_of(kernel, trace), part_of(given, trace)
    if weight is None or weight.transposed or (given is not None and bias is None):
        return None
    if groups != 1:
        return None
    padded = padding not in ("valid",) and (isinstance(padding, str) or any(integers(padding)))
    # Without a batch there is one leading axis less.
    channels = len(shape_of(node)) - 1 - _SPATIAL[operator_name(node)]
    read, written = Place(_node(x), channels), Place(node, channels)
    return Operation(node, "convolution", trace.path_of(node), read, written, weight, bias, padded)


def _last(node: fx.Node) -> Place:
    return Place(node, len(shape_of(node)) - 1)


def _node(value: Any) -> fx.Node:
    assert isinstance(value, fx.Node)
    return value


_SAME_VALUE = frozenset({"contiguous", "clone", "alias", "detach", "lift_fresh_copy"})
_SAME_SHAPE = frozenset({"view", "reshape", "_unsafe_view", "to", "_to_copy", "expand"})


def part_of(value: object, trace: Trace) -> TensorPart | None:
    """Return the parameter part that a node is: all rows or some, transposed or not; or None."""
    if not isinstance(value, fx.Node):
        return None
    name = trace.tensor_of(value)
    if name is not None:
        shape = shape_of(value)
        return TensorPart(name, (0, shape[0])) if shape else None
    if value.op != "call_function" or not value.args:
        return None
    kind = operator_name(value)
    if kind == "getitem":
        return _piece(value, trace)
    inner = part_of(value.args[0], trace)
    if inner is None:
        return None
    source = _node(value.args[0])
    if kind in _SAME_VALUE or (kind in _SAME_SHAPE and _is_same(value, source)):
        return inner
    if kind == "t" or (kind in ("transpose", "permute") and len(shape_of(value)) == 2):
        swaps = kind != "permute" or [int(d) % 2 for d in integers(value.args[1])] == [1, 0]
        return replace(inner, transposed=not inner.transposed) if swaps else inner
    if kind == "slice" and not inner.transposed:
        return _slice(value, inner)
    return None


def _is_same(value: fx.Node, source: fx.Node) -> bool:
    after, before = value.meta.get("val"), source.meta.get("val")
    return (
        isinstance(after, Tensor)
        and isinstance(before, Tensor)
        and (after.shape, after.dtype) == (before.shape, before.dtype)
    )


def _slice(value: fx.Node, inner: TensorPart) -> TensorPart | None:
    given: list[Any] = [0, None, None, 1]
    given[: len(value.args) - 1] = value.args[1:]
    if given[0] != 0 or given[3] != 1:
        return None
    first, last, _ = slice(given[1], given[2]).indices(inner.rows[1] - inner.rows[0])
    return replace(inner, rows=(inner.rows[0] + first, inner.rows[0] + last))


def _piece(value: fx.Node, trace: Trace) -> TensorPart | None:
    """Return one of the row blocks that a packed projection is split into, or None."""
    split, index = value.args
    if not isinstance(split, fx.Node) or value.target is not operator.getitem:
        return None
    kind = operator_name(split)
    inner = part_of(split.args[0] if split.args else None, trace)
    dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    if inner is None or inner.transposed or dim != 0 or not isinstance(index, int):
        return None
    if kind not in ("split", "split_with_sizes", "chunk"):
        return None
    sizes = [int(piece.shape[0]) for piece in split.meta["val"]]
    start = inner.rows[0] + sum(sizes[:index])
    return replace(inner, rows=(start, start + sizes[index]))
