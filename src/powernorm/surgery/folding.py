"""Folding static norms into the weights around them: plan, apply, verify, undo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from powernorm.errors import InputError
from powernorm.inspection.finder import FoundNorm, find_norms
from powernorm.inspection.rows import NormRow, NormTable, format_rows
from powernorm.norms import NORMS, Norm
from powernorm.norms.registry import short_name
from powernorm.surgery.changes import Changes, parameter_like, slot_of
from powernorm.surgery.fold_solver import (
    Folding,
    Tied,
    solve_fold,
    static_of,
    statics_of,
    why_not_static,
)
from powernorm.surgery.marking import mark
from powernorm.surgery.solution import Static
from powernorm.surgery.structure import Structure, build_structure
from powernorm.surgery.verification import (
    Errors,
    Examples,
    as_call,
    attributes_read,
    check,
    compare,
    run_folded,
    with_masks,
)
from powernorm.surgery.weight_updates import Replacement, compute


@dataclass(frozen=True)
class FoldReport(NormTable):
    """What folding has done.

    Args:
        model: the folded model.
        rows: one per norm: `fold`, nothing is left, absorbed by these parameters; `swap`, replaced
            by a multiply-add per feature; `keep`. The reason says why it did not fold.
        errors: differences from the original on the example inputs, one per type.
        structure: how the modules differ from the original's.
    """

    model: nn.Module
    rows: tuple[NormRow, ...]
    errors: tuple[Errors, ...]
    structure: Structure
    _changes: Changes = field(repr=False)

    def __str__(self) -> str:
        return "\n".join([format_rows(self.rows), *map(str, self.errors)])

    def undo(self) -> None:
        """Restore the model's norms and its original parameter objects.

        Raises:
            InputError: it was undone already.
        """
        self._changes.undo()
        mark(self.model)


@dataclass(frozen=True)
class FoldPlan(NormTable):
    """What folding would change; nothing has been changed yet.

    Args:
        model: the model.
        rows: one per norm.
        replacements: the parameters that get new values.
        structure: how the modules change.
        multiply_adds: weight and bias of the norms that leave a multiply-add.
        statics: the norms to be removed, as they were when the plan was made.
        examples: the example inputs, one call each.
        wrapper: class around the model that keeps lists of its tensors, `""` if there is none.
    """

    model: nn.Module
    rows: tuple[NormRow, ...]
    replacements: tuple[Replacement, ...]
    structure: Structure
    multiply_adds: Mapping[str, Static]
    statics: Mapping[str, Static]
    examples: tuple[Examples, ...]
    wrapper: str = ""

    def apply(self, *, inplace: bool = True, verify: bool = True) -> FoldReport:
        """Fold the norms.

        Args:
            inplace: change the model itself; False folds a copy.
            verify: first fold copies and compare them with the original on the example inputs, in
                float64, float32 and the model's own type. Without, the folded model is run once.

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
        if verify:
            errors = compare(self.model, self._fold_into, self.examples)
            check(errors)
        model = self.model if inplace else deepcopy(self.model)
        changes = self._fold_into(model)
        if not verify:
            try:
                run_folded(model, self.examples)
            except InputError:
                changes.undo()
                raise
        return FoldReport(model, self.rows, errors, self.structure, changes)

    def _check_unchanged(self) -> None:
        training = [name for name, module in self.model.named_modules() if module.training]
        if training:
            raise InputError(
                f"the model is in training mode ({training[0] or 'the model itself'!r}) since the "
                "fold was planned: call model.eval() first"
            )
        now = statics_of(find_norms(self.model))
        for name, static in self.statics.items():
            other = now.get(name)
            if other is None or not static.equals(other):
                raise InputError(
                    f"norm {name!r} has changed since the fold was planned: plan it again"
                )

    def _fold_into(self, model: nn.Module) -> Changes:
        tensors = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        try:
            new = [compute(replacement, tensors) for replacement in self.replacements]
        except (KeyError, RuntimeError) as error:
            raise InputError(
                f"the model's parameters have changed since the fold was planned ({error}): plan "
                "it again"
            ) from error
        changes = build_structure(model, self.structure)
        try:
            self._fill(model, new, changes)
        except InputError:
            changes.undo()
            raise
        mark(model)
        return changes

    def _fill(self, model: nn.Module, new: list[torch.Tensor], changes: Changes) -> None:
        for replacement, value in zip(self.replacements, new, strict=True):
            module, attribute = slot_of(model, replacement.names[0])
            tensor = parameter_like(value, getattr(module, attribute))
            if not bool(tensor.isfinite().all()):
                raise InputError(
                    f"the new values of {replacement.names[0]} do not fit into {tensor.dtype}: "
                    "fold the model in float32, or clamp the norms' scales"
                )
            for name in replacement.names:
                module, attribute = slot_of(model, name)
                changes.set_tensor(module, attribute, tensor)
        for name, static in self.multiply_adds.items():
            left = model.get_submodule(name)
            for attribute, value in (("weight", static.scale), ("bias", static.shift)):
                old = getattr(left, attribute)
                with torch.no_grad():
                    old.copy_(value)
                if not bool(old.isfinite().all()):
                    raise InputError(
                        f"the multiply-add that is left of {name!r} does not fit into {old.dtype}: "
                        "fold the model in float32"
                    )


def plan_fold(
    model: nn.Module,
    example_inputs: object,
    *,
    more_examples: Sequence[object] = (),
    tied: Tied = "untie",
) -> FoldPlan:
    """Plan how the static norms of a model fold into the weights around them.

    A static norm is `y = a ⊙ x + c` in evaluation. Every value s of the folded model stands for
    `A ⊙ s + B` of the original one, with A and B per feature such that each norm becomes the
    identity and the weights around it absorb the rest. This covers pre-norm, Linear → norm, and
    post-norm by a reparametrized stream, through reshapes, dropout and residual sums, into linear
    maps, convolutions, embeddings and parameters.

    Args:
        model: in evaluation mode; it is not changed. Of one that DistributedDataParallel or
            DataParallel wraps, the module inside is folded, which is then the plan's `model`; for
            the former apply it to a copy.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments
            that the model takes; a dict for a model of sentence-transformers, too. The computation
            on them is what is folded. Other lengths and masks work afterwards. But if the model's
            Python code branches on shapes, arguments or values, give an example of each branch
            that will be used (of more than one token). Values inside the folded model are
            reparametrized, so that hidden states that the example does not return differ from the
            original's.
        more_examples: inputs of other branches, each as `example_inputs`. The fold holds for all.
        tied: if one tensor is both the embedding and the head and the two need different values,
            `untie` gives the head a tensor of its own (memory for another table), `keep` leaves a
            multiply-add before the head.

    Raises:
        InputError: a model in training mode, uncalibrated statistics, scales that are not finite,
            inputs that fail, no static norm, or a model that torch.export cannot trace.
    """
    wrapper = ""
    while isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        if isinstance(model, nn.parallel.DistributedDataParallel):
            wrapper = type(model).__name__
        model = model.module
    examples = _examples(model, example_inputs, more_examples)
    found = find_norms(model)
    statics = _checked_statics(model, found, examples)
    modules = dict(model.named_modules())
    read = attributes_read(model, {name: modules[name] for name in statics}, examples)
    masked = with_masks(model, examples[0])
    try:
        both = examples if masked is None else (*examples, masked)
        folding = solve_fold(model, found, statics, both, tied, read)
        examples = both
    except InputError:
        if masked is None:
            raise
        folding = solve_fold(model, found, statics, examples, tied, read)
    return FoldPlan(
        model,
        tuple(_row(norm, folding) for norm in found),
        folding.replacements,
        folding.structure(model),
        folding.multiply_adds,
        {name: statics[name] for name in folding.replaced},
        examples,
        wrapper,
    )


def fold(
    model: nn.Module,
    example_inputs: object,
    *,
    more_examples: Sequence[object] = (),
    inplace: bool = True,
    verify: bool = True,
    tied: Tied = "untie",
) -> FoldReport:
    """Fold the static norms of a model into its weights, exactly, so that none is left.

    This is `plan_fold` followed by `apply`; see `plan_fold` for what is folded and how.

    Args:
        model: in evaluation mode, with trained or calibrated statistics.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.
        more_examples: inputs of other branches of the model's code, see `plan_fold`.
        inplace: change the model itself; False folds a copy, the report's `model`.
        verify: compare with the original on the example inputs.
        tied: see `plan_fold`.

    Returns:
        The report: the model, a row per norm (what was folded into what, what stayed and why), the
        measured errors, and `undo()`.

    Raises:
        InputError: as in `plan_fold`; or the outputs differ, and nothing has changed.

    >>> model = torch.nn.Sequential(powernorm.BatchNorm(4), torch.nn.Linear(4, 2))
    >>> y = model(torch.randn(8, 4))
    >>> report = fold(model.eval(), torch.randn(8, 4))
    >>> [row.action for row in report.rows]
    ['fold']
    """
    plan = plan_fold(model, example_inputs, more_examples=more_examples, tied=tied)
    return plan.apply(inplace=inplace, verify=verify)


def _examples(model: nn.Module, first: object, others: Sequence[object]) -> tuple[Examples, ...]:
    if not isinstance(others, tuple | list):
        raise InputError(
            f"more_examples is a {type(others).__name__}, expected a list of inputs, each as "
            "example_inputs"
        )
    more = (as_call(one, model, name=f"more_examples[{i}]") for i, one in enumerate(others))
    return (as_call(first, model), *more)


def _checked_statics(
    model: nn.Module, found: Sequence[FoundNorm], examples: Sequence[Examples]
) -> Mapping[str, Static]:
    """Return the static norms by name, after checking that the model can be folded."""
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise InputError(
            f"{type(model).__name__} is on the meta device and has no values to fold: load its "
            "weights first"
        )
    if any("" in norm.names and static_of(norm) is not None for norm in found):
        raise InputError(
            f"the model is itself a norm ({type(model).__name__}): there is nothing around it to "
            "fold it into; its scale and shift are model.affine()"
        )
    training = [name for name, module in model.named_modules() if module.training]
    if training:
        raise InputError(
            f"the model is in training mode ({training[0] or 'the model itself'!r}): a norm is "
            "static in evaluation only, call model.eval() first"
        )
    statics = statics_of(found)
    if not statics:
        present = ", ".join(sorted({norm.type_name for norm in found})) or "none"
        later = sorted({why_not_static(one) for one in found if _becomes_static(one)})
        raise InputError(
            f"the model holds no static norm to fold (it holds {present}): "
            + ("; ".join(later) or "see powernorm.swap, and `static` in powernorm.NORMS")
        )
    for position, example in enumerate(examples):
        name = f"more_examples[{position - 1}]" if position else "the example inputs"
        try:
            example.call(model)
        except Exception as error:
            raise InputError(
                f"{type(model).__name__} fails on {name}: {type(error).__name__}: {error}; give "
                "inputs that it takes"
            ) from error
    return statics


def _becomes_static(found: FoundNorm) -> bool:
    """Return whether a norm is of a kind that is static, if not as it is now."""
    norm = found.inner[1]
    return isinstance(norm, Norm) and short_name(norm) in NORMS and NORMS[short_name(norm)].static


def _row(found: FoundNorm, folding: Folding) -> NormRow:
    name, _ = found.inner
    reason = folding.reasons.get(name, "")
    row = NormRow(name=found.names[0], kind=found.kind, action="keep", reason=reason)
    into = folding.into.get(name, ())
    if not reason:
        return replace(row, action="fold", into=into)
    # A norm that does not fold is still replaced if a multiply-add can take its place.
    is_simpler = name in folding.multiply_adds
    return replace(row, action="swap", into=("multiply-add", *into)) if is_simpler else row
