"""LayerNorm's centering in the weights that write to its stream, which turns it into RMSNorm.

`LayerNorm(x) = RMSNorm(x - mean x)`, with the same eps. Centering is linear and commutes with sums,
reshapes, masks and factors per token. If every writer of a stream is centered over its output
features, W' = W - mean W and b' = b - mean b, so is the stream, and no other result changes if
only LayerNorms read it.

A static norm that centers, `y = a ⊙ (x - mean x) + c`, moves its centering to the linear maps that
read it: `W' = V - mean V` over the input features, with `V = W diag(a)`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from powernorm.surgery.folding.axes import Place
from powernorm.surgery.folding.operations import Operation
from powernorm.surgery.folding.relations import (
    NormedValue,
    Relation,
    Relations,
    Same,
)
from powernorm.surgery.folding.trace import describe, statistic_of


class CenteringConflictError(Exception):
    """Weights that would be centered are in use elsewhere, too.

    Args:
        places: places that the weights write.
        reason: why, for the user.
    """

    def __init__(self, places: Collection[Place], reason: str) -> None:
        super().__init__(reason)
        self.places = places
        self.reason = reason


@dataclass
class Stream:
    """Features that are added to each other, and the norms that read them."""

    places: set[Place] = field(default_factory=set)
    norms: set[int] = field(default_factory=set)
    obstacle: str = ""
    """Why it cannot be centered, "" if it can."""


def streams_of(relations: Relations, layer_norms: Collection[int]) -> list[Stream]:
    """Return the streams that statistics read.

    Args:
        relations: of the graph.
        layer_norms: indices of the norms that center their input.
    """
    found: list[Stream] = []
    seen: set[Place] = set()
    for start in relations.statistics:
        if start not in seen:
            stream = _stream(relations, start, layer_norms)
            seen |= stream.places
            found.append(stream)
    return found


def centered_norms(streams: Collection[Stream]) -> dict[int, str]:
    """Return the norms whose streams these are, each with why it stays, "" if it need not."""
    reasons: dict[int, str] = {}
    for stream in streams:
        for index in stream.norms:
            reasons[index] = reasons.get(index, "") or stream.obstacle
    return reasons


def _stream(relations: Relations, start: Place, layer_norms: Collection[int]) -> Stream:
    stream, queue = Stream({start}), [start]
    while queue:
        place = queue.pop()
        for obstacle in _obstacles(relations, place, layer_norms):
            stream.obstacle = stream.obstacle or obstacle
        for node in relations.statistics.get(place, ()):
            index = statistic_of(node)
            assert index is not None
            stream.norms.add(index)
        for relation in relations.around(place):
            if isinstance(relation, Operation | NormedValue):
                continue
            new = {*relation.inputs, relation.output} - stream.places
            stream.places |= new
            queue += new
    return stream


def _obstacles(relations: Relations, place: Place, layer_norms: Collection[int]) -> Iterator[str]:
    """Yield the obstacles to centering features."""
    if place in relations.fixed:
        yield relations.fixed[place]
    for node in relations.statistics.get(place, ()):
        if statistic_of(node) not in layer_norms:
            yield f"{describe(node)}, which does not center, reads it"
    for relation in relations.readers.get(place, ()):
        if isinstance(relation, Operation | NormedValue):
            yield f"{_described(relation)} reads it without a LayerNorm"
    producer = relations.producers.get(place)
    if isinstance(producer, NormedValue):
        yield f"{_described(producer)} writes to it"
    elif isinstance(producer, Operation) and (producer.kind == "diagonal" or producer.groups > 1):
        yield f"{_described(producer)} scales its features one by one, or group by group"


def _described(relation: Relation) -> str:
    return describe(relation.node if isinstance(relation, Operation) else relation.output.node)


def drop(streams: Collection[Stream], conflict: CenteringConflictError) -> None:
    """Exclude the streams of a conflict."""
    for stream in streams:
        if not stream.places.isdisjoint(conflict.places):
            stream.obstacle = conflict.reason


def centered_places(streams: Collection[Stream]) -> set[Place]:
    """Return the features that are centered."""
    return {place for stream in streams if not stream.obstacle for place in stream.places}


# Readers of static norms that center ---------------------------------------------------------


def why_not_centered_behind(relations: Relations, uses: Sequence[NormedValue]) -> str:
    """Return why the readers of a static norm that centers cannot center instead, "" if they can.

    Args:
        relations: relations of the graph.
        uses: uses of the norm.
    """
    for use in uses:
        for place in _passed_on(relations, use.output):
            if place in relations.fixed:
                return f"{_BEHIND}: {relations.fixed[place]}"
            for reader in relations.readers.get(place, ()):
                if not _can_center(reader):
                    return f"{_BEHIND}: {describe(reader.output.node)} reads it"
    return ""


def centered_behind(relations: Relations, centers: Callable[[int], bool]) -> dict[Place, Place]:
    """Return places after folded static norms that center, with the input of the norm.

    Args:
        relations: relations of the graph.
        centers: whether the norm with an index centers.
    """
    return {
        place: use.inputs[0]
        for use in relations.norms()
        if centers(use.index)
        for place in _passed_on(relations, use.output)
    }


_BEHIND = "it centers each token, which only a linear map behind it can take over"


def _passed_on(relations: Relations, place: Place) -> list[Place]:
    """Return a place and later ones that hold the same features of the same tokens."""
    found = [place]
    for here in found:
        for reader in relations.readers.get(here, ()):
            if _passes_on(reader) and reader.output not in found:
                found.append(reader.output)
    return found


def _passes_on(relation: Relation) -> bool:
    return isinstance(relation, Same) and len(set(relation.inputs)) == 1


def _can_center(relation: Relation) -> bool:
    if isinstance(relation, Operation):
        return relation.kind == "linear" and relation.groups == 1
    return _passes_on(relation)
