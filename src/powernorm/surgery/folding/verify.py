"""Checking that a folded model reproduces the original's outputs on example inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from powernorm.errors import InputError
from powernorm.inspection.examples import Examples, kept_buffers, mapped
from powernorm.inspection.mask_arguments import parameters_of
from powernorm.surgery.changes import Changes, tensors_of
from powernorm.surgery.folding.trace import tensors_in


def with_masks(model: nn.Module, examples: Examples) -> Examples | None:
    """Return example inputs with the masks that a Hugging Face model takes and they leave out.

    Some models set vectors to zero by their mask between a norm and what would take it up, and
    only if they are given one. The masks hide nothing, and there are at least two rows, as such
    code leaves single ones alone.

    Returns:
        None where there is nothing to add, or the model does not take it.
    """
    parameters = parameters_of(model)
    given = dict(zip(parameters, examples.args, strict=False)) | dict(examples.kwargs)
    added: dict[str, Tensor] = {}
    for name, datas in _MASKS.items():
        data = next((given[one] for one in datas if isinstance(given.get(one), Tensor)), None)
        if name in parameters and given.get(name) is None and data is not None and data.ndim > 1:
            added[name] = torch.ones(data.shape[:2], dtype=torch.long, device=data.device)
    if not added:
        return None
    kwargs = given | added
    one_row = all(len(mask) == 1 for mask in added.values())
    twice = mapped(kwargs, _two_rows) if one_row else kwargs
    masked = Examples((), twice)
    try:
        masked.call(model)
    except Exception:  # whatever a model raises that wants another mask
        return None
    return masked


_MASKS: Final = {
    "attention_mask": ("input_ids", "inputs_embeds", "input_features", "input_values"),
    "decoder_attention_mask": ("decoder_input_ids", "decoder_inputs_embeds"),
}
"""Masks of Hugging Face's models, and the data that they belong to."""


def _two_rows(tensor: Tensor) -> Tensor:
    return tensor.repeat(2, *(1,) * (tensor.ndim - 1)) if tensor.shape[:1] == (1,) else tensor


def with_other_numbers(example: Examples) -> list[Examples]:
    """Return a call with other numbers in its arguments.

    In the graph of torch.export a number of the arguments is a constant, and 0 may be neutral
    there. What holds for other numbers, too, does not depend on it. All numbers grow at once, and
    shrink, and each grows alone where there are few. True and False choose a branch and stay.
    """
    numbers: list[int | float] = []
    example.changed(numbers.append, int | float)
    every = range(len(numbers))
    alone = [(1, [i]) for i in every] if 1 < len(numbers) <= _FEW else []
    found = []
    for sign, which in ((1, every), (-1, every), *alone) if numbers else ():
        new = [
            n + sign * (1 + which.index(i) + (0 if isinstance(n, int) else 0.25))
            if i in which
            else n
            for i, n in enumerate(numbers)
        ]

        def drawn(_: object, left: Iterator[Any] = iter(new)) -> Any:  # noqa: B008
            return next(left)

        pairs = ", ".join(f"{new[i]} in place of {numbers[i]}" for i in which[:3])
        note = f" (for other arguments, {pairs})"
        found.append(example.changed(drawn, int | float, note))
    return found


_FEW: Final = 4
"""Most numbers that are also changed one by one."""


def with_other_defaults(model: nn.Module, example: Examples) -> list[Examples]:
    """Return a call with other numbers for arguments that it leaves out."""
    left = list(inspect.signature(model.forward).parameters.values())[len(example.args) :]
    numbers = {
        one.name: one.default
        for one in left
        if type(one.default) in (int, float) and one.name not in example.kwargs
    }
    return [
        replace(example, kwargs={**example.kwargs, **other.kwargs}, note=other.note)
        for other in with_other_numbers(Examples((), numbers))
    ]


def with_other_sizes(example: Examples) -> list[Examples]:
    """Return a call with tensors that are longer by one.

    All dimensions of one size grow together.
    """
    sizes: dict[int, None] = {}
    example.changed(lambda tensor: sizes.update(dict.fromkeys(tensor.shape)))
    found = []
    for size in filter(None, sizes):

        def longer(tensor: Tensor, size: int = size) -> Tensor:
            for dim in range(tensor.ndim):
                if tensor.shape[dim] == size:
                    tensor = torch.cat([tensor, tensor.narrow(dim, -1, 1)], dim)
            return tensor

        note = f" (for other inputs, of {size + 1} in place of {size})"
        found.append(example.changed(longer, note=note))
    return found


def taken(model: nn.Module, examples: Iterable[Examples]) -> Iterator[Examples]:
    """Yield those calls that a model takes."""
    for example in examples:
        with suppress(Exception):  # whatever a model raises that takes no such arguments
            example.call(model)
            yield example


def written_by(model: nn.Module, example: Examples) -> frozenset[str]:
    """Return the names of the parameters and buffers that a call of a model writes.

    In place, or by putting another tensor there, which no graph of torch.export shows.
    """
    before = tensors_of(model)
    versions = {name: _version(tensor) for name, tensor in before.items()}
    found: set[str] = set()
    hook = model.register_forward_hook(
        lambda *_: found.update(
            name
            for name, tensor in tensors_of(model).items()
            if before.get(name) is not tensor or _version(tensor) != versions[name]
        )
    )
    try:
        example.call(model)
    finally:
        hook.remove()
    return frozenset(found)


def _version(tensor: Tensor) -> int | float:
    # Tensors of inference mode have none.
    return float(tensor.double().sum()) if tensor.is_inference() else tensor._version


_TOLERANCES: Final = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.bfloat16: 0.25,
    torch.float16: 0.05,
}
"""Largest relative errors that rounding explains, with a wide margin: an error of the algebra is
far larger in float64, which decides if the model computes in it."""

_PARTLY_NARROW: Final = 1e-4
"""Tolerance for a float64 copy of a model that converts to float32 in between."""


class Errors(NamedTuple):
    """How far the folded model's outputs are from the original's, over all of them.

    Args:
        dtype: the type that both ran in.
        absolute: largest difference.
        relative: largest difference of an output tensor over its largest magnitude.
        tolerance: largest relative error that rounding explains.
    """

    dtype: torch.dtype
    absolute: float
    relative: float
    tolerance: float

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}: max. absolute error {self.absolute:.1e}, relative {self.relative:.1e}"


def differences(
    model: nn.Module, other: Callable[[nn.Module], object], examples: Sequence[Examples]
) -> tuple[Errors, ...]:
    """Run a model and another one in its place, in float64, float32 and its own type.

    A type that the original does not run in is left out, except its own. In its own type they also
    run as they will be called, each example twice: under `torch.no_grad()` and
    `torch.inference_mode()`, with torch's fused attention as it is set.

    Args:
        model: the one.
        other: changes a copy of it in place that has run, in the type to compare in; or returns
            another model of the copy's type.
        examples: calls.

    Raises:
        InputError: the other one fails, or its outputs hold no floating-point tensor, or no finite
            number.
    """
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    found: list[Errors] = []
    for dtype in dict.fromkeys((torch.float64, torch.float32, own)):
        copy = deepcopy(model).to(dtype) if dtype != own else deepcopy(model)
        calls = [one if dtype == own else one.converted(dtype) for one in examples]
        try:
            with _Types() as types:
                before = [tensor for call in calls for tensor in _outputs(call.call(copy))]
        except Exception:
            if dtype == own:
                raise
            continue
        modes = [mode for mode in _MODES if dtype == own and _runs_twice(copy, calls, mode, before)]
        folded = other(copy)
        folded = folded if isinstance(folded, nn.Module) else copy
        results = run_folded(folded, calls)
        for mode in modes:
            results += run_folded(folded, calls, mode)
        after = [tensor for result in results for tensor in _outputs(result)]
        narrow = dtype == torch.float64 and types.narrower_than(dtype)
        tolerance = _PARTLY_NARROW if narrow else _TOLERANCES.get(dtype, 0.05)
        errors = _errors(dtype, before, after, tolerance)
        floats = [tensor for tensor in before if tensor.is_floating_point()]
        overflows = not all(bool(tensor.isfinite().all()) for tensor in floats)
        if overflows and found and not errors.relative <= tolerance:
            # In float64 they agree, or `found` says so.
            if dtype == own:
                raise InputError(
                    f"the outputs of {type(model).__name__} itself hold infinity or NaN in {dtype} "
                    "on the example inputs, and none in float64: nothing can be compared there. "
                    "Fold it in float64 (model.double()), or give examples that do not overflow"
                )
        elif any(bool(tensor.isfinite().any()) for tensor in floats):
            found.append(errors)
    if not found:
        raise InputError(
            f"nothing was compared: the outputs of {type(model).__name__} on the example inputs "
            "are empty, or NaN and infinity alone. Give examples that are not empty and hold no NaN"
        )
    return tuple(found)


_MODES: Final = (torch.no_grad, torch.inference_mode)
"""How a folded model will be called."""


def _runs_twice(
    model: nn.Module, calls: Sequence[Examples], mode: Callable[[], Any], found: list[Tensor]
) -> bool:
    """Append the outputs of two calls each in a mode; return whether the model runs in it."""
    model = deepcopy(model)  # it may keep tensors of inference mode
    try:
        results = [result for call in calls for result in call.call_twice(model, mode)]
    except Exception:  # whatever a model raises that does not run so
        return False
    found += [tensor for result in results for tensor in _outputs(result)]
    return True


def run_folded(
    model: nn.Module, examples: Sequence[Examples], mode: Callable[[], Any] | None = None
) -> list[object]:
    """Return the outputs of a folded model on each example.

    Args:
        model: folded.
        examples: calls.
        mode: that of `Examples.call_twice`, which gives two outputs of each.

    Raises:
        InputError: it fails.
    """
    try:
        if mode is None:
            return [example.call(model) for example in examples]
        return [result for example in examples for result in example.call_twice(model, mode)]
    except Exception as error:
        where = f" under torch.{mode.__name__}()" if mode else ""
        raise InputError(
            f"the folded {type(model).__name__} fails on the example inputs{where} "
            f"({type(error).__name__}: {error}): nothing was changed. {_where(model, error)}"
        ) from error


def _where(model: nn.Module, error: Exception) -> str:
    """Return what a folded model lacks, as far as the error shows it."""
    target = getattr(error, "obj", None)
    for name, module in model.named_modules():
        if module is target:
            return f"Something reads an attribute of the norm {name!r}: let it read that elsewhere"
    return "The model may read attributes of a norm: let it read them elsewhere"


def attributes_read(
    model: nn.Module, norms: Mapping[str, nn.Module], examples: Sequence[Examples]
) -> dict[str, str]:
    """Return the attribute that a model reads of each norm from outside, by the norm's name.

    Such as Mamba, which converts its stream to the type of `norm.weight`: without the norm it would
    fail. The model runs once per example with each norm behind a stand-in that passes calls on.
    """
    stand_ins = {norm: _FoldedNorm(norm).eval() for norm in norms.values()}
    changes, kept = Changes(), kept_buffers(nn.ModuleList(stand_ins))
    for parent in list(model.modules()):
        for attribute, child in list(parent._modules.items()):
            if child in stand_ins:
                changes.set_module(parent, attribute, stand_ins[child])
    try:
        # What else fails because of the stand-ins is found when the folded model runs.
        with kept, suppress(Exception):
            for example in examples:
                example.call(model)
    finally:
        changes.undo()
    read = {name: stand_ins[norm].__dict__["read"] for name, norm in norms.items()}
    return {name: attributes[0] for name, attributes in read.items() if attributes}


class _FoldedNorm(nn.Module):
    """A module with the attributes of a folded norm, and those of the norm when they are read."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.__dict__["norm"] = norm  # no part of the model while it stands in
        self.__dict__["read"] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the norm returns."""
        return self.__dict__["norm"](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Record that an attribute of the norm is read."""
        value = getattr(self.__dict__["norm"], name)
        self.__dict__["read"].append(name)
        return value


class _Types(TorchDispatchMode):
    """Mode that records the floating-point types of operators' outputs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        del types
        output = func(*args, **(kwargs or {}))
        for tensor in tensors_in(output):
            if tensor.is_floating_point():
                self.seen.add(tensor.dtype)
        return output

    def narrower_than(self, dtype: torch.dtype) -> bool:
        """Return whether an operator returned a narrower type."""
        return any(seen.itemsize < dtype.itemsize for seen in self.seen)


def _outputs(result: object) -> list[Tensor]:
    found = [tensor.clone() for tensor in tensors_in(result)]
    if not any(tensor.is_floating_point() for tensor in found):
        raise InputError(
            "the model's outputs hold no floating point tensor that could be compared: wrap it so "
            "that it returns logits or features, or pass verify=False"
        )
    return found


def _errors(
    dtype: torch.dtype, before: list[Tensor], after: list[Tensor], tolerance: float
) -> Errors:
    if [tensor.shape for tensor in before] != [tensor.shape for tensor in after]:
        return Errors(dtype, float("inf"), float("inf"), tolerance)
    absolute = relative = 0.0
    for old, new in zip(before, after, strict=True):
        if not old.is_floating_point() or not old.numel():
            continue
        wide, other = old.double(), new.double()
        alike = (wide == other) | (wide.isnan() & other.isnan())
        gap = torch.where(alike, 0.0, (wide - other).abs()).nan_to_num(nan=float("inf"))
        scale = wide.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp(min=1e-30)
        absolute = max(absolute, float(gap.max()))
        relative = max(relative, float(gap.max() / scale))
    return Errors(dtype, absolute, relative, tolerance)


def check(errors: tuple[Errors, ...]) -> None:
    """Raise an InputError if rounding does not explain the errors.

    Raises:
        InputError: errors above the tolerance; names the type and the errors.
    """
    for item in errors:
        if not item.relative <= item.tolerance:
            raise InputError(
                "the folded model does not give the original's outputs on the example inputs "
                f"({item}): nothing was changed. A part of the model does what the graph of its "
                "operators does not show: fold its parts one by one to find which "
                "(powernorm.fold(model.encoder, …))"
            )
