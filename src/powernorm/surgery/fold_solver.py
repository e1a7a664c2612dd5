"""Finding the norms of a model that fold, by solving for scales and shifts without conflicts.

What becomes of a static norm:

| outcome | left of it | values on its two sides |
|---|---|---|
| folds | nothing | reparametrized, A_out = a A_in |
| decoupled | a multiply-add | reparametrized, independently of each other |
| pinned | a multiply-add | the original ones |
| untouched (pinned too) | the norm | the original ones |

And of a norm of each token, whose statistic stays either way:

| outcome | left of it | values behind it |
|---|---|---|
| folds | the statistic | A = a, B = c |
| keeps its bias | the statistic + c/a | A = a, B = 0 |
| pinned | the norm | the original ones |

Each round of the solver takes one norm more out of those that fold, so it ends.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.inspection.examples import Examples
from powernorm.inspection.finder import FoundNorm
from powernorm.inspection.functional import Hiding
from powernorm.inspection.observer import ObserverHook
from powernorm.inspection.reading import CHANNEL_NORMS
from powernorm.inspection.trials import does_more_than_torch
from powernorm.norms import BatchStatisticsNorm, Norm, ProgressiveRepBatchNorm, TaperNorm
from powernorm.norms.adapted import AdaptedNorm
from powernorm.norms.feature_dims import LAST
from powernorm.surgery.axes import only_checks
from powernorm.surgery.canceling import canceled
from powernorm.surgery.centering import (
    CenteringConflictError,
    Stream,
    centered_norms,
    centered_places,
    drop,
    streams_of,
    why_not_centered_behind,
)
from powernorm.surgery.planned_norms import PlannedNorms
from powernorm.surgery.relations import (
    Normed,
    Relations,
    Weighted,
    adapter_reason,
    assumes_number,
    describe,
    relate,
)
from powernorm.surgery.solution import FoldConflictError, Problem, Solution, Static, solve
from powernorm.surgery.structure import Rest, RmsRest, Structure
from powernorm.surgery.token_norms import TokenNorm
from powernorm.surgery.tracing import Trace, mark_of, run, trace
from powernorm.surgery.weight_updates import Editor, Replacement, Slots, can_shift

Centering = Literal["keep", "weights"]
"""Where LayerNorm's centering is: in the norm, or in the weights that write to its stream."""

Tied = Literal["untie", "keep"]
"""What to do if an embedding and a head share one tensor and need different values."""


@dataclass
class Folding:
    """The solution: which norms fold, and how.

    Args:
        replacements: the parameters that get new values.
        multiply_adds: weight and bias of the norms that leave a multiply-add, by name.
        replaced: the norms that leave nothing or a multiply-add.
        reasons: why the others do not fold.
        into: the parameters that absorb each norm.
        token_norms: what is left behind the statistics of the norms of each token that fold.
        rms: those that become an RMSNorm, with eps.
        canceled: those whose statistic goes, as another one cancels it but for eps.
        assumes_numbers: whether it may depend on sizes of the inputs or on other numbers.
    """

    replacements: tuple[Replacement, ...] = ()
    multiply_adds: dict[str, Static] = field(default_factory=dict)
    replaced: tuple[str, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)
    into: dict[str, tuple[str, ...]] = field(default_factory=dict)
    token_norms: dict[str, Static] = field(default_factory=dict)
    rms: dict[str, float] = field(default_factory=dict)
    canceled: frozenset[str] = frozenset()
    assumes_numbers: bool = False

    def structure(self, model: nn.Module) -> Structure:
        """Return how the modules change, with every slot of the norms."""
        slots = list(model.named_modules(remove_duplicate=False))
        modules = dict(slots)
        norms: dict[str, Rest] = {}
        features: dict[str, int] = {}
        dims: dict[str, int] = {}
        rms: dict[str, RmsRest] = {}
        for changed, eps in self.rms.items():
            scale = self.token_norms[changed].scale
            left = RmsRest(len(scale), eps, affine=bool((scale != 1).any()))
            rms |= {name: left for name, module in slots if module is modules[changed]}
        norms |= dict.fromkeys(rms, "rms")
        for gone in self.replaced:
            for name, module in slots:
                if module is modules[gone]:
                    norms[name] = "multiply-add" if gone in self.multiply_adds else "nothing"
                    if gone in self.multiply_adds:
                        features[name] = len(self.multiply_adds[gone].scale)
                        if _feature_axis(module) != LAST:
                            dims[name] = _feature_axis(module)
        made = {r.names[0]: r.size for r in self.replacements if r.size is not None}
        for path in [name.rpartition(".")[0] for name in made if name.endswith("in_proj_bias")]:
            # torch's fused attention takes two biases or none.
            out = modules[path].out_proj
            if isinstance(out, nn.Linear) and out._parameters["bias"] is None:
                made.setdefault(f"{path}.out_proj.bias".lstrip("."), out.out_features)
        untied = tuple(name for r in self.replacements if r.unties for name in r.names)
        return Structure(norms, features, made, untied, dims, rms)


def solve_fold(
    model: nn.Module,
    found: Sequence[FoundNorm],
    statics: Mapping[str, Static],
    examples: Sequence[Examples],
    tied: Tied,
    read_attributes: Mapping[str, str],
    written: Collection[str],
    runs: dict[int, Trace],
    token_norms: Mapping[str, TokenNorm] = MappingProxyType({}),
    centering: Centering = "keep",
    approximate: bool = False,
) -> Folding:
    """Trace the model and find the changes that fold as many norms as possible.

    Every norm that conflicts with the others stays as a multiply-add per feature, which makes its
    two sides independent; then the system is solved again.

    Args:
        model: in evaluation mode.
        found: its norms.
        statics: scale and shift of the static ones, by the name of the module that computes.
        examples: arguments to trace the model with; the fold holds for all of them.
        tied: see `powernorm.plan_fold`.
        read_attributes: attributes of norms that other modules read, by the norm's name.
        written: names of the parameters and buffers that the model's forward writes.
        runs: what is known of each example; filled.
        token_norms: norms of each token whose weight and bias fold, by name. Without static norms
            no bias is made for theirs, so that the model's own class takes the result.
        centering: see `powernorm.plan_fold`.
        approximate: see `powernorm.plan_fold`.
    """
    names = [*statics, *token_norms]
    modules = dict(model.named_modules())
    norms = [modules[name] for name in names]
    with_statistic = range(len(statics), len(names))
    marks = {norm: i for i, norm in enumerate(norms)}
    for one in examples:
        if id(one) not in runs:
            runs[id(one)] = run(model, marks, one.args, one.kwargs, one.note, with_statistic)
    traced = trace(model, [runs[id(one)] for one in examples], written)
    axes = [_feature_axis(modules[name]) for name in statics]
    axes += [norm.feature_dim for norm in token_norms.values()]
    relations = relate(traced, axes, streams=centering == "weights")
    affines = [*statics.values(), *(norm.affine for norm in token_norms.values())]
    solver = _Solver(traced, relations, affines, norms, Slots(model), tied, with_statistic)
    if centering == "weights":
        solver.center([*(None for _ in statics), *token_norms.values()])
    solver.leave_shared(traced, [norm.parameters for norm in token_norms.values()])
    solver.needed = {names.index(name) for name in read_attributes if name in token_norms}
    for name, attribute in read_attributes.items():
        if name in token_norms:
            continue
        solver.leave_untouched(
            names.index(name),
            f"another module reads its attribute {attribute!r}, which nothing folded has: let it "
            "read that elsewhere to fold the norm",
        )
    for index, name in enumerate(names):
        changed = [one for one in written if one.startswith(f"{name}.")]
        if changed:
            solver.leave_untouched(index, f"the model's forward writes {changed[0]}")
    solver.bare = {names.index(name) for name, norm in token_norms.items() if not norm.parameters}
    solver.run()
    summary = _Summary(found, names, solver)
    if approximate:
        kinds = [*("" for _ in statics), *(norm.kind for norm in token_norms.values())]
        summary.canceled = solver.canceled(traced, kinds)
    folding = summary.folding()
    folding.assumes_numbers = any(map(assumes_number, relations.all()))
    return folding


class _Solver:
    def __init__(
        self,
        traced: Trace,
        relations: Relations,
        statics: Sequence[Static],
        norms: Sequence[nn.Module],
        slots: Slots,
        tied: Tied,
        with_statistic: range,
    ) -> None:
        self.relations = relations
        self.with_statistic = with_statistic
        """Indices of the norms of each token, which come last."""
        self.statics = statics
        self.norms = norms
        self.slots = slots
        self.tied = tied
        self.editor = Editor(traced, slots, relations)
        self.uses = _uses(relations)
        self.reasons: dict[int, str] = {}
        self.decoupled: set[int] = set()
        self.pinned: set[int] = set()
        self.with_bias: set[int] = set()
        """Indices of the norms of each token whose bias stays."""
        self.streams: list[Stream] = []
        """Those that are centered, if they can be."""
        self.epsilons: dict[int, float] = {}
        """eps of the norms that may become an RMSNorm."""
        self.bare: set[int] = set()
        """Indices of the norms of each token without weight and bias."""
        self.needed: set[int] = set()
        """Indices of the norms of each token whose attributes other modules read."""
        self.untouched: set[int] = set()
        """Indices of the pinned norms that do not become a multiply-add either."""
        self.solution = Solution()
        self.replacements: list[Replacement] = []
        self._exclude(traced)
        self._exclude_centered()

    def _exclude(self, traced: Trace) -> None:
        for index in range(len(self.norms)):
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
            if mark.is_masked and _hides_padding(self.norms[mark.index]):
                self.leave_untouched(
                    mark.index,
                    "variant='released' sets padding to 0 in evaluation, which is no affine map "
                    "of its input where a mask is given: if the model will run without one, give "
                    "example inputs without one",
                )
            if traced.adapter_of(node):
                self.leave_untouched(mark.index, adapter_reason(traced.adapter_of(node)))
        for index, norm in enumerate(self.norms):
            if _does_more(norm):
                self.leave_untouched(
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
        """Leave norms alone that center where nothing behind them could do that in their place."""
        for index, static in enumerate(self.statics):
            uses = self.uses.get(index, ()) if static.centers else ()
            reason = why_not_centered_behind(self.relations, uses)
            if reason:
                self.leave_untouched(index, reason)

    def leave_untouched(self, index: int, reason: str) -> None:
        """Take a norm out of those that change, with a reason."""
        self.reasons[index] = reason
        self.pinned.add(index)
        self.untouched.add(index)

    def leave_shared(self, traced: Trace, parameters: Sequence[Sequence[str]]) -> None:
        """Take norms of each token out whose weight or bias is in use elsewhere, too."""
        for index, names in zip(self.with_statistic, parameters, strict=True):
            for name in names:
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
                    self.leave_untouched(index, f"{name} is also in use as {others[0]}")

    def center(self, norms: Sequence[TokenNorm | None]) -> None:
        """Center the streams that LayerNorms read, as far as nothing else needs them."""
        self.epsilons = {
            index: norm.eps
            for index, norm in enumerate(norms)
            if norm is not None
            and (norm.kind, norm.feature_dim) == ("layer", LAST)
            and norm.eps is not None
        }
        self.streams = streams_of(self.relations, self.epsilons)

    def run(self) -> None:
        # What is of another class anyway may have biases of its own.
        makes_biases = self.with_statistic.start > 0 or bool(self.epsilons)
        shiftable = {
            id(relation.operation): can_shift(relation.operation, self.slots, makes_biases)
            for relation in self.relations.all()
            if isinstance(relation, Weighted)
        }
        while True:
            problem = Problem(
                self.relations,
                self.statics,
                self.decoupled,
                self.pinned,
                shiftable,
                self.with_statistic,
                self.with_bias,
            )
            try:
                self.solution = solve(problem)
                self.replacements = self.editor.replacements(
                    self.solution,
                    problem,
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
        """Return the norms that would have to be a different multiply-add at each of their uses."""
        return {
            index
            for index in self.decoupled | self.with_bias
            if not all(
                self.affine(index, use).equals(self.affine(index, self.uses[index][0]))
                for use in self.uses[index][1:]
            )
        }

    def affine(self, index: int, use: Normed) -> Static:
        """Return weight and bias of a norm that stays, between reparametrized values."""
        norm = self.statics[index]
        scales, shifts = self.solution.scales, self.solution.shifts
        inner, outer = use.inputs[0], use.output
        scale = norm.scale * scales[inner] / scales[outer]
        shift = (norm.scale * shifts[inner] + norm.shift - shifts[outer]) / scales[outer]
        return Static(scale, shift)

    def behind_statistic(self, index: int) -> Static:
        """Return what is left behind the statistic of a norm that folds."""
        scale = torch.ones_like(self.statics[index].scale)
        if index not in self.with_bias:
            return Static(scale, torch.zeros_like(scale))
        return Static(scale, self.affine(index, self.uses[index][0]).shift)

    def as_rms(self, index: int) -> Static | str:
        """Return the weight of the RMSNorm in place of a LayerNorm, or why it stays one."""
        reason = centered_norms(self.streams).get(index, "the graph does not show its input")
        if index in self.untouched or reason:
            return reason or self.reasons[index]
        left = self.statics[index] if index in self.pinned else self.behind_statistic(index)
        return "RMSNorm has no bias" if bool(left.shift.any()) else left

    def canceled(self, traced: Trace, kinds: Sequence[str]) -> frozenset[int]:
        """Return the norms whose statistic others cancel; `kinds` are those of the norms."""
        candidates = {
            index
            for index in self.with_statistic
            if (kinds[index] == "rms" or isinstance(self.as_rms(index), Static))
            and not bool(self.statics[index].shift.any())
            and index in self.uses
            and index not in self.untouched | self.needed | traced.inplace_neighbors.keys()
        }
        invariant = [i for i in self.with_statistic if kinds[i] in ("layer", "rms")]
        return canceled(traced, candidates, invariant)

    def _drop_idle_streams(self) -> bool:
        """Leave the streams alone that no RMSNorm would come of; return whether there are any."""
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
        index = conflict.index
        if self.statics[index].centers:
            # A multiply-add per feature cannot stand for it.
            self.leave_untouched(index, conflict.reason)
            return
        self.reasons[index] = conflict.reason
        if index in self.with_statistic:
            self._keep(conflict)
            return
        self.decoupled.add(index)

    def _keep(self, conflict: FoldConflictError) -> None:
        """Let a norm of each token keep its bias; or all, and others with it."""
        if conflict.of_shift:
            self.with_bias.add(conflict.index)
            return
        for index, reason in {conflict.index: conflict.reason, **conflict.others}.items():
            self.reasons[index] = reason
            self.pinned.add(index)
            self.with_bias.discard(index)


def _uses(relations: Relations) -> dict[int, list[Normed]]:
    uses: dict[int, list[Normed]] = {}
    for use in relations.norms():
        uses.setdefault(use.index, []).append(use)
    return uses


class _Summary:
    """The solver's result by names of norms and parameters."""

    def __init__(self, found: Sequence[FoundNorm], names: Sequence[str], solver: _Solver) -> None:
        self.found = found
        self.names = names
        self.solver = solver
        self.canceled: frozenset[int] = frozenset()

    def folding(self) -> Folding:
        solver = self.solver
        folding = Folding(tuple(solver.replacements))
        for index, name in enumerate(self.names):
            if index in solver.reasons:
                folding.reasons[name] = solver.reasons[index]
            if index in solver.with_statistic:
                if index in self.canceled:
                    self._drop_token_norm(folding, index, name)
                else:
                    self._add_token_norm(folding, index, name)
                continue
            if index in solver.decoupled or self._is_pinned(index):
                folding.multiply_adds[name] = solver.affine(index, solver.uses[index][0])
        folding.replaced = tuple(
            name
            for index, name in enumerate(self.names)
            if index in self.canceled
            or (index not in solver.with_statistic and index not in solver.pinned)
            or name in folding.multiply_adds
        )
        folding.canceled = frozenset(self.names[index] for index in self.canceled)
        for found in self.found:
            name, _ = found.inner
            if name not in self.names:
                folding.reasons[name] = why_not_static(found)
        changed = {name for replacement in solver.replacements for name in replacement.names}
        for index, uses in solver.uses.items():
            if index not in solver.pinned:
                folding.into[self.names[index]] = self._around(uses, changed)
        return folding

    def _drop_token_norm(self, folding: Folding, index: int, name: str) -> None:
        left = self.solver.statics[index]
        if index in self.solver.pinned and bool((left.scale != 1).any()):
            folding.multiply_adds[name] = left
        folding.reasons[name] = (
            "approximate: its statistic goes, which those behind it cancel but for eps"
        )

    def _add_token_norm(self, folding: Folding, index: int, name: str) -> None:
        solver = self.solver
        if index not in solver.pinned and index not in solver.bare:
            folding.token_norms[name] = solver.behind_statistic(index)
        if index in solver.with_bias:
            folding.reasons[name] = f"its bias stays: {solver.reasons[index]}"
        if index not in solver.epsilons:
            return
        rms = solver.as_rms(index)
        if isinstance(rms, str):
            why = f"it stays a LayerNorm: {rms}"
            reason = solver.reasons.get(index, "")
            same = reason == rms
            folding.reasons[name] = "; ".join(filter(None, ("" if same else reason, why)))
        else:
            folding.token_norms[name] = rms
            folding.rms[name] = solver.epsilons[index]

    def _is_pinned(self, index: int) -> bool:
        """Return whether it is a norm with fixed neighbors, hence a multiply-add."""
        solver = self.solver
        return index in solver.pinned and index in solver.uses and index not in solver.untouched

    def _around(self, uses: Sequence[Normed], changed: set[str]) -> tuple[str, ...]:
        """Return the changed parameters next to a norm, across operators that pass features on."""
        relations, found = self.solver.relations, dict[str, None]()
        queue = [place for use in uses for place in (use.output, *use.inputs)]
        seen = set(queue)
        while queue:
            place = queue.pop(0)
            neighbors = [relations.producers.get(place), *relations.readers.get(place, ())]
            for relation in neighbors:
                if isinstance(relation, Weighted):
                    found.update(dict.fromkeys(self._names_of(relation, changed)))
                elif relation is not None and not isinstance(relation, Normed):
                    new = [p for p in (*relation.inputs, relation.output) if p not in seen]
                    seen.update(new)
                    queue.extend(new)
        return tuple(found)

    def _names_of(self, relation: Weighted, changed: set[str]) -> list[str]:
        name = relation.operation.weight.name
        slot = self.solver.slots.read_at(name, relation.operation.path)
        return [slot] if slot in changed else []


_TORCH_BATCH_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def statics_of(norms: Iterable[FoundNorm]) -> dict[str, Static]:
    """Return scale and shift of the static norms among these, by the module that computes.

    Raises:
        InputError: one of them has never seen a batch, or its scales are not finite.
    """
    statics = {}
    for found in norms:
        static = static_of(found)
        if static is None:
            continue
        name, norm = found.inner
        counted = norm.layer if isinstance(norm, AdaptedNorm) else norm
        tracked = getattr(counted, "num_batches_tracked", None)
        if tracked is not None and int(tracked) == 0 and not _has_other_statistics(counted):
            raise InputError(
                f"the statistics of {name!r} ({type(norm).__name__}) have never seen a batch: "
                "train the model, or call powernorm.calibrate(model, batches) first"
            )
        for what, value in (("scale", static.scale), ("shift", static.shift)):
            wrong = int((~value.isfinite()).sum())
            if wrong:
                raise InputError(
                    f"the {what} of {name!r} ({type(norm).__name__}) is not finite in {wrong} of "
                    f"{len(value)} features: its weights or statistics are broken, calibrate or "
                    "train again"
                )
        statics[name] = static
    return statics


def static_of(found: FoundNorm) -> Static | None:
    """Return scale and shift of a static norm in evaluation, None for everything else."""
    _, norm = found.inner
    if found.function:
        return None
    if isinstance(norm, Norm):
        if not (norm.is_static or norm.centers):
            return None
        scale, shift = norm.affine()
        return Static(scale.detach().cpu(), shift.detach().cpu(), norm.centers)
    if not isinstance(norm, _TORCH_BATCH_NORMS):
        return None if isinstance(norm, CHANNEL_NORMS) else _frozen(norm)
    if does_more_than_torch(norm):
        return None
    if norm.running_var is not None:
        assert norm.running_mean is not None
        scale = torch.rsqrt(norm.running_var.double() + norm.eps)
        if norm.weight is not None:
            scale = scale * norm.weight.double()
        shift = -scale * norm.running_mean.double()
        if norm.bias is not None:
            shift = shift + norm.bias.double()
        return Static(scale.detach().cpu(), shift.detach().cpu())
    return None


def _has_other_statistics(norm: nn.Module) -> bool:
    """Return whether a BatchNorm of torch has statistics that are not those of its start.

    Weights from before torch 0.4.1 had no counter, and it is 0 where they are loaded.
    """
    if not isinstance(norm, _TORCH_BATCH_NORMS) or norm.running_var is None:
        return False
    assert norm.running_mean is not None
    return bool(norm.running_mean.any() or (norm.running_var != 1).any())


_CHANNELS: Final = 1
"""Dimension of the features in the input of a BatchNorm of torch or another library."""


def _frozen(norm: nn.Module) -> Static | None:
    """Return scale and shift of another library's BatchNorm with frozen statistics, else None.

    Such as the FrozenBatchNorm2d of torchvision and of DETR and its relatives: a few vectors of one
    length and no other part. That it is an affine map per channel is tried out, in float64.
    """
    tensors = [*norm._parameters.values(), *norm._buffers.values()]
    vectors = [one for one in tensors if one is not None and one.ndim == 1]
    sizes = {len(one) for one in vectors}
    others = [one for one in tensors if one is not None and one.ndim > 1]
    if norm._modules or others or len(sizes) != 1 or not hasattr(norm, "running_var"):
        return None
    (channels,) = sizes
    shadow = _in_float64(norm)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, channels, 3, 3, generator=generator, dtype=torch.float64, device="cpu")
    try:
        with torch.no_grad():
            y, one, zero = (
                type(norm).forward(shadow, value)
                for value in (x, torch.ones_like(x[:1]), torch.zeros_like(x[:1]))
            )
    except Exception:  # whatever a foreign forward raises, it is no map of a tensor alone
        return None
    if not all(isinstance(value, Tensor) and value.dtype == x.dtype for value in (y, one, zero)):
        return None
    shift = zero[0, :, 0, 0]
    scale = one[0, :, 0, 0] - shift
    expected = x * scale[:, None, None] + shift[:, None, None]
    is_affine = y.shape == x.shape and torch.allclose(y, expected, 1e-10, 1e-10, equal_nan=True)
    return Static(scale, shift) if is_affine else None


def _in_float64(norm: nn.Module) -> nn.Module:
    """Return a shallow copy in evaluation, its tensors on the CPU in float64."""
    shadow = copy.copy(norm)

    def wide(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        return {
            name: None if one is None else one.detach().cpu().double()
            for name, one in tensors.items()
        }

    shadow.__dict__["_parameters"] = wide(norm._parameters)
    shadow.__dict__["_buffers"] = wide(norm._buffers)
    shadow.__dict__["training"] = False
    return shadow


def why_not_static(found: FoundNorm) -> str:
    """Return why a norm is not an affine map per feature."""
    if found.function:
        return found.reason
    norm = found.inner[1]
    if isinstance(norm, CHANNEL_NORMS) and does_more_than_torch(norm):
        return found.reason
    if isinstance(norm, _TORCH_BATCH_NORMS):
        return (
            "without running statistics it depends on the batch in evaluation: swap it, and train"
        )
    if isinstance(norm, CHANNEL_NORMS):
        return "it depends on each input in evaluation: swap it for a static norm to fold it"
    if isinstance(found.module, AdaptedNorm):
        return (
            "it does not say that it is an affine map per feature in evaluation (is_static = True)"
        )
    if isinstance(norm, ProgressiveRepBatchNorm):
        return f"its share of LayerNorm is {norm.share:.3g}, not 0 yet: train it to the end of that"
    if isinstance(norm, TaperNorm):
        return f"its gate is {norm.gate:.3g}, not 0 yet: train it to its end_step"
    return "it depends on each token in evaluation: swap it for a static norm to fold it"


def _feature_axis(norm: nn.Module) -> int:
    """Return the dimension of the features in the input of a norm that may be static."""
    return norm.feature_dim if isinstance(norm, Norm) else _CHANNELS


def _does_more(norm: nn.Module) -> bool:
    """Return whether a call of the norm does more than its class defines."""
    # Of a user's norm also those of the module inside.
    return "forward" in norm.__dict__ or any(
        not _only_observes(hook)
        for part in norm.modules()
        for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    )


def _only_observes(hook: object) -> bool:
    """Return whether it is a hook of this library that changes nothing in evaluation."""
    is_watch = isinstance(getattr(hook, "__self__", None), PlannedNorms)
    return is_watch or isinstance(hook, Hiding | ObserverHook)


def _hides_padding(norm: nn.Module) -> bool:
    """Return whether the norm sets padding to 0 in evaluation.

    With a mask such a norm is not an affine map.
    """
    return isinstance(norm, BatchStatisticsNorm) and norm.floor
