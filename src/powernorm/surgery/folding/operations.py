"""The operators whose weights can absorb a scale and a shift per feature."""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from powernorm.surgery.changes import tensors_of
from powernorm.surgery.folding.axes import Place, integers, operator_name, shape_of
from powernorm.surgery.folding.trace import Trace, path_of

Kind = Literal["linear", "convolution", "einsum", "embedding", "value", "diagonal"]


@dataclass(frozen=True)
class TensorPart:
    """Rows of a parameter or buffer, as an operator sees it.

    Args:
        name: name of the parameter or buffer.
        rows: range of its first dimension.
        transposed: whether the operator sees the transposed matrix, or matrices.
    """

    name: str
    rows: tuple[int, int]
    transposed: bool = False


@dataclass(frozen=True)
class Operation:
    """An operator that is affine in its input, with its weights in the model.

    As a relation it absorbs any A and B on its two sides.

    `linear`: y = W x + b; `convolution`: the same over a window; `einsum`: the same with W of more
    dimensions and no b; `embedding`: a row of the table; `value`: the parameter itself;
    `diagonal`: y = w ⊙ x.
    """

    node: fx.Node
    kind: Kind
    reads: Place | None
    """Features of its input, None for an embedding and a value."""
    output: Place
    """Features of its output."""
    weight: TensorPart
    bias: TensorPart | None = None
    padded: bool = False
    """Whether a convolution pads its input with zeros."""
    groups: int = 1
    """Groups of a convolution."""
    axes: tuple[int, int] = (0, 1)
    """Dimensions of the weight with the features of the output and of the input, for `einsum`."""

    @property
    def inputs(self) -> tuple[Place, ...]:
        """Features that it reads, if any."""
        return () if self.reads is None else (self.reads,)

    @property
    def path(self) -> str:
        """Name of the module that calls it."""
        return path_of(self.node)


_SPATIAL = {"conv1d": 1, "conv2d": 2, "conv3d": 3}
_WEIGHT_AT = {"linear": 1, "mm": 1, "matmul": 1, "addmm": 2}
WITH_WEIGHTS = frozenset({*_SPATIAL, *_WEIGHT_AT, "embedding"})
"""Operators that torch's modules call with their weights."""
_PRODUCTS = ("mm", "matmul")
_OF_EXPERTS = ("bmm", "_grouped_mm", "transformers.grouped_mm_fallback.default")
"""Products of each token with the matrix of its expert."""


def operation_of(node: fx.Node, trace: Trace) -> Operation | None:
    """Return the operation of a node, None if it is none or its weight is computed."""
    if node.op != "call_function":
        return None
    name = operator_name(node)
    if name in _WEIGHT_AT:
        return _linear(node, trace, name)
    if name == "add":
        return _product_plus_bias(node, trace)
    if name in _SPATIAL:
        return _convolution(node, trace)
    if name == "einsum":
        return _einsum(node, trace)
    if name in _OF_EXPERTS:
        return _experts(node, trace)
    if name == "embedding":
        table = part_of(node.args[0], trace)
        if table is not None and not table.transposed:
            return Operation(node, "embedding", None, _last(node), table)
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
    product = Operation(node, "linear", read, _last(node), weight, bias)
    users = list(node.users)
    if name in _PRODUCTS and len(users) == 1:
        return _with_bias(product, users[0], trace) or product
    return product


def _product_plus_bias(node: fx.Node, trace: Trace) -> Operation | None:
    """Return the operation of a sum that adds its bias to a product `x @ W`, or None."""
    for value in node.args[:2]:
        if isinstance(value, fx.Node) and operator_name(value) in _PRODUCTS:
            product = operation_of(value, trace)
            if product is not None and product.output.node is node:
                return product
    return None


def _with_bias(product: Operation, total: fx.Node, trace: Trace) -> Operation | None:
    """Return a product together with the bias that its only user adds, None if that is no bias."""
    if operator_name(total) != "add" or total.kwargs.get("alpha", 1) != 1:
        return None
    others = [value for value in total.args[:2] if value is not product.node]
    bias = part_of(others[0], trace) if len(others) == 1 else None
    width = shape_of(product.node)[-1]
    if bias is None or shape_of(_node(others[0])) != (width,):
        return None
    return replace(product, output=_last(total), bias=bias)


def _convolution(node: fx.Node, trace: Trace) -> Operation | None:
    defaults: list[Any] = [None, None, None, 1, 0, 1, 1]
    arguments = [*node.args, *defaults[len(node.args) :]]
    x, kernel, given, _stride, padding, _dilation, groups = arguments
    weight, bias = part_of(kernel, trace), part_of(given, trace)
    if weight is None or weight.transposed or (given is not None and bias is None):
        return None
    padded = padding not in ("valid",) and (isinstance(padding, str) or any(integers(padding)))
    # Without a batch there is one leading axis less.
    channels = len(shape_of(node)) - 1 - _SPATIAL[operator_name(node)]
    read, written = Place(_node(x), channels), Place(node, channels)
    return Operation(node, "convolution", read, written, weight, bias, padded, groups)


def _einsum(node: fx.Node, trace: Trace) -> Operation | None:
    """Return a product of a value and a whole parameter, such as `ibh,hnd->ibnd` in XLNet.

    If several dimensions are summed over, or only the parameter has several, the last one
    counts as the features: each can absorb a scale per feature.
    """
    equation, operands = node.args[:2]
    terms, _, written = str(equation).replace(" ", "").partition("->")
    named = terms.split(",")
    if not isinstance(operands, Sequence) or len(operands) != 2 or len(named) != 2:
        return None
    if any(not text.isalpha() or len(set(text)) < len(text) for text in (*named, written)):
        return None
    for x, weight in ((0, 1), (1, 0)):
        part = part_of(operands[weight], trace)
        summed = [one for one in named[x] if one in named[weight] and one not in written]
        new = [one for one in written if one in named[weight] and one not in named[x]]
        if part is None or part.transposed or not summed or not new:
            continue
        sizes = [dict(zip(named[i], shape_of(_node(operands[i])), strict=True)) for i in (0, 1)]
        if any(sizes[0][one] != sizes[1][one] for one in sizes[0].keys() & sizes[1].keys()):
            continue  # one of them is broadcast
        read = Place(_node(operands[x]), named[x].index(summed[-1]))
        wrote = Place(node, written.index(new[-1]))
        axes = (named[weight].index(new[-1]), named[weight].index(summed[-1]))
        return Operation(node, "einsum", read, wrote, part, axes=axes)
    return None


def _experts(node: fx.Node, trace: Trace) -> Operation | None:
    """Return a product of tokens, sorted by expert, with a parameter (experts, in, out).

    The parameter may be (experts, out, in), transposed.
    """
    x, given = node.args[:2]
    weight = part_of(given, trace)
    if weight is None or len(shape_of(_node(given))) != 3:
        return None
    axes = (1, 2) if weight.transposed else (2, 1)
    part = replace(weight, transposed=False)
    return Operation(node, "einsum", _last(_node(x)), _last(node), part, axes=axes)


def _last(node: fx.Node) -> Place:
    return Place(node, len(shape_of(node)) - 1)


def _node(value: Any) -> fx.Node:
    assert isinstance(value, fx.Node)
    return value


_SAME_VALUE = frozenset({"contiguous", "clone", "alias", "detach", "lift_fresh_copy"})
_SAME_SHAPE = frozenset({"view", "reshape", "_unsafe_view", "to", "_to_copy", "expand"})


def part_of(value: object, trace: Trace) -> TensorPart | None:
    """Return the parameter part that a node is: all rows or some, transposed or not; or None.

    With three dimensions the first counts the matrices, and each may be transposed.
    """
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
    dims = {dim % 3 for dim in integers(list(value.args[1:3]))} if kind == "transpose" else set()
    if len(shape_of(value)) == 3 and dims == {1, 2}:
        return replace(inner, transposed=not inner.transposed)
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


_WITH_BIAS = ("linear", "convolution")


class Slots:
    """The slots that hold the tensors of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._adds_bias: dict[nn.Module, bool] = {}
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.tensors = tensors_of(model)
        self._aliases: dict[int, list[str]] = {}
        for name, tensor in self.tensors.items():
            self._aliases.setdefault(id(tensor), []).append(name)

    def aliases(self, name: str) -> list[str]:
        """Return all names of the tensor, each slot of each module once."""
        slots: dict[tuple[int, str], str] = {}
        for alias in self._aliases[id(self.tensors[name])]:
            path, _, attribute = alias.rpartition(".")
            slots.setdefault((id(self.modules[path]), attribute), alias)
        return list(slots.values())

    def read_at(self, name: str, path: str) -> str:
        """Return the slot that a module at `path` reads the tensor from."""
        aliases = self.aliases(name)
        inside = [alias for alias in aliases if alias.rpartition(".")[0] == path] or [
            alias for alias in aliases if path and alias.startswith(f"{path}.")
        ]
        return inside[0] if inside else aliases[0]

    def bias_for(self, operation: Operation) -> tuple[TensorPart, int] | None:
        """Return (part, size) of a bias that can be added to an operation without one, or None."""
        slot = self.read_at(operation.weight.name, operation.path)
        path, _, attribute = slot.rpartition(".")
        module, weight = self.modules[path], self.tensors[slot]
        name = {"weight": "bias", "in_proj_weight": "in_proj_bias"}.get(attribute)
        if name is None or operation.weight.transposed or operation.kind not in _WITH_BIAS:
            return None
        has_empty_slot = name in module._parameters and module._parameters[name] is None
        if not has_empty_slot or not self._reads(operation, path):
            return None
        part = TensorPart(f"{path}.{name}" if path else name, operation.weight.rows)
        return part, weight.shape[0]

    def _reads(self, operation: Operation, path: str) -> bool:
        """Return whether the operator is in the owner's own forward, which would add a bias."""
        caller, owner = self.modules.get(operation.path), self.modules[path]
        attention = isinstance(caller, nn.MultiheadAttention) and _runs(caller, _ATTENTION)
        if attention and caller is not None:
            return owner is caller or owner is caller.out_proj
        if caller is None or owner is not caller:
            return False
        return _runs(caller, _FORWARDS) or self._is_linear(caller)

    def _is_linear(self, module: nn.Module) -> bool:
        """Return whether a subclass of Linear with a forward of its own would add a bias."""
        if not isinstance(module, nn.Linear) or "forward" in module.__dict__:
            return False
        if module not in self._adds_bias:
            self._adds_bias[module] = _adds_bias(module)
        return self._adds_bias[module]


_ATTENTION = (nn.MultiheadAttention.forward,)
_FORWARDS = (nn.Linear.forward, nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)


def _runs(module: nn.Module, forwards: tuple[object, ...]) -> bool:
    """Return whether the module's forward is one of these, not a subclass's or an instance's."""
    return type(module).forward in forwards and "forward" not in module.__dict__


def _adds_bias(module: nn.Linear) -> bool:
    """Return whether a copy of a linear layer with another weight and a bias uses both."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

    rows, columns = module.weight.shape
    # One expanded column takes no memory, and a sum over the inputs still shows all reads.
    weight, bias, x = draw(rows, 1).expand(rows, columns), draw(rows), draw(2, 3, columns)
    shadow = copy.copy(module)
    shadow.__dict__["_parameters"] = {
        **dict.fromkeys(module._parameters),
        "weight": nn.Parameter(weight, requires_grad=False),
        "bias": nn.Parameter(bias, requires_grad=False),
    }
    try:
        with torch.no_grad():
            y = type(module).forward(shadow, x)
    except Exception:  # if a foreign forward raises anything, it is no plain linear map
        return False
    expected = nn.functional.linear(x, weight, bias)
    return isinstance(y, Tensor) and y.shape == expected.shape and torch.allclose(y, expected)


def can_shift(operation: Operation, slots: Slots, makes_biases: bool = True) -> bool:
    """Return whether an operation can add a constant per feature of its output.

    Args:
        operation: the operation.
        slots: slots of the model.
        makes_biases: whether it can get a bias if it has none.
    """
    if operation.kind in ("embedding", "value") or operation.bias is not None:
        return True
    return makes_biases and slots.bias_for(operation) is not None
