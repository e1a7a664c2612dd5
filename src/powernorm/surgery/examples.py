"""The inputs that a model is tried on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.norms.preserved_state import preserved_state


@dataclass(frozen=True)
class Examples:
    """Arguments of one call of a model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def converted(self, dtype: torch.dtype) -> Examples:
        """The same with floating point tensors of another type."""

        def convert(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return Examples(_mapped(self.args, convert), _mapped(dict(self.kwargs), convert))

    def call(self, model: nn.Module) -> object:
        """The model's output, without gradients and without a trace in model or arguments."""
        # The model may work in place on what it is given.
        args, kwargs = _mapped(self.args, torch.clone), _mapped(dict(self.kwargs), torch.clone)
        with preserved_state(model, ()):
            return model(*args, **kwargs)


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


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nested containers with other tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        items = [_mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    return value
