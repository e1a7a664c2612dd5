"""Statistics that another statistic behind them cancels, but for eps.

RMSNorm multiplies each token by a number. Where all that reads it is homogeneous (linear layers
without a bias, reshapes, ReLU) and ends in norms of the same token, as of queries, keys and values,
these divide that number out again: x̂ and x give the same, up to the eps of the norms behind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import fx

from powernorm.surgery.axes import (
    integers,
    is_one_for_all,
    only_checks,
    operator_name,
    shape_of,
)
from powernorm.surgery.operations import operation_of, part_of
from powernorm.surgery.tracing import Trace, mark_of, statistic_of

_RESHAPES = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze"})
_ALIKE = frozenset(
    {
        *("contiguous", "clone", "alias", "detach", "to", "_to_copy", "relu", "neg", "slice"),
        *("split", "split_with_sizes", "chunk", "type_as"),
    }
)
Axes = tuple[bool, ...]
"""Which dimensions hold the features of a token, rather than tokens."""


def canceled(
    trace: Trace, candidates: Collection[int], invariant: Collection[int]
) -> frozenset[int]:
    """Return the norms whose statistic the ones behind them cancel.

    Args:
        trace: the graphs.
        candidates: norms that only multiply each token by a number and features by a weight each.
        invariant: norms whose output a factor on each token does not change, but for eps.
    """
    found = set(candidates)
    for node in trace.nodes():
        mark = mark_of(node)
        if mark is not None and mark.index in found:
            axes = (False,) * (len(shape_of(node)) - 1) + (True,)
            if not all(_cancels(trace, node, user, axes, invariant) for user in node.users):
                found.discard(mark.index)
    return frozenset(found)


def _cancels(
    trace: Trace, value: fx.Node, user: fx.Node, axes: Axes, invariant: Collection[int]
) -> bool:
    """Return whether a factor per token of a value leaves what comes of a reader as it is."""
    if only_checks(user):
        return True
    index = statistic_of(user)
    if index is not None:
        return index in invariant and axes[-1]
    if user.op != "call_function" or trace.adapter_of(user):
        return False
    after = _axes_behind(trace, value, user, axes)
    return after is not None and all(
        _cancels(trace, user, reader, after, invariant) for reader in user.users
    )


def _axes_behind(trace: Trace, value: fx.Node, user: fx.Node, axes: Axes) -> Axes | None:
    """Return where the features are behind a homogeneous operator, None behind all others."""
    operation = operation_of(user, trace)
    if operation is not None:
        plain = operation.kind == "linear" and operation.bias is None and operation.node is user
        read = operation.reads
        is_read = read is not None and read.node is value
        return axes if plain and is_read and axes == _last_alone(axes) else None
    name = operator_name(user)
    if name in ("mul", "div"):
        return axes if _is_scaled(trace, value, user) else None
    if not user.args or user.args[0] is not value:
        return None
    if name in _ALIKE or name == "getitem":
        return axes
    if name in _RESHAPES:
        return _reshaped(shape_of(value), shape_of(user), axes)
    return _moved(user, name, axes)


def _last_alone(axes: Axes) -> Axes:
    return (False,) * (len(axes) - 1) + (True,)


def _is_scaled(trace: Trace, value: fx.Node, user: fx.Node) -> bool:
    """Return whether a value is multiplied by a number or by a parameter alone."""
    others = [one for one in user.args[:2] if one is not value]
    if len(others) != 1 or shape_of(user) != shape_of(value):
        return False
    other = others[0]
    if not isinstance(other, fx.Node):
        return user.args[0] is value or operator_name(user) == "mul"
    known = part_of(other, trace) is not None or is_one_for_all(
        user, other, len(shape_of(user)) - 1
    )
    return operator_name(user) == "mul" and known


def _moved(user: fx.Node, name: str, axes: Axes) -> Axes | None:
    ndim = len(axes)
    if name == "transpose":
        first, second = (dim % ndim for dim in integers(list(user.args[1:3])))
        order = list(range(ndim))
        order[first], order[second] = second, first
        return tuple(axes[dim] for dim in order)
    if name == "permute":
        return tuple(axes[dim % ndim] for dim in integers(user.args[1]))
    return None


def _reshaped(before: tuple[int, ...], after: tuple[int, ...], axes: Axes) -> Axes | None:
    """Return where the features are in another shape, None where tokens and features are merged."""
    found: list[bool] = []
    for old, new in _blocks(before, after):
        kinds = {axes[dim] for dim in old if before[dim] != 1}
        if len(kinds) > 1:
            return None
        found += [kinds.pop() if kinds else False] * len(new)
    return tuple(found)


def _blocks(
    before: tuple[int, ...], after: tuple[int, ...]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the shortest runs of dimensions that hold the same number of values."""
    old, new = 0, 0
    while old < len(before) or new < len(after):
        first, second = [old], [new]
        sizes = [before[old] if old < len(before) else 1, after[new] if new < len(after) else 1]
        old, new = old + 1, new + 1
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1]:
                sizes[0] *= before[old]
                first.append(old)
                old += 1
            else:
                sizes[1] *= after[new]
                second.append(new)
                new += 1
        yield (
            [dim for dim in first if dim < len(before)],
            [dim for dim in second if dim < len(after)],
        )
