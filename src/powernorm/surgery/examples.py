"""The inputs that a model is tried on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from powernorm.errors import InputError


@dataclass(frozen=True)
class Examples:
    """Arguments of one call of a model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def converted(self, dtype: torch.dtype) -> Examples:
        """The same with floating point tensors of another type."""
        return Examples(_converted(self.args, dtype), _converted(dict(self.kwargs), dtype))

    def call(self, model: nn.Module) -> object:
        """The model's output, without gradients."""
        with torch.no_grad():
            return model(*self.args, **self.kwargs)


def as_call(example_inputs: object) -> Examples:
    """Example inputs as the arguments of a call.

    Args:
        example_inputs: a tensor, a tuple or list of positional arguments, or a mapping of keyword
            arguments.

    Raises:
        InputError: something else.
    """
    if isinstance(example_inputs, Tensor):
        return Examples((example_inputs,), {})
    if isinstance(example_inputs, Mapping):
        return Examples((), dict(example_inputs))
    if isinstance(example_inputs, tuple | list):
        return Examples(tuple(example_inputs), {})
    raise InputError(
        f"example_inputs is a {type(example_inputs).__name__}, expected a tensor, a tuple of "
        "positional arguments or a dict of keyword arguments"
    )


def _converted(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_converted(item, dtype) for item in value)
    if isinstance(value, dict):
        return {key: _converted(item, dtype) for key, item in value.items()}
    return value
