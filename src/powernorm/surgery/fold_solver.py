"""Which norms of a model fold, by solving for scales and shifts until nothing contradicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from powernorm.norms import Norm
from powernorm.norms.feature_dims import LAST
from powernorm.surgery.examples import Examples
from powernorm.surgery.relations import Affine, Normed, Relations, relate
from powernorm.surgery.solution import FoldConflictError, Problem, Solution, Static, solve
from powernorm.surgery.static_layers import (
    feature_axis,
    has_own_ways,
    hides_padding,
    norms_of,
    static_of,
    why_not_static,
)
from powernorm.surgery.structure import Rest, Structure
from powernorm.surgery.tracing import MARK, Trace, trace
from powernorm.surgery.weight_updates import Editor, Replacement, Slots, can_shift

Tied = Literal["untie", "keep"]
"""What to do where an embedding and a head are one tensor and need different values."""


@dataclass
class Folding:
    """What was worked out.

    Args:
        replacements: the parameters that get new values.
        affines: weight and bias of the norms that leave a multiply-add, by name.
        gone: the norms that leave nothing or a multiply-add.
        reasons: why the others do not fold.
        into: the parameters that take up each norm.
    """

    replacements: tuple[Replacement, ...] = ()
    affines: dict[str, Static] = field(default_factory=dict)
    gone: tuple[str, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)
    into: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def structure(self, model: nn.Module) -> Structure:
        """How the modules change, with every slot of the norms."""
        slots = list(model.named_modules(remove_duplicate=False))
        modules = dict(slots)
        norms: dict[str, Rest] = {}
        features: dict[str, int] = {}
        dims: dict[str, int] = {}
        for gone in self.gone:
            for name, module in slots:
                if module is modules[gone]:
                    norms[name] = "multiply-add" if gone in self.affines else "nothing"
                    if gone in self.affines:
                        features[name] = len(self.affines[gone].scale)
                        if feature_axis(module) != LAST:
                            dims[name] = feature_axis(module)
        made = {r.names[0]: r.size for r in self.replacements if r.size is not None}
        untied = tuple(name for r in self.replacements if r.unties for name in r.names)
        return Structure(norms, features, made, untied, dims)


def work_out(
    model: nn.Module, statics: Mapping[str, Static], examples: Examples, tied: Tied
) -> Folding:
    """Trace the model and find the changes that fold as many norms as possible.

    Every norm that stands in the way of the others stays as a multiply-add per feature, which
    makes what is before and what is behind it independent; then it is solved again.
    """
    names = list(statics)
    modules = dict(model.named_modules())
    norms = [modules[name] for name in names]
    graph = trace(model, {norm: i for i, norm in enumerate(norms)}, examples.args, examples.kwargs)
    relations = relate(graph, [feature_axis(norm) for norm in norms])
    solver = _Solver(graph, relations, list(statics.values()), norms, Slots(model), tied)
    solver.run()
    return _Summary(model, names, solver).folding()


class _Solver:
    def __init__(
        self,
        graph: Trace,
        relations: Relations,
        statics: Sequence[Static],
        norms: Sequence[nn.Module],
        slots: Slots,
        tied: Tied,
    ) -> None:
        self.relations = relations
        self.statics = statics
        self.norms = norms
        self.slots = slots
        self.tied = tied
        self.editor = Editor(graph, slots, relations)
        self.uses = _uses(relations)
        self.reasons: dict[int, str] = {}
        self.kept: set[int] = set()
        self.bound: set[int] = set()
        self.untouchable: set[int] = set()
        """Of the bound ones those that do not become a multiply-add either."""
        self.solution = Solution()
        self.replacements: list[Replacement] = []
        self._exclude(graph)

    def _exclude(self, graph: Trace) -> None:
        for index in range(len(self.norms)):
            if index not in self.uses:
                self.reasons[index] = "the model does not use it on the example inputs"
                self.bound.add(index)
        for node in graph.graph.nodes:
            if node.target is MARK and node.args[2] and hides_padding(self.norms[node.args[1]]):
                self._leave_alone(
                    node.args[1],
                    "variant='released' sets padding to 0 in evaluation, which is no affine map "
                    "of its input where a mask is given",
                )
        for index, norm in enumerate(self.norms):
            if has_own_ways(norm):
                self._leave_alone(index, "it has hooks or a forward of its own")
            elif index in graph.worked_on and index not in self.bound:
                self._leave(
                    FoldConflictError(index, f"{graph.worked_on[index]} works in place next to it")
                )

    def _leave_alone(self, index: int, reason: str) -> None:
        self.reasons[index] = reason
        self.bound.add(index)
        self.untouchable.add(index)

    def run(self) -> None:
        shiftable = {
            id(relation.operation): can_shift(relation.operation, self.slots)
            for relation in self.relations.all()
            if isinstance(relation, Affine)
        }
        while True:
            problem = Problem(self.relations, self.statics, self.kept, self.bound, shiftable)
            try:
                self.solution = solve(problem)
                self.replacements = self.editor.replacements(
                    self.solution, problem, untie=self.tied == "untie"
                )
            except FoldConflictError as conflict:
                self._leave(conflict)
            else:
                return

    def _leave(self, conflict: FoldConflictError) -> None:
        index = conflict.index
        self.reasons[index] = conflict.reason
        # A multiply-add takes the place of one of our norms only; and one that is used several
        # times cannot take up different scales, so the values around it stay.
        free = isinstance(self.norms[index], Norm) and len(self.uses[index]) == 1
        (self.kept if free else self.bound).add(index)


def _uses(relations: Relations) -> dict[int, list[Normed]]:
    uses: dict[int, list[Normed]] = {}
    for use in relations.norms():
        uses.setdefault(use.index, []).append(use)
    return uses


class _Summary:
    """Puts names to what the solver found."""

    def __init__(self, model: nn.Module, names: Sequence[str], solver: _Solver) -> None:
        self.model = model
        self.names = names
        self.solver = solver

    def folding(self) -> Folding:
        solver = self.solver
        folding = Folding(tuple(solver.replacements))
        for index, name in enumerate(self.names):
            if index in solver.reasons:
                folding.reasons[name] = solver.reasons[index]
            if index in solver.kept or self._is_ours_and_bound(index):
                folding.affines[name] = self._affine(index)
        folding.gone = tuple(
            name
            for index, name in enumerate(self.names)
            if index not in solver.bound or name in folding.affines
        )
        for place in norms_of(self.model):
            if place.found.function or static_of(place.module) is None:
                folding.reasons[place.name] = why_not_static(place)
        changed = {name for replacement in solver.replacements for name in replacement.names}
        for index, uses in solver.uses.items():
            if index not in solver.bound:
                folding.into[self.names[index]] = self._around(uses, changed)
        return folding

    def _is_ours_and_bound(self, index: int) -> bool:
        """Is it a norm of this library whose neighbours stay, so that it is a multiply-add?"""
        solver = self.solver
        norm = solver.norms[index]
        return (
            index in solver.bound
            and index in solver.uses
            and isinstance(norm, Norm)
            and index not in solver.untouchable
        )

    def _affine(self, index: int) -> Static:
        """Weight and bias of a norm that stays, between reparametrised values."""
        solver = self.solver
        norm, use = solver.statics[index], solver.uses[index][0]
        scales, shifts = solver.solution.scales, solver.solution.shifts
        inner, outer = use.inputs[0], use.output
        scale = norm.scale * scales[inner] / scales[outer]
        shift = (norm.scale * shifts[inner] + norm.shift - shifts[outer]) / scales[outer]
        return Static(scale, shift)

    def _around(self, uses: Sequence[Normed], changed: set[str]) -> tuple[str, ...]:
        """The changed parameters next to a norm, through what hands features on."""
        relations, found = self.solver.relations, dict[str, None]()
        queue = [place for use in uses for place in (use.output, *use.inputs)]
        seen = set(queue)
        while queue:
            place = queue.pop(0)
            neighbours = [relations.producers.get(place), *relations.readers.get(place, ())]
            for relation in neighbours:
                if isinstance(relation, Affine):
                    found.update(dict.fromkeys(self._names_of(relation, changed)))
                elif relation is not None and not isinstance(relation, Normed):
                    new = [p for p in (*relation.inputs, relation.output) if p not in seen]
                    seen.update(new)
                    queue.extend(new)
        return tuple(found)

    def _names_of(self, relation: Affine, changed: set[str]) -> list[str]:
        name = relation.operation.weight.name
        slot = self.solver.slots.read_at(name, relation.operation.path)
        return [slot] if slot in changed else []
