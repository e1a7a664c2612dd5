"""Records of checkpointed forwards, for the forward that autograd repeats in the backward.

Activation checkpointing runs a region of the model twice. The second run must see what the first
one saw: the padding mask (its scope is closed by then) and, for layers that normalize by running
statistics, those statistics (another backward may have updated them in between).

A region is identified by the function `unpack` of the hooks on saved tensors that are open in its
first run. It is made for the region only, lives as long as the graph, and calls the second run, so
that it is on the stack there. Torch has no public way to ask which region is being repeated.

Within a region the k-th call of a layer in the second run repeats the k-th in the first. A call is
recorded in all regions around it, and the innermost function on the stack that repeats a region is
the one that has called the layer. A repetition may contain regions of its own, which are repeated
later: they record the repeated call.

A call in a backward that repeats no known region raises an error: it would count a batch a second
time, or miss its mask. This also refuses reentrant checkpointing, whose first run has no hooks.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, Final, NamedTuple, Self, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction

from powernorm.errors import InputError
from powernorm.ops.torch_private import (
    NO_BACKWARD,
    UNKNOWN_BACKWARD,
    Hook,
    current_backward,
    in_backward,
    innermost_hooks,
    unknown_backward,
    version_of,
    without_modes,
)

_MAX_CALLS: Final = 256
"""Maximum number of calls of a layer in a region.

Hooks that are not for recomputation may be opened repeatedly, and would collect records for as long
as they live.
"""


def _code_of(function: Callable[..., Any]) -> CodeType | None:
    """Return the code of a function of torch, None if it is not in Python."""
    return getattr(inspect.unwrap(function), "__code__", None)


_STARTS: Final = (_code_of(torch.autograd.backward), _code_of(torch.autograd.grad))
"""Code that starts a backward: frames outside of it on the stack belong to another backward.

If it is no longer Python code in some torch, every repetition raises an error.
"""
_REENTRANT: Final = _code_of(CheckpointFunction.backward)
"""Code of reentrant checkpointing that starts a backward inside another one."""


class SeenInputs(NamedTuple):
    """Mask, stage and statistics that a call normalizes by."""

    padding_mask: Tensor | None
    stage: int
    state: tuple[Tensor, ...]
    is_repeated: bool = False
    """Whether the call repeats another, so that it is not a new batch."""


class _Copy:
    """A copy of a tensor, for all calls that saw the same values."""

    def __init__(self, source: Tensor) -> None:
        with without_modes():  # the second run makes no copy
            self.values = source.detach().clone()
        self._source = weakref.ref(source)
        self._version = version_of(source)

    def is_of(self, source: Tensor) -> bool:
        """Return whether this is the copied tensor, without writes since."""
        unchanged = self._version is not None and self._version == version_of(source)
        return unchanged and self._source() is source


class _RepeatableCall(NamedTuple):
    """A call that may be repeated."""

    shape: torch.Size
    padding_mask: _Copy | None
    stage: int
    state: tuple[_Copy, ...]

    @property
    def seen(self) -> SeenInputs:
        mask = None if self.padding_mask is None else self.padding_mask.values
        return SeenInputs(mask, self.stage, tuple(one.values for one in self.state), True)


class _Repetition:
    """A run of a function that repeats a region; it lives as long as that run."""

    @classmethod
    def by(cls, frame: FrameType) -> Self:
        """Return the same object for each call in a run: it is kept in the frame's variables."""
        return cast(Self, frame.f_locals.setdefault("repetition of a region", cls()))


@dataclass(eq=False)
class _Region:
    """The calls of one layer in a region."""

    began_in: int
    """Number of the backward that the first run is part of."""
    calls: list[_RepeatableCall] | None
    """Calls in order; None if they cannot be distinguished."""
    repetition: weakref.ref[_Repetition] | None = None
    """The last repetition."""
    position: int = 0
    """Number of calls in the last repetition."""

    def add(self, call: _RepeatableCall) -> None:
        if self.calls is not None:
            self.calls.append(call)
            if len(self.calls) > _MAX_CALLS:
                self.calls = None

    def next_position(self, repetition: _Repetition) -> int:
        """Count a call of a repetition; return its position."""
        if self.repetition is None or self.repetition() is not repetition:
            self.repetition, self.position = weakref.ref(repetition), 0
        self.position += 1
        return self.position - 1


class CallRecords:
    """The calls of one layer that activation checkpointing may repeat; eager mode only.

    Copies and pickles of it are empty: no backward repeats the calls of a copy.
    """

    def __init__(self) -> None:
        self._regions = weakref.WeakKeyDictionary[object, _Region]()
        self._codes = set[int]()
        """Identities of code that may repeat a region; a hash would cover all of its contents."""
        self._copies = weakref.WeakValueDictionary[int, _Copy]()

    def __reduce__(self) -> tuple[type[CallRecords], tuple[()]]:
        return CallRecords, ()

    def replay(self, norm: str, x: Tensor, seen: SeenInputs) -> SeenInputs:
        """Return the values that this call must normalize by: its own, or the repeated call's.

        Args:
            norm: class name of the layer, for errors.
            x: the input.
            seen: inputs that the call normalizes by if it repeats none.

        Raises:
            InputError: it is unknown which call is repeated.
        """
        backward = current_backward()
        if backward == UNKNOWN_BACKWARD:
            if (
                in_backward() or not torch.is_grad_enabled()
            ):  # as in reentrant checkpointing's first
                raise unknown_backward()
            return seen
        repeating = self._repeating()
        # In this order, because a backward inside the first run may ask for the calls so far.
        around = self._open_regions(backward)
        call = None
        if repeating is not None and None not in _STARTS:
            call = self._repeated(norm, x, *repeating, around)
        elif repeating is not None or (backward != NO_BACKWARD and torch.is_grad_enabled()):
            raise _unknown(norm)
        first = [region for region in around if region.calls is not None]
        first = [region for region in first if region.began_in == backward]
        if first:
            recorded = call or self._recorded(x, seen)
            for region in first:
                region.add(recorded)
        if call is not None:
            return call.seen
        is_repeated = repeating is not None or backward != NO_BACKWARD
        return seen._replace(is_repeated=True) if is_repeated else seen

    def _repeating(self) -> tuple[object, _Repetition] | None:
        """Return the region that the innermost function on the stack repeats, if any does."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code not in _STARTS:
            if id(frame.f_code) in self._codes:
                for key in list(self._regions):
                    if _is_running(key, frame):
                        return key, _Repetition.by(frame)
            frame = frame.f_back
        return None

    def _open_regions(self, backward: int) -> list[_Region]:
        """Return the regions whose first run the call may be part of."""
        regions = []
        for key in _open_hooks():
            function = _function_of(key)
            if function is not None:
                self._codes.add(id(function.__code__))
            # A function without closure cannot be made for a region.
            calls: list[_RepeatableCall] | None = None if _is_bare(key) else []
            with suppress(TypeError):  # not hashable, or no weak references to it
                regions.append(self._regions.setdefault(key, _Region(backward, calls)))
        return regions

    def _repeated(
        self, norm: str, x: Tensor, key: object, repetition: _Repetition, around: list[_Region]
    ) -> _RepeatableCall | None:
        """Return the repeated call of a region, None if this is still the first run."""
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
                "repetition of a checkpointed region, which did not call it like this the first "
                "time: make the region call the same layers in the same order"
            )
        return call

    def _recorded(self, x: Tensor, seen: SeenInputs) -> _RepeatableCall:
        mask = None if seen.padding_mask is None else self._copy(seen.padding_mask)
        return _RepeatableCall(x.shape, mask, seen.stage, tuple(map(self._copy, seen.state)))

    def _copy(self, source: Tensor) -> _Copy:
        copy = self._copies.get(id(source))
        if copy is None or not copy.is_of(source):
            copy = self._copies[id(source)] = _Copy(source)
        return copy


def refuse_reentrant(norm: str) -> None:
    """Raise an InputError in a backward that reentrant checkpointing has started.

    An eager forward raises before that; with a compiled one each use would update the statistics.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _STARTS:
        frame = frame.f_back
    if frame is not None and frame.f_back is not None and frame.f_back.f_code is _REENTRANT:
        raise _unknown(norm)


def _open_hooks() -> list[Hook]:
    """Return the functions `unpack` of all open hooks on saved tensors, the outermost first."""
    hooks = innermost_hooks()
    if hooks is None:
        return []
    innermost = saved_tensors_hooks(*hooks)
    innermost.__exit__()  # torch shows no others
    try:
        return [*_open_hooks(), hooks[1]]
    finally:
        innermost.__enter__()


def _function_of(hook: object) -> FunctionType | None:
    function = hook.__func__ if isinstance(hook, MethodType) else hook
    return function if isinstance(function, FunctionType) else None


def _is_bare(hook: object) -> bool:
    """Return whether a hook is a function of only its argument."""
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


def _unknown(norm: str) -> InputError:
    return InputError(
        f"{norm} is called in a backward, and it cannot be told which forward that repeats: "
        "checkpoint by torch.utils.checkpoint.checkpoint(…, use_reentrant=False), with at most "
        f"{_MAX_CALLS} calls of a layer in a region; reentrant checkpointing is not supported"
    )
