"""Folding norms into the weights around them: plan, apply, verify, undo.

Static norms fold away. For per-token norms the weight and bias fold, and the statistic stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Final, Literal, get_args

import torch
from torch import nn

from powernorm.errors import InputError
from powernorm.inspection.affine import AffinePart, affine_parts, check_static, why_not_static
from powernorm.inspection.examples import (
    Examples,
    as_calls,
    taken,
    with_masks,
    with_other_defaults,
    with_other_numbers,
    with_other_sizes,
)
from powernorm.inspection.finder import FoundNorm, find_norms
from powernorm.inspection.rows import NormRow, NormTable
from powernorm.norms import ProgressiveRepBatchNorm, TaperNorm
from powernorm.norms.arguments import check_choice, check_model
from powernorm.norms.preserved_state import by_itself
from powernorm.surgery.changes import Changes, parameter_like, slot_of, tensors_of
from powernorm.surgery.folding.rewrite import compute
from powernorm.surgery.folding.solver import Centering, Folding, FoldOutcome, Tied, solve_fold
from powernorm.surgery.folding.structure import build_structure
from powernorm.surgery.folding.trace import Trace, effects_of, run, trace
from powernorm.surgery.folding.verify import Errors, check, differences, run_folded
from powernorm.surgery.saving.records import mark

Keep = Literal["nothing", "statistics"]
"""Norms that stay: `nothing` folds the static norms, `statistics` only weights and biases."""


@dataclass(frozen=True)
class FoldReport(NormTable):
    """Result of folding.

    Args:
        plan: the plan that was applied.
        rows: those of the plan.
        model: the folded model.
        errors: differences from the original on the example inputs, one per type.
    """

    plan: FoldPlan = field(repr=False)
    rows: tuple[NormRow, ...]
    model: nn.Module
    errors: tuple[Errors, ...]
    _changes: Changes = field(repr=False)

    def _notes(self) -> list[str]:
        return [*self.plan._notes(), *map(str, self.errors)]

    def __str__(self) -> str:
        """Return the table as text, and how the model is saved."""
        how = "as you save any other model" if self.is_stock else "by powernorm.save"
        return f"{self.to_text()}\nto keep it, save it {how}"

    @property
    def is_stock(self) -> bool:
        """Whether the model's own class holds the result: no module, bias or tie has changed."""
        structure = self.plan.folding.structure
        return not (structure.norms or structure.biases or structure.untied)

    def undo(self) -> None:
        """Restore the model's norms and its original parameter objects.

        Raises:
            InputError: it was undone already.
        """
        self._changes.undo()


@dataclass(frozen=True)
class FoldPlan(NormTable):
    """Plan of the changes of folding; nothing has been changed yet.

    Args:
        model: the model.
        rows: one per norm: `fold`, absorbed by these parameters, which leaves nothing, or for a
            per-token norm its statistic; `simplify`, replaced by a multiply-add per feature, or a
            LayerNorm by an RMSNorm; `keep`. The reason tells which part did not fold, and why.
        folding: the changes: outcome of each norm that could fold, by the name of the computing
            module, with its affine part at the time of the plan; new parameters and modules.
        examples: the example inputs, one call each.
        wrapper: class around the model that keeps lists of its tensors, `""` if there is none.
    """

    model: nn.Module
    rows: tuple[NormRow, ...]
    folding: Folding
    examples: tuple[Examples, ...]
    wrapper: str = ""

    def apply(self, *, inplace: bool = True, verify: bool = True) -> FoldReport:
        """Fold the norms.

        Args:
            inplace: change the model itself; False folds a copy.
            verify: first fold copies and compare them with the original on the example inputs, in
                float64, float32 and the model's own type. If False, the folded model is run once.

        Raises:
            InputError: the model is wrapped by DistributedDataParallel and would be changed in
                place; the folded model's outputs differ, it fails, the weights do not fit into
                the model's type, or the model has changed since the plan was made; nothing has
                changed then.
        """
        if inplace and self.wrapper:
            raise InputError(
                f"the model is wrapped by {self.wrapper}, which keeps lists of the parameters and "
                "buffers that folding replaces: fold a copy of the module inside (inplace=False; "
                "the report's model), or fold before wrapping"
            )
        self._check_unchanged()
        errors: tuple[Errors, ...] = ()
        with by_itself(self.model):
            if verify:
                errors = differences(self.model, self._fold_into, self.examples)
                check(errors)
            model = self.model if inplace else deepcopy(self.model)
            changes = self._fold_into(model)
            if not verify:
                try:
                    run_folded(model, self.examples)
                except InputError:
                    changes.undo()
                    raise
        # A report of a copy leaves the original model to the garbage collector.
        return FoldReport(replace(self, model=model), self.rows, model, errors, changes)

    def _notes(self) -> list[str]:
        count = self.num_neutral
        text = f"{count:,} weights and biases of norms no longer compute anything"
        return [text] if count else []

    @property
    def num_neutral(self) -> int:
        """Number of weights and biases of norms that will no longer compute anything.

        These are weights of 1, or 0 if the class adds 1 to its weight, and biases of 0.
        """
        return sum(
            int((value == neutral).sum())
            for one in self.folding.outcomes.values()
            if one.part.has_statistic and one.left is not None
            for slot, value, neutral in (
                (one.part.weight, one.left.scale, 1),
                (one.part.bias, one.left.shift, 0),
            )
            if slot
        )

    def _check_unchanged(self) -> None:
        _check_evaluates(self.model, " since the fold was planned")
        changed = {name: one.part for name, one in self.folding.outcomes.items() if one.changes}
        of_tokens = any(part.has_statistic for part in changed.values())
        now, _ = affine_parts(find_norms(self.model), of_tokens=of_tokens)
        for name, part in changed.items():
            if name not in now or not part.map.equals(now[name].map):
                raise InputError(
                    f"norm {name!r} has changed since the fold was planned: plan it again"
                )

    def _fold_into(self, model: nn.Module) -> Changes:
        tensors = tensors_of(model)
        try:
            new = [compute(replacement, tensors) for replacement in self.folding.replacements]
        except (KeyError, RuntimeError) as error:
            raise InputError(
                f"the model's parameters have changed since the fold was planned ({error}): plan "
                "it again"
            ) from error
        changes = Changes()
        changes.on_undo(lambda: mark(model))
        try:
            build_structure(model, self.folding.structure, changes)
            self._fill(model, new, changes)
        except InputError:
            changes.undo()
            raise
        mark(model)
        return changes

    def _fill(self, model: nn.Module, new: list[torch.Tensor], changes: Changes) -> None:
        for replacement, value in zip(self.folding.replacements, new, strict=True):
            names = replacement.names
            what = f"the new values of {names[0]} do"
            _set(model, names, value, changes, what, ", or clamp the norms' scales")
        for name, outcome in self.folding.outcomes.items():
            part, left = outcome.part, outcome.left
            if left is None:
                continue
            what = f"what is left of {name!r} does"
            values = {f"{name}.weight": left.scale, f"{name}.bias": left.shift}
            if outcome.eps is not None:
                affine = self.folding.structure.norms[name].options["affine"]
                values = {f"{name}.weight": left.scale} if affine else {}
            elif part.has_statistic:
                values = {part.weight: left.scale - part.offset, part.bias: left.shift}
            for slot, value in values.items():
                if slot:
                    _set(model, (slot,), value, changes, what)


def _set(
    model: nn.Module,
    names: Sequence[str],
    value: torch.Tensor,
    changes: Changes,
    what: str,
    advice: str = "",
) -> None:
    """Set the slots of a tensor to new values, or raise an InputError if these do not fit."""
    module, attribute = slot_of(model, names[0])
    tensor = parameter_like(value, getattr(module, attribute))
    if not bool(tensor.isfinite().all()):
        raise InputError(f"{what} not fit into {tensor.dtype}: fold the model in float32{advice}")
    for name in names:
        changes.set_tensor(*slot_of(model, name), tensor)


def plan_fold(
    model: nn.Module,
    example_inputs: object,
    *,
    keep: Keep = "nothing",
    centering: Centering = "keep",
    more_examples: Sequence[object] = (),
    tied: Tied | None = None,
) -> FoldPlan:
    """Plan how the norms of a model fold into the weights around them.

    A static norm is `y = a ⊙ x + c` in evaluation. For every value s of the folded model, the
    original has `A ⊙ s + B`, with A and B per feature such that each norm becomes the
    identity and the weights around it absorb the rest. This covers pre-norm, Linear → norm, and
    post-norm by a reparametrized stream, through reshapes, dropout and residual sums, into linear
    maps, convolutions, embeddings and parameters.

    A per-token norm, LayerNorm or RMSNorm, is `y = (offset + weight) ⊙ x̂ + bias`: an affine map
    after the statistic x̂. With `keep="statistics"` that map folds in the same way. The norm stays
    with the neutral weight of its class (1; 0 in Gemma, where the offset is 1) and a bias of 0, and
    no other class or shape in the model changes: its own class loads the result.

    Args:
        model: model in evaluation mode; it is not changed. If DistributedDataParallel or
            DataParallel wraps it, the inner module is folded, which is then the plan's `model`; for
            the former apply the plan to a copy.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments
            that the model takes; a dict for a model of sentence-transformers, too. Their
            computation is folded. Other lengths and masks work afterwards. But if the model's
            Python code branches on shapes, arguments or values, give an example of each branch
            that will be used (of more than one token). Values inside the folded model are
            reparametrized, so hidden states that the example does not return differ from the
            original's.
        keep: `nothing` folds the static norms, `statistics` the weights and biases of the others,
            too. Those that cannot fold stay, each with the reason in its row. A layer gets no new
            bias, unless static norms fold as well: the part of the weight that can fold without the
            bias does, and the bias stays, divided by the weight.
        centering: `weights` centers the layers that write to a stream that only LayerNorms read
            (embeddings and the last layers of sub-layers), so that the LayerNorms become RMSNorms,
            which is another class: use `powernorm.save`. Only with `keep="statistics"`; missing
            biases are added.
        more_examples: inputs of other branches, each as `example_inputs`. The fold holds for all.
        tied: if one tensor is both the embedding and the head and the two need different values,
            `untie` gives the head its own tensor (memory for another table), `keep` leaves a
            multiply-add before the head, or the unchanged norm if its statistic stays. By default
            `untie`, and `keep` with `keep="statistics"`, so that the model's own class loads it.

    Raises:
        InputError: a model in training mode, uncalibrated statistics, scales that are not finite,
            inputs that fail, no norm to fold, or a model that torch.export cannot trace.
    """
    check_options(keep, centering, tied)
    tied = tied or ("untie" if keep == "nothing" else "keep")
    wrapper = ""
    while isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        if isinstance(model, nn.parallel.DistributedDataParallel):
            wrapper = type(model).__name__
        model = model.module
    examples = as_calls(model, example_inputs, more_examples)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise InputError(
            f"{type(model).__name__} is on the meta device and has no values to fold: load its "
            "weights first"
        )
    check_model(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{name!r} is TorchScript, which cannot be changed: fold the model before torch.jit"
            )
    with by_itself(model):
        return _plan(model, examples, example_inputs, keep, centering, tied, wrapper)


def _plan(
    model: nn.Module,
    examples: tuple[Examples, ...],
    example_inputs: object,
    keep: Keep,
    centering: Centering,
    tied: Tied,
    wrapper: str,
) -> FoldPlan:
    found = find_norms(model, example_inputs)
    parts, reasons = affine_parts(found, of_tokens=keep == "statistics")
    _check_foldable(model, found, parts, reasons if keep == "statistics" else {})
    modules = dict(model.named_modules())
    static = {name: modules[name] for name, part in parts.items() if not part.has_statistic}
    effects = effects_of(model, static, examples)
    marks = {
        modules[name]: (index, part.has_statistic)
        for index, (name, part) in enumerate(parts.items())
    }
    runs: dict[int, Trace] = {}

    def solved(calls: Sequence[Examples]) -> Folding:
        for one in calls:
            if id(one) not in runs:
                runs[id(one)] = run(model, marks, one)
        traced = trace(model, [runs[id(one)] for one in calls], effects)
        return solve_fold(model, parts, traced, tied, centering)

    masked = with_masks(model, examples[0])
    examples = (*examples, *taken(model, chain.from_iterable(map(with_other_numbers, examples))))
    try:
        both = examples if masked is None else (*examples, masked)
        result = solved(both)
        examples = both
    except InputError:
        if masked is None:
            raise
        result = solved(examples)
    if result.assumes_numbers:
        more = (*with_other_sizes(examples[0]), *with_other_defaults(model, examples[0]))
        examples = (*examples, *taken(model, more))
        result = solved(examples)
    rows = tuple(_row(norm, result.outcomes, reasons) for norm in found)
    return FoldPlan(model, rows, result, examples, wrapper)


def fold(
    model: nn.Module,
    example_inputs: object,
    *,
    keep: Keep = "nothing",
    centering: Centering = "keep",
    more_examples: Sequence[object] = (),
    inplace: bool = True,
    verify: bool = True,
    tied: Tied | None = None,
) -> FoldReport:
    """Fold the norms of a model into its weights, exactly; static norms disappear.

    This is `plan_fold` followed by `apply`; see `plan_fold` for what is folded and how.

    Args:
        model: in evaluation mode, with trained or calibrated statistics.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.
        keep: `statistics` folds the weights and biases of LayerNorm and RMSNorm, too, which then
            only compute their statistic; see `plan_fold`.
        centering: `weights` makes RMSNorms of LayerNorms; see `plan_fold`.
        more_examples: inputs of other branches of the model's code, see `plan_fold`.
        inplace: change the model itself; False folds a copy, the report's `model`.
        verify: compare with the original on the example inputs.
        tied: see `plan_fold`.

    Returns:
        The report: the model, a row per norm (which parameters absorbed it, or why it stayed),
        the measured errors, and `undo()`.

    Raises:
        InputError: as in `plan_fold`; or the outputs differ, and nothing has changed.

    >>> model = torch.nn.Sequential(powernorm.BatchNorm(4), torch.nn.Linear(4, 2))
    >>> y = model(torch.randn(8, 4))
    >>> report = fold(model.eval(), torch.randn(8, 4))
    >>> [row.action for row in report.rows]
    ['fold']

    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 2)).eval()
    >>> _ = torch.nn.init.normal_(model[0].weight)
    >>> print(fold(model, torch.randn(8, 4), keep="statistics").rows[0].into, model[0].weight.data)
    ('1.weight',) tensor([1., 1., 1., 1.])
    """
    plan = plan_fold(
        model,
        example_inputs,
        keep=keep,
        centering=centering,
        more_examples=more_examples,
        tied=tied,
    )
    return plan.apply(inplace=inplace, verify=verify)


def check_options(keep: str, centering: str, tied: str | None) -> None:
    """Raise an InputError unless these are options of `fold` that can be combined.

    Raises:
        InputError: names the value and the expected ones.
    """
    check_choice("keep", keep, get_args(Keep))
    check_choice("centering", centering, get_args(Centering))
    if tied is not None:
        check_choice("tied", tied, get_args(Tied))
    if centering == "weights" and keep != "statistics":
        raise InputError("centering=weights needs norms that stay: give keep=statistics, too")


def _check_foldable(
    model: nn.Module,
    found: Sequence[FoundNorm],
    parts: Mapping[str, AffinePart],
    reasons: Mapping[str, str],
) -> None:
    """Raise an InputError if a model cannot be folded.

    Args:
        model: any model.
        found: its norms.
        parts: the affine parts of the norms that may fold.
        reasons: why others may not.
    """
    if any("" in norm.names and norm.inner[0] in parts for norm in found):
        raise InputError(
            f"the model is itself a norm ({type(model).__name__}): there is nothing around it to "
            "fold it into"
        )
    _check_evaluates(model, ": a norm is static in evaluation only")
    for norm in found:
        name, module = norm.inner
        if name in parts and not parts[name].has_statistic:
            check_static(name, module, parts[name].map)
    if not parts:
        present = sorted({norm.type_name for norm in found})
        scheduled = ProgressiveRepBatchNorm | TaperNorm
        later = [why_not_static(one) for one in found if isinstance(one.inner[1], scheduled)]
        others = (f"{name}: {reason}" for name, reason in reasons.items())
        why = next(iter(later), next(others, _OTHER_WAYS))
        raise InputError(
            f"the model holds no static norm to fold (it holds {', '.join(present) or 'none'}): "
            f"{why}"
        )


def _check_evaluates(model: nn.Module, why: str) -> None:
    """Raise an InputError if a part of the model is in training mode."""
    training = [name for name, module in model.named_modules() if module.training]
    if training:
        raise InputError(
            f"the model is in training mode ({training[0] or 'the model itself'!r}){why}: call "
            "model.eval() first"
        )


_OTHER_WAYS: Final = (
    "see powernorm.swap, and `static` in powernorm.NORMS; keep='statistics' folds the weights of "
    "LayerNorm and RMSNorm"
)


def _row(
    found: FoundNorm, outcomes: Mapping[str, FoldOutcome], reasons: Mapping[str, str]
) -> NormRow:
    name, _ = found.inner
    outcome = outcomes.get(name)
    reason = (outcome.reason if outcome else "") or reasons.get(name, "")
    row = NormRow(name=found.names[0], kind=found.kind, action="keep", reason=reason)
    if outcome is None or not outcome.changes:
        return row
    part, left, into = outcome.part, outcome.left, outcome.into
    if outcome.eps is not None:
        return replace(row, action="simplify", into=("rms", *into))
    if part.has_statistic or left is None:
        return replace(row, action="fold", into=into)
    # A norm that does not fold is still replaced if a multiply-add can take its place.
    return replace(row, action="simplify", into=("multiply-add", *into))
