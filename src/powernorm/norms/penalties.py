"""What a penalized forward leaves for a penalty that may be asked for, without keeping its graph.

The penalty of a forward has to reach the norm's node in autograd's graph, from which everything
below the layer hangs. So the layer holds a forward's `_Term`, which has a tensor of that node, by a
weak reference alone. It is the graph that owns the term: in the metadata of a node *behind* the
norm's, where there is no cycle of references. Who drops the result of a forward, and all that was
computed from it, drops the term with it, at once and without the garbage collector.
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
"""Compiled forwards of a layer between two times that its penalty is asked for."""

_NONE_COMPILED: Final[tuple[Tensor | None, ...]] = (None,) * (MOST_COMPILED + 1)

Measured = tuple[Tensor, Tensor, Tensor, float | Tensor]
"""The statistics of a forward's op; running mean and variance as they were; the batch's weight."""

Evaluation = Callable[[Tensor, Tensor, Tensor, float | Tensor], tuple[Tensor, Tensor]]
"""What was measured to the penalty and its gradient by the statistics.

The penalty is differentiable itself, where a graph is recorded.
"""


class _Term:
    """One forward whose result is kept.

    Attributes:
        measured: what its penalty is computed from; the statistics are an output of the norm's
            node.
    """

    __slots__ = ("__weakref__", "measured")

    def __init__(self, measured: Measured) -> None:
        self.measured = measured

    @property
    def is_over(self) -> bool:
        """Whether a backward has come through the norm's node."""
        return getattr(self.measured[0].grad_fn, "has_run", False)


def _own(y: Tensor, term: _Term) -> None:
    """Let a node behind the norm's own a term."""
    # A node of torch's own, which moves nothing. In place: behind an alias autograd would forbid
    # what works in place itself. In its metadata: a checkpoint would throw a saved tensor away.
    version = version_of(y)
    y.transpose_(0, 0)
    if num_dispatch_modes():
        # As nothing was written: a selective checkpoint that has saved y would refuse it.
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
    if torch.compiler.is_compiling():  # a compiled loss function, behind a model that is not
        return evaluate(*term.measured)[0]
    return _Value.apply_plain(term.measured[0], term, evaluate)  # type: ignore[no-any-return]


class Pending:
    """The forwards of a layer since its penalty was last asked for."""

    def __init__(self) -> None:
        self._terms: list[weakref.ref[_Term]] = []
        self._compiled = _NONE_COMPILED
        self._before: tuple[Tensor | None, ...] | None = None
        """The compiled ones before the backward that goes on."""
        self._last: Measured | None = None
        """Of the last forward but compiled ones, without its graph."""
        self.is_blind = False
        """Was there a forward without gradients?"""
        self._is_read = False
        """Has the penalty been asked for since the last forward?"""
        self.is_asked = False
        """Has it been asked for since the last backward?"""

    def copy(self) -> Pending:
        """What is pending now, whatever comes."""
        copied = Pending()
        copied.__dict__.update(self.__dict__, _terms=[*self._terms])
        return copied

    def add(self, y: Tensor, measured: Measured) -> None:
        """Note a forward in eager mode; the graph of its y keeps what the penalty needs."""
        self._start()
        term = _Term(measured)
        self._terms = [ref for ref in self._terms if ref() is not None]
        self._terms.append(weakref.ref(term))
        self._last = (measured[0].detach(), *measured[1:])
        _own(y, term)

    def add_compiled(self, value: Tensor) -> None:
        """Note the penalty of a forward that is being compiled.

        No code of ours runs behind a compiled forward, which could see whether its graph is still
        there: so it is held on to, and the oldest of many falls out. The trace never looks at an
        element of this tuple of one length, or it would compile once more for every number of
        them. Nor does it add them up, or the backward of one would go through all.
        """
        self._start()
        self._compiled = (value, *self._compiled[:-1])

    def add_blind(self, measured: Measured) -> None:
        """Note a forward without gradients."""
        self._start()
        self._last, self.is_blind = measured, True

    def _start(self) -> None:
        if self._is_read:
            self._terms, self._compiled, self._last = [], _NONE_COMPILED, None
            self.is_blind = self._is_read = False

    @property
    def is_empty(self) -> bool:
        """Is there no forward to give the penalty of?"""
        return self._last is None and self._compiled[0] is None

    @property
    def is_eager(self) -> bool:
        """Was there a forward in eager mode, with gradients?"""
        return bool(self._terms)

    @property
    def is_overfull(self) -> bool:
        """Has a compiled forward fallen out?"""
        return self._compiled[-1] is not None

    def read(self, evaluate: Evaluation) -> Tensor:
        """The sum over the forwards whose result is kept, else the last one's value.

        So forwards without a graph do not add up, as in a pass over the data.
        """
        if torch.compiler.is_compiling():
            total = self._total(evaluate)
        else:
            # Who asks first, perhaps a logger under inference_mode, leaves it usable for others.
            with torch.inference_mode(False), torch.enable_grad():
                total = self._total(evaluate)
                if self._compiled[0] is not None and total.requires_grad:
                    # On a node of its own: that of the forward runs late in its backward.
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
        """Drop the forwards that a backward has come through."""
        waits = self.is_asked and not self._is_read
        terms = [ref for ref in self._terms if (term := ref()) is not None and not term.is_over]
        compiled = [value for value in self._compiled if value is not None] if waits else []
        later = [value for value in compiled if self._was_before(value) and not _is_spent(value)]
        # Else a later forward is waiting: forward A, penalty, forward B, backward A.
        if not waits or len(terms) < len(self._terms) or len(later) < len(compiled):
            self.is_blind = False
            if not terms:
                self._last, self._is_read = None, False
        self._terms = terms
        self._compiled = (*later, *_NONE_COMPILED[len(later) :])
        self._before = None
        self.is_asked = False

    def start_backward(self) -> None:
        """Know what came before a backward.

        A checkpoint around a compiled region runs it again in the backward, and no compiled code
        can tell that it does.
        """
        self._before = self._compiled

    def _was_before(self, value: Tensor) -> bool:
        return self._before is None or any(value is other for other in self._before)


class _Start:
    """A hook on a penalty, which every backward from it comes through first."""

    def __init__(self, pending: Pending) -> None:
        # Weakly: a penalty's node may hang on to the very one that is pending.
        self._pending = weakref.ref(pending)

    def __call__(self, _grad: Tensor) -> None:
        pending = self._pending()
        if pending is not None:
            pending.start_backward()


def _is_spent(value: Tensor) -> bool:
    """Has the backward of a compiled forward run? Then its node has let go of what it saved."""
    try:
        value.grad_fn.saved_tensors  # type: ignore[union-attr] # noqa: B018
    except AttributeError:  # no node of a compiled graph: backend="eager" makes none
        return False
    except RuntimeError:
        return True
    return False
