"""Training calls whose arguments are checked once, for layers that are called repeatedly.

At 64 tokens of 512 features the Python around a kernel takes longer than the kernel. Between two
calls of a layer little but the data changes. The task that the general path has checked and filled
is kept as a prototype, and what may have changed since is compared at each call.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from powernorm.ops.dispatch import is_cpu_chosen
from powernorm.ops.kernels.cpu.calls import fail, library
from powernorm.ops.kernels.cpu.tasks import CPU, KernelTask
from powernorm.ops.operators import (
    PLAIN_TYPES,
    Inputs,
    Operator,
    PlainFunction,
    is_plain,
)
from powernorm.ops.torch_private import (
    is_batched,
    is_zero_tensor,
    may_be_repeated,
    num_dispatch_modes,
)

_copy: Final = KernelTask.from_buffer_copy
_byref: Final = ctypes.byref
_empty_like: Final = torch.empty_like
_num_threads: Final = torch.get_num_threads


def _is_plain_step(x: Tensor) -> bool:
    """Return whether this is an eager call on the CPU kernels that autograd records.

    No mode or compiler records its operators, no checkpointing repeats it, and x is dense.
    """
    return (
        is_plain(x)
        and x.is_cpu
        and x.is_contiguous()
        and not x.is_neg()
        and not is_zero_tensor(x)
        and torch.is_grad_enabled()
        and not may_be_repeated()
        and is_cpu_chosen()
    )


_NO_OUTPUT: Final = SimpleNamespace(
    y=None, total=None, scales=None, statistics=None, sums=None, has_tokens=None
)


class Prepared:
    """A training call of a layer, without a residual.

    Attributes:
        operator: the op.
        operation: number of the forward; the backward has the next number.
        forward: prototype of the forward's task.
        backward: prototype of the backward's task.
        dtype: type of x.
        acc: accumulation type, which γ and β must have.
        features: C.
        settings: settings of the layer, which must be the same at the next call.
        vector: a tensor like γ.
        statistics: a tensor like the statistics; None for per-token statistics.
        sums: a tensor like the sums that the backward needs, None if it needs none.
        carried: a tensor like the carrier's gradient, if that differs from the sums.
        returns_statistics: whether the statistics are an output with a gradient.
        alive: objects that the prototypes point to.
        saved: values other than tensors that the op's own gradient reads.
    """

    __slots__ = (
        "acc",
        "alive",
        "backward",
        "carried",
        "dtype",
        "features",
        "forward",
        "operation",
        "operator",
        "returns_statistics",
        "saved",
        "settings",
        "statistics",
        "sums",
        "vector",
    )

    def __init__(
        self,
        operator: Operator,
        operation: int,
        args: Any,
        forward: KernelTask,
        backward: KernelTask,
        *,
        statistics: Tensor | None = None,
        sums: Tensor | None = None,
        carried: Tensor | None = None,
        returns_statistics: bool = False,
        alive: Any = None,
    ) -> None:
        self.operator, self.operation = operator, operation
        self.forward, self.backward = forward, backward
        self.dtype, self.features = args.x.dtype, args.x.shape[-1]
        self.acc = torch.float64 if self.dtype is torch.float64 else torch.float32
        self.vector = torch.empty(self.features, dtype=self.acc, device=CPU)
        self.statistics, self.sums, self.carried = statistics, sums, carried
        self.returns_statistics, self.alive = returns_statistics, alive
        self.settings: tuple[Any, ...] = ()
        seen = SimpleNamespace(
            save_for_backward=lambda *_: None, set_materialize_grads=lambda _: None
        )
        operator.save(seen, args, _NO_OUTPUT)
        del seen.save_for_backward, seen.set_materialize_grads
        # γ and β of a prepared call have the accumulation type; this call's may not.
        self.saved: dict[str, Any] = vars(seen) | {"bias_dtype": self.acc}

    def __reduce__(self) -> tuple[Any, ...]:
        return _none, ()  # addresses cannot be copied

    def fits(
        self, x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> bool:
        """Return whether tensors are like the prepared ones, as far as they may have changed."""
        acc, features = self.acc, self.features
        return (
            x.dtype is self.dtype
            and _is_plain_step(x)
            and x.ndim > 0
            and x.shape[-1] == features
            and (
                mask is None
                or (
                    isinstance(mask, Tensor)
                    and mask.dtype is torch.bool
                    and mask.is_cpu
                    and mask.is_contiguous()
                    and mask.shape == x.shape[:-1]
                )
            )
            and (weight is None or _is_vector(weight, acc, features))
            and (bias is None or _is_vector(bias, acc, features))
        )

    def run(
        self,
        x: Tensor,
        mask: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        carrier: Tensor | None = None,
    ) -> Any:
        """Return y, or (y, statistics) if those have a gradient."""
        return _apply(x, weight, bias, carrier, self, mask)  # type: ignore[no-untyped-call]


def _none() -> None:
    return None


def _is_vector(values: Tensor, dtype: torch.dtype, size: int) -> bool:
    return (
        values.dtype is dtype
        and values.numel() == size
        and values.is_cpu
        and values.is_contiguous()
        and not values.is_neg()
        and not is_zero_tensor(values)
        and type(values) in PLAIN_TYPES
    )


class _Step(PlainFunction):
    """Autograd function of any op with kernels; compare `operators._Function`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, carrier: Any, call: Prepared, mask: Any
    ) -> Any:
        del carrier
        task = _copy(call.forward)
        tokens = x.numel() // call.features
        y = _empty_like(x)
        task.tokens, task.threads = tokens, _num_threads()
        task.x, task.y = x.data_ptr(), y.data_ptr()
        if weight is not None:
            task.weight = weight.data_ptr()
        if bias is not None:
            task.bias = bias.data_ptr()
        if call.statistics is None:
            statistics = torch.empty((2, tokens, task.groups), dtype=call.acc, device=CPU)
            task.scales = statistics.data_ptr()
            ctx.save_for_backward(x, weight, bias, statistics)
        else:
            scales = sums = None
            statistics = _empty_like(call.statistics)
            task.statistics = statistics.data_ptr()
            if mask is not None:
                task.mask = mask.data_ptr()
            if task.groups:
                scales = torch.empty((tokens, task.groups), dtype=call.acc, device=CPU)
                task.scales = scales.data_ptr()
            if call.sums is not None:
                sums = _empty_like(call.sums)
                task.sums = sums.data_ptr()
            ctx.save_for_backward(x, mask, weight, scales, statistics, sums)
        if status := library().powernorm_run(call.operation, _byref(task)):
            fail(status)
        ctx.set_materialize_grads(False)
        ctx.call = call
        return (y, statistics) if call.returns_statistics else y

    @staticmethod
    def backward(
        ctx: Any, grad_y: Tensor | None, grad_statistics: Tensor | None = None
    ) -> tuple[Any, ...]:
        call: Prepared = ctx.call
        ctx.has_run = True
        if not (
            _is_simple_gradient(grad_y, grad_statistics, call)
            and _are_as_before(saved := ctx.saved_tensors, call)
        ):
            return _general(ctx, call, grad_y, grad_statistics)
        assert grad_y is not None
        task = _copy(call.backward)
        carried = None
        if call.statistics is None:
            x, weight, bias, statistics = saved
            task.scales = statistics.data_ptr()
            affine = weight is not None or bias is not None
        else:
            x, mask, weight, scales, statistics, carried = saved
            affine = True
            task.statistics = statistics.data_ptr()
            if mask is not None:
                task.mask = mask.data_ptr()
            if scales is not None:
                task.scales = scales.data_ptr()
            if grad_statistics is not None:
                task.grad_statistics = grad_statistics.data_ptr()
            if call.carried is not None:
                task.sums = carried.data_ptr()
                carried = _empty_like(call.carried)
                task.carried = carried.data_ptr()
        grad_x = _empty_like(x)
        task.tokens, task.threads = x.numel() // call.features, _num_threads()
        task.x, task.grad_y, task.grad_x = x.data_ptr(), grad_y.data_ptr(), grad_x.data_ptr()
        needs_x, needs_weight, needs_bias, needs_carrier, *_ = ctx.needs_input_grad
        grad_weight = grad_bias = None
        if weight is not None:
            task.weight = weight.data_ptr()
        if affine:
            grad_weight, grad_bias = _empty_like(call.vector), _empty_like(call.vector)
            task.grad_weight, task.grad_bias = grad_weight.data_ptr(), grad_bias.data_ptr()
        if status := library().powernorm_run(call.operation + 1, _byref(task)):
            fail(status)
        return (
            grad_x if needs_x else None,
            grad_weight if needs_weight else None,
            grad_bias if needs_bias else None,
            carried if needs_carrier else None,
            None,
            None,
        )


_apply: Final = super(torch.autograd.Function, _Step).apply


def _is_simple_gradient(grad_y: Tensor | None, grad_statistics: Any, call: Prepared) -> bool:
    return (
        grad_y is not None
        and type(grad_y) is Tensor
        and grad_y.dtype is call.dtype
        and grad_y.is_cpu
        and grad_y.is_contiguous()
        and not grad_y.is_neg()
        and not is_zero_tensor(grad_y)
        and not is_batched(grad_y)
        and not torch.is_grad_enabled()
        and not num_dispatch_modes()
        and is_cpu_chosen()
        and (
            grad_statistics is None
            or (
                grad_statistics.dtype is call.acc
                and grad_statistics.is_contiguous()
                and not grad_statistics.is_neg()
                and not is_batched(grad_statistics)
            )
        )
    )


def _are_as_before(saved: tuple[Any, ...], call: Prepared) -> bool:
    """Return whether x and γ have the same memory as before: a leaf's may be replaced."""
    weight = saved[1] if call.statistics is None else saved[2]
    return saved[0].is_contiguous() and (
        weight is None or _is_vector(weight, call.acc, call.features)
    )


def _general(
    ctx: Any, call: Prepared, grad_y: Tensor | None, grad_statistics: Tensor | None
) -> tuple[Any, ...]:
    """Return the gradients by the op's own rule, from its saved tensors."""
    if grad_y is None and grad_statistics is None:
        return (None,) * 6
    for name, value in call.saved.items():
        setattr(ctx, name, value)
    needs_x, needs_weight, needs_bias, needs_carrier, *_ = ctx.needs_input_grad
    needs = Inputs(needs_x, False, needs_weight, needs_bias, needs_carrier)
    found = call.operator.gradients(ctx, needs, grad_y, None, grad_statistics)
    return found.x, found.weight, found.bias, found.carrier, None, None
