"""Operators in place around a norm, which no longer has memory of its own once it is folded.

A norm writes a new tensor. Folded it gives its input itself, so that what works in place on its
output would change its input too, and the other way round.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from powernorm.surgery.axes import operator_name


def norms_worked_on(graph: fx.Graph, mark: object) -> dict[int, str]:
    """The norms that must not give their input itself, with the operator in place that forbids it.

    Args:
        graph: as traced, before operators in place are made functional.
        mark: the operator that stands for a norm, (x, index, …).
    """
    memory = _Memory(graph, mark)
    found: dict[int, str] = {}
    for order, node in enumerate(graph.nodes):
        for written in _written(node):
            for index in memory.norms_in_the_way(written, order):
                found.setdefault(index, operator_name(node))
    return found


class _Memory:
    """Which nodes share memory before folding, and which norms would join them."""

    def __init__(self, graph: fx.Graph, mark: object) -> None:
        self.block: dict[fx.Node, fx.Node] = {}
        """The first node in the same memory."""
        self.last_use: dict[fx.Node, int] = {}
        self.norms: list[tuple[fx.Node, fx.Node, int, int]] = []
        """Blocks before and behind each norm, its index and its place in the graph."""
        for order, node in enumerate(graph.nodes):
            aliased = None if node.target is mark else _aliased(node)
            self.block[node] = node if aliased is None else self.block[aliased]
            for used in node.all_input_nodes:
                self.last_use[self.block[used]] = order
            if node.target is mark:
                inner, index = node.args[:2]
                assert isinstance(inner, fx.Node)
                assert isinstance(index, int)
                self.norms.append((self.block[inner], node, index, order))

    def norms_in_the_way(self, written: fx.Node, order: int) -> Iterator[int]:
        """Norms that keep a write from reaching memory that is read later or is the user's."""
        changed = self.block[written]
        norms = [norm[:3] for norm in self.norms if norm[3] < order]
        joined = _joined(changed, norms)
        for block in joined - {changed}:
            if block.op == "placeholder" or self.last_use.get(block, -1) > order:
                yield from (
                    index
                    for before, behind, index in norms
                    if changed in (before, behind) or block in (before, behind)
                )


def _joined(block: fx.Node, norms: Sequence[tuple[fx.Node, fx.Node, int]]) -> set[fx.Node]:
    """The blocks that are one when all norms are folded."""
    joined, waiting = {block}, [block]
    while waiting:
        here = waiting.pop()
        for before, behind, _ in norms:
            for other, end in ((before, behind), (behind, before)):
                if other is here and end not in joined:
                    joined.add(end)
                    waiting.append(end)
    return joined


def _aliased(node: fx.Node) -> fx.Node | None:
    """The operand whose memory the output may be."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if node.target is operator.getitem or operator_name(node) in ("dropout", "feature_dropout"):
        return node.args[0]
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    returned = [value.alias_info for value in node.target._schema.returns]
    return node.args[0] if any(info is not None for info in returned) else None


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """The operands that an operator changes in place."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    for position, argument in enumerate(node.target._schema.arguments):
        info = argument.alias_info
        if info is None or not info.is_write:
            continue
        value = node.args[position] if position < len(node.args) else None
        value = node.kwargs.get(argument.name, value)
        if isinstance(value, fx.Node):
            yield value
