"""Example inputs of a model: their forms, calls without side effects, and variants of calls."""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, Final

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.inspection.modules import parameters_of
from powernorm.norms.preserved_state import preserved_state


@dataclass(frozen=True)
class Examples:
    """Arguments of one call of a model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    note: str = ""
    """Difference from the given inputs, for reasons and errors."""

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
            model: unchanged afterwards; the second call sees the writes of the first one.
            mode: `torch.no_grad` or `torch.inference_mode`; torch's fused attention keeps its
                setting.
        """
        fused = torch.backends.mha.get_fastpath_enabled()
        calls = [mapped([self.args, dict(self.kwargs)], torch.clone) for _ in range(2)]
        with kept_buffers(model), mode(), preserved_state(model, ()):
            torch.backends.mha.set_fastpath_enabled(fused)
            return [model(*args, **kwargs) for args, kwargs in calls]


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffer objects and their values; a forward may replace buffers."""
    kept = [
        (module._buffers, name, buffer, mapped(buffer, torch.clone))
        for module in model.modules()
        for name, buffer in module._buffers.items()  # the only way through those of TorchScript
    ]
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
        name: name of the inputs in errors.

    Raises:
        InputError: the inputs have another type.
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
    """Convert mappings, nested ones too, to dicts; torch.export takes no others."""
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


def tensors_in(value: object, outer: tuple[object, ...] = ()) -> Iterator[Tensor]:
    """Yield the tensors in nested mappings, sequences and other objects, in order.

    Args:
        value: any value.
        outer: the objects that it is in, which are not searched again.
    """
    items: Iterable[object] = ()
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, tuple | list):
        items = value
    elif not isinstance(value, type | nn.Module) and not callable(value):
        items = _attributes(value)
    if not any(value is one for one in outer):
        for item in items:
            yield from tensors_in(item, (*outer, value))


def _attributes(value: object) -> list[object]:
    """Return the attributes of an output of a custom class, such as a cache of keys and values."""
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    named = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return [*named.values(), *getattr(value, "__dict__", {}).values()]


# Variants of a call -------------------------------------------------------------------------------


def with_masks(model: nn.Module, examples: Examples) -> Examples | None:
    """Add the masks that a Hugging Face model takes to example inputs without them.

    Some models set vectors to zero by their mask between a norm and its reader, and only if a mask
    is given. The masks hide nothing, and there are at least two rows, because such code skips the
    mask for a single row.

    Returns:
        None if there is nothing to add, or the model does not take it.
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
    except Exception:  # the model may raise anything if it needs another mask
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
    there. A property that holds for other numbers, too, does not depend on it. All numbers grow at
    once, and shrink, and if there are few each also grows alone. True and False select branches and
    stay.
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
"""Maximum number of numbers that are also changed one by one."""


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
    """Yield those calls that the model accepts."""
    for example in examples:
        with suppress(Exception):  # the model may raise anything if it rejects such arguments
            example.call(model)
            yield example
