"""Equalization of unlike feature scales in an ONNX graph, before it is quantized."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from torch import Tensor

UNLIKE: Final = 100.0
"""Ratio of the largest to the smallest scale of a weight's rows, or columns, from which on they are
equalized. In trained encoders it is below 30; int8 distinguishes 256 values."""
_PRODUCTS: Final = ("MatMul", "Gemm")


def even_scales(model: ModelProto) -> list[str]:
    """Move unlike scales of features from the weights into separate multiplications.

    A model whose norms were folded on the residual stream (post-norm) holds each feature of the
    stream divided by the slopes of the norms before it, and weights that compensate for that. In
    floating point this is exact; in int8 only the largest features survive. Here a matrix product
    `x W` becomes `((x ⊙ c) (W / (c d))) ⊙ d`, with the scales of W's rows for c and of its columns
    for d, and a table of embeddings a look-up and a product with d. Products that read the same
    features share c. If scales differ by less than `UNLIKE`, nothing changes.

    Norms of rows would depend on the columns' scales, so scales are first geometric means of
    magnitudes, and then norms of the remainders.

    Args:
        model: a graph with its weights in it; it is changed, its outputs are not.

    Returns:
        Names of the operators other than the products that compute with features of unlike scale,
        including the multiplications: they have to stay in floating point.
    """
    return _Graph(model).even()


class _Graph:
    """A graph in which weights change, and multiplications are added."""

    def __init__(self, model: ModelProto) -> None:
        self._graph = model.graph
        self._stored = {tensor.name: tensor for tensor in model.graph.initializer}
        self._before: dict[int, list[NodeProto]] = {}
        """New nodes, by the index of the node that they precede."""
        self._behind: dict[int, list[NodeProto]] = {}
        self._unlike: set[str] = set()
        """Names of values with features of unlike scale."""

    def even(self) -> list[str]:
        """Equalize the scales; see `even_scales`."""
        nodes = list(enumerate(self._graph.node))
        products: dict[str, list[int]] = {}
        for place, node in nodes:
            if self._is_product(node):
                products.setdefault(node.input[0], []).append(place)
        for features, places in products.items():
            self._even_inputs(features, places)
        for place, node in nodes:
            if self._is_product(node) or self._is_table(node):
                self._even_outputs(place, node)
        if not self._unlike:
            return []
        self._put_in_order()
        return [
            node.name
            for node in self._graph.node
            if not (self._is_product(node) or self._is_table(node))
            and self._unlike & {*node.input, *node.output}
        ]

    def _is_product(self, node: NodeProto) -> bool:
        """Return whether a node is `x W`, or `x W + b`, with a matrix W."""
        if node.op_type not in _PRODUCTS or not self._is_matrix(node.input[1]):
            return False
        factors = [one.f for one in node.attribute if one.name in ("alpha", "beta")]
        turned = any(one.name == "transA" and one.i for one in node.attribute)
        return not turned and {*factors} <= {1.0} and all(i in self._stored for i in node.input[2:])

    def _is_table(self, node: NodeProto) -> bool:
        """Return whether a node looks up rows of a matrix."""
        of_rows = not any(one.name == "axis" and one.i for one in node.attribute)
        return node.op_type == "Gather" and of_rows and self._is_matrix(node.input[0])

    def _is_matrix(self, name: str) -> bool:
        tensor = self._stored.get(name)
        return tensor is not None and (len(tensor.dims), tensor.data_type) == (2, TensorProto.FLOAT)

    def _even_inputs(self, features: str, places: Sequence[int]) -> None:
        """Put one multiplication in front of all products that read the same features."""
        nodes = [self._graph.node[place] for place in places]
        weights = [self._weight(node) for node in nodes]
        scale = _scale(torch.cat(weights, 1))
        if scale is None:
            return
        even = f"{features}_to_read"
        self._before[places[0]] = [self._multiplication(features, even, scale)]
        self._unlike.add(features)
        for node, weight in zip(nodes, weights, strict=True):
            self._set_weight(node, weight / scale[:, None])
            node.input[0] = even

    def _even_outputs(self, place: int, node: NodeProto) -> None:
        """Put a multiplication after a product, or after a table."""
        weight, features = self._weight(node), node.output[0]
        scale = _scale(weight.T)
        if scale is None:
            return
        self._set_weight(node, weight / scale)
        self._unlike.add(features)
        node.output[0] = f"{features}_written"
        if len(node.input) < 3:
            self._behind[place] = [self._multiplication(node.output[0], features, scale)]
            return
        # Divided by the scale, the bias of a hardly written feature would be the largest.
        self._unlike.add(f"{features}_scaled")
        scaled = self._multiplication(node.output[0], f"{features}_scaled", scale)
        added = self._node("Add", [f"{features}_scaled", node.input.pop()], features)
        self._behind[place] = [scaled, added]

    def _weight(self, node: NodeProto) -> Tensor:
        """Return the weight of a product, (inputs, outputs), or a table; in float64."""
        value = self._values(node.input[_slot(node)])
        return value.T if _is_transposed(node) else value

    def _set_weight(self, node: NodeProto, value: Tensor) -> None:
        """Give a node a separate weight, as other nodes may read the old one."""
        value = value.T if _is_transposed(node) else value
        # An output always has a unique name, unlike a node.
        node.input[_slot(node)] = self._store(f"{node.output[0]}_even_weight", value)

    def _values(self, name: str) -> Tensor:
        return torch.from_numpy(numpy_helper.to_array(self._stored[name]).copy()).double()

    def _store(self, name: str, value: Tensor) -> str:
        self._stored[name] = numpy_helper.from_array(value.float().contiguous().numpy(), name)
        return name

    def _multiplication(self, features: str, out: str, scale: Tensor) -> NodeProto:
        return self._node("Mul", [features, self._store(f"{out}_factors", scale)], out)

    def _node(self, kind: str, inputs: Sequence[str], out: str) -> NodeProto:
        return helper.make_node(kind, inputs, [out], name=f"{out}_{kind}")

    def _put_in_order(self) -> None:
        """Write the nodes with the new ones in between, and the weights that are still read."""
        nodes = []
        for place, node in enumerate(self._graph.node):
            node.name = node.name or f"{node.output[0]}_{node.op_type}"
            nodes += [*self._before.get(place, []), node, *self._behind.get(place, [])]
        del self._graph.node[:]
        self._graph.node.extend(nodes)
        read = {*_read(nodes), *(value.name for value in self._graph.output)}
        kept = [tensor for name, tensor in self._stored.items() if name in read]
        del self._graph.initializer[:]
        self._graph.initializer.extend(kept)


def _read(nodes: Iterable[NodeProto]) -> Iterator[str]:
    """Yield the names of all values that nodes read, also in the branches of a condition."""
    for node in nodes:
        yield from node.input
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _read(graph.node)


def _slot(node: NodeProto) -> int:
    """Return which input of a node is its weight."""
    return 0 if node.op_type == "Gather" else 1


def _is_transposed(node: NodeProto) -> bool:
    return any(one.name == "transB" and one.i for one in node.attribute)


def _scale(weight: Tensor) -> Tensor | None:
    """Return the scale of each row if they are unlike, else None; the median is 1.

    A row of zeros has no scale, and gets 1. A matrix with infinities is not changed.
    """
    if not bool(weight.isfinite().all()):
        return None
    rows = _geometric_mean(weight)
    known = rows > 0
    if not bool(known.any()) or rows[known].max() < UNLIKE * rows[known].min():
        return None
    left = weight / rows.where(known, 1.0)[:, None]
    columns = _geometric_mean(left.T)
    scale: Tensor = rows * (left / columns.where(columns > 0, 1.0)).norm(dim=1)
    return (scale / scale[known].log().median().exp()).where(known, 1.0)


def _geometric_mean(weight: Tensor) -> Tensor:
    """Return that of each row's magnitudes above 0; 0 where there is none."""
    counted = weight != 0
    logs = weight.abs().log().where(counted, 0.0).sum(1) / counted.sum(1)
    return logs.exp().where(counted.any(1), 0.0)
