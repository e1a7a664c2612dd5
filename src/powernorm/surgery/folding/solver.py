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

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

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
from powernorm.surgery.folding.relations import (
    NormedValue,
    Relations,
    Weighted,
    adapter_reason,
    assumes_number,
    describe,
    relate,
)
from powernorm.surgery.folding.rewrite import Editor, Replacement, Slots, can_shift
from powernorm.surgery.folding.solution import FoldConflictError, Problem, Solution, Static, solve
from powernorm.surgery.folding.structure import Part, Structure
from powernorm.surgery.folding.token_norms import TokenNorm
from powernorm.surgery.folding.trace import Trace, mark_of, run, trace
from powernorm.surgery.planned_norms import PlannedNorms

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
        assumes_numbers: whether it may depend on sizes of the inputs or on other numbers.
    """

    replacements: tuple[Replacement, ...] = ()
    multiply_adds: dict[str, Static] = field(default_factory=dict)
    replaced: tuple[str, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)
    into: dict[str, tuple[str, ...]] = field(default_factory=dict)
    token_norms: dict[str, Static] = field(default_factory=dict)
    rms: dict[str, float] = field(default_factory=dict)
    assumes_numbers: bool = False

    def structure(self, model: nn.Module) -> Structure:
        """Return how the modules change, with every slot of the norms."""
        slots = dict(model.named_modules(remove_duplicate=False))
        left: dict[nn.Module, Part] = {}
        for name, eps in self.rms.items():
            scale = self.token_norms[name].scale
            options = {"eps": eps, "affine": bool((scale != 1).any())}
            left[slots[name]] = Part("norm", (), "rms", len(scale), options)
        for name in self.replaced:
            static, module = self.multiply_adds.get(name), slots[name]
            left[module] = Part("nothing")
            if static is not None:
                options = {"feature_dim": _feature_axis(module)}
                left[module] = Part("multiply-add", (), "", len(static.scale), options)
        norms = {name: left[module] for name, module in slots.items() if module in left}
        made = {r.names[0]: r.size for r in self.replacements if r.size is not None}
        for path in [name.rpartition(".")[0] for name in made if name.endswith("in_proj_bias")]:
            # torch's fused attention takes two biases or none.
            out: Any = slots[path].out_proj
            if isinstance(out, nn.Linear) and out._parameters["bias"] is None:
                made.setdefault(f"{path}.out_proj.bias".lstrip("."), out.out_features)
        untied = tuple(name for r in self.replacements if r.unties for name in r.names)
        return Structure(norms, made, untied)


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
        solver.center(token_norms.values())
    solver.leave_shared(traced, [norm.parameters for norm in token_norms.values()])
    for name, attribute in read_attributes.items():
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
    folding = solver.folding(found, names)
    folding.assumes_numbers = any(map(assumes_number, relations.all()))
    return folding


class _Solver(Problem):
    """The problem of all norms, and which of them leave it because it has no solution with them."""

    def __init__(
        self,
        traced: Trace,
        relations: Relations,
        affines: Sequence[Static],
        modules: Sequence[nn.Module],
        slots: Slots,
        tied: Tied,
        with_statistic: range,
    ) -> None:
        super().__init__(relations, affines, with_statistic)
        self.modules = modules
        self.slots = slots
        self.tied = tied
        self.editor = Editor(traced, slots, relations)
        self.uses: dict[int, list[NormedValue]] = {}
        for use in relations.norms():
            self.uses.setdefault(use.index, []).append(use)
        self.reasons: dict[int, str] = {}
        self.streams: list[Stream] = []
        """Those that are centered, if they can be."""
        self.epsilons: dict[int, float] = {}
        """eps of the norms that may become an RMSNorm."""
        self.bare: set[int] = set()
        """Indices of the norms of each token without weight and bias."""
        self.untouched: set[int] = set()
        """Indices of the pinned norms that do not become a multiply-add either."""
        self.solution = Solution()
        self.replacements: list[Replacement] = []
        self._exclude(traced)
        self._exclude_centered()

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
                self.leave_untouched(
                    mark.index,
                    "variant='released' sets padding to 0 in evaluation, which is no affine map "
                    "of its input where a mask is given: if the model will run without one, give "
                    "example inputs without one",
                )
            if traced.adapter_of(node):
                self.leave_untouched(mark.index, adapter_reason(traced.adapter_of(node)))
        for index, norm in enumerate(self.modules):
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
        for index, static in enumerate(self.norms):
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

    def center(self, norms: Iterable[TokenNorm]) -> None:
        """Center the streams that LayerNorms read, as far as nothing else needs them."""
        self.epsilons = {
            index: norm.eps
            for index, norm in zip(self.with_statistic, norms, strict=True)
            if (norm.kind, norm.feature_dim) == ("layer", LAST) and norm.eps is not None
        }
        self.streams = streams_of(self.relations, self.epsilons)

    def run(self) -> None:
        # What is of another class anyway may have biases of its own.
        makes_biases = self.with_statistic.start > 0 or bool(self.epsilons)
        self.shiftable = {
            id(relation.operation): can_shift(relation.operation, self.slots, makes_biases)
            for relation in self.relations.all()
            if isinstance(relation, Weighted)
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
        """Return the norms that would have to be a different multiply-add at each of their uses."""
        return {
            index
            for index in self.decoupled | self.with_bias
            if not all(
                self.affine(index, use).equals(self.affine(index, self.uses[index][0]))
                for use in self.uses[index][1:]
            )
        }

    def affine(self, index: int, use: NormedValue) -> Static:
        """Return weight and bias of a norm that stays, between reparametrized values."""
        norm = self.norms[index]
        (inner, inner_shift), (outer, outer_shift) = map(
            self.solution.at, (use.inputs[0], use.output)
        )
        shift = norm.scale * inner_shift + norm.shift - outer_shift
        return Static(norm.scale * inner / outer, shift / outer)

    def behind_statistic(self, index: int) -> Static:
        """Return what is left behind the statistic of a norm that folds."""
        scale = torch.ones_like(self.norms[index].scale)
        if index not in self.with_bias:
            return Static(scale, torch.zeros_like(scale))
        return Static(scale, self.affine(index, self.uses[index][0]).shift)

    def as_rms(self, index: int) -> Static | str:
        """Return the weight of the RMSNorm in place of a LayerNorm, or why it stays one."""
        reason = centered_norms(self.streams).get(index, "the graph does not show its input")
        if index in self.untouched or reason:
            return reason or self.reasons[index]
        left = self.norms[index] if index in self.pinned else self.behind_statistic(index)
        return "RMSNorm has no bias" if bool(left.shift.any()) else left

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
        """Let a norm leave a multiply-add, one of each token its bias; or all, and others too."""
        index = conflict.index
        self.reasons[index] = conflict.reason
        if self.norms[index].centers:
            # A multiply-add per feature cannot stand for it.
            self.leave_untouched(index, conflict.reason)
            return
        if index not in self.with_statistic or conflict.of_shift:
            (self.with_bias if index in self.with_statistic else self.decoupled).add(index)
            return
        self.reasons |= conflict.others
        self.pinned |= {index, *conflict.others}
        self.with_bias -= {index, *conflict.others}

    def folding(self, found: Sequence[FoundNorm], names: Sequence[str]) -> Folding:
        """Return the result by names of norms and parameters.

        Args:
            found: all norms of the model.
            names: those that take part, in the order of their indices.
        """
        folding = Folding(tuple(self.replacements))
        for index, name in enumerate(names):
            if index in self.reasons:
                folding.reasons[name] = self.reasons[index]
            if index in self.with_statistic:
                self._add_token_norm(folding, index, name)
                continue
            # A pinned one has fixed neighbors.
            is_pinned = index in self.pinned and index in self.uses and index not in self.untouched
            if index in self.decoupled or is_pinned:
                folding.multiply_adds[name] = self.affine(index, self.uses[index][0])
        folding.replaced = tuple(
            name
            for index, name in enumerate(names)
            if (index not in self.with_statistic and index not in self.pinned)
            or name in folding.multiply_adds
        )
        for norm in found:
            name, _ = norm.inner
            if name not in names:
                folding.reasons[name] = why_not_static(norm)
        changed = {name for replacement in self.replacements for name in replacement.names}
        for index, uses in self.uses.items():
            if index not in self.pinned:
                folding.into[names[index]] = self._around(uses, changed)
        return folding

    def _add_token_norm(self, folding: Folding, index: int, name: str) -> None:
        if index not in self.pinned and index not in self.bare:
            folding.token_norms[name] = self.behind_statistic(index)
        if index in self.with_bias:
            folding.reasons[name] = f"its bias stays: {self.reasons[index]}"
        if index not in self.epsilons:
            return
        rms = self.as_rms(index)
        if isinstance(rms, str):
            reason = self.reasons.get(index, "")
            said = f"{reason}; " if reason not in ("", rms) else ""
            folding.reasons[name] = f"{said}it stays a LayerNorm: {rms}"
        else:
            folding.token_norms[name] = rms
            folding.rms[name] = self.epsilons[index]

    def _around(self, uses: Sequence[NormedValue], changed: set[str]) -> tuple[str, ...]:
        """Return the changed parameters next to a norm, across operators that pass features on."""
        found: dict[str, None] = {}
        queue = [place for use in uses for place in (use.output, *use.inputs)]
        seen = set(queue)
        while queue:
            place = queue.pop(0)
            for relation in self.relations.around(place):
                if isinstance(relation, Weighted):
                    operation = relation.operation
                    slot = self.slots.read_at(operation.weight.name, operation.path)
                    found |= {slot: None} if slot in changed else {}
                elif not isinstance(relation, NormedValue):
                    new = [p for p in (*relation.inputs, relation.output) if p not in seen]
                    seen.update(new)
                    queue.extend(new)
        return tuple(found)


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
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, channels, 3, 3, generator=generator, dtype=torch.float64, device="cpu")
    try:
        shadow = deepcopy(norm).cpu().double().eval()
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
