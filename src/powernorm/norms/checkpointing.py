"""Records of checkpointed forwards, for the forward that autograd repeats in the backward.

Activation checkpointing runs a region of the model twice. The second run must see what the first
one saw: the padding mask (its scope is closed by then) and, for layers that normalize by running
statistics, those statistics (another backward may have updated them in between).

A region is known by an object that is made for it alone, that both runs have at hand, and that
lives as long as the graph:

- Hooks on saved tensors (non-reentrant checkpointing): the function `unpack` of the hooks that are
  open in the first run. It calls the second run, so that it is on the stack there.
- Reentrant checkpointing: the `ctx` of an autograd.Function. Its forward calls the first run, its
  backward the second.

Within a region the k-th call of a layer in the second run repeats the k-th in the first. A call is
recorded in all regions around it, and the innermost function on the stack that repeats a region is
the one that has called the layer. A repetition may contain regions of its own, which are repeated
later: they record what the call was found to repeat.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, Final, NamedTuple, Self, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, Function, FunctionCtx
from torch.utils._python_dispatch import _disable_current_modes

from powernorm.errors import InputError
from powernorm.ops.operators import NO_BACKWARD, current_backward

Hook = Callable[[Any], Any]

_MAX_CALLS: Final = 256
"""Maximum number of calls of a layer in a region.

Hooks that are not for recomputation may be opened again and again, and would gather records for as
long as they live.
"""

_FORWARD: Final[CodeType] = cast(Any, Function.apply).__func__.__code__
"""Code that calls the forward of an autograd.Function."""
_BACKWARD: Final[CodeType] = BackwardCFunction.apply.__code__
"""Code that calls the backward of an autograd.Function; its first argument is the ctx."""
_STARTS: Final = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
"""Code that starts a backward."""
_LANDMARKS: Final = {id(code): code for code in (_FORWARD, _BACKWARD, *_STARTS)}
"""Code to look for on the stack, by its identity: its hash would be of all that it holds."""


class Seen(NamedTuple):
    """What a call normalizes by, besides its input."""

    padding_mask: Tensor | None
    stage: int
    state: tuple[Tensor, ...]


class _Copy:
    """A copy of a tensor, for all calls that saw the same values."""

    def __init__(self, source: Tensor) -> None:
        # Selective checkpointing counts the operators of both runs, and the second makes no copy.
        modes = torch._C._len_torch_dispatch_stack()
        with _disable_current_modes() if modes else nullcontext():
            self.values = source.detach().clone()
        self._source = weakref.ref(source)
        self._version = _version_of(source)

    def is_of(self, source: Tensor) -> bool:
        """Return whether the tensor is the copied one and has not been written to since."""
        unchanged = self._version is not None and self._version == _version_of(source)
        return unchanged and self._source() is source


class _Call(NamedTuple):
    """A call that may be repeated."""

    shape: torch.Size
    padding_mask: _Copy | None
    stage: int
    state: tuple[_Copy, ...]

    @property
    def seen(self) -> Seen:
        mask = None if self.padding_mask is None else self.padding_mask.values
        return Seen(mask, self.stage, tuple(one.values for one in self.state))


class _Repetition:
    """A run of a function that repeats a region; it lives as long as that run."""

    @classmethod
    def by(cls, frame: FrameType) -> Self:
        """Return the same for each call in a run: it is kept among the function's variables."""
        return cast(Self, frame.f_locals.setdefault("repetition of a region", cls()))


@dataclass(eq=False)
class _Region:
    """The calls of one layer in a region."""

    began_in: int
    """Backward that the first run is part of."""
    calls: list[_Call | None] | None
    """In order, None for one that is not repeated again; or None if they cannot be told apart."""
    repetition: weakref.ref[_Repetition] | None = None
    """The last one."""
    position: int = 0
    """Number of calls in it."""

    def add(self, call: _Call) -> None:
        if self.calls is not None:
            self.calls.append(call)
            if len(self.calls) > _MAX_CALLS:
                self.calls = None

    def next_position(self, repetition: _Repetition) -> int:
        """Count a call of a repetition; return its place."""
        if self.repetition is None or self.repetition() is not repetition:
            self.repetition, self.position = weakref.ref(repetition), 0
        self.position += 1
        return self.position - 1


class _Place(NamedTuple):
    """What the stack says of a call."""

    contexts: list[object]
    """Each `ctx` of the forwards of autograd functions that the call is part of."""
    region: object | None = None
    """Region of which the call is part of a repetition."""
    repetition: _Repetition | None = None


class CallRecords:
    """The calls of one layer that activation checkpointing may repeat; eager mode only.

    Copies and pickles of it are empty: no backward repeats the calls of a copy.
    """

    def __init__(self) -> None:
        self._regions = weakref.WeakKeyDictionary[object, _Region]()
        self._landmarks = dict(_LANDMARKS)
        self._copies = weakref.WeakValueDictionary[int, _Copy]()

    def __reduce__(self) -> tuple[type[CallRecords], tuple[()]]:
        return CallRecords, ()

    def replay(self, norm: str, x: Tensor, seen: Seen) -> Seen:
        """Return what this call must normalize by: its own, or that of the call it repeats.

        Args:
            norm: class name of the layer, for errors.
            x: the input.
            seen: what the call would normalize by if it repeats none.

        Raises:
            InputError: it cannot be told which call it repeats.
        """
        backward = current_backward()
        place = self._place()
        # In this order: a backward inside the first run may ask for the calls so far.
        around = self._open_regions(place.contexts, backward)
        call = None
        if place.repetition is not None:
            call = self._repeated(norm, x, place.region, place.repetition, around)
        elif backward != NO_BACKWARD:
            call = self._only_one(norm, x, seen)
        first = [region for region in around if region.calls is not None]
        first = [region for region in first if region.began_in == backward]
        if first:
            recorded = call or self._recorded(x, seen)
            for region in first:
                region.add(recorded)
        return seen if call is None else call.seen

    def _place(self) -> _Place:
        contexts: list[object] = []
        inner: FrameType | None = None
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if id(code) in self._landmarks:
                if code in _STARTS:
                    break  # what is outside of it belongs to another backward
                if code is _FORWARD and inner is not None:
                    contexts += _context_of(inner)
                region = self._repeated_by(frame)
                if region is not None:
                    return _Place(contexts, region, _Repetition.by(frame))
            inner, frame = frame, frame.f_back
        return _Place(contexts)

    def _repeated_by(self, frame: FrameType) -> object | None:
        """Return the region that a function on the stack repeats, None if it repeats none."""
        if frame.f_code is _BACKWARD:
            ctx: object = frame.f_locals["self"]
            return ctx if ctx in self._regions else None
        return next((key for key in list(self._regions) if _is_running(key, frame)), None)

    def _open_regions(self, contexts: list[object], backward: int) -> list[_Region]:
        """Return the regions of whose first run the call may be part."""
        regions = []
        for key in (*contexts, *_open_hooks()):
            function = _function_of(key)
            if function is not None:
                self._landmarks[id(function.__code__)] = function.__code__
            # A function that holds nothing cannot be made for a region.
            calls: list[_Call | None] | None = None if _is_bare(key) else []
            with suppress(TypeError):  # not hashable, or no weak references to it
                regions.append(self._regions.setdefault(key, _Region(backward, calls)))
        return regions

    def _repeated(
        self, norm: str, x: Tensor, key: object, repetition: _Repetition, around: list[_Region]
    ) -> _Call | None:
        """Return the call of a region that is repeated, None if its first run has yet to come."""
        region = self._regions[key]
        position = region.next_position(repetition)
        if region.calls is None:
            raise _unknown(norm)
        if position >= len(region.calls) and region in around:
            return None
        call = region.calls[position] if position < len(region.calls) else None
        if call is None or call.shape != x.shape:
            raise InputError(
                f"{norm} got call {position + 1}, an input of shape {tuple(x.shape)}, in the "
                "repetition of a checkpointed region that did not call it so the first time: make "
                "the region call the same layers in the same order"
            )
        if isinstance(key, FunctionCtx) and not _is_graph_kept():
            # A ctx may outlive its backward by far, with the result of the forward.
            region.calls[position] = None
        return call

    def _only_one(self, norm: str, x: Tensor, seen: Seen) -> _Call | None:
        """Return what a call in a backward repeats that is part of no known region.

        Raises:
            InputError: it may repeat several, which did not see the same.
        """
        calls = [call for region in list(self._regions.values()) for call in region.calls or ()]
        fitting = [call for call in calls if call is not None and call.shape == x.shape]
        if not fitting:
            return None
        one, *others = fitting
        own = seen.padding_mask is None or _are_equal(seen.padding_mask, one.seen.padding_mask)
        if not own or not all(_have_seen_the_same(one, other) for other in others):
            raise _unknown(norm)
        return one

    def _recorded(self, x: Tensor, seen: Seen) -> _Call:
        mask = None if seen.padding_mask is None else self._copy(seen.padding_mask)
        return _Call(x.shape, mask, seen.stage, tuple(map(self._copy, seen.state)))

    def _copy(self, source: Tensor) -> _Copy:
        copy = self._copies.get(id(source))
        if copy is None or not copy.is_of(source):
            copy = self._copies[id(source)] = _Copy(source)
        return copy


def _version_of(source: Tensor) -> int | None:
    # Tensors made under inference_mode do not count their writes.
    return None if source.is_inference() else source._version


def _innermost_hooks() -> tuple[Hook, Hook] | None:
    """Return the functions `pack` and `unpack` of the innermost open hooks on saved tensors."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _open_hooks() -> list[Hook]:
    """Return the functions `unpack` of all open hooks on saved tensors, the outermost first."""
    hooks = _innermost_hooks()
    if hooks is None:
        return []
    # Torch shows no others.
    torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        return [*_open_hooks(), hooks[1]]
    finally:
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


def _context_of(forward: FrameType) -> list[object]:
    """Return the `ctx` that the forward of an autograd.Function got, if it got one."""
    code, names = forward.f_code, forward.f_code.co_varnames
    ctx: object = None
    if code.co_argcount:
        ctx = forward.f_locals.get(names[0])
    elif code.co_flags & inspect.CO_VARARGS:  # a decorator's
        ctx = next(iter(forward.f_locals.get(names[code.co_kwonlyargcount], ())), None)
    return [ctx] if isinstance(ctx, FunctionCtx) else []


def _function_of(hook: object) -> FunctionType | None:
    function = hook.__func__ if isinstance(hook, MethodType) else hook
    return function if isinstance(function, FunctionType) else None


def _is_bare(hook: object) -> bool:
    """Return whether a hook is a function of its argument alone."""
    return isinstance(hook, FunctionType) and not hook.__closure__


def _is_running(hook: object, frame: FrameType) -> bool:
    """Return whether a function on the stack is this very hook, not another of the same code."""
    function, code = _function_of(hook), frame.f_code
    if function is None or function.__code__ is not code:
        return False
    held = dict(zip(code.co_freevars, map(_contents, function.__closure__ or ()), strict=True))
    if isinstance(hook, MethodType):
        held[code.co_varnames[0]] = hook.__self__
    now = frame.f_locals
    return all(now.get(name) is value for name, value in held.items())


def _contents(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _is_graph_kept() -> bool:
    """Return whether the backward that runs is one with `retain_graph`."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def _have_seen_the_same(one: _Call, other: _Call) -> bool:
    a, b = one.seen, other.seen
    if a.stage != b.stage or len(a.state) != len(b.state):
        return False
    pairs = zip((a.padding_mask, *a.state), (b.padding_mask, *b.state), strict=True)
    return all(_are_equal(x, y) for x, y in pairs)


def _are_equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is b:
        return True
    return a is not None and b is not None and torch.equal(a, b)


def _unknown(norm: str) -> InputError:
    return InputError(
        f"{norm} is called in a backward, and it cannot be told which of its checkpointed forwards "
        "that repeats, which had other padding or statistics: checkpoint by "
        f"torch.utils.checkpoint, with at most {_MAX_CALLS} calls of a layer in a region, or run "
        "each backward before the next forward"
    )
