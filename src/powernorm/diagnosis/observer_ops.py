"""Operators that show a norm's inputs, outputs and gradients to an observer, unchanged.

`observe` comes before a norm, and after it with the norm's input. It returns a copy; its autograd
rule does the same with the gradient, by `observe_gradient`. Each passes its tensor to an
`Observer`, which it finds by a number. Registered with `torch.library` they are opaque to
`torch.compile`: the observer is called when the graph runs, forward and backward. So nothing in
the observer is traced, and a forward that activation checkpointing repeats is recognized.

A gradient hook on a tensor would not work: inside a compiled graph it is not called.
"""

from __future__ import annotations

import itertools
from typing import Any, Final, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from powernorm.ops.operators import is_plain


class Observer(Protocol):
    """Receives the tensors of one norm, without gradients; returns nothing."""

    def see_input(self, x: Tensor, padding_mask: Tensor | None) -> None:
        """Receive the norm's input."""

    def see_gradient(self, gradient: Tensor, x: Tensor | None, masked: bool) -> None:
        """Receive the gradient of the input, or that of the output together with the input x."""


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


def observe(
    tensor: Tensor, padding_mask: Tensor | None, number: Tensor, x: Tensor | None = None
) -> Tensor:
    """Return a copy of a norm's input, which the observer receives, and later its gradient.

    Args:
        tensor: the norm's input; with x its output, for which the observer receives only the
            gradient, together with x.
        padding_mask: padding of the input.
        number: the observer's number.
        x: the norm's input.
    """
    operator: Any = _Observe.apply if is_plain(tensor) else torch.ops.powernorm.observe
    copy: Tensor = operator(tensor, padding_mask, number, x)
    return copy


def _observe(
    tensor: Tensor, padding_mask: Tensor | None, number: Tensor, x: Tensor | None
) -> Tensor:
    observer = _observers.get(int(number))
    if observer is not None and x is None:
        with torch.no_grad():
            observer.see_input(tensor.detach(), padding_mask)
    return tensor.clone()


def _show_gradient(gradient: Tensor, number: Tensor, x: Tensor | None, masked: bool) -> None:
    observer = _observers.get(int(number))
    if observer is not None:
        with torch.no_grad():
            observer.see_gradient(gradient.detach(), None if x is None else x.detach(), masked)


def _observe_gradient(gradient: Tensor, *args: Any) -> Tensor:
    _show_gradient(gradient, *args)
    return gradient.clone()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    _, padding_mask, number, x = inputs
    ctx.save_for_backward(number, x)
    ctx.masked = padding_mask is not None


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    args = (gradient, *ctx.saved_tensors, ctx.masked)
    if torch.is_grad_enabled() or not is_plain(gradient):
        gradient = torch.ops.powernorm.observe_gradient(*args)
    else:  # what the operator does, but without a copy
        _show_gradient(*args)
    return gradient, None, None, None


class _Observe(torch.autograd.Function):
    """`observe` in eager mode, where calling an operator takes longer than its work."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        _keep(ctx, args, args[0])
        return _observe(*args)

    backward = staticmethod(_backward)


def _pass_on(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Return the derivative of the copied gradient, for second derivatives."""
    del ctx
    return gradient, None, None, None


def _like_first(first: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(first)


def _register(schema: str, function: Any, backward: Any, setup: Any = None) -> None:
    name = schema.partition("(")[0]
    # CUDA graphs replay kernels but not Python code.
    _LIBRARY.define(schema, tags=(torch.Tag.cudagraph_unsafe,))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    name = f"powernorm::{name}"
    torch.library.register_fake(name, _like_first, lib=_LIBRARY)
    torch.library.register_autograd(name, backward, setup_context=setup, lib=_LIBRARY)


_register(
    "observe(Tensor tensor, Tensor? padding_mask, Tensor number, Tensor? x) -> Tensor",
    _observe,
    _backward,
    _keep,
)
_register(
    "observe_gradient(Tensor gradient, Tensor number, Tensor? x, bool masked) -> Tensor",
    _observe_gradient,
    _pass_on,
)
