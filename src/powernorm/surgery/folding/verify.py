"""Comparison of a folded model's outputs with the original's on example inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from powernorm.errors import InputError
from powernorm.inspection.examples import Examples, tensors_in

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
    """Differences of the folded model's outputs from the original's, over all of them.

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
    """Compare a model with another one, in float64, float32 and its own type.

    A type in which the original does not run is left out, except its own. In its own type both
    also run as they will be called, each example twice: under `torch.no_grad()` and
    `torch.inference_mode()`, with the current setting of torch's fused attention.

    Args:
        model: the original.
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
"""Contexts in which a folded model is called."""


def _runs_twice(
    model: nn.Module, calls: Sequence[Examples], mode: Callable[[], Any], found: list[Tensor]
) -> bool:
    """Append the outputs of two calls each in a mode; return whether the model runs in it."""
    model = deepcopy(model)  # it may keep tensors made in inference mode
    try:
        results = [result for call in calls for result in call.call_twice(model, mode)]
    except Exception:  # a model that does not run like this may raise anything
        return False
    found += [tensor for result in results for tensor in _outputs(result)]
    return True


def run_folded(
    model: nn.Module, examples: Sequence[Examples], mode: Callable[[], Any] | None = None
) -> list[object]:
    """Return the outputs of a folded model on each example.

    Args:
        model: the folded model.
        examples: calls.
        mode: mode of `Examples.call_twice`, which gives two outputs of each.

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
    """Return what a folded model lacks, if the error shows it."""
    target = getattr(error, "obj", None)
    for name, module in model.named_modules():
        if module is target:
            return f"Something reads an attribute of the norm {name!r}: let it read that elsewhere"
    return "The model may read attributes of a norm: let it read them elsewhere"


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
        gaps = largest_gap(new, old)
        absolute, relative = max(absolute, gaps[0]), max(relative, gaps[1])
    return Errors(dtype, absolute, relative, tolerance)


def largest_gap(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Return the largest difference of two tensors, and that over the largest of the second.

    Both are infinite if only one of the tensors holds a NaN or infinity at some place.
    """
    wide, other = wanted.double(), found.double()
    alike = (wide == other) | (wide.isnan() & other.isnan())
    gap = torch.where(alike, 0.0, (wide - other).abs()).nan_to_num(nan=float("inf")).max()
    scale = wide.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp(min=1e-30)
    return float(gap), float(gap / scale)


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
