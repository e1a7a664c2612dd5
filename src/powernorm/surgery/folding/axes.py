"""The features' axis across operators that do not change the features."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, fx


class Place(NamedTuple):
    """The features of a value: a node of the graph and one of its axes, counted from 0."""

    node: fx.Node
    axis: int

    def __repr__(self) -> str:
        return f"{self.node.name}[{self.axis}]"


def operator_name(node: fx.Node) -> str:
    """Return `linear` for `aten.linear.default`; the target itself if it is no such operator."""
    if node.target is operator.getitem:
        return "getitem"
    name = str(node.target)
    return name.split(".")[1] if name.startswith("aten.") else name


def only_checks(node: fx.Node) -> bool:
    """Return whether the operator reads only a tensor's type and shape, not its values."""
    return operator_name(node) == "_assert_tensor_metadata"


_SPLITS: Final = frozenset({"split", "split_with_sizes", "chunk", "unbind", "tensor_split"})
_CASTS: Final = frozenset({"to", "_to_copy", "type_as"})


def _value_of(node: fx.Node) -> Tensor | None:
    """Return a node's value, None if it is no tensor; for a split, the tensor that it splits."""
    if operator_name(node) in _SPLITS:
        return _value_of(operand_of(node))
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node's value; for a split, the shape of the tensor that it splits."""
    value = _value_of(node)
    return () if value is None else tuple(map(_size, value.shape))


def _size(size: int | torch.SymInt) -> int:
    """Return the size of a dimension; if it depends on values, a number that no other has."""
    known = size if isinstance(size, int) else size.node.maybe_as_int()
    return -1 - abs(hash(str(size))) if known is None else int(known)


def holds_floats(node: fx.Node) -> bool:
    """Return whether the node's value is a floating-point tensor, or a split of one."""
    value = _value_of(node)
    return value is not None and value.is_floating_point()


Mapped = int | None
AxisMap = Callable[[fx.Node, int, bool], Mapped]
"""(node, axis, forward) → the axis on the other side of the node, None if it is not kept.

With `forward` the axis of the first operand is mapped to that of the output, else the reverse.
"""


def _reshaped(node: fx.Node, axis: int, forward: bool) -> Mapped:
    before, after = shape_of(operand_of(node)), shape_of(node)
    if not forward:
        before, after = after, before
    leading = math.prod(before[:axis])
    for other, size in enumerate(after):
        if size == before[axis] and math.prod(after[:other]) == leading:
            return other
    return None


def _expanded(node: fx.Node, axis: int, forward: bool) -> Mapped:
    before, after = shape_of(operand_of(node)), shape_of(node)
    added = len(after) - len(before)
    other = axis + added if forward else axis - added
    inner = axis if forward else other
    kept = other >= 0 and before[inner] == after[inner + added]
    return other if kept else None


def _transposed(node: fx.Node, axis: int, forward: bool) -> Mapped:
    del forward
    ndim = len(shape_of(node))
    first, second = (0, 1) if len(node.args) < 3 else (_axis(node, 1, ndim), _axis(node, 2, ndim))
    return {first: second, second: first}.get(axis, axis)


def _permuted(node: fx.Node, axis: int, forward: bool) -> Mapped:
    ndim = len(shape_of(node))
    order = [int(dim) % ndim for dim in integers(node.args[1])]
    return order.index(axis) if forward else order[axis]


def _removed(node: fx.Node, axis: int, forward: bool) -> Mapped:
    """Map the axis across `select` or one piece of `unbind`, which remove a dimension."""
    return _without(_axis(node, 1, len(shape_of(operand_of(node)))), axis, forward)


def _without(dim: int, axis: int, forward: bool) -> Mapped:
    """Map the axis across the removal of a dimension, or backward, across a new one."""
    if forward:
        return None if axis == dim else axis - (axis > dim)
    return axis + (axis >= dim)


def _same_but(position: int, default: int | None = 0) -> AxisMap:
    """Return a map that keeps the axis unless the operator works along it.

    `position` is the index of the operator's argument `dim`.
    """

    def mapped(node: fx.Node, axis: int, forward: bool) -> Mapped:
        del forward
        ndim = len(shape_of(node))
        dims = node.args[position] if len(node.args) > position else default
        if dims is None or dims == []:
            return None
        return None if axis in {int(dim) % ndim for dim in integers(dims)} else axis

    return mapped


def _piece(node: fx.Node, axis: int, forward: bool) -> Mapped:
    """Map the axis across one piece of a split: it stays, or `unbind` removes a dimension."""
    split = operand_of(node)
    return _removed(split, axis, forward) if operator_name(split) == "unbind" else axis


def _reduced(node: fx.Node, axis: int, forward: bool) -> Mapped:
    ndim = len(shape_of(operand_of(node)))
    dims = node.args[1] if len(node.args) > 1 and node.args[1] is not None else list(range(ndim))
    gone = {int(dim) % ndim for dim in integers(dims)} if dims != [] else set(range(ndim))
    keep = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    kept = [dim for dim in range(ndim) if dim not in gone]
    if keep:
        return None if axis in gone else axis
    if forward:
        return kept.index(axis) if axis in kept else None
    return kept[axis]


def _outside(spatial: int) -> AxisMap:
    """Return a map that keeps all axes but the last ones, over which windows are taken."""

    def mapped(node: fx.Node, axis: int, forward: bool) -> Mapped:
        del forward
        return axis if axis < len(shape_of(node)) - spatial else None

    return mapped


def _indexed(node: fx.Node, axis: int, forward: bool) -> Mapped:
    """Map the axis across `x[i, j]` with tensor indices for leading dimensions.

    The dimensions after them keep their order.
    """
    indices = node.args[1]
    assert isinstance(indices, Sequence)
    before, after = shape_of(operand_of(node)), shape_of(node)
    moved = len(after) - len(before)
    inner = axis if forward else axis - moved
    last = _covered(indices) - 1
    return (inner + moved if forward else inner) if inner > last else None


def _covered(indices: Sequence[Any]) -> int:
    """Return the number of leading dimensions up to the last indexed one.

    A bool mask covers several dimensions.
    """
    covered = reached = 0
    for index in indices:
        value = index.meta["val"] if isinstance(index, fx.Node) else None
        masks = value is not None and value.dtype in (torch.bool, torch.uint8)
        covered += value.ndim if masks and value is not None else 1
        reached = covered if index is not None else reached
    return reached


_AVERAGES: Final = {
    1: ("adaptive_avg_pool1d", "upsample_nearest1d", "upsample_linear1d"),
    2: (
        *("adaptive_avg_pool2d", "_adaptive_avg_pool2d"),
        *("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"),
    ),
    3: (
        *("adaptive_avg_pool3d", "_adaptive_avg_pool3d"),
        *("upsample_nearest3d", "upsample_trilinear3d"),
    ),
}
"""Averages over windows of existing values, by their number of dimensions."""
_PASSING: Final[dict[str, AxisMap]] = {
    **dict.fromkeys(
        (
            *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze"),
            *("contiguous", "clone", "alias", "detach", "to", "_to_copy", "lift_fresh_copy"),
            *("view_as", "type_as"),
        ),
        _reshaped,
    ),
    "expand": _expanded,
    "transpose": _transposed,
    "t": _transposed,
    "permute": _permuted,
    "select": _removed,
    "slice": _same_but(1),
    "narrow": _same_but(1),
    "index_select": _same_but(1),
    "roll": _same_but(2, default=None),  # without dimensions it rolls through the features
    "flip": _same_but(1),
    "split": _same_but(2),
    "split_with_sizes": _same_but(2),
    "chunk": _same_but(2),
    "tensor_split": _same_but(2),
    "unbind": _same_but(1),
    "getitem": _piece,
    "mean": _reduced,
    "index": _indexed,
    **{name: _outside(spatial) for spatial, names in _AVERAGES.items() for name in names},
}
"""Operators that commute with a multiply-add per feature, as long as the axis survives."""


def passes(node: fx.Node) -> bool:
    """Return whether the operator passes its first operand's features on."""
    name = operator_name(node)
    if name not in _PASSING:
        return False
    # `view(dtype)` reads the same bits as other numbers.
    after, before = _value_of(node), _value_of(operand_of(node))
    same = after is not None and before is not None and after.dtype == before.dtype
    return same or name in _SPLITS or name in _CASTS


def _stacked(node: fx.Node, axis: int, forward: bool) -> Mapped:
    """Map the axis across `cat` or `stack`."""
    ndim = len(shape_of(node))
    dim = _axis(node, 1, ndim) if len(node.args) > 1 else 0
    if operator_name(node) == "cat":
        operands = node.args[0]
        alone = isinstance(operands, Sequence) and len(operands) == 1
        return axis if axis != dim or alone else None
    return _without(dim, axis, not forward)


_POOLS: Final = {"avg_pool1d": 1, "avg_pool2d": 2, "avg_pool3d": 3}
_PADS: Final = frozenset({"pad", "constant_pad_nd"})


def _gathered(node: fx.Node, axis: int, forward: bool) -> Mapped:
    """Map the axis across `gather` if it takes whole tokens: one index for all features."""
    del forward
    index = node.args[2]
    gathered = _axis(node, 1, len(shape_of(node))) == axis
    if gathered or not isinstance(index, fx.Node) or not _is_constant_along(index, axis):
        return None
    return axis if shape_of(node)[axis] == shape_of(operand_of(node))[axis] else None


def takes_windows(node: fx.Node) -> bool:
    """Return whether the operator averages over windows, or pads, which may bring zeros in."""
    return operator_name(node) in _POOLS or operator_name(node) in _PADS


def _padded(node: fx.Node, axis: int, forward: bool) -> Mapped:
    """Map the axis across padding, unless that is along it."""
    del forward
    widths = integers(node.args[1])
    first = 2 * (len(shape_of(node)) - 1 - axis)  # from the last dimension to the first
    return None if any(widths[first : first + 2]) else axis


_MAPS: Final[dict[str, AxisMap]] = {
    **_PASSING,
    "sum": _reduced,
    "cat": _stacked,
    "stack": _stacked,
    "gather": _gathered,
    **{name: _outside(spatial) for name, spatial in _POOLS.items()},
    **dict.fromkeys(_PADS, _padded),
}


def across(node: fx.Node, axis: int, *, forward: bool) -> int | None:
    """Return the axis on the other side of an operator, None if it is not kept, or not known."""
    name = operator_name(node)
    if name not in _MAPS or (name in _PASSING and not passes(node)):
        return None
    return _MAPS[name](node, axis, forward)


def window_keeps_constants(node: fx.Node) -> bool | None:
    """Return whether the same constant everywhere stays one; None if not even zeros stay zeros.

    Zeros that are padded, and an average that counts them, keep no other constant. This includes
    padding of no width: its width may come from a shape, and be another one for other inputs.
    """
    name = operator_name(node)
    if name in _POOLS:
        defaults: list[Any] = [None, None, None, 0, False, True, None]
        given = [*node.args, *defaults[len(node.args) :]]
        padding, counts_zeros, divisor = given[3], given[5], given[6]
        return divisor is None and not (counts_zeros and any(integers(padding)))
    if name == "pad" and len(node.args) > 2 and node.args[2] != "constant":
        return True  # reflected, replicated or circular
    position = 3 if name == "pad" else 2
    value = node.args[position] if len(node.args) > position else node.kwargs.get("value")
    return False if value in (None, 0) else None


_CONSTANTS: Final = frozenset(
    {"full", "ones", "zeros", "full_like", "ones_like", "zeros_like", "new_ones", "new_zeros"}
)
_PER_ELEMENT: Final = frozenset(
    {
        *("add", "sub", "rsub", "mul", "div", "neg", "abs", "exp", "log", "sqrt", "rsqrt", "pow"),
        *("reciprocal", "clamp", "clamp_min", "clamp_max", "sigmoid", "where", "logical_not"),
        *("bitwise_not", "logical_and", "bitwise_and", "logical_or", "bitwise_or"),
        *("eq", "ne", "lt", "le", "gt", "ge"),
    }
)


def _is_constant_along(node: fx.Node, axis: int, known: dict[Place, bool] | None = None) -> bool:
    """Return whether a value is known to be the same all along an axis.

    Examples are a mask of tokens expanded to the features, and sums with one. Intermediate results
    are stored in `known`.
    """
    known, place = {} if known is None else known, Place(node, axis)
    if place not in known:
        known[place] = False
        known[place] = _finds_constant(node, axis, known)
    return known[place]


def _finds_constant(node: fx.Node, axis: int, known: dict[Place, bool]) -> bool:
    name = operator_name(node)
    if shape_of(node)[axis] == 1 or name in _CONSTANTS:
        return True
    if node.op != "call_function":
        return False
    if name in _PER_ELEMENT:
        operands = [value for value in node.args if isinstance(value, fx.Node)]
        places = [(one, across_broadcast(node, one, axis)) for one in operands]
        return all(other is None or _is_constant_along(one, other, known) for one, other in places)
    if name == "expand":
        inner = axis - (len(shape_of(node)) - len(shape_of(operand_of(node))))
        return inner < 0 or _is_constant_along(operand_of(node), inner, known)
    if name == "sum" or (name in _PASSING and name not in _SPLITS and name != "getitem"):
        before = _MAPS[name](node, axis, False)
        return before is not None and _is_constant_along(operand_of(node), before, known)
    return False


def across_broadcast(node: fx.Node, operand: fx.Node, axis: int) -> int | None:
    """Return the operand's axis that corresponds to an output axis, None if it is broadcast."""
    other = axis - (len(shape_of(node)) - len(shape_of(operand)))
    kept = other >= 0 and shape_of(operand)[other] == shape_of(node)[axis]
    return other if kept else None


def is_one_for_all(node: fx.Node, operand: fx.Node, axis: int) -> bool:
    """Return whether all positions along an output axis see the same value of an operand."""
    other = across_broadcast(node, operand, axis)
    return other is None or _is_constant_along(operand, other)


def operand_of(node: fx.Node) -> fx.Node:
    """Return the first operand."""
    first = node.args[0]
    assert isinstance(first, fx.Node)
    return first


def integers(value: Any) -> list[int]:
    """Return a dimension or a list of dimensions as a list."""
    return [int(item) for item in value] if isinstance(value, Sequence) else [int(value)]


def _axis(node: fx.Node, position: int, ndim: int) -> int:
    """Return the dimension given as an argument, counted from 0; 0 if it is left out."""
    argument = node.args[position] if len(node.args) > position else 0
    assert isinstance(argument, int)
    return argument % ndim
