"""Arc-standard parsing with lists and loops, one sentence at a time, as in textbooks."""

from collections.abc import Callable
from dataclasses import dataclass, field

from powernorm_lab.tasks.parse.trees import NO_ID, ROOT_ID

SHIFT, LEFT, RIGHT = "shift", "left", "right"


@dataclass
class NaiveConfiguration:
    """A configuration; nodes are words, from 1, and the root, 0."""

    words: list[int]
    tags: list[int]
    stack: list[int] = field(default_factory=lambda: [0])
    buffer: list[int] = field(default_factory=list)
    arcs: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Head and label by dependent."""

    def __post_init__(self) -> None:
        self.buffer = list(range(1, len(self.words) + 1))

    def is_final(self) -> bool:
        return self.stack == [0] and not self.buffer

    def possible(self) -> set[str]:
        kinds = set()
        if self.buffer:
            kinds.add(SHIFT)
        if len(self.stack) > 1:
            below = self.stack[-2]
            if below != 0:
                kinds |= {LEFT, RIGHT}
            elif not self.buffer:
                kinds.add(RIGHT)
        return kinds

    def apply(self, kind: str, label: int = NO_ID) -> None:
        if kind == SHIFT:
            self.stack.append(self.buffer.pop(0))
        elif kind == LEFT:
            dependent = self.stack.pop(-2)
            self.arcs[dependent] = (self.stack[-1], label)
        else:
            dependent = self.stack.pop()
            self.arcs[dependent] = (self.stack[-1], label)

    def features(self) -> list[int]:
        stack = [self.stack[-i] if len(self.stack) >= i else None for i in (1, 2, 3)]
        buffer = [self.buffer[i] if len(self.buffer) > i else None for i in (0, 1, 2)]
        family: list[int | None] = []
        for node in stack[:2]:
            family += [
                self._left(node, 0),
                self._right(node, 0),
                self._left(node, 1),
                self._right(node, 1),
                self._left(self._left(node, 0), 0),
                self._right(self._right(node, 0), 0),
            ]
        nodes = [*stack, *buffer, *family]
        return [
            *(self._value(self.words, node) for node in nodes),
            *(self._value(self.tags, node) for node in nodes),
            *(NO_ID if node is None else self.arcs[node][1] for node in family),
        ]

    def _left(self, node: int | None, place: int) -> int | None:
        """Return a dependent before the node by its place from the left."""
        found = sorted(d for d, (head, _) in self.arcs.items() if head == node and d < head)
        return found[place] if place < len(found) else None

    def _right(self, node: int | None, place: int) -> int | None:
        """Return a dependent after the node by its place from the right."""
        found = sorted((d for d, (head, _) in self.arcs.items() if head == node and d > head))[::-1]
        return found[place] if place < len(found) else None

    @staticmethod
    def _value(values: list[int], node: int | None) -> int:
        if node is None:
            return NO_ID
        return ROOT_ID if node == 0 else values[node - 1]


def naive_oracle(
    words: list[int], tags: list[int], heads: list[int], labels: list[int]
) -> list[tuple[list[int], str, int]] | None:
    """Return features, kind and label of every step; None if the oracle fails."""
    now = NaiveConfiguration(words, tags)
    steps = []
    while not now.is_final():
        top = now.stack[-1]
        below = now.stack[-2] if len(now.stack) > 1 else None
        waiting = any(head == top for d, head in enumerate(heads, 1) if d not in now.arcs)
        if below and heads[below - 1] == top:
            kind, label = LEFT, labels[below - 1]
        elif below is not None and top and heads[top - 1] == below and not waiting:
            kind, label = RIGHT, labels[top - 1]
        elif now.buffer:
            kind, label = SHIFT, NO_ID
        else:
            return None
        steps.append((now.features(), kind, label))
        now.apply(kind, label)
    return steps


def naive_parse(
    words: list[int],
    tags: list[int],
    best: Callable[[list[int], set[str]], tuple[str, int]],
) -> list[tuple[int, int]]:
    """Return head and label of each word; `best` chooses among the legal kinds."""
    now = NaiveConfiguration(words, tags)
    while not now.is_final():
        now.apply(*best(now.features(), now.possible()))
    return [now.arcs[node] for node in range(1, len(words) + 1)]


def arcs_cross(heads: list[int]) -> bool:
    arcs = [(min(d, head), max(d, head)) for d, head in enumerate(heads, 1)]
    return any(a < c < b < d for a, b in arcs for c, d in arcs)
