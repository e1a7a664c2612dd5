"""Calls of functional norms, such as `F.rms_norm`, seen by running a model on example inputs.

A helper around the function, which a module's own code does not show, makes no difference.
Arithmetic that computes a norm, `x * x.square().mean(-1, keepdim=True).rsqrt()`, is not seen.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from powernorm.errors import InputError
from powernorm.inspection.examples import Examples

_ARGUMENTS: Final = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
    "batch_norm": ("input", "running_mean", "running_var", "weight", "bias"),
    "instance_norm": ("input", "running_mean", "running_var", "weight", "bias"),
}
"""Names of the positional arguments that are read, of the functions in torch.nn.functional and of
those in torch."""
FUNCTIONS: Final[Mapping[Any, str]] = {
    **{getattr(module, name): name for module in (functional, torch) for name in _ARGUMENTS},
    torch.native_layer_norm: "native_layer_norm",
    torch.native_group_norm: "native_group_norm",
}
"""Names of the functions that compute a norm."""
CALLS: Final = "_norm_calls"
"""Attribute of a module whose calls were made modules: all its calls, in their order."""
_NAME: Final = "norm_call{}"
_NAME_OF_HEADS: Final = "qk_norm{}"
"""A name by which a norm of queries, keys or values is known."""


class _Hidden(threading.local):
    """Depth of norms that run in this thread, whose own calls of functions do not count."""

    depth = 0


HIDDEN: Final = _Hidden()


class Hiding:
    """A hook that only hides the calls that a norm makes from the modules around it."""

    def __init__(self, change: int) -> None:
        self._change = change

    def __call__(self, *_: object) -> None:
        """Begin or end to hide calls."""
        HIDDEN.depth += self._change


@dataclass(frozen=True)
class NormCall:
    """One call of a functional norm in the forward of a module."""

    name: str
    """Name of the call, and of the module that may take its place, in the module that calls."""
    function: str
    size: tuple[int, ...]
    """The shape that is normalized; of `group_norm` the groups and the channels."""
    eps: float | None
    weight: str | None
    """Name of γ in the module that calls, "" without, None if it is no parameter of that module."""
    bias: str | None
    site: str = field(compare=False)
    """File and line."""

    @property
    def obstacle(self) -> str:
        """Return why no module of torch computes exactly this, or ""."""
        if self.function not in ("layer_norm", "rms_norm", "group_norm"):
            return f"no module computes {self.function} exactly as called: write one into __init__"
        if self.weight is None or self.bias is None:
            return (
                "its weight or bias is no parameter of the module that calls it (computed, cast "
                "or from elsewhere): make it a parameter there, of the type that is used"
            )
        return ""


def arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a functional norm by name."""
    return {**dict(zip(_ARGUMENTS.get(FUNCTIONS[func], ("input",)), args, strict=False)), **kwargs}


@dataclass
class SeenCalls:
    """What example calls of a model have shown.

    Args:
        calls: by module, the calls in one forward of it.
        varying: modules whose forwards differ in their calls, with the numbers of calls.
        outputs: of the model, one an example.
    """

    calls: dict[nn.Module, tuple[NormCall, ...]] = field(default_factory=dict)
    varying: dict[nn.Module, tuple[int, int]] = field(default_factory=dict)
    outputs: list[object] = field(default_factory=list)

    def note(self, module: nn.Module, calls: tuple[NormCall, ...]) -> None:
        """Take the calls of one forward."""
        known = self.calls.setdefault(module, calls)
        if known != calls:
            self.varying[module] = (len(known), len(calls))
            self.calls[module] = max(known, calls, key=len)


def see_calls(
    model: nn.Module, examples: Sequence[Examples], norms: Collection[nn.Module]
) -> SeenCalls:
    """Run a model, in evaluation, and return its calls of functional norms.

    Args:
        model: afterwards as before: mode, buffers and random numbers, too.
        examples: the calls.
        norms: modules that are norms, whose own calls are left out.

    Raises:
        InputError: the model fails on an example.
    """
    recorder = _Recorder(model)
    with _watched(model, recorder, norms):
        try:
            with recorder:
                recorder.seen.outputs = outputs_of(model, examples)
        except Exception as error:
            raise InputError(
                f"{type(model).__name__} fails on the example inputs: {type(error).__name__}: "
                f"{error}; give inputs that it takes"
            ) from error
    recorder.seen.calls = {module: calls for module, calls in recorder.seen.calls.items() if calls}
    return recorder.seen


def outputs_of(model: nn.Module, examples: Sequence[Examples]) -> list[object]:
    """Return the outputs on each example; each call draws other random numbers."""
    with torch.random.fork_rng(devices=[]):
        outputs = []
        for example in examples:
            outputs.append(example.call(model))
            torch.rand(())
        return outputs


class _Recorder(TorchFunctionMode):
    """Records calls by the module whose forward runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.seen = SeenCalls()
        self.running: list[tuple[nn.Module, list[NormCall]] | None] = []
        """The forwards that run, None for one of a norm."""
        self._in_attention = {
            module
            for attention in model.modules()
            if "att" in type(attention).__name__.lower()
            for module in attention.modules()
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, and record it if it is a norm."""
        del types
        kwargs = kwargs or {}
        if func in FUNCTIONS and self.running and self.running[-1] is not None:
            module, calls = self.running[-1]
            calls.append(self._call(module, len(calls), func, arguments(func, args, kwargs)))
        return func(*args, **kwargs)

    def _call(
        self, module: nn.Module, position: int, func: Any, given: Mapping[str, Any]
    ) -> NormCall:
        function, x = FUNCTIONS[func], given["input"]
        size = tuple(map(int, given.get("normalized_shape") or ()))
        if function == "group_norm":
            size = (int(given["num_groups"]), x.shape[1])
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        weight, bias = (
            "" if given.get(name) is None else names.get(id(given[name]))
            for name in ("weight", "bias")
        )
        name = _NAME_OF_HEADS if self._is_of_heads(module, x, size) else _NAME
        eps = given.get("eps", None if function == "rms_norm" else 1e-5)
        called = name.format(_number(module, position))
        return NormCall(called, function, size, eps, weight, bias, _site_in(module))

    def _is_of_heads(self, module: nn.Module, x: Tensor, size: tuple[int, ...]) -> bool:
        """Return whether (batch, length, heads, size) are normalized, not what a map reads."""
        if module not in self._in_attention or x.ndim < 4 or len(size) != 1:
            return False
        return size[0] not in {getattr(child, "in_features", None) for child in module.children()}


def _number(module: nn.Module, position: int) -> int:
    """Return the number of a call, without those whose names are taken."""
    names = (_NAME, _NAME_OF_HEADS)
    free = (n for n in count() if not any(hasattr(module, name.format(n)) for name in names))
    return next(islice(free, position, None))


@contextmanager
def _watched(model: nn.Module, recorder: _Recorder, norms: Collection[nn.Module]) -> Iterator[None]:
    """Tell a recorder in the block which forward runs; hooks would miss calls of `forward`."""
    before: dict[nn.Module, Any] = {}
    try:
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            before[module] = module.__dict__.get("forward")
            module.__dict__["forward"] = _watch(module, recorder, module in norms)
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward


def _watch(module: nn.Module, recorder: _Recorder, is_norm: bool) -> Callable[..., Any]:
    forward, running = module.forward, recorder.running

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        hidden = is_norm or (bool(running) and running[-1] is None)
        calls: list[NormCall] = []
        running.append(None if hidden else (module, calls))
        try:
            output = forward(*args, **kwargs)
        finally:
            running.pop()
        if not hidden:
            recorder.seen.note(module, tuple(calls))
        return output

    return run


def _site_in(module: nn.Module) -> str:
    """Return file and line of the module's code that runs, and of a helper that it calls."""
    frame, helper = inspect.currentframe(), ""
    while frame is not None:
        code, name = frame.f_code, str(frame.f_globals.get("__name__"))
        here = f"{Path(code.co_filename).name}:{frame.f_lineno}"
        if code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is module:
            if name != __name__:
                return f"{here} through {helper}" if helper else here
        elif not helper and name != __name__ and not re.match(r"torch(\.|$)", name):
            helper = here
        frame = frame.f_back
    return helper
