"""Terms of penalized forwards, kept for a penalty that may be requested, without their graphs.

The penalty of a forward has to reach the norm's node in autograd's graph, on which the whole graph
below the layer depends. So the layer has only a weak reference to a forward's `_Term`, which holds
a tensor of that node. The graph owns the term: it is in the metadata of a node *behind* the
norm's, where it forms no reference cycle. When the result of a forward and everything computed from
it is dropped, the term is freed with it, at once and without the garbage collector.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from powernorm.ops.operators import PlainFunction
from powernorm.ops.torch_private import num_dispatch_modes, restore_version, version_of

MOST_COMPILED: Final = 64
"""Compiled forwards of a layer between two requests of its penalty."""

_NONE_COMPILED: Final[tuple[Tensor | None, ...]] = (None,) * (MOST_COMPILED + 1)

Measured = tuple[Tensor, Tensor, Tensor, float | Tensor]
"""The statistics of a forward's op; the running mean and variance before it; the batch's weight."""

Evaluation = Callable[[Tensor, Tensor, Tensor, float | Tensor], tuple[Tensor, Tensor]]
"""Function from `Measured` to the penalty and its gradient with respect to the statistics.

If a graph is recorded, the penalty is differentiable itself.
"""


class _Term:
    """A forward whose result still exists.

    Attributes:
        measured: inputs of its penalty; the statistics are an output of the norm's node.
    """

    __slots__ = ("__weakref__", "measured")

    def __init__(self, measured: Measured) -> None:
        self.measured = measured

    @property
    def is_over(self) -> bool:
        """Whether a backward has run through the norm's node."""
        return getattr(self.measured[0].grad_fn, "has_run", False)


def _own(y: Tensor, term: _Term) -> None:
    """Let a node behind the norm's keep a term alive."""
    # A node of torch that changes nothing. In place, because autograd forbids in-place operations
    # on an alias. In metadata, because a checkpoint would drop a saved tensor.
    version = version_of(y)
    y.transpose_(0, 0)
    if num_dispatch_modes():
        # Undo the version count: a selective checkpoint that has saved y would reject it.
        restore_version(y, version)
    node: Any = y.grad_fn
    node.metadata["powernorm"] = term


class _Value(PlainFunction):
    """The penalty of one forward."""

    @staticmethod
    def forward(ctx: Any, statistics: Tensor, term: _Term, evaluate: Evaluation) -> Tensor:
        value, ctx.gradient = evaluate(statistics, *term.measured[1:])
        ctx.term = term  # a penalty that is kept keeps its forward
        return value

    @staticmethod
    def backward(ctx: Any, grad_value: Tensor) -> tuple[Tensor, None, None]:
        return grad_value * ctx.gradient, None, None


def _value_of(term: _Term, evaluate: Evaluation) -> Tensor:
    if torch.compiler.is_compiling():  # a compiled loss function after a model that is not
        return evaluate(*term.measured)[0]
    return _Value.apply_plain(term.measured[0], term, evaluate)  # type: ignore[no-any-return]


class Pending:
    """The forwards of a layer since its penalty was last requested."""

    def __init__(self) -> None:
        self._terms: list[weakref.ref[_Term]] = []
        self._compiled = _NONE_COMPILED
        self._before: tuple[Tensor | None, ...] | None = None
        """Compiled forwards before the running backward."""
        self._last: Measured | None = None
        """Values of the last forward that was not compiled, without its graph."""
        self.is_blind = False
        """Whether there was a forward without gradients."""
        self._is_read = False
        """Whether the penalty was requested since the last forward."""
        self.is_asked = False
        """Whether it was requested since the last backward."""

    def copy(self) -> Pending:
        """Return a copy of the current state, which later forwards do not change."""
        copied = Pending()
        copied.__dict__.update(self.__dict__, _terms=[*self._terms])
        return copied

    def add(self, y: Tensor, measured: Measured) -> None:
        """Record a forward in eager mode; the graph of its y keeps the term."""
        self._start()
        term = _Term(measured)
        self._terms = [ref for ref in self._terms if ref() is not None]
        self._terms.append(weakref.ref(term))
        self._last = (measured[0].detach(), *measured[1:])
        _own(y, term)

    def add_compiled(self, value: Tensor) -> None:
        """Record the penalty of a forward that is being compiled.

        No code of ours runs after a compiled forward to check whether its graph still exists, so
        the penalty is kept, and of too many the oldest is dropped. The trace never reads an element
        of this tuple of fixed length, which would cause a recompilation for every number of them.
        Nor does it add them up, as then the backward of one would go through all.
        """
        self._start()
        self._compiled = (value, *self._compiled[:-1])

    def add_blind(self, measured: Measured) -> None:
        """Record a forward without gradients."""
        self._start()
        self._last, self.is_blind = measured, True

    def _start(self) -> None:
        if self._is_read:
            self._terms, self._compiled, self._last = [], _NONE_COMPILED, None
            self.is_blind = self._is_read = False

    @property
    def is_empty(self) -> bool:
        """Whether there is no forward with a penalty."""
        return self._last is None and self._compiled[0] is None

    @property
    def is_eager(self) -> bool:
        """Whether there was a forward in eager mode with gradients."""
        return bool(self._terms)

    @property
    def is_overfull(self) -> bool:
        """Whether a compiled forward has been dropped."""
        return self._compiled[-1] is not None

    def read(self, evaluate: Evaluation) -> Tensor:
        """Return the sum over the forwards whose result still exists, else the last one's value.

        Forwards without a graph, as in a pass over the data, therefore do not add up.
        """
        if torch.compiler.is_compiling():
            total = self._total(evaluate)
        else:
            # Even if a logger under inference_mode reads it first, others can still use it.
            with torch.inference_mode(False), torch.enable_grad():
                total = self._total(evaluate)
                if self._compiled[0] is not None and total.requires_grad:
                    # Use a separate node, as that of the forward runs late in its backward.
                    total = total.clone()
                    total.register_hook(_Start(self))
        self._is_read = self.is_asked = True
        return total

    def _total(self, evaluate: Evaluation) -> Tensor:
        values = [value for value in reversed(self._compiled) if value is not None]
        for ref in self._terms:
            term = ref()
            if term is not None:
                values.append(_value_of(term, evaluate))
        if self._last is not None and (self.is_blind or not values):
            return evaluate(*self._last)[0]
        total = values[0]
        for value in values[1:]:
            total = total + value
        return total

    def end_backward(self) -> None:
        """Drop the forwards that a backward has run through."""
        waits = self.is_asked and not self._is_read
        terms = [ref for ref in self._terms if (term := ref()) is not None and not term.is_over]
        compiled = [value for value in self._compiled if value is not None] if waits else []
        later = [value for value in compiled if self._was_before(value) and not _is_spent(value)]
        # Otherwise a later forward is waiting: forward A, penalty, forward B, backward A.
        if not waits or len(terms) < len(self._terms) or len(later) < len(compiled):
            self.is_blind = False
            if not terms:
                self._last, self._is_read = None, False
        self._terms = terms
        self._compiled = (*later, *_NONE_COMPILED[len(later) :])
        self._before = None
        self.is_asked = False

    def start_backward(self) -> None:
        """Record which compiled forwards came before a backward.

        A checkpoint around a compiled region runs it again in the backward, which compiled code
        cannot detect.
        """
        self._before = self._compiled

    def _was_before(self, value: Tensor) -> bool:
        return self._before is None or any(value is other for other in self._before)


class _Start:
    """A hook on a penalty that runs first in every backward from it."""

    def __init__(self, pending: Pending) -> None:
        # Weakly, because a penalty's node may keep the pending one alive.
        self._pending = weakref.ref(pending)

    def __call__(self, _grad: Tensor) -> None:
        pending = self._pending()
        if pending is not None:
            pending.start_backward()


def _is_spent(value: Tensor) -> bool:
    """Return whether the backward of a compiled forward has run and freed its saved tensors."""
    try:
        value.grad_fn.saved_tensors  # type: ignore[union-attr] # noqa: B018
    except AttributeError:  # backend="eager" makes no node of a compiled graph
        return False
    except RuntimeError:
        return True
    return False
