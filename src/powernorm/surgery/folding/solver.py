"""Search for the norms of a model that fold, by solving for scales and shifts without conflicts.

Outcomes of a static norm:

| outcome | what remains | values on its two sides |
|---|---|---|
| folds | nothing | reparametrized, A_out = a A_in |
| decoupled | a multiply-add | reparametrized, independently of each other |
| pinned | a multiply-add | the original ones |
| untouched (pinned too) | the norm | the original ones |

Outcomes of a per-token norm, whose statistic stays in each case:

| outcome | what remains | values after it |
|---|---|---|
| folds | the statistic | A = a, B = c |
| keeps its bias | the statistic + c/a | A = a, B = 0 |
| pinned | the norm | the original ones |

Each round of the solver removes at least one norm from those that fold, so it ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from powernorm.inspection.affine import AffineMap, AffinePart
from powernorm.inspection.functional import Hiding
from powernorm.inspection.observer import ObserverHook
from powernorm.norms import BatchStatisticsNorm
from powernorm.norms.feature_dims import LAST
from powernorm.surgery.folding.axes import only_checks
from powernorm.surgery.folding.centering import (
    CenteringConflictError,
    Stream,
    centered_norms,
    centered_places,
    drop,
    streams_of,
    why_not_centered_behind,
)
from powernorm.surgery.folding.operations import Operation, Slots, can_shift
from powernorm.surgery.folding.relations import (
    NormedValue,
    assumes_number,
    relate,
)
from powernorm.surgery.folding.rewrite import Editor, Replacement
from powernorm.surgery.folding.solution import FoldConflictError, Problem, Solution, solve
from powernorm.surgery.folding.structure import Part, Structure
from powernorm.surgery.folding.trace import Effects, Trace, adapter_reason, describe, mark_of
from powernorm.surgery.planned_norms import MaskWatch, PlannedNorms

Centering = Literal["keep", "weights"]
"""Location of LayerNorm's centering: in the norm, or in the weights that write to its stream."""

Tied = Literal["untie", "keep"]
"""Treatment of a tensor that is both embedding and head, if the two need different values."""


@dataclass(frozen=True)
class FoldOutcome:
    """Result of folding for one norm.

    Args:
        part: its affine part, as it was when the fold was planned.
        left: the affine map that stays, in a multiply-add or after a statistic; None if a
            static norm leaves nothing, or the norm stays unchanged.
        changes: whether the norm is replaced, or its weight and bias change.
        eps: eps of the RMSNorm that replaces a LayerNorm, else None.
        into: the parameters that absorb it.
        reason: why it does not fold, or not entirely.
    """

    part: AffinePart
    left: AffineMap | None
    changes: bool
    eps: float | None
    into: tuple[str, ...]
    reason: str

    @property
    def rest(self) -> Part | None:
        """The part in the norm's place; None if it stays, with the neutral weight or unchanged."""
        if not self.changes:
            return None
        if self.left is None:
            return Part("nothing")
        size = len(self.left.scale)
        if not self.part.has_statistic:
            return Part("multiply-add", (), "", size, {"feature_dim": self.part.feature_dim})
        if self.eps is None:
            return None
        options = {"eps": self.eps, "affine": bool((self.left.scale != 1).any())}
        return Part("norm", (), "rms", size, options)


class Folding(NamedTuple):
    """The norms that fold, and their changes.

    Args:
        outcomes: by name.
        replacements: the parameters that get new values.
        structure: how the modules change.
        assumes_numbers: whether the result may depend on sizes of the inputs or other numbers.
    """

    outcomes: Mapping[str, FoldOutcome]
    replacements: tuple[Replacement, ...]
    structure: Structure
    assumes_numbers: bool


def solve_fold(
    model: nn.Module,
    parts: Mapping[str, AffinePart],
    traced: Trace,
    tied: Tied,
    centering: Centering,
) -> Folding:
    """Find the changes that fold as many norms as possible.

    Every norm that conflicts with the others stays as a multiply-add per feature, which makes its
    two sides independent; then the system is solved again.

    Args:
        model: model in evaluation mode.
        parts: affine parts of its norms, by the name of the computing module, the static ones
            first. Without static norms no bias is added for the others, so that the model's own
            class can load the result.
        traced: runs of the model; the fold holds for all of them.
        tied: see `powernorm.plan_fold`.
        centering: see `powernorm.plan_fold`.
    """
    solver = _Solver(model, parts, traced, tied, centering)
    solver.run()
    outcomes = {name: solver.outcome(index) for index, name in enumerate(parts)}
    assumes = any(map(assumes_number, solver.relations.all()))
    structure = _structure(model, outcomes, solver.replacements)
    return Folding(outcomes, tuple(solver.replacements), structure, assumes)


def _structure(
    model: nn.Module, outcomes: Mapping[str, FoldOutcome], replacements: Sequence[Replacement]
) -> Structure:
    """Return how the modules change, with every slot of the norms."""
    slots = dict(model.named_modules(remove_duplicate=False))
    rests = {slots[name]: one.rest for name, one in outcomes.items()}
    norms = {name: rest for name, module in slots.items() if (rest := rests.get(module))}
    made = {r.names[0]: r.size for r in replacements if r.size is not None}
    for path in [name.rpartition(".")[0] for name in made if name.endswith("in_proj_bias")]:
        # torch's fused attention takes two biases or none.
        out: Any = slots[path].out_proj
        if isinstance(out, nn.Linear) and out._parameters["bias"] is None:
            made.setdefault(f"{path}.out_proj.bias".lstrip("."), out.out_features)
    untied = tuple(name for r in replacements if r.unties for name in r.names)
    return Structure(norms, made, untied)


class _Solver(Problem):
    """The problem of all norms, from which norms without a common solution are removed."""

    def __init__(
        self,
        model: nn.Module,
        parts: Mapping[str, AffinePart],
        traced: Trace,
        tied: Tied,
        centering: Centering,
    ) -> None:
        self.parts = list(parts.values())
        axes = [part.feature_dim for part in self.parts]
        relations = relate(traced, axes, streams=centering == "weights")
        num_static = sum(not part.has_statistic for part in self.parts)
        with_statistic = range(num_static, len(parts))
        super().__init__(relations, [part.map for part in self.parts], with_statistic)
        modules = dict(model.named_modules())
        self.modules = [modules[name] for name in parts]
        self.slots = Slots(model)
        self.tied = tied
        self.editor = Editor(traced, self.slots, relations)
        self.uses: dict[int, list[NormedValue]] = {}
        for use in relations.norms():
            self.uses.setdefault(use.index, []).append(use)
        self.reasons: dict[int, str] = {}
        self.streams: list[Stream] = []
        """Streams that are centered, if possible."""
        self.epsilons: dict[int, float] = {}
        """eps of the norms that may become an RMSNorm."""
        self.untouched: set[int] = set()
        """Indices of the pinned norms that do not become a multiply-add either."""
        self.solution = Solution()
        self.replacements: list[Replacement] = []
        self._exclude(traced)
        self._exclude_centered()
        if centering == "weights":
            self._center()
        self._exclude_shared(traced)
        self._exclude_by_effects(list(parts), traced.effects)

    def _exclude(self, traced: Trace) -> None:
        for index in range(len(self.modules)):
            if index not in self.uses:
                self.reasons[index] = (
                    "the model does not use it on the example inputs: give those that do in "
                    "more_examples"
                )
                self.pinned.add(index)
        for node in traced.nodes():
            mark = mark_of(node)
            if mark is None:
                continue
            norm = self.modules[mark.index]
            # It sets padding to 0 in evaluation: with a mask it is no affine map.
            if mark.is_masked and isinstance(norm, BatchStatisticsNorm) and norm.floor:
                self._leave_untouched(
                    mark.index,
                    "variant='released' sets padding to 0 in evaluation, which is no affine map "
                    "of its input where a mask is given: if the model will run without one, give "
                    "example inputs without one",
                )
            if traced.adapter_of(node):
                self._leave_untouched(mark.index, adapter_reason(traced.adapter_of(node)))
        for index, norm in enumerate(self.modules):
            if _does_more(norm):
                self._leave_untouched(
                    index, "it has hooks or a forward of its own: remove them to fold it"
                )
            elif index in traced.inplace_neighbors and index not in self.pinned:
                self._give_up(
                    FoldConflictError(
                        index,
                        f"{traced.inplace_neighbors[index]} works in place next to it: use the "
                        "operator that makes a new tensor to fold it",
                    )
                )

    def _exclude_centered(self) -> None:
        """Exclude norms that center if no reader could center instead."""
        for index, uses in self.uses.items():
            centers = self.norms[index].centers
            reason = why_not_centered_behind(self.relations, uses) if centers else ""
            if reason:
                self._leave_untouched(index, reason)

    def _leave_untouched(self, index: int, reason: str) -> None:
        """Exclude a norm from those that change, with a reason."""
        self.reasons[index] = reason
        self.pinned.add(index)
        self.untouched.add(index)

    def _exclude_by_effects(self, names: Sequence[str], effects: Effects) -> None:
        """Exclude norms that other modules read attributes of, or that the forward writes to."""
        for name, attribute in effects.read.items():
            self._leave_untouched(
                names.index(name),
                f"another module reads its attribute {attribute!r}, which nothing folded has: let "
                "it read that elsewhere to fold the norm",
            )
        for index, name in enumerate(names):
            changed = [one for one in effects.written if one.startswith(f"{name}.")]
            if changed:
                self._leave_untouched(index, f"the model's forward writes {changed[0]}")

    def _exclude_shared(self, traced: Trace) -> None:
        """Exclude per-token norms whose weight or bias is in use elsewhere, too."""
        for index, part in enumerate(self.parts):
            for name in part.parameters:
                aliases = self.slots.aliases(name)
                readers = [
                    describe(user)
                    for node in traced.nodes()
                    if traced.tensor_of(node) in aliases
                    for user in node.users
                    if not only_checks(user)
                ]
                others = [alias for alias in aliases if alias != name] + readers
                if others:
                    self._leave_untouched(index, f"{name} is also in use as {others[0]}")

    def _center(self) -> None:
        """Center the streams that LayerNorms read, as far as nothing else needs them."""
        self.epsilons = {
            index: part.eps
            for index, part in enumerate(self.parts)
            if (part.kind, part.feature_dim) == ("layer", LAST) and part.eps is not None
        }
        self.streams = streams_of(self.relations, self.epsilons)

    def run(self) -> None:
        """Take out norms until the others have a solution."""
        # Modules whose class changes anyway may get biases.
        makes_biases = self.with_statistic.start > 0 or bool(self.epsilons)
        self.shiftable = {
            id(relation): can_shift(relation, self.slots, makes_biases)
            for relation in self.relations.all()
            if isinstance(relation, Operation)
        }
        while True:
            try:
                self.solution = solve(self)
                self.replacements = self.editor.replacements(
                    self.solution,
                    self,
                    untie=self.tied == "untie",
                    centered=centered_places(self.streams),
                )
            except CenteringConflictError as conflict:
                drop(self.streams, conflict)
            except FoldConflictError as conflict:
                self._give_up(conflict)
            else:
                uneven = self._uneven()
                if not uneven and not self._drop_idle_streams():
                    return
                self.decoupled -= uneven
                self.with_bias -= uneven
                self.pinned |= uneven

    def _uneven(self) -> set[int]:
        """Return the norms that would need a different multiply-add at each of their uses."""
        return {
            index
            for index in self.decoupled | self.with_bias
            if not all(
                self.affine(index, use).equals(self.affine(index, self.uses[index][0]))
                for use in self.uses[index][1:]
            )
        }

    def affine(self, index: int, use: NormedValue) -> AffineMap:
        """Return weight and bias of a norm that stays, between reparametrized values."""
        norm = self.norms[index]
        (inner, inner_shift), (outer, outer_shift) = map(
            self.solution.at, (use.inputs[0], use.output)
        )
        # A_out t + B_out = a (A_in s + B_in) + c, solved for t: the map from s to t.
        shift = norm.scale * inner_shift + norm.shift - outer_shift
        return AffineMap(norm.scale * inner / outer, shift / outer)

    def behind_statistic(self, index: int) -> AffineMap:
        """Return the affine map that remains after the statistic of a norm that folds."""
        scale = torch.ones_like(self.norms[index].scale)
        if index not in self.with_bias:
            return AffineMap(scale, torch.zeros_like(scale))
        return AffineMap(scale, self.affine(index, self.uses[index][0]).shift)

    def as_rms(self, index: int) -> AffineMap | str:
        """Return the weight of the RMSNorm in place of a LayerNorm, or why it stays one."""
        reason = centered_norms(self.streams).get(index, "the graph does not show its input")
        if index in self.untouched or reason:
            return reason or self.reasons[index]
        left = self.norms[index] if index in self.pinned else self.behind_statistic(index)
        return "RMSNorm has no bias" if bool(left.shift.any()) else left

    def _drop_idle_streams(self) -> bool:
        """Drop the streams that lead to no RMSNorm; return whether there are any."""
        idle = [
            stream
            for stream in self.streams
            if not stream.obstacle
            and all(isinstance(self.as_rms(index), str) for index in stream.norms)
        ]
        for stream in idle:
            why = self.as_rms(min(stream.norms))
            stream.obstacle = why if isinstance(why, str) else ""
        return bool(idle)

    def _give_up(self, conflict: FoldConflictError) -> None:
        """Keep a norm's multiply-add, a per-token norm's bias, or whole norms, after a conflict."""
        index = conflict.index
        self.reasons[index] = conflict.reason
        if self.norms[index].centers:
            # A multiply-add per feature cannot replace it.
            self._leave_untouched(index, conflict.reason)
            return
        if index not in self.with_statistic or conflict.of_shift:
            (self.with_bias if index in self.with_statistic else self.decoupled).add(index)
            return
        self.reasons |= conflict.others
        self.pinned |= {index, *conflict.others}
        self.with_bias -= {index, *conflict.others}

    def outcome(self, index: int) -> FoldOutcome:
        """Return the outcome of a norm."""
        part, reason = self.parts[index], self.reasons.get(index, "")
        uses = self.uses.get(index, []) if index not in self.pinned else []
        left, eps = None, None
        if part.has_statistic:
            if index not in self.pinned and part.parameters:
                left = self.behind_statistic(index)
            if index in self.with_bias:
                reason = f"its bias stays: {reason}"
            if index in self.epsilons:
                rms = self.as_rms(index)
                if isinstance(rms, str):
                    first = self.reasons.get(index, "")
                    said = f"{first}; " if first not in ("", rms) else ""
                    reason = f"{said}it stays a LayerNorm: {rms}"
                else:
                    left, eps = rms, self.epsilons[index]
            changes = left is not None
        else:
            # A pinned one has fixed neighbors.
            is_pinned = index in self.pinned and index in self.uses and index not in self.untouched
            if index in self.decoupled or is_pinned:
                left = self.affine(index, self.uses[index][0])
            changes = left is not None or index not in self.pinned
        return FoldOutcome(part, left, changes, eps, self._around(uses), reason)

    def _around(self, uses: Sequence[NormedValue]) -> tuple[str, ...]:
        """Return the changed parameters next to a norm, across operators that pass features on."""
        changed = {name for replacement in self.replacements for name in replacement.names}
        found: dict[str, None] = {}
        queue = [place for use in uses for place in (use.output, *use.inputs)]
        seen = set(queue)
        while queue:
            place = queue.pop(0)
            for relation in self.relations.around(place):
                if isinstance(relation, Operation):
                    slot = self.slots.read_at(relation.weight.name, relation.path)
                    found |= {slot: None} if slot in changed else {}
                elif not isinstance(relation, NormedValue):
                    new = [p for p in (*relation.inputs, relation.output) if p not in seen]
                    seen.update(new)
                    queue.extend(new)
        return tuple(found)


def _does_more(norm: nn.Module) -> bool:
    """Return whether a call of the norm does more than its class defines."""
    # For a user's norm also those of the inner module.
    return "forward" in norm.__dict__ or any(
        not _only_observes(hook)
        for part in norm.modules()
        for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    )


def _only_observes(hook: object) -> bool:
    """Return whether it is a hook of this library that changes nothing in evaluation."""
    is_watch = isinstance(getattr(hook, "__self__", None), PlannedNorms | MaskWatch)
    return is_watch or isinstance(hook, Hiding | ObserverHook)
