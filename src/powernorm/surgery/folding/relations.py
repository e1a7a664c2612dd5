"""Relations that a graph implies for scale and shift of the features that flow through it.

Each value s of the folded model represents a value y of the original one by `y = A ⊙ s + B` along
the axis of its features. Each operator relates the (A, B) of its operands to those of its output.
An operator without a relation (softmax, GELU, LayerNorm) fixes its operands and its output to the
original values: A = 1, B = 0. So a LayerNorm on a residual stream fixes the whole stream. Its
weight and bias come after its statistic, which is such an operator: they are a norm with a fixed
input.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from torch import fx

from powernorm.surgery.folding.axes import (
    Place,
    across,
    across_broadcast,
    holds_floats,
    is_one_for_all,
    only_checks,
    operand_of,
    operator_name,
    passes,
    shape_of,
    takes_windows,
    window_keeps_constants,
)
from powernorm.surgery.folding.operations import (
    WITH_WEIGHTS,
    Operation,
    TensorPart,
    operation_of,
    part_of,
)
from powernorm.surgery.folding.trace import (
    Trace,
    TracedNorm,
    adapter_reason,
    describe,
    is_of_torch,
    mark_of,
    path_of,
    statistic_of,
)


@dataclass(frozen=True)
class Same:
    """The output has the operands' A and B."""

    output: Place
    inputs: tuple[Place, ...]


@dataclass(frozen=True)
class Sum:
    """The output has the A of every term, and the sum of their B."""

    output: Place
    inputs: tuple[Place, ...]
    factors: tuple[float, ...]


@dataclass(frozen=True)
class Homogeneous:
    """A stays; B has to be 0 on both sides: a mask, a sum over tokens, a factor.

    This includes a factor that is a plain number: it may come from a shape or an argument of this
    call, and only relations that do not depend on its value hold for other calls.
    """

    output: Place
    inputs: tuple[Place]


@dataclass(frozen=True)
class NormedValue:
    """A static norm `y = a ⊙ x + c`.

    Folded, it returns its input s itself: A_out = a ⊙ A_in, B_out = a ⊙ B_in + c.
    """

    output: Place
    inputs: tuple[Place]
    index: int


Relation = Same | Sum | Homogeneous | NormedValue | Operation


@dataclass
class Relations:
    """All relations around the norms of a graph."""

    producers: dict[Place, Relation] = field(default_factory=dict)
    """Relations by the features that they write."""

    fixed: dict[Place, str] = field(default_factory=dict)
    """Features that must equal the original ones (A = 1, B = 0), with the reason."""

    places: list[Place] = field(default_factory=list)
    """All features that were reached from a norm, in the order of the graph."""

    readers: dict[Place, list[Relation]] = field(default_factory=dict)
    """Relations by the features that they read."""

    operations: dict[fx.Node, Operation] = field(default_factory=dict)
    """All operations with weights next to the reached features."""

    statistics: dict[Place, list[fx.Node]] = field(default_factory=dict)
    """Statistics of per-token norms by the features that they read; these are fixed, too."""

    def around(self, place: Place) -> list[Relation]:
        """Return the relation that writes features, if any, and those that read them."""
        writes = self.producers.get(place)
        return [*(() if writes is None else (writes,)), *self.readers.get(place, ())]

    def all(self) -> Iterator[Relation]:
        """Yield each relation once, in the order of the graph."""
        every = (relation for place in self.places for relation in self.around(place))
        yield from {id(relation): relation for relation in every}.values()

    def norms(self) -> Iterator[NormedValue]:
        """Yield the uses of norms, in the order of the graph."""
        return (relation for relation in self.all() if isinstance(relation, NormedValue))


def assumes_number(relation: Relation) -> bool:
    """Return whether a neutral number was assumed that may differ in other calls.

    This is a 0 that is added or filled in, except for padding. It may come from sizes or from
    arguments. Modules of torch have theirs as attributes.
    """
    if isinstance(relation, Operation):
        is_unpadded = relation.kind == "convolution" and not relation.padded
        return is_unpadded and not is_of_torch(relation.node)
    node = relation.output.node
    if is_of_torch(node):
        return False
    if operator_name(node) in ("add", "sub"):
        return isinstance(relation, Same) or "alpha" in node.kwargs
    return operator_name(node) == "masked_fill" or takes_windows(node)


def relate(trace: Trace, feature_axes: Sequence[int], *, streams: bool = False) -> Relations:
    """Follow the features of every marked norm up and down the graph.

    Args:
        trace: the graphs.
        feature_axes: the dimension of the features of each norm, by the norm's index.
        streams: also follow the features that statistics read.
    """
    return _Explorer(trace, feature_axes).explore(streams)


def _twins(trace: Trace) -> dict[Place, Place]:
    """Return the output of the same weights in the first graph that uses them, by place.

    The n-th use in one graph goes with the n-th in the other.
    """
    first: dict[tuple[object, ...], Place] = {}
    twins: dict[Place, Place] = {}
    for graph in trace.graphs if len(trace.graphs) > 1 else ():
        uses: Counter[tuple[object, ...]] = Counter()
        for node in graph.nodes:
            operation = operation_of(node, trace)
            part = part_of(node, trace) if node.op == "placeholder" else None
            if operation is not None:
                key, place = (operation.kind, operation.weight), operation.output
            elif part is not None:
                key, place = ("value", part), Place(node, len(shape_of(node)) - 1)
            else:
                continue
            uses[key] += 1
            known = first.setdefault((*key, uses[key]), place)
            if known.node.graph is not graph:
                twins[place] = known
    return twins


def _written(node: fx.Node, trace: Trace) -> str:
    name = trace.written_at(node)
    return f"the model's forward writes {name}" if name else ""


_GIVEN = "it is an input or a constant of the model"


class _Explorer:
    def __init__(self, trace: Trace, feature_axes: Sequence[int]) -> None:
        self.trace = trace
        self.feature_axes = feature_axes
        self.order = {node: i for i, node in enumerate(trace.nodes())}
        self.found = Relations()
        self.queue: deque[Place] = deque()
        self.seen: set[Place] = set()
        self.twins = _twins(trace)
        """Output of the same weights in the first graph, by their output in another one."""

    def explore(self, streams: bool) -> Relations:
        for node in self.trace.nodes():
            mark = mark_of(node)
            if mark is not None:
                self._see(self._norm(node, mark).output)
            read = self._read_by_statistic(node)
            if streams and read is not None:
                self._see(read)
        while self.queue:
            place = self.queue.popleft()
            self._look_up(place)
            for user in place.node.users:
                self._look_down(place, user)
        self.found.places = sorted(self.seen, key=lambda place: (self.order[place.node], place[1]))
        return self.found

    def _see(self, place: Place) -> None:
        if place not in self.seen:
            self.seen.add(place)
            self.queue.append(place)

    def _fix(self, place: Place, reason: str) -> None:
        self.found.fixed.setdefault(place, reason)

    def _add(self, relation: Relation) -> None:
        if isinstance(relation, Operation) and relation.output in self.twins:
            self._add_twin(relation)
            return
        known = self.found.producers.setdefault(relation.output, relation)
        if known is not relation:
            return
        for place in dict.fromkeys(relation.inputs):
            self.found.readers.setdefault(place, []).append(relation)
        # The exploration stops at weights: their other side has its own A and B.
        if isinstance(relation, Operation):
            self.found.operations.setdefault(relation.node, relation)
            return
        for place in (relation.output, *relation.inputs):
            self._see(place)

    def _add_twin(self, relation: Operation) -> None:
        """Relate the output of weights to that in the first graph, as weights change only once.

        The output therefore cannot have any A and B, but only those that it has there.
        """
        twin = self.twins[relation.output]
        known = self.found.producers.get(relation.output)
        if known is None:
            known = self.found.producers[relation.output] = Same(relation.output, (twin,))
            self.found.readers.setdefault(twin, []).append(known)
            for place in relation.inputs:
                self.found.readers.setdefault(place, []).append(relation)
        self._see(twin)
        self._see(relation.output)

    def _look_up(self, place: Place) -> None:
        """Relate features to the operator that writes them."""
        node = place.node
        if node.op == "placeholder":
            self._look_up_tensor(place)
            return
        if node.op != "call_function":
            self._fix(place, "it is a constant of the graph")
            return
        relation = self._relation(node, place, None)
        if relation is None:
            self._fix(place, self._why(node) or f"it comes out of {describe(node)}")
        else:
            self._add(relation)

    def _look_up_tensor(self, place: Place) -> None:
        part = part_of(place.node, self.trace)
        whole = part is not None and place.axis == len(shape_of(place.node)) - 1
        if part is None:
            self._fix(place, _written(place.node, self.trace) or _GIVEN)
        elif not whole:
            self._fix(place, "its last dimension is not that of the features")
        else:
            self._add(self._weights(Operation(place.node, "value", None, place, part)))

    def _look_down(self, place: Place, user: fx.Node) -> None:
        """Relate features to one operator that reads them."""
        if only_checks(user):
            return
        if user.op == "output":
            self._fix(place, "it is an output of the model")
            return
        if self._read_by_statistic(user) == place:
            self.found.statistics.setdefault(place, []).append(user)
            return
        relation = self._relation(user, None, place)
        if relation is None or place not in relation.inputs:
            reason = f"{describe(user)} needs the original values"
            self._fix(place, self._why(user) or reason)
        else:
            self._add(relation)

    def _read_by_statistic(self, node: fx.Node) -> Place | None:
        """Return the features that a node is the statistic of, None if it is none."""
        index = statistic_of(node)
        if index is None:
            return None
        return Place(operand_of(node), self.feature_axes[index] % len(shape_of(node)))

    def _why(self, node: fx.Node) -> str:
        """Return why an operator with weights is left alone, "" for all others."""
        adapter = self.trace.adapter_of(node)
        if adapter:
            return adapter_reason(adapter)
        fix = self.trace.computed.get(path_of(node))
        if fix and operator_name(node) in WITH_WEIGHTS:
            return (
                f"{describe(node)} has a weight that is computed at each call (parametrized, or "
                f"pruned): make it a parameter, torch.nn.utils.{fix}, to fold the norm"
            )
        return next(filter(None, (_written(one, self.trace) for one in node.all_input_nodes)), "")

    def _relation(self, node: fx.Node, output: Place | None, read: Place | None) -> Relation | None:
        """Return the relation of an operator, reached at its output or at an operand, or None."""
        mark = mark_of(node)
        if mark is not None:
            return self._norm(node, mark)
        if not holds_floats(node) or self.trace.adapter_of(node):
            return None
        operation = operation_of(node, self.trace)
        if operation is not None:
            met = operation.output == output if output else operation.reads == read
            return self._weights(operation) if met else None
        name = operator_name(node)
        if output is None:
            assert read is not None
            output = self._output_of(node, name, read)
        if output is None:
            return None
        return self.found.producers.get(output) or self._build(node, name, output)

    def _weights(self, operation: Operation) -> Operation:
        """Return the operation of a node, which is the same object from both sides."""
        return self.found.operations.setdefault(operation.node, operation)

    def _norm(self, node: fx.Node, mark: TracedNorm) -> NormedValue:
        axis = self.feature_axes[mark.index] % len(shape_of(node))
        return NormedValue(Place(node, axis), (Place(mark.x, axis),), mark.index)

    def _output_of(self, node: fx.Node, name: str, read: Place) -> Place | None:
        """Return the place of an operator's output for the features that it reads, or None."""
        if name in _ELEMENTWISE:
            return Place(node, read.axis + len(shape_of(node)) - len(shape_of(read.node)))
        is_first = name in _STACKS or node.args[:1] == (read.node,)
        axis = across(node, read.axis, forward=True) if is_first else None
        return None if axis is None else Place(node, axis)

    def _build(self, node: fx.Node, name: str, output: Place) -> Relation | None:
        if name in _ELEMENTWISE:
            return _ELEMENTWISE[name](node, output, self.trace)
        axis = across(node, output.axis, forward=False)
        if axis is None:
            return None
        if name in _STACKS:
            return _stacked(node, output, axis)
        inputs = (Place(operand_of(node), axis),)
        if takes_windows(node):
            keeps = window_keeps_constants(node)
            return None if keeps is None else (Same if keeps else Homogeneous)(output, inputs)
        if name == "sum":
            return Homogeneous(output, inputs)
        known = not passes(node) or across(node, axis, forward=True) == output.axis
        return Same(output, inputs) if known else None


_STACKS: Final = ("cat", "stack")


def _stacked(node: fx.Node, output: Place, axis: int) -> Relation | None:
    operands = node.args[0]
    if not isinstance(operands, Sequence):
        return None
    # Empty caches are concatenated before keys and values.
    nodes = [item for item in operands if isinstance(item, fx.Node)]
    if any(len(shape_of(item)) <= axis for item in nodes):
        return None
    return Same(output, tuple(Place(item, axis) for item in nodes))


def _added(node: fx.Node, output: Place, _: Trace, factor: float = 1.0) -> Relation | None:
    """Return the relation of `x + factor y`, where both have the features."""
    if node.kwargs.get("alpha", 1) != 1:
        return None
    places: list[Place] = []
    for operand in node.args[:2]:
        if not isinstance(operand, fx.Node):
            return Same(output, (places[0],)) if operand == 0 and places else None
        axis = across_broadcast(node, operand, output.axis)
        if axis is None or not holds_floats(operand):
            return None
        places.append(Place(operand, axis))
    return Sum(output, tuple(places), (1.0, factor))


def _multiplied(node: fx.Node, output: Place, trace: Trace) -> Relation | None:
    first, second = node.args[:2]
    if not isinstance(first, fx.Node):
        first, second = second, first
    assert isinstance(first, fx.Node)
    if not isinstance(second, fx.Node):
        return _scaled(node, output, first)
    for x, factor in ((first, second), (second, first)):
        found = _by_tensor(node, output, x, factor, trace)
        if found is not None:
            return found
    return None


def _by_tensor(
    node: fx.Node, output: Place, x: fx.Node, factor: fx.Node, trace: Trace
) -> Relation | None:
    """Return the relation of a product with a factor per token or a parameter per feature.

    The latter is LayerScale, and a scale of each head.
    """
    axis, found = across_broadcast(node, x, output.axis), _scaled(node, output, x, factor)
    if axis is None or found is not None:
        return found
    part: TensorPart | None = part_of(factor, trace)
    last = len(shape_of(node)) - 1
    if part is None and _is_of_parameters(factor, trace):
        # A scale per head, repeated for its features: it stays, and A passes it.
        return Homogeneous(output, (Place(x, axis),))
    if part is None or len(shape_of(factor)) != 1 or output.axis != last or axis != last:
        return None
    return Operation(node, "diagonal", Place(x, axis), output, part)


def _scaled(node: fx.Node, output: Place, x: fx.Node, factor: object = None) -> Homogeneous | None:
    """Return the relation of an operator that multiplies all features of x by the same."""
    axis = across_broadcast(node, x, output.axis)
    is_uneven = isinstance(factor, fx.Node) and not is_one_for_all(node, factor, output.axis)
    return None if axis is None or is_uneven else Homogeneous(output, (Place(x, axis),))


def _is_of_parameters(node: fx.Node, trace: Trace) -> bool:
    """Return whether a value is computed from parameters and buffers only."""
    if node.op == "placeholder":
        return trace.tensor_of(node) is not None
    operands = node.all_input_nodes
    return bool(operands) and all(_is_of_parameters(operand, trace) for operand in operands)


def _divided(node: fx.Node, output: Place, _: Trace) -> Relation | None:
    x, divisor = node.args[:2]
    if not isinstance(x, fx.Node) or node.kwargs.get("rounding_mode") is not None:
        return None
    return _scaled(node, output, x, divisor)


def _negated(node: fx.Node, output: Place, _: Trace) -> Relation | None:
    return _scaled(node, output, operand_of(node))


def _masked(node: fx.Node, output: Place, trace: Trace) -> Relation | None:
    """Return the relation of `masked_fill(x, mask, 0)` with one mask for all features, or None."""
    del trace
    x, mask, value = node.args
    if not isinstance(x, fx.Node) or not isinstance(mask, fx.Node) or value != 0:
        return None
    return _scaled(node, output, x, mask)


_ELEMENTWISE: Final[Mapping[str, Callable[[fx.Node, Place, Trace], Relation | None]]] = {
    "add": _added,
    "sub": partial(_added, factor=-1.0),
    "mul": _multiplied,
    "div": _divided,
    "neg": _negated,
    "masked_fill": _masked,
}
