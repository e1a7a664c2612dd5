"""Operators that show a norm's inputs, outputs and gradients to an observer, unchanged.

`observe_input` comes before a norm and `observe_output` after it. Both return a copy of their
input; their autograd rules do the same with the gradient. Each passes what it sees to an
`Observer`, which it finds by a number. Registered with `torch.library` they are opaque to
`torch.compile`: the observer is called when the graph runs, forward and backward. So nothing that
it does is traced, and a forward that activation checkpointing repeats is recognized.

A gradient hook on a tensor would not do: those inside a compiled graph are not called.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from powernorm.ops.operators import is_plain


class Observer(Protocol):
    """Receives what passes through one norm, without gradients; returns nothing."""

    def see_input(self, x: Tensor, padding_mask: Tensor | None) -> None:
        """Receive the norm's input."""

    def see_input_gradient(self, gradient: Tensor) -> None:
        """Receive the gradient of the input."""

    def see_output_gradient(self, gradient: Tensor, x: Tensor, masked: bool) -> None:
        """Receive the gradient of the output, together with the input."""


# Operators take tensors, not objects. Weak: an observer lives as long as its hooks.
_observers: Final[WeakValueDictionary[int, Observer]] = WeakValueDictionary()
_numbers: Final = itertools.count(1)
_LIBRARY: Final = torch.library.Library("powernorm", "FRAGMENT")


def number_of(observer: Observer) -> Tensor:
    """Return a number by which the operators find the observer, without keeping it alive.

    The number is a tensor on the CPU: an integer would be a constant in compiled code, which
    layers that are compiled one by one could then not share.
    """
    number = next(_numbers)
    _observers[number] = observer
    return torch.tensor(number, device="cpu")


def observe_input(x: Tensor, padding_mask: Tensor | None, number: Tensor) -> Tensor:
    """Return a copy of a norm's input; the observer receives the input and its gradient."""
    operator: Any = _Input.apply if is_plain(x) else torch.ops.powernorm.observe_input
    copy: Tensor = operator(x, padding_mask, number)
    return copy


def observe_output(y: Tensor, x: Tensor, masked: bool, number: Tensor) -> Tensor:
    """Return a copy of a norm's output; the observer receives its gradient together with x.

    Args:
        y: the norm's output.
        x: the norm's input.
        masked: whether a part of x is padding.
        number: the observer's number.
    """
    operator: Any = _Output.apply if is_plain(y) else torch.ops.powernorm.observe_output
    copy: Tensor = operator(y, x, masked, number)
    return copy


def _observe_input(x: Tensor, padding_mask: Tensor | None, number: Tensor) -> Tensor:
    observer = _observers.get(int(number))
    if observer is not None:
        with torch.no_grad():
            observer.see_input(x.detach(), padding_mask)
    return x.clone()


def _show_input_gradient(gradient: Tensor, number: Tensor) -> None:
    observer = _observers.get(int(number))
    if observer is not None:
        with torch.no_grad():
            observer.see_input_gradient(gradient.detach())


def _observe_input_gradient(gradient: Tensor, number: Tensor) -> Tensor:
    _show_input_gradient(gradient, number)
    return gradient.clone()


def _observe_output(y: Tensor, x: Tensor, masked: bool, number: Tensor) -> Tensor:
    del x, masked, number
    return y.clone()


def _show_output_gradient(gradient: Tensor, x: Tensor, masked: bool, number: Tensor) -> None:
    observer = _observers.get(int(number))
    if observer is not None:
        with torch.no_grad():
            observer.see_output_gradient(gradient.detach(), x.detach(), masked)


def _observe_output_gradient(gradient: Tensor, x: Tensor, masked: bool, number: Tensor) -> Tensor:
    _show_output_gradient(gradient, x, masked, number)
    return gradient.clone()


_SHOW: Final[dict[str, Callable[..., None]]] = {
    "observe_input_gradient": _show_input_gradient,
    "observe_output_gradient": _show_output_gradient,
}


def _run(name: str, gradient: Tensor, *args: Any) -> Tensor:
    """Run the backward operator; in eager mode do its work without it and without its copy."""
    if torch.is_grad_enabled() or not is_plain(gradient):
        seen: Tensor = getattr(torch.ops.powernorm, name)(gradient, *args)
        return seen
    _SHOW[name](gradient, *args)
    return gradient


def _like_first(first: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(first)


def _keep_input(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(inputs[2])


def _input_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (number,) = ctx.saved_tensors
    return _run("observe_input_gradient", gradient, number), None, None


def _keep_output(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(inputs[1], inputs[3])
    ctx.masked = inputs[2]


def _output_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, number = ctx.saved_tensors
    seen = _run("observe_output_gradient", gradient, x, ctx.masked, number)
    return seen, None, None, None


class _Input(torch.autograd.Function):
    """`observe_input` in eager mode, where calling an operator takes longer than its work."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        _keep_input(ctx, args, args[0])
        return _observe_input(*args)

    backward = staticmethod(_input_backward)


class _Output(torch.autograd.Function):
    """`observe_output` in eager mode."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        _keep_output(ctx, args, args[0])
        return _observe_output(*args)

    backward = staticmethod(_output_backward)


def _pass_on(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Return the derivative of the copied gradient, for second derivatives."""
    return (gradient, *[None] * (ctx.num_inputs - 1))


def _count_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.num_inputs = len(inputs)


def _register() -> None:
    # CUDA graphs replay kernels and not the Python code beside them.
    tags = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()
    rules: tuple[tuple[str, Any, Any, Any], ...] = (
        (
            "observe_input(Tensor x, Tensor? padding_mask, Tensor number) -> Tensor",
            _observe_input,
            _input_backward,
            _keep_input,
        ),
        (
            "observe_input_gradient(Tensor gradient, Tensor number) -> Tensor",
            _observe_input_gradient,
            _pass_on,
            _count_inputs,
        ),
        (
            "observe_output(Tensor y, Tensor x, bool masked, Tensor number) -> Tensor",
            _observe_output,
            _output_backward,
            _keep_output,
        ),
        (
            "observe_output_gradient(Tensor gradient, Tensor x, bool masked, Tensor number)"
            " -> Tensor",
            _observe_output_gradient,
            _pass_on,
            _count_inputs,
        ),
    )
    for schema, function, backward, setup in rules:
        name = schema.split("(", 1)[0]
        _LIBRARY.define(schema, tags=tags)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"powernorm::{name}", _like_first, lib=_LIBRARY)
        torch.library.register_autograd(
            f"powernorm::{name}", backward, setup_context=setup, lib=_LIBRARY
        )


_register()
