"""Calls of functional norms, such as `F.rms_norm`, seen by running a model on example inputs.

Calls inside a helper, which a module's own code does not show, are found as well. Arithmetic that
computes a norm, `x * x.square().mean(-1, keepdim=True).rsqrt()`, is not.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from powernorm.errors import InputError
from powernorm.inspection.examples import Examples
from powernorm.inspection.modules import ReplacedForward
from powernorm.ops.torch_private import may_be_repeated

_ARGUMENTS: Final = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
    "batch_norm": ("input", "running_mean", "running_var", "weight", "bias"),
    "instance_norm": ("input", "running_mean", "running_var", "weight", "bias"),
}
"""Names of the positional arguments that are read, for the functions in torch.nn.functional and
those in torch."""
FUNCTIONS: Final[Mapping[Any, str]] = {
    **{getattr(module, name): name for module in (functional, torch) for name in _ARGUMENTS},
    torch.native_layer_norm: "native_layer_norm",
    torch.native_group_norm: "native_group_norm",
}
"""Names of the functions that compute a norm."""
CALLS: Final = "_norm_calls"
"""Attribute of a module whose calls were made modules: all of its calls, in order."""
_NAME: Final = "norm_call{}"
_NAME_OF_HEADS: Final = "qk_norm{}"
"""A name by which a norm of queries, keys or values is known."""


class _Hidden(threading.local):
    """Depth of norms that run in this thread, whose own function calls do not count."""

    depth = 0


HIDDEN: Final = _Hidden()


class Hiding:
    """A hook that hides the calls inside a norm from the modules around it."""

    def __init__(self, change: int) -> None:
        self._change = change

    @staticmethod
    def put_on(norm: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
        """Hide the calls of a norm."""
        return (
            norm.register_forward_pre_hook(Hiding(1)),
            norm.register_forward_hook(Hiding(-1), always_call=True),
        )

    def __call__(self, *_: object) -> None:
        """Begin or end hiding calls."""
        HIDDEN.depth += self._change


@dataclass(frozen=True)
class FunctionCall:
    """One call of a functional norm in the forward of a module."""

    name: str
    """Name of the call, and of the module that may replace it, within the calling module."""
    function: str
    size: tuple[int, ...]
    """The normalized shape; for `group_norm` the groups and the channels."""
    eps: float | None
    weight: str | None
    """Name of γ in the calling module, "" without, None if it is no parameter of that module."""
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


class FunctionForward(ReplacedForward):
    """A forward that records its calls of functional norms, or replaces them by calls of modules.

    Args:
        module: owner of the forward.
        calls: calls that are modules now, in order; None records them.
    """

    def __init__(self, module: nn.Module, calls: tuple[FunctionCall, ...] | None = None) -> None:
        super().__init__(module)
        self.calls = calls
        self.seen: dict[tuple[FunctionCall, ...], None] = {}
        """Calls of one forward, for each forward that differs."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        mode = _CallMode(self.module, self.calls)
        depth = HIDDEN.depth
        try:
            with mode:
                output = self.call_replaced(args, kwargs)
        finally:
            HIDDEN.depth = depth
        if self.calls is None:
            self.seen[tuple(mode.made)] = None
        elif len(mode.made) != len(self.calls):
            raise mode.other(f"makes {len(mode.made)} calls of functional norms", self.calls)
        return output


class _CallMode(TorchFunctionMode):
    """Intercepts the calls of one forward; see `FunctionForward`."""

    def __init__(self, module: nn.Module, calls: tuple[FunctionCall, ...] | None) -> None:
        super().__init__()
        self._module = module
        self._calls = calls
        self.made: list[FunctionCall] = []
        self._depth = HIDDEN.depth
        self._may_be_repeated = not torch.compiler.is_compiling() and may_be_repeated()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, or the module that replaces it."""
        del types
        kwargs = kwargs or {}
        if func not in FUNCTIONS or HIDDEN.depth != self._depth:
            return func(*args, **kwargs)
        function = FUNCTIONS[func]
        given = {**dict(zip(_ARGUMENTS.get(function, ("input",)), args, strict=False)), **kwargs}
        if self._calls is None:
            call = _recorded(self._module, len(self.made), function, given)
        else:
            call = self._expected(self._calls, function, given)
        self.made.append(call)
        HIDDEN.depth += 1
        if self._calls is None or call.obstacle:
            output = func(*args, **kwargs)
        else:
            output = getattr(self._module, call.name)(given["input"])
        HIDDEN.depth -= 1
        return output

    def _expected(
        self, calls: tuple[FunctionCall, ...], function: str, given: Mapping[str, Any]
    ) -> FunctionCall:
        number = len(self.made)
        if number == len(calls) or calls[number].function != function:
            raise self.other(f"calls {function} as number {number}", calls)
        call = calls[number]
        if torch.compiler.is_compiling():
            return call
        for attribute, name in (("weight", call.weight), ("bias", call.bias)):
            if name is not None and given.get(attribute) is not parameter_of(self._module, name):
                raise self.other(f"gives {function} another {attribute}", calls)
        if not self._may_be_repeated and may_be_repeated():
            raise InputError(
                f"{type(self._module).__name__} calls {function} inside a checkpointed function, "
                "whose repetition would not find the module: checkpoint a whole module"
            )
        return call

    def other(self, what: str, calls: tuple[FunctionCall, ...]) -> InputError:
        """Return the error for calls that differ from those of the examples."""
        return InputError(
            f"{type(self._module).__name__} {what}, where the examples of powernorm.modularize had "
            f"{len(calls)} calls ({', '.join(call.name for call in calls)}): undo, and give "
            "more_examples, or put a torch.nn norm into its __init__"
        )


def parameter_of(module: nn.Module, name: str) -> Any:
    """Return the parameter of a dotted name, None for none."""
    path, _, attribute = name.rpartition(".")
    return getattr(module.get_submodule(path), attribute, None)


def see_calls(
    model: nn.Module, examples: Sequence[Examples], norms: Collection[nn.Module]
) -> dict[nn.Module, tuple[tuple[FunctionCall, ...], ...]]:
    """Run a model, in evaluation, and return the calls of functional norms in forwards.

    Args:
        model: unchanged afterwards, including mode, buffers and random numbers.
        examples: the calls.
        norms: modules that are norms, whose own calls are ignored.

    Returns:
        The calls of one forward by module; several lists if its forwards differ.

    Raises:
        InputError: the model fails on an example.
    """
    inside = {part for norm in norms for part in norm.modules()}
    with ExitStack() as stack, torch.random.fork_rng(devices=[]):
        for norm in norms:
            for handle in Hiding.put_on(norm):
                stack.callback(handle.remove)
        forwards = [
            FunctionForward(module)
            for module in model.modules()
            if module not in inside and not isinstance(module, torch.jit.ScriptModule)
        ]
        for forward in forwards:
            stack.callback(forward.remove)
        try:
            for example in examples:
                example.call(model)
                torch.rand((), device="cpu")  # the next call draws other numbers
        except Exception as error:
            raise InputError(
                f"{type(model).__name__} fails on the example inputs: {type(error).__name__}: "
                f"{error}; give inputs that it takes"
            ) from error
    return {forward.module: tuple(forward.seen) for forward in forwards if any(forward.seen)}


def _recorded(
    module: nn.Module, position: int, function: str, given: Mapping[str, Any]
) -> FunctionCall:
    x = given["input"]
    size = tuple(map(int, given.get("normalized_shape") or ()))
    if function == "group_norm":
        size = (int(given["num_groups"]), x.shape[1])
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    weight, bias = (
        "" if given.get(name) is None else names.get(id(given[name])) for name in ("weight", "bias")
    )
    # Heads: (batch, length, heads, size), if no inner map reads that size.
    widths = {(getattr(child, "in_features", None),) for child in module.children()}
    in_attention = "att" in type(module).__name__.lower()
    is_of_heads = in_attention and x.ndim > 3 and size not in widths
    taken = (_NAME, _NAME_OF_HEADS)
    free = (n for n in count() if not any(hasattr(module, name.format(n)) for name in taken))
    number = next(islice(free, position, None))
    name = (_NAME_OF_HEADS if is_of_heads else _NAME).format(number)
    eps = given.get("eps", None if function == "rms_norm" else 1e-5)
    return FunctionCall(name, function, size, eps, weight, bias, _site_in(module))


def _site_in(module: nn.Module) -> str:
    """Return file and line of the module's running code, and of a helper that it calls."""
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
