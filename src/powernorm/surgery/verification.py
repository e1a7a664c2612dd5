"""Does a folded model give the original's outputs?"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.surgery.examples import Examples
from powernorm.surgery.tracing import tensors_in

_TOLERANCES: Final = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest relative errors that rounding explains, generously: an error of the algebra is far
larger in float64, which decides wherever the model runs in it."""


class Errors(NamedTuple):
    """How far the folded model's outputs are from the original's, over all of them.

    Args:
        dtype: that both ran in.
        absolute: largest difference.
        relative: largest difference of an output tensor over its largest magnitude.
    """

    dtype: torch.dtype
    absolute: float
    relative: float

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}: max. absolute error {self.absolute:.1e}, relative {self.relative:.1e}"


def compare(
    model: nn.Module, change: Callable[[nn.Module], object], examples: Examples
) -> tuple[Errors, ...]:
    """Run copies of a model before and after a change, in float64, float32 and its own type.

    A type that the model does not run in is left out, but for its own.
    """
    own = model_dtype(model)
    found = []
    for dtype in dict.fromkeys((torch.float64, torch.float32, own)):
        copy = deepcopy(model).to(dtype) if dtype != own else deepcopy(model)
        inputs = examples if dtype == own else examples.converted(dtype)
        try:
            before = [tensor.clone() for tensor in tensors_in(inputs.call(copy))]
        except Exception:
            if dtype == own:
                raise
            continue
        change(copy)
        after = list(tensors_in(inputs.call(copy)))
        found.append(_errors(dtype, before, after))
    return tuple(found)


def model_dtype(model: nn.Module) -> torch.dtype:
    """The type of most parameters' first floating point one."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _errors(dtype: torch.dtype, before: list[Tensor], after: list[Tensor]) -> Errors:
    if [tensor.shape for tensor in before] != [tensor.shape for tensor in after]:
        return Errors(dtype, float("inf"), float("inf"))
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
    return Errors(dtype, absolute, relative)


def check(errors: tuple[Errors, ...]) -> None:
    """Raise where rounding does not explain the errors.

    Raises:
        InputError: names the type and the errors.
    """
    for item in errors:
        if not item.relative <= _TOLERANCES.get(item.dtype, 0.05):
            raise InputError(
                "the folded model does not give the original's outputs on the example inputs "
                f"({item}): nothing was changed. A part of the model does what the graph of its "
                "operators does not show, such as a hook on a norm"
            )
