"""Solving for scale and shift of every value of the folded model, from its graph's relations."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from powernorm.inspection.affine import AffineMap
from powernorm.surgery.folding.axes import Place, operator_name
from powernorm.surgery.folding.operations import Operation
from powernorm.surgery.folding.relations import (
    Homogeneous,
    NormedValue,
    Relation,
    Relations,
    Same,
    Sum,
)
from powernorm.surgery.folding.trace import describe


class FoldConflictError(Exception):
    """A norm cannot be folded together with the others.

    Args:
        index: index of the norm.
        reason: why, for the user.
        of_shift: whether its scale would fold without the shift.
        others: reasons of other norms that cannot fold either, by index.
    """

    def __init__(
        self,
        index: int,
        reason: str,
        *,
        of_shift: bool = False,
        others: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(reason)
        self.index = index
        self.reason = reason
        self.of_shift = of_shift
        self.others = others or {}


@dataclass
class Problem:
    """Relations and norms of a folding problem, before solving.

    Args:
        relations: the relations of the graph.
        norms: the static norms by index, and the affine parts of per-token norms.
        with_statistic: per-token norms, which come last. Their input is a statistic, hence
            fixed.
        decoupled: norms that become a separate multiply-add; their two sides are independent.
        pinned: norms whose two sides keep the original values (A = 1, B = 0).
        with_bias: per-token norms that keep a bias, so that only their scale folds.
        shiftable: whether an operation with weights can add a constant (has a bias, or a slot for
            it), by its id.
    """

    relations: Relations
    norms: Sequence[AffineMap]
    with_statistic: range
    decoupled: set[int] = field(default_factory=set)
    pinned: set[int] = field(default_factory=set)
    with_bias: set[int] = field(default_factory=set)
    shiftable: Mapping[int, bool] = field(default_factory=dict)

    def folds(self, index: int) -> bool:
        """Return whether the norm is removed entirely."""
        return index not in self.decoupled and index not in self.pinned

    def folds_shift(self, index: int) -> bool:
        """Return whether the norm folds, including its shift."""
        if not self.folds(index) or index in self.with_bias:
            return False
        return index not in self.with_statistic or bool(self.norms[index].shift.any())

    def centers(self, index: int) -> bool:
        """Return whether the norm is removed, and its readers have to center instead."""
        return self.folds(index) and self.norms[index].centers

    def can_shift(self, relation: Operation) -> bool:
        """Return whether an operation can absorb a shift."""
        return self.shiftable[id(relation)]

    def fixed(self) -> dict[Place, str]:
        """Return the features that must equal the original ones, with the reason."""
        fixed = dict(self.relations.fixed)
        for place, nodes in self.relations.statistics.items():
            fixed.setdefault(place, f"{describe(nodes[0])} needs the original values")
        for use in self.relations.norms():
            if use.index in self.pinned:
                for place in (use.output, *use.inputs):
                    fixed.setdefault(place, "a norm that stays")
        return fixed


@dataclass
class Solution:
    """A (`scales`) and B (`shifts`) of the features of each place: `y = A ⊙ s + B`.

    Each is (C,), or 0-d for one number for all features, in float64. A place that is not among
    them has A = 1 and B = 0.
    """

    scales: dict[Place, Tensor] = field(default_factory=dict)
    shifts: dict[Place, Tensor] = field(default_factory=dict)

    def at(self, place: Place | None) -> tuple[Tensor, Tensor]:
        """Return A and B of a place; None means no features."""
        if place is None:
            return _number(1), _number(0)
        return self.scales.get(place, _number(1)), self.shifts.get(place, _number(0))


def solve(problem: Problem) -> Solution:
    """Return scales and shifts that fold every norm that is neither decoupled nor pinned.

    Raises:
        FoldConflictError: there are none; names a norm that causes the conflict.
    """
    scales = _Scales(problem).solve()
    return Solution(scales, _Shifts(problem).solve())


class _Scales:
    """Classes of values whose scales are linked by known ratios (union-find)."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.parents: dict[Place, tuple[Place, Tensor | None]] = {}
        self.pins: dict[Place, Tensor] = {}

    def solve(self) -> dict[Place, Tensor]:
        relations = self.problem.relations
        for relation in relations.all():
            if not isinstance(relation, NormedValue | Operation):
                for place in relation.inputs:
                    self._join(relation.output, place, None)
        for place in self.problem.fixed():
            root, ratio = self._root(place)
            # A(place) = ratio ⊙ A(root) has to be 1.
            self.pins[root] = _wide(_inverse(ratio))
        self._fold_norms()
        scales = {place: self._scale(place) for place in relations.places}
        self._check(scales)
        return scales

    def _fold_norms(self) -> None:
        """Relate the two sides of each norm that is removed."""
        failed: dict[int, str] = {}
        for use in self.problem.relations.norms():
            if self.problem.centers(use.index):
                # The centering is between its two sides, and its readers do it instead.
                self.pins[self._root(use.output)[0]] = self.problem.norms[use.index].scale
            elif self.problem.folds(use.index):
                try:
                    self._fold(use)
                except FoldConflictError as conflict:
                    # A use whose input is fixed conflicts with nothing that comes later.
                    if use.index not in self.problem.with_statistic:
                        raise
                    failed.setdefault(use.index, conflict.reason)
        if failed:
            index, reason = next(iter(failed.items()))
            raise FoldConflictError(index, reason, others=failed)

    def _root(self, place: Place) -> tuple[Place, Tensor | None]:
        """Return the root of a place and the ratio of its scale to that of the root."""
        ratio: Tensor | None = None
        while place in self.parents:
            place, step = self.parents[place]
            if step is not None:
                ratio = step if ratio is None else ratio * step
        return place, ratio

    def _join(self, place: Place, other: Place, factor: Tensor | None) -> bool:
        """Add `A(place) = factor ⊙ A(other)`; return False if it contradicts what is known."""
        (root, ratio), (base, base_ratio) = self._root(place), self._root(other)
        # ratio ⊙ A(root) = A(place) = factor ⊙ A(other) = factor ⊙ base_ratio ⊙ A(base).
        step = _times(_times(factor, base_ratio), _inverse(ratio))
        if root == base:
            return _is_one(step)
        if root in self.pins:
            value = _times(self.pins[root], _inverse(step))
            if base in self.pins:
                if not torch.allclose(_wide(value), _wide(self.pins[base]), rtol=1e-12, atol=0):
                    return False
            else:
                assert value is not None
                self.pins[base] = value
        self.parents[root] = (base, step)
        return True

    def _fold(self, use: NormedValue) -> None:
        scale = self.problem.norms[use.index].scale
        keeps_bias = use.index in self.problem.with_bias
        if not bool(scale.all()) and (keeps_bias or self._needs_inverse(use.output)):
            zeros = int((scale == 0).sum())
            raise FoldConflictError(
                use.index,
                f"its scale is 0 in {zeros} of {len(scale)} features, and what follows it would "
                "have to be divided by it",
            )
        if not self._join(use.output, use.inputs[0], scale):
            raise FoldConflictError(use.index, self._contradiction(use))

    def _needs_inverse(self, place: Place) -> bool:
        """Return whether anything but operators with weights follows a norm."""
        root, _ = self._root(place)
        relations = self.problem.relations
        members = [other for other in relations.places if self._root(other)[0] == root]
        fixed = self.problem.fixed()
        return any(
            other in fixed
            or isinstance(producer := relations.producers.get(other), Operation)
            # A norm that stays as a multiply-add is divided by the scale.
            or (isinstance(producer, NormedValue) and producer.index in self.problem.decoupled)
            or any(isinstance(reader, NormedValue) for reader in relations.readers.get(other, ()))
            for other in members
        )

    def _contradiction(self, use: NormedValue) -> str:
        root, _ = self._root(use.output)
        fixed = self.problem.fixed()
        places = [place for place in fixed if self._root(place)[0] == root]
        if use.index in self.problem.with_statistic:
            # The norm that is normalized again explains most: post-norm, not the other end.
            places.sort(key=lambda place: place not in self.problem.relations.statistics)
            if places:
                reason = self._why_statistic(places[0]) or fixed[places[0]]
                return f"its output has to keep its values: {reason}"
        if places:
            return f"its output has to keep its values: {fixed[places[0]]}"
        return "its input and its output are added to each other"

    def _why_statistic(self, place: Place) -> str:
        """Return why the weight of a per-token norm cannot pass here, "" if it is unknown."""
        for node in self.problem.relations.statistics.get(place, ()):
            return f"{describe(node)} needs it (post-norm, or a norm on a sub-layer's output)"
        if any(operator_name(user) == "mul" for user in place.node.users):
            reason = self.problem.fixed()[place]
            return f"{reason} (a weight per feature does not commute with a rotation by position)"
        return ""

    def _scale(self, place: Place) -> Tensor:
        root, ratio = self._root(place)
        return _wide(_times(ratio, self.pins.get(root)))

    def _check(self, scales: Mapping[Place, Tensor]) -> None:
        for place, scale in scales.items():
            # Zeros are fine where only operators with weights read them, see _fold.
            used = scale[scale != 0]
            if not bool(scale.isfinite().all()) or (
                used.numel() and not (_SMALLEST < used.abs().min() <= used.abs().max() < _LARGEST)
            ):
                index = nearest_norm(self.problem, place)
                raise FoldConflictError(
                    index, "the product of the scales up to it leaves float's range"
                )


_SMALLEST, _LARGEST = 1e-30, 1e30


def _times(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None:
        return second
    return first if second is None else first * second


def _inverse(value: Tensor | None) -> Tensor | None:
    return None if value is None else 1 / value


def _wide(value: Tensor | None) -> Tensor:
    return _number(1) if value is None else value


def _is_one(value: Tensor | None) -> bool:
    return value is None or torch.allclose(value, torch.ones_like(value), rtol=1e-12, atol=0)


def nearest_norm(problem: Problem, *places: Place, of_shift: bool = False) -> int:
    """Return the folded norm that is the fewest operators away, those before the place first.

    Args:
        problem: knows which norms fold.
        places: starting places; a later one counts if nothing is connected with the earlier.
        of_shift: only norms with a shift.

    Raises:
        LookupError: there is none.
    """
    relations = problem.relations
    counts = problem.folds_shift if of_shift else problem.folds
    for start in places:
        queue, seen = deque([start]), {start}
        while queue:
            for relation in relations.around(queue.popleft()):
                if isinstance(relation, NormedValue) and counts(relation.index):
                    return relation.index
                if not isinstance(relation, Operation | NormedValue):
                    new = dict.fromkeys((*relation.inputs, relation.output))
                    queue.extend(other for other in new if other not in seen)
                    seen |= new.keys()
    raise LookupError(f"no norm to be folded is connected with {places}")


class _Shifts:
    """Shifts B of all places, in units of the original values.

    First they are propagated forward: each folded norm adds its c. Then each demand (a place whose
    B must be 0, or that of another place) is met in graph order: a constant is chosen at the
    nearest operation before it that can add one, everything is propagated again, and all demands
    so far are checked again.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.fixed = problem.fixed()
        self.hopeless: set[Place] = set()
        """Places before which nothing can absorb a shift."""

        self.chosen: dict[Place, Tensor] = {}
        """Shifts chosen for operations with weights and for decoupled norms."""

    def solve(self) -> dict[Place, Tensor]:
        shifts = self._forward()
        met: list[tuple[Place, Place | None]] = []
        for place, like in self._demands():
            met.append((place, like))
            if _equal(shifts[place], self._target(like, shifts)):
                continue
            self.hopeless.clear()  # a place may work for another target
            try:
                settled = self._settle(place, self._target(like, shifts), shifts)
            except RecursionError:  # hundreds of operators that cannot take a shift
                settled = False
            if not settled:
                self._fail(place)
            shifts = self._forward()
            if not all(_equal(shifts[p], self._target(other, shifts)) for p, other in met):
                self._fail(place)
        # Rounding may have left small remainders of shifts that cancel.
        return {**shifts, **{place: _number(0) for place, like in met if like is None}}

    def _target(self, like: Place | None, shifts: Mapping[Place, Tensor]) -> Tensor:
        return _number(0) if like is None else shifts[like]

    def _fail(self, place: Place) -> None:
        index = nearest_norm(self.problem, place, of_shift=True)
        reason = self.fixed.get(place) or self._why_not_shifted(place)
        raise FoldConflictError(index, f"its shift has nowhere to go: {reason}", of_shift=True)

    def _why_not_shifted(self, place: Place) -> str:
        """Return which reader of the features cannot take a shift."""
        for reader in self.problem.relations.readers.get(place, ()):
            if isinstance(reader, Operation) and not self._takes_shift(reader):
                lacks = "pads with zeros" if reader.padded else "has no place for a bias"
                return f"{describe(reader.node)} {lacks}"
            if isinstance(reader, Homogeneous | Same):
                return f"{describe(reader.output.node)} does not keep it"
        return f"{describe(place.node)} does not give it"

    def _demands(self) -> list[tuple[Place, Place | None]]:
        """Return places whose shift must be 0, or that of another place, in graph order."""
        demands: list[tuple[Place, Place | None]] = []
        relations = self.problem.relations
        for place in relations.places:
            if place in self.fixed:
                demands.append((place, None))
            for reader in relations.readers.get(place, ()):
                if isinstance(reader, Same) and place != reader.inputs[0]:
                    demands.append((place, reader.inputs[0]))
                if isinstance(reader, Homogeneous) or (
                    isinstance(reader, Operation) and not self._takes_shift(reader)
                ):
                    demands.append((place, None))
        return demands

    def _takes_shift(self, relation: Operation) -> bool:
        return self.problem.can_shift(relation) and not relation.padded

    def _forward(self) -> dict[Place, Tensor]:
        shifts: dict[Place, Tensor] = {}
        for place in self.problem.relations.places:
            producer = self.problem.relations.producers.get(place)
            shifts[place] = self._shift(place, producer, shifts)
        return shifts

    def _shift(
        self, place: Place, producer: Relation | None, shifts: Mapping[Place, Tensor]
    ) -> Tensor:
        if place in self.chosen:
            return self.chosen[place]
        if producer is None or isinstance(producer, Operation | Homogeneous):
            return _number(0)
        before = shifts[producer.inputs[0]]
        if isinstance(producer, Same):
            return before
        if isinstance(producer, Sum):
            return _total(producer, shifts)
        if not self.problem.folds(producer.index) or producer.index in self.problem.with_bias:
            return _number(0)
        return self.problem.norms[producer.index].shifted(before)

    def _settle(self, place: Place, target: Tensor, shifts: Mapping[Place, Tensor]) -> bool:
        """Set a place's shift by the nearest operation before it; return whether one could."""
        before = dict(self.chosen)
        done = place not in self.hopeless and self._settle_by(place, target, shifts)
        if not done:
            self.chosen = before  # undo the choices of the failed path
            self.hopeless.add(place)
        return done

    def _settle_by(self, place: Place, target: Tensor, shifts: Mapping[Place, Tensor]) -> bool:
        producer = self.problem.relations.producers.get(place)
        if isinstance(producer, Operation):
            if place in self.chosen or not self.problem.can_shift(producer):
                return False
            self.chosen[place] = target
            return True
        if isinstance(producer, Same):
            return all(self._settle(inner, target, shifts) for inner in producer.inputs)
        if isinstance(producer, Sum):
            return self._settle_sum(producer, target, shifts)
        if not isinstance(producer, NormedValue) or producer.index in self.problem.pinned:
            return False
        if producer.index in self.problem.decoupled or producer.index in self.problem.with_bias:
            self.chosen[place] = target
            return True
        norm = self.problem.norms[producer.index]
        if norm.centers or not bool(norm.scale.all()):
            return False
        # B_out = a ⊙ B_in + c, solved for B_in.
        return self._settle(producer.inputs[0], (target - norm.shift) / norm.scale, shifts)

    def _settle_sum(self, producer: Sum, target: Tensor, shifts: Mapping[Place, Tensor]) -> bool:
        rest = target - _total(producer, shifts)
        readers = self.problem.relations.readers
        terms = sorted(
            zip(producer.factors, producer.inputs, strict=True),
            # Only the sum reads a branch, while later operators read the stream too.
            key=lambda term: (len(term[1].node.users), len(readers.get(term[1], ()))),
        )
        return any(
            # One term absorbs the rest: factor ⊙ (B + rest / factor) = factor ⊙ B + rest.
            bool(factor) and self._settle(inner, shifts[inner] + rest / factor, shifts)
            for factor, inner in terms
        )


def _number(value: float) -> Tensor:
    return torch.full((), value, dtype=torch.float64, device="cpu")


def _total(relation: Sum, shifts: Mapping[Place, Tensor]) -> Tensor:
    terms = zip(relation.factors, relation.inputs, strict=True)
    return sum((factor * shifts[place] for factor, place in terms), _number(0))


def _equal(value: Tensor, target: Tensor) -> bool:
    return torch.allclose(value, target.expand_as(value) if value.ndim else target, 1e-12, 1e-12)
