"""Choice of the code that computes an op: kernels if there are any for device and type, else torch.

`explain` and `powernorm doctor` show the choice, `use_backend` forces it. A forced backend that
cannot compute a call raises an error; it never falls back silently. Triton compiles its kernels at
their first launch. If that fails, eager torch computes all calls from then on, after one warning.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final, Literal

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm.ops.kernels.errors import KernelError

Backend = Literal["eager", "cpu", "triton"]
BACKENDS: Final[tuple[Backend, ...]] = ("eager", "cpu", "triton")
VARIABLE: Final = "POWERNORM_BACKEND"
"""Environment variable that forces a backend for the whole process."""

OPS: Final = ("batch_norm", "power_norm", "token_norm", "static_norm")
"""Ops with kernels."""
EAGER_OPS: Final = {"moving_average_norm": "MABN", "unified_norm": "UnifiedNorm"}
"""Ops that are eager everywhere, with the norm that uses them."""

_NOT_OTHERS: Final = (None, "cpu")
_CPU_TYPES: Final = frozenset({torch.float32, torch.bfloat16, torch.float64})
_TRITON_TYPES: Final = frozenset({*_CPU_TYPES, torch.float16})


@dataclass(frozen=True)
class Choice:
    """The backend that serves an op, with the reasons.

    Attributes:
        op: name of the op.
        backend: name of the backend.
        reason: why this backend was chosen.
        others: why each other backend was not, by name.
    """

    op: str
    backend: Backend
    reason: str
    others: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.backend} ({self.reason})"]
        lines += [f"  not {name}: {why}" for name, why in self.others.items()]
        return "\n".join(lines)


class _BackendSetting:
    """The forced backend of this process; it holds in the threads of backwards too."""

    def __init__(self, forced: str | None) -> None:
        self.forced = None if forced is None else _check_backend(forced)
        self.functions: Any = None


def _check_backend(name: str) -> Backend:
    """Return the name if it is a backend's.

    Raises:
        InputError: there is no such backend.
    """
    if name not in BACKENDS:
        raise InputError(f"backend is {name!r}, expected one of {', '.join(BACKENDS)}")
    return name


_setting = _BackendSetting(os.environ.get(VARIABLE) or None)
_loaders: Final[dict[Backend, Callable[[], ModuleType]]] = {}


def add_backend(backend: Backend, load: Callable[[], ModuleType]) -> None:
    """Register how the functions of a backend are imported when they are first needed.

    The package `powernorm.ops` calls this, because backends import the ops, whose files call
    `functions_for`.
    """
    _loaders[backend] = load


@contextmanager
def use_backend(backend: Backend | None) -> Iterator[None]:
    """Let one backend compute every op inside the scope, for the whole process.

    Forward and backward belong inside the same scope. If the backend cannot compute an op, the call
    raises an InputError with the reason; the ops of MABN and UnifiedNorm are eager in any case.

    Args:
        backend: `eager`, `cpu` or `triton`; None restores the automatic choice.

    Raises:
        InputError: there is no such backend, or it is not available on this machine.

    >>> import torch, powernorm
    >>> norm, x = powernorm.PowerNorm(4), torch.randn(2, 4)
    >>> with powernorm.ops.use_backend("eager"):
    ...     norm(x).sum().backward()
    """
    chosen = None if backend is None else _check_backend(backend)
    if chosen is not None and (missing := missing_reason(chosen)):
        raise InputError(f"backend {backend!r} is not available here: {missing}")
    previous, _setting.forced = _setting.forced, chosen
    try:
        yield
    finally:
        _setting.forced = previous


@contextmanager
def use_functions(functions: Any) -> Iterator[None]:
    """Let these functions compute every op inside the scope; for benchmarks and experiments.

    Args:
        functions: an object with the functions of `powernorm.ops.eager` by name.
    """
    previous, _setting.functions = _setting.functions, functions
    try:
        yield
    finally:
        _setting.functions = previous


def missing_reason(backend: Backend) -> str:
    """Return why a backend is not available on this machine, `""` if it is."""
    if backend == "cpu":
        from powernorm.ops.kernels.cpu.loading import load_library

        library = load_library()
        return "" if library.functions is not None else library.reason
    if backend == "triton":
        return _triton_failure or _triton_absence()
    return ""


@cache
def _triton_absence() -> str:
    if find_spec("triton") is None:
        return "the package triton is not installed (it comes with torch for CUDA)"
    if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
        return (
            "torch sees no CUDA device (TRITON_INTERPRET=1 runs the kernels, slowly, without one)"
        )
    try:
        _loaders["triton"]()
    except Exception as error:
        said = " ".join(str(error).split())[:160]
        return f"triton cannot be imported ({said}), so install the one that this torch asks for"
    return ""


def unfit_reason(backend: Backend, x: Tensor) -> str:
    """Return why an available backend cannot serve this input, `""` if it can."""
    if backend == "eager":
        return ""
    if backend == "cpu":
        if not x.is_cpu:
            return f"the input is on {x.device}"
        types = _CPU_TYPES
    else:
        if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            return f"the input is on {x.device}"
        types = _TRITON_TYPES
    if x.dtype not in types:
        return f"there are no kernels for {x.dtype}"
    return "" if x.shape[-1] else "the input has no features"


@cache
def _module(backend: Backend) -> ModuleType | None:
    """Return the backend's functions, None if it is not available."""
    return None if missing_reason(backend) else _loaders[backend]()


def _eager() -> ModuleType:
    return _loaders["eager"]()


_triton_failure = ""
"""Why no Triton kernel can run on this machine, set by a failed launch."""


class _TritonFunctions:
    """Functions of `kernels.triton` for one type and width, with eager torch for those that fail.

    A kernel that failed was never started, and a function that updates buffers in place starts only
    one kernel, so eager torch never repeats an update.
    """

    def __init__(self, dtype: torch.dtype, features: int) -> None:
        self.kind = f"{str(dtype).removeprefix('torch.')} with {features} features"
        self.failures: dict[str, tuple[str, str]] = {}
        """(what cannot be served, reason) by the name of the function."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function, instead = (getattr(_loaders[kind](), name) for kind in ("triton", "eager"))

        def call(*args: Any) -> Any:
            if name not in self.failures:
                try:
                    return function(*args)
                except KernelError as failure:
                    self._note(name, failure)
            if _setting.forced == "triton":
                raise InputError(_refusal("triton", self.failures[name][1]))
            _warn_of_eager(*self.failures[name])
            return instead(*args)

        self.__dict__[name] = call
        return call

    def _note(self, name: str, failure: KernelError) -> None:
        global _triton_failure
        if failure.is_general:
            _triton_failure = _triton_failure or failure.reason
            self.failures[name] = ("the norms", _triton_failure)
        else:
            op = name.removesuffix("_backward")
            self.failures[name] = (f"{op} of {self.kind}", failure.reason)

    def failure_of(self, op: str) -> str:
        """Return why an op or its backward cannot be served, `""` if no failure is known."""
        found = (self.failures.get(name) for name in (op, f"{op}_backward"))
        return next((why for _, why in filter(None, found)), "")


_triton_functions = cache(_TritonFunctions)


@cache
def _or_eager(backend: Backend) -> ModuleType:
    """Return the default backend of a device; eager, with a warning, if it is not available."""
    module = _module(backend)
    if module is None:
        _warn_of_eager("the norms", missing_reason(backend))
    return module or _eager()


@cache
def _warn_of_eager(what: str, reason: str) -> None:
    """Warn once."""
    warnings.warn(
        f"eager torch serves {what}, several times slower than kernels, because {reason} "
        f"({VARIABLE}=eager silences this)",
        stacklevel=3,
    )


def _refusal(backend: Backend, reason: str) -> str:
    return f"backend {backend!r} was asked for and cannot serve this input: {reason}"


def _natural(x: Tensor) -> Backend:
    return "cpu" if x.is_cpu else "triton" if x.is_cuda else "eager"


def functions_for(x: Tensor, has_kernels: bool = True) -> Any:
    """Return the module whose functions serve an op on this input.

    Args:
        x: the input.
        has_kernels: False for an op that is eager everywhere.

    Raises:
        InputError: a forced backend cannot serve this input.
    """
    if not has_kernels:
        return _eager()
    if _setting.functions is not None:
        return _setting.functions
    forced = _setting.forced
    if forced is None and x.is_cpu and x.dtype in _CPU_TYPES and x.shape[-1]:
        return _or_eager("cpu")
    if forced is None:
        backend = _natural(x)
        if unfit_reason(backend, x):
            return _eager()
        return _for_input(backend, _or_eager(backend), x)
    module = _module(forced)
    is_lost = module is None or (forced == "triton" and _triton_failure)
    problem = missing_reason(forced) if is_lost else unfit_reason(forced, x)
    if problem:
        raise InputError(_refusal(forced, problem))
    assert module is not None
    return _for_input(forced, module, x)


def _for_input(backend: Backend, module: ModuleType, x: Tensor) -> Any:
    """Return the functions for an input, without Triton kernels that have failed."""
    if backend != "triton" or module is _eager():
        return module
    if _triton_failure:
        _warn_of_eager("the norms", _triton_failure)
        return _eager()
    return _triton_functions(x.dtype, x.shape[-1])


def is_cpu_chosen() -> bool:
    """Return whether the CPU kernels are used where possible: no other backend is forced."""
    return _setting.functions is None and _setting.forced in _NOT_OTHERS


def explain(x: Tensor, op: str | None = None) -> list[Choice]:
    """Return which backend serves the ops on an input like this one, and why.

    Args:
        x: an input of a norm, (..., C).
        op: one of `OPS` or `EAGER_OPS`; None for all.

    Raises:
        InputError: there is no such op.

    >>> import torch, powernorm
    >>> with powernorm.ops.use_backend("eager"):
    ...     print(powernorm.ops.explain(torch.randn(2, 4), "power_norm")[0].reason)
    forced by use_backend or POWERNORM_BACKEND
    """
    names = (*OPS, *EAGER_OPS)
    if op is not None and op not in names:
        raise InputError(f"op is {op!r}, expected one of {', '.join(names)}")
    return [_explain(x, name) for name in (names if op is None else (op,))]


def _explain(x: Tensor, op: str) -> Choice:
    problems = {name: missing_reason(name) or unfit_reason(name, x) for name in BACKENDS}
    problems["triton"] = problems["triton"] or _triton_functions(x.dtype, x.shape[-1]).failure_of(
        op
    )
    if op in EAGER_OPS:
        why = f"{EAGER_OPS[op]} has no kernels"
        return Choice(op, "eager", why, dict.fromkeys(("cpu", "triton"), why))
    forced = _setting.forced
    if forced is not None:
        reason = "forced by use_backend or POWERNORM_BACKEND"
        if problems[forced]:
            reason += f", and cannot serve: {problems[forced]}"
        others = {name: problems[name] or "another is forced" for name in BACKENDS}
        return Choice(op, forced, reason, _without(others, forced))
    natural = _natural(x)
    if natural != "eager" and not problems[natural]:
        others = {name: problems[name] or f"{natural} is faster" for name in BACKENDS}
        reason = f"kernels for {x.device.type} and {str(x.dtype).removeprefix('torch.')}"
        return Choice(op, natural, reason, _without(others, natural))
    reason = "no kernels can serve this input"
    return Choice(op, "eager", reason, _without(problems, "eager"))


def _without(reasons: dict[Backend, str], chosen: str) -> dict[str, str]:
    return {name: why for name, why in reasons.items() if name != chosen}
