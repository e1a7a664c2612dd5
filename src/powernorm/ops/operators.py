"""Base class of the ops: registration with torch, and eager calls that bypass the dispatcher.

Each op is a pure function of one named tuple of arguments. It returns its output *and* the
statistics that it used; its backward reads saved outputs only, never a buffer. This keeps gradients
right under `torch.compile`, where a buffer that the graph overwrites would be read too late. The
optional `carrier` is a leaf tensor that the result does not depend on: the backward returns the
sums that update the running statistics as its "gradient" (see `powernorm.norms.carrier`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final, NamedTuple, NoReturn, get_type_hints

import torch
from torch import Tensor

from powernorm.ops.arrays import accumulation_dtype
from powernorm.ops.dispatch import functions_for, is_cpu_chosen
from powernorm.ops.graphs import refuse_transforms
from powernorm.ops.torch_private import (
    are_transforms_active,
    in_backward,
    in_forward_mode,
    is_batched,
    is_tracing,
    is_zero_tensor,
    may_be_repeated,
    num_dispatch_modes,
)

PLAIN_TYPES: Final = (Tensor, torch.nn.Parameter)

_LIBRARY: Final = torch.library.Library("powernorm", "DEF")

_SCHEMA_TYPES: Final = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
}

# Bound once, because every attribute look-up is noticeable in a small norm.
_is_compiling = torch.compiler.is_compiling


class Inputs(NamedTuple):
    """One value for each argument of an op that may have a gradient, else None."""

    x: Any = None
    residual: Any = None
    weight: Any = None
    bias: Any = None
    carrier: Any = None
    others: None = None
    """All other arguments; autograd sees them as one in eager mode."""


Saved = tuple[tuple[Tensor | None, ...], Any]
"""Tensors and settings that a backward reads."""


class Gradients(NamedTuple):
    """Outputs of most backwards."""

    x: Tensor | None
    """Gradient of x, and of the residual."""
    weight: Tensor | None
    bias: Tensor | None


def is_plain(*tensors: Tensor | None) -> bool:
    """Return whether these are ordinary tensors in eager mode and no mode records operators.

    The dispatcher costs about as much as a small norm itself. Compilers, export, tracers, dispatch
    modes and tensor subclasses need it, and get it.
    """
    for tensor in tensors:
        if tensor is not None and type(tensor) not in PLAIN_TYPES:
            return False
    return (
        not _is_compiling()
        and not num_dispatch_modes()
        and not are_transforms_active()
        and not is_tracing()
        and not in_forward_mode()
    )


class Operator(ABC):
    """An op: its arguments and outputs, its gradient, and its registration with torch.

    The backends have the computation itself, in two functions each: `NAME(arguments)` and
    `NAME_backward(backward_arguments)`. Missing tensors are None. Operators of torch can return
    tensors only, so these are empty, (0,), in a compiled graph.
    """

    name: ClassVar[str]
    arguments: ClassVar[Any]
    """Named tuple with at least `x`, `residual`, `weight` and `bias`."""
    output: ClassVar[Any]
    """Named tuple of tensors with at least `y` and `total`."""
    backward_arguments: ClassVar[Any]
    backward_output: ClassVar[Any] = Gradients
    differentiable: ClassVar[tuple[str, ...]] = ("y", "total")
    """Outputs that have a gradient."""
    has_kernels: ClassVar[bool] = True
    has_carrier: ClassVar[bool] = False

    @abstractmethod
    def fake(self, args: Any) -> Any:
        """Return outputs of the right shapes without computing."""

    @abstractmethod
    def backward_fake(self, args: Any) -> Any:
        """Return outputs of the backward of the right shapes without computing."""

    @abstractmethod
    def saved(self, inputs: Tensor, args: Any, output: Any) -> Saved:
        """Return the values that the backward reads: inputs and outputs, never buffers.

        Args:
            inputs: the normalized input: x, or its sum with the residual.
            args: the op's arguments.
            output: its outputs.
        """

    @abstractmethod
    def gradients(
        self,
        ctx: Any,
        needs: Inputs,
        grad_y: Tensor | None,
        grad_total: Tensor | None,
        grad_statistics: Tensor | None,
    ) -> Inputs:
        """Return the gradients that are needed; at least one gradient arrives.

        Args:
            ctx: has the values that `saved` returned and `bias_dtype`, the type of β.
            needs: which gradients are needed.
            grad_y: gradient of y; this and the other gradients are None if absent.
            grad_total: gradient of the sum with the residual.
            grad_statistics: gradient of the statistics, if they are differentiable.
        """

    def compute(self, args: Any) -> Any:
        """Return the outputs by the backend that fits the input."""
        return getattr(functions_for(args.x, self.has_kernels), self.name)(args)

    def apply(self, args: Any, update: Any = None) -> Any:
        """Return the outputs of a layer's call, without torch's dispatcher if nothing needs it.

        Args:
            args: the op's arguments.
            update: an update of running statistics that the backend makes in the same call; in
                eager mode only.
        """
        if args.residual is not None and args.residual.dtype != args.x.dtype:
            args = _in_common_type(args)
        if not is_plain(args.x, args.residual, args.weight, args.bias):
            return self.call(args)
        forward = getattr(functions_for(args.x, self.has_kernels), self.name)
        if not torch.is_grad_enabled():
            return forward(args) if update is None else forward(args, update)
        call = _OperatorCall(self, forward, args, update)
        carrier = args.carrier if self.has_carrier else None
        _apply(args.x, args.residual, args.weight, args.bias, carrier, call)  # type: ignore[no-untyped-call]
        return call.output

    def prepare(self, args: Any, *update: Any) -> Any:
        """Return a prepared training call like this one, which can be made repeatedly.

        Return None if the backend prepares no calls; see `kernels.cpu.prepared`.
        """
        if _is_compiling():
            return None
        x = args.x
        # A repeated call reads copies of the layer's current buffers.
        plain = is_plain(x, args.weight, args.bias) and not may_be_repeated()
        if not (plain and torch.is_grad_enabled() and x.is_cpu and is_cpu_chosen()):
            return None
        if not x.is_contiguous() or x.is_neg() or is_zero_tensor(x):
            return None  # the next input will hardly have the memory layout of prepared calls
        prepare = getattr(functions_for(x), f"prepare_{self.name}", None)
        return None if prepare is None else prepare(args, *update)

    def backward(self, args: Any) -> Any:
        """Return the gradients: from the registered op if a graph is recorded, else the backend."""
        grad_y, grad_total = args.grad_y, args.grad_total
        # torch calls the registered op for each gradient of a batch of gradients.
        batched = is_batched(grad_y) or (grad_total is not None and is_batched(grad_total))
        if not torch.is_grad_enabled() and is_plain(grad_y) and not batched:
            functions = functions_for(args.inputs, self.has_kernels)
            return getattr(functions, f"{self.name}_backward")(args)
        recorded = getattr(torch.ops.powernorm, f"{self.name}_backward")(*args)
        return self.backward_output(*recorded)

    def call(self, args: Any) -> Any:
        """Return the outputs of the registered op, for compilers, modes and tensor subclasses.

        Raises:
            InputError: the call is inside a transform of torch.func.
        """
        refuse_transforms()
        return self.output(*getattr(torch.ops.powernorm, self.name)(*args))

    def save(self, ctx: Any, args: Any, output: Any) -> None:
        """Save the tensors and settings that `gradients` reads."""
        inputs = args.x if args.residual is None else output.total
        tensors, ctx.settings = self.saved(inputs, args, output)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.bias_dtype = None if args.bias is None else args.bias.dtype

    def register(self) -> None:
        """Register the op and its backward with torch."""
        forward, backward = self.name, f"{self.name}_backward"
        _define(forward, self.arguments, self.output, self._run, self._fake)
        _define(
            backward,
            self.backward_arguments,
            self.backward_output,
            self._run_backward,
            self._fake_backward,
        )
        torch.library.register_autograd(
            f"powernorm::{forward}", self._gradients, setup_context=self._setup, lib=_LIBRARY
        )
        torch.library.register_autograd(
            f"powernorm::{backward}", _raise_on_double_backward, lib=_LIBRARY
        )

    def _run(self, *values: Any) -> tuple[Tensor, ...]:
        args = self.arguments(*values)
        return _filled(args.x, self.compute(args))

    def _fake(self, *values: Any) -> tuple[Tensor, ...]:
        args = self.arguments(*values)
        return _filled(args.x, self.fake(args))

    def _run_backward(self, *values: Any) -> tuple[Tensor, ...]:
        args = self.backward_arguments(*values)
        inputs = args.inputs
        functions = functions_for(inputs, self.has_kernels)
        return _filled(inputs, getattr(functions, f"{self.name}_backward")(args))

    def _fake_backward(self, *values: Any) -> tuple[Tensor, ...]:
        args = self.backward_arguments(*values)
        return _filled(args.inputs, self.backward_fake(args))

    def _setup(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        args = self.arguments(*inputs)
        outputs = self.output(*output)
        self.save(ctx, args, outputs)
        ctx.mark_non_differentiable(
            *(getattr(outputs, name) for name in outputs._fields if name not in self.differentiable)
        )

    def _gradients(self, ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        fields = self.arguments._fields
        arriving = dict(zip(self.output._fields, grads, strict=True))
        needed = dict(zip(fields, ctx.needs_input_grad, strict=True))
        given = [existing(arriving.get(name)) for name in ("y", "total", "statistics")]
        ctx.has_run = True
        if all(grad is None for grad in given):
            return (None,) * len(fields)
        needs = Inputs(*(needed.get(name, False) for name in Inputs._fields))
        found = self.gradients(ctx, needs, *given)
        return tuple(getattr(found, name, None) for name in fields)


class PlainFunction(torch.autograd.Function):
    """A function whose application skips the work of `Function.apply` for torch.func."""

    # With `forward(ctx, ...)` and not `setup_context`: torch binds the arguments of the latter form
    # with Python's `inspect` at every call, which takes longer than a small norm.

    @classmethod
    def apply_plain(cls, *args: Any) -> Any:
        """Apply the function, outside transforms of torch.func."""
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


class _OperatorCall:
    """All other arguments of a call, hidden from autograd, which looks for tensors."""

    __slots__ = ("args", "forward", "operator", "output", "update")

    def __init__(self, operator: Operator, forward: Any, args: Any, update: Any) -> None:
        self.operator, self.forward, self.args, self.update = operator, forward, args, update
        self.output: Any = None


class _Function(PlainFunction):
    """Autograd function of any op in eager mode."""

    @staticmethod
    def forward(
        ctx: Any,
        _x: Tensor,
        _residual: Any,
        _weight: Any,
        _bias: Any,
        carrier: Any,
        call: _OperatorCall,
    ) -> tuple[Tensor | None, ...]:
        operator, args, update = call.operator, call.args, call.update
        output = call.forward(args) if update is None else call.forward(args, update)
        operator.save(ctx, args, output)
        ctx.operator, call.output = operator, output
        # Return differentiable outputs only: autograd wraps each one.
        if carrier is None or "statistics" not in operator.differentiable:
            return output.y, output.total
        return output.y, output.total, output.statistics

    @staticmethod
    def backward(
        ctx: Any,
        grad_y: Tensor | None,
        grad_total: Tensor | None,
        grad_statistics: Tensor | None = None,
    ) -> Inputs:
        ctx.has_run = True
        if grad_y is None and grad_total is None and grad_statistics is None:
            return Inputs()
        needs = Inputs._make(ctx.needs_input_grad)
        found: Inputs = ctx.operator.gradients(ctx, needs, grad_y, grad_total, grad_statistics)
        return found


_apply: Final = super(torch.autograd.Function, _Function).apply


def _define(name: str, arguments: Any, output: Any, function: Any, fake: Any) -> None:
    hints = get_type_hints(arguments)
    listed = ", ".join(f"{_SCHEMA_TYPES[hints[field]]} {field}" for field in arguments._fields)
    results = ", ".join("Tensor" for _ in output._fields)
    _LIBRARY.define(f"{name}({listed}) -> ({results})")
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"powernorm::{name}", fake, lib=_LIBRARY)


def _filled(x: Tensor, output: Any) -> tuple[Tensor, ...]:
    """Return outputs in the form of torch's operators: empty tensors for None."""
    return tuple(
        x.new_empty(0, dtype=x.dtype if name == "total" else accumulation_dtype(x))
        if value is None
        else value
        for name, value in zip(output._fields, output, strict=True)
    )


def existing(value: Tensor | None) -> Tensor | None:
    """Return None for an empty tensor that replaces None; see `Operator`."""
    return None if value is None or value.shape == (0,) else value


def _in_common_type(args: Any) -> Any:
    """Convert x and residual to the type of their sum.

    Under autocast the branch has a narrower type than the residual stream.
    """
    x, residual = args.x, args.residual
    dtype = torch.promote_types(x.dtype, residual.dtype)
    return args._replace(x=x.to(dtype), residual=residual.to(dtype))


def input_gradients(
    grads: Any,
    needs: Inputs,
    weight: Tensor | None,
    bias_dtype: torch.dtype | None,
    carried: Tensor | None = None,
) -> Inputs:
    """Return the gradients that are needed, in the types of their inputs.

    Args:
        grads: `Gradients`, or a named tuple with its fields.
        needs: which gradients are needed.
        weight: γ.
        bias_dtype: type of β.
        carried: the carrier's gradient.
    """
    grad_x, grad_weight, grad_bias = grads.x, None, None
    if needs.weight and weight is not None:
        grad_weight = grads.weight
        if grad_weight.dtype != weight.dtype:
            grad_weight = grad_weight.to(weight.dtype)
    if needs.bias:
        grad_bias = grads.bias
        if grad_bias.dtype != bias_dtype:
            grad_bias = grad_bias.to(bias_dtype)
    return Inputs(
        grad_x if needs.x else None,
        grad_x if needs.residual else None,
        grad_weight,
        grad_bias,
        carried if needs.carrier else None,
    )


def _raise_on_double_backward(*_: object) -> NoReturn:
    """Raise the error of a backward that has no derivative.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "double backward through a powernorm batch-statistics norm is not available: drop "
        "create_graph=True, or use a per-token norm (ln, ln-simple, rms, gn) in this model"
    )


def features_like(x: Tensor, *leading: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty (*leading, C), in the accumulation type by default."""
    return x.new_empty((*leading, x.shape[-1]), dtype=dtype or accumulation_dtype(x))


def dense_like(x: Tensor) -> Tensor:
    """Return an empty tensor of x's shape, contiguous."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def scales_like(x: Tensor, groups: int) -> Tensor | None:
    """Return an empty (tokens, groups), None without groups."""
    if not groups:
        return None
    return x.new_empty((x.numel() // x.shape[-1], groups), dtype=accumulation_dtype(x))


def snapshot(buffer: Tensor) -> Tensor:
    """Return a copy, by an op that is opaque to compilers.

    A compiled backward would otherwise read the buffer after its update.
    """
    copied: Tensor = torch.ops.powernorm.snapshot(buffer)
    return copied


_LIBRARY.define("snapshot(Tensor buffer) -> Tensor")
_LIBRARY.impl("snapshot", Tensor.clone, "CompositeExplicitAutograd")
torch.library.register_fake("powernorm::snapshot", torch.empty_like, lib=_LIBRARY)


def unless_repeated(sums: Tensor) -> Tensor:
    """Return the sums of a batch, zeros in a backward, by an op that is opaque to compilers.

    If activation checkpointing repeats a compiled forward, none of the layer's Python runs.
    """
    counted: Tensor = torch.ops.powernorm.unless_repeated(sums)
    return counted


_LIBRARY.define("unless_repeated(Tensor sums) -> Tensor")
_LIBRARY.impl(
    "unless_repeated",
    lambda sums: torch.zeros_like(sums) if in_backward() else sums.clone(),
    "CompositeExplicitAutograd",
)
torch.library.register_fake("powernorm::unless_repeated", torch.empty_like, lib=_LIBRARY)
