"""Example inputs of a model: how they are given, and a call that changes nothing."""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import UnionType
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
    note: str = ""
    """How they differ from what was given, for reasons and errors."""

    def converted(self, dtype: torch.dtype) -> Examples:
        """Return the same examples with floating-point tensors of another type."""
        return self.changed(lambda one: one.to(dtype) if one.is_floating_point() else one)

    def changed(
        self, change: Callable[[Any], Any], kinds: type | UnionType = Tensor, note: str = ""
    ) -> Examples:
        """Return the same nested arguments with changed tensors, or other kinds of values."""
        args, kwargs = mapped([self.args, dict(self.kwargs)], change, kinds)
        return Examples(args, kwargs, note or self.note)

    def call(self, model: nn.Module) -> object:
        """Return the model's output, without gradients; model and arguments stay unchanged."""
        # The model may change its arguments in place.
        args, kwargs = mapped([self.args, dict(self.kwargs)], torch.clone)
        with kept_buffers(model), preserved_state(model, ()):
            return model(*args, **kwargs)

    def call_twice(self, model: nn.Module, mode: Callable[[], Any]) -> list[object]:
        """Return the outputs of two calls in a row, as users make them.

        Args:
            model: unchanged afterwards; the second call sees what the first one has written.
            mode: `torch.no_grad` or `torch.inference_mode`; torch's fused attention is as it is
                set.
        """
        fused = torch.backends.mha.get_fastpath_enabled()
        calls = [mapped([self.args, dict(self.kwargs)], torch.clone) for _ in range(2)]
        with kept_buffers(model), mode(), preserved_state(model, ()):
            torch.backends.mha.set_fastpath_enabled(fused)
            return [model(*args, **kwargs) for args, kwargs in calls]


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Put the same buffers back with their values; the forward may put others in their places."""
    slots = [(module._buffers, name) for module in model.modules() for name in module._buffers]
    kept = [(slot, name, slot[name], mapped(slot[name], torch.clone)) for slot, name in slots]
    try:
        yield
    finally:
        for slot, name, buffer, value in kept:
            if buffer is not None and (slot[name] is not buffer or not torch.equal(buffer, value)):
                with torch.inference_mode(buffer.is_inference()):
                    buffer.detach().copy_(value)
            slot[name] = buffer


def as_call(
    example_inputs: object, model: nn.Module | None = None, *, name: str = "example_inputs"
) -> Examples:
    """Return example inputs as the arguments of a call.

    Args:
        example_inputs: a tensor, a tuple or list of positional arguments, or a mapping of keyword
            arguments, such as a tokenizer returns.
        model: if its forward does not take these keyword arguments but a single one, the mapping
            is that one, as for sentence-transformers.
        name: what the inputs are called in errors.

    Raises:
        InputError: something else.
    """
    if isinstance(example_inputs, Tensor):
        return Examples((example_inputs,), {})
    if isinstance(example_inputs, Mapping):
        named = _plain(example_inputs)
        if model is not None and _takes_one_mapping(model, named):
            return Examples((named,), {})
        return Examples((), named)
    if isinstance(example_inputs, tuple | list):
        return Examples(tuple(map(_plain, example_inputs)), {})
    raise InputError(
        f"{name} is a {type(example_inputs).__name__}, expected a tensor, a tuple of "
        "positional arguments or a dict of keyword arguments"
    )


def as_calls(model: nn.Module, first: object, others: Sequence[object]) -> tuple[Examples, ...]:
    """Return `example_inputs` and `more_examples` as the arguments of calls."""
    if not isinstance(others, tuple | list):
        raise InputError(
            f"more_examples is a {type(others).__name__}, expected a list of inputs, each as "
            "example_inputs"
        )
    more = (as_call(one, model, name=f"more_examples[{i}]") for i, one in enumerate(others))
    return (as_call(first, model), *more)


def _plain(value: Any) -> Any:
    """Return a mapping as a dict, with those in it; torch.export takes no others."""
    if isinstance(value, dict | UserDict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _takes_one_mapping(model: nn.Module, named: Mapping[str, object]) -> bool:
    """Return whether a forward takes one argument, and none by these names."""
    signature = inspect.signature(model.forward)
    for args, kwargs in (((), named), ((named,), {})):
        with suppress(TypeError):
            signature.bind(*args, **kwargs)
            return bool(args)
    return False


def mapped(value: Any, change: Callable[[Any], Any], kinds: type | UnionType = Tensor) -> Any:
    """Return the same nested containers with changed tensors, or other kinds of values."""
    if isinstance(value, kinds) and not isinstance(value, bool):
        return change(value)
    if isinstance(value, tuple | list):
        items = [mapped(item, change, kinds) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: mapped(item, change, kinds) for key, item in value.items()}
    return value
