"""Conversion of functional norms in a model to modules, so that other verbs can use them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from powernorm.errors import InputError
from powernorm.inspection.examples import Examples, as_calls
from powernorm.inspection.finder import norm_modules
from powernorm.inspection.functional import (
    CALLS,
    FunctionCall,
    FunctionForward,
    Hiding,
    parameter_of,
    see_calls,
)
from powernorm.inspection.rows import NormRow, NormTable
from powernorm.norms.arguments import check_model
from powernorm.surgery.changes import Changes
from powernorm.surgery.plans import check_untouched


@dataclass(frozen=True)
class Modularization(NormTable):
    """Result of `modularize`.

    Args:
        model: the changed model.
        rows: one per call: `modularize`, into a module with the row's name; or `keep`, and why.
    """

    model: nn.Module
    rows: tuple[NormRow, ...]
    _changes: Changes = field(repr=False)
    _made: tuple[tuple[nn.Module, str, object], ...] = field(repr=False)
    """Modules, with the attributes and values that were set in them."""

    def undo(self) -> None:
        """Remove the modules: the model's own forwards call the functions again.

        Raises:
            InputError: undo was called already, or an attribute has been replaced since.
        """
        self._changes.check_not_undone()
        for module, name, value in self._made:
            if getattr(module, name, None) is not value:
                raise InputError(
                    f"{name} of {type(module).__name__} has been replaced since modularize: "
                    "undo later changes first"
                )
        self._changes.undo()


def modularize(
    model: nn.Module, example_inputs: object, *, more_examples: Sequence[object] = ()
) -> Modularization:
    """Make modules of the functional norms that a model calls, in place.

    A call such as `F.rms_norm(x, (x.size(-1),))` in the forward of `h.0`, also by a helper, becomes
    a call of the new module `h.0.norm_call0`, a `torch.nn.RMSNorm`; the next call in the same
    forward becomes one of `h.0.norm_call1`, and so on. Calls inside an attention that normalize
    queries or keys of each head are named `h.0.attn.qk_norm0`. The model computes the same, bit for
    bit. `powernorm.swap`, `fold` and `diagnose` treat the new modules like others.

    Parameters that are passed to a call stay where they are, and the new module holds the same
    objects. The state dict keeps their names and gets no second ones.

    Covered are `layer_norm`, `rms_norm` and `group_norm`. Other calls stay, each with a reason in
    its row. Norms that are computed by hand, `x * x.square().mean(-1, keepdim=True).rsqrt()`, are
    not seen.

    Args:
        model: changed in place.
        example_inputs: as in `powernorm.fold`; the model runs on them, in evaluation.
        more_examples: further inputs, each as `example_inputs`, for other branches of the code.

    Returns:
        A row for each call, and `undo()`.

    Raises:
        InputError: the model makes no such call, or no call can be a module; a module's calls
            differ between its forwards, as in a loop whose length depends on the data; the model
            fails on the inputs, or is compiled or wrapped already. Nothing is changed then. Later
            calls of the model raise it if its norm calls are no longer those of the examples.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.linear = nn.Linear(8, 8)
    ...     def forward(self, x):
    ...         return x + self.linear(torch.nn.functional.rms_norm(x, (8,)))
    >>> model = nn.Sequential(Block(), Block())
    >>> made = modularize(model, torch.randn(2, 8))
    >>> model[1].norm_call0
    RMSNorm((8,), eps=None, elementwise_affine=False)
    >>> [row.action for row in powernorm.plan_swap(model, "rbn").rows]
    ['swap', 'swap']
    >>> made.undo()
    """
    check_model(model)
    check_untouched(model, "modularize")
    examples = as_calls(model, example_inputs, more_examples)
    norms = norm_modules(model)
    # Twice, because calls that depend on random numbers do not repeat.
    seen = see_calls(model, (*examples, *examples), norms)
    _check_steady(model, seen)
    called = {module: forwards[0] for module, forwards in seen.items()}
    rows = tuple(_row(model, called))
    if all(row.action == "keep" for row in rows):
        reasons = "; ".join(f"{row.name}: {row.reason}" for row in rows[:3])
        raise InputError(
            f"{type(model).__name__} makes no call of a functional norm that could be a module "
            f"({reasons or 'none is made on the example inputs; arithmetic is not looked at'})"
        )
    changes = Changes()
    made: list[tuple[nn.Module, str, object]] = []
    for module, calls in called.items():
        if not all(call.obstacle for call in calls):
            made.extend(_replace(module, calls, changes, norms))
    result = Modularization(model, rows, changes, tuple(made))
    try:
        _check_runs(model, examples)
    except InputError:
        result.undo()
        raise
    return result


def _check_steady(
    model: nn.Module, seen: Mapping[nn.Module, tuple[tuple[FunctionCall, ...], ...]]
) -> None:
    for name, module in model.named_modules():
        if len(seen.get(module, ())) > 1:
            one, other, *_ = map(len, seen[module])
            raise InputError(
                f"the forward of {name or 'the model'} ({type(module).__name__}) makes {one} calls "
                f"of functional norms and then {other}, or others: which module each is depends on "
                "the data. Put a torch.nn norm for each into its __init__"
            )


def _row(model: nn.Module, seen: Mapping[nn.Module, Sequence[FunctionCall]]) -> Iterator[NormRow]:
    kinds = {"layer_norm": ("layer", "LayerNorm"), "rms_norm": ("rms", "RMSNorm")}
    for name, module in model.named_modules():
        for call in seen.get(module, ()):
            kind, into = kinds.get(call.function, ("channel", "GroupNorm"))
            yield NormRow(
                name=f"{name}.{call.name}" if name else call.name,
                kind=kind,
                action="keep" if call.obstacle else "modularize",
                into=() if call.obstacle else (into,),
                reason=f"{call.function} at {call.site}: {call.obstacle}".removesuffix(": "),
            )


def _built(module: nn.Module, call: FunctionCall) -> nn.Module:
    """Return a module of torch with a call's computation and the same parameters."""
    norm: nn.Module
    if call.function == "group_norm":
        groups, channels = call.size
        norm = nn.GroupNorm(groups, channels, eps=call.eps or 0.0, affine=False)
        norm.affine = bool(call.weight or call.bias)
    elif call.function == "rms_norm":
        norm = nn.RMSNorm(call.size, eps=call.eps, elementwise_affine=False)
        norm.elementwise_affine = bool(call.weight)
    else:
        norm = nn.LayerNorm(call.size, eps=call.eps or 0.0, elementwise_affine=False)
        norm.elementwise_affine = bool(call.weight or call.bias)
    for attribute, name in (("weight", call.weight), ("bias", call.bias)):
        if name:
            setattr(norm, attribute, module.get_parameter(name))
    return norm.train(module.training)


def _replace(
    module: nn.Module, calls: tuple[FunctionCall, ...], changes: Changes, norms: set[nn.Module]
) -> Iterator[tuple[nn.Module, str, object]]:
    """Put the new modules of one module in place; yield the attributes and values."""
    for call in calls:
        if not call.obstacle:
            norm = _built(module, call)
            changes.set_module(module, call.name, norm)
            yield module, call.name, norm
    forward = FunctionForward(module, calls)
    changes.on_undo(forward.remove)
    for inner in module.modules():
        if inner in norms:
            for handle in Hiding.put_on(inner):
                changes.on_undo(handle.remove)
    changes.set_entry(module, CALLS, calls)
    seconds = {
        f"{call.name}.{attribute}": name
        for call in calls
        for attribute, name in (("weight", call.weight), ("bias", call.bias))
        if name and not call.obstacle
    }
    handles = (
        module.register_state_dict_post_hook(partial(_leave_out, seconds)),
        module.register_load_state_dict_pre_hook(partial(_fill_in, seconds)),
    )
    for handle in handles:
        changes.on_undo(handle.remove)
    yield module, "forward", forward


def _tied(module: nn.Module, seconds: Mapping[str, str]) -> dict[str, str]:
    """Return second names of parameters that a module holds twice, with the first ones."""
    return {
        second: name
        for second, name in seconds.items()
        if parameter_of(module, second) is parameter_of(module, name)
    }


def _leave_out(
    seconds: Mapping[str, str], module: nn.Module, state_dict: Any, prefix: str, _: object
) -> None:
    """Omit the second names from the result of `state_dict`."""
    for second in _tied(module, seconds):
        state_dict.pop(prefix + second, None)


def _fill_in(
    seconds: Mapping[str, str], module: nn.Module, state_dict: Any, prefix: str, *_: object
) -> None:
    """Add the second names to a state dict that is being loaded."""
    for second, name in _tied(module, seconds).items():
        if prefix + name in state_dict:
            state_dict.setdefault(prefix + second, state_dict[prefix + name])


def _check_runs(model: nn.Module, examples: Sequence[Examples]) -> None:
    try:
        for example in examples:
            example.call(model)
    except Exception as error:
        raise InputError(
            f"{type(model).__name__} fails with modules in the place of functional norms, nothing "
            f"was changed ({error}). A forward that iterates over its children, like that of an "
            "nn.Sequential, finds new ones: put a torch.nn norm into its __init__"
        ) from error
