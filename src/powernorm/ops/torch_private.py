"""Private names of torch, each looked up once, and the replacement if a version lacks it.

No layer needs one to be imported, constructed or called. If there is a slower public way, it
replaces the name. If there is none, the information is unknown: a call whose result depends on it
raises an error, and no batch is counted twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks

from powernorm.errors import InputError

NEWEST_TESTED: Final = (2, 15)
"""Newest release of torch that the tests have run with."""
_NEWEST: Final = ".".join(map(str, NEWEST_TESTED))

Hook = Callable[[Any], Any]
_F = TypeVar("_F", bound=Callable[..., Any])


def untested_note() -> str:
    """Return a note if torch is newer than the newest tested release, else ""."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) <= NEWEST_TESTED:
        return ""
    return f"powernorm was tested with torch up to {_NEWEST}, not with {torch.__version__}"


@cache
def warn_of_untested_torch() -> None:
    """Warn once per process if torch is newer than the newest tested release."""
    if note := untested_note():
        warnings.warn(
            f"{note}: `powernorm doctor` shows whether the layers run", UserWarning, stacklevel=3
        )


NO_BACKWARD: Final = -1
UNKNOWN_BACKWARD: Final = -2
"""Number of the backward if none runs, or if torch does not report it."""


def find(path: str) -> Any:
    """Return torch's object with a dotted name, None if it does not exist."""
    value: Any = torch
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _raises(probe: Callable[[], object]) -> bool:
    """Return whether a call, or entering the context manager it returns, raises a RuntimeError."""
    try:
        given = probe()
        with given if isinstance(given, AbstractContextManager) else nullcontext():
            return False
    except RuntimeError:
        return True


# Backwards and recomputation.

_graph_task: Final = find("_C._current_graph_task_id")
_top_hooks: Final = find("_C._autograd._top_saved_tensors_default_hooks")

KNOWS_BACKWARDS: Final = _graph_task is not None

current_backward: Final[Callable[[], int]] = _graph_task or (lambda: UNKNOWN_BACKWARD)
"""Torch's number of the backward that runs in this thread, or `NO_BACKWARD`."""


def innermost_hooks() -> tuple[Hook, Hook] | None:
    """Return `pack` and `unpack` of the innermost open hooks on saved tensors.

    None if torch does not report them: a call in a backward then repeats no known region.
    """
    return None if _top_hooks is None else _top_hooks(True)


_no_hooks: Final = partial(disable_saved_tensors_hooks, "some are open")


def _are_hooks_open() -> bool:
    return _raises(_no_hooks) if _top_hooks is None else _top_hooks(True) is not None


def in_backward() -> bool:
    """Return whether autograd runs a backward in this thread, as when a forward is repeated.

    Raises:
        InputError: torch does not report it, and the call may be part of a checkpointed region.
    """
    if _graph_task is not None:
        return bool(_graph_task() != NO_BACKWARD)
    if _are_hooks_open():
        raise unknown_backward()
    return False


def may_be_repeated() -> bool:
    """Return whether activation checkpointing may repeat this call, or the call is a repetition."""
    return current_backward() != NO_BACKWARD or _are_hooks_open()


def unknown_backward() -> InputError:
    """Return the error for a call that may or may not be a repetition."""
    return InputError(
        f"torch {torch.__version__} does not report whether a backward runs, so a forward "
        "repeated by activation checkpointing cannot be distinguished from a new batch: train "
        f"without checkpointing, torch.compile and torch.no_grad, or install torch {_NEWEST}"
    )


# Modes and tracers that record operators.

_has_export_flag: Final = find("compiler._is_exporting_flag") is not None


def is_exporting() -> bool:
    """Return whether torch.export makes the graph.

    torch 2.11's public function also returns True in graphs of torch.compile.
    """
    return torch.compiler._is_exporting_flag if _has_export_flag else torch.compiler.is_exporting()


is_tracing: Final[Callable[[], bool]] = torch.jit.is_tracing  # type: ignore[attr-defined]
"""Whether TorchScript's tracer records the operators."""

num_dispatch_modes: Final[Callable[[], int]] = find("_C._len_torch_dispatch_stack") or (lambda: 1)
"""Number of open dispatch modes; if it is unknown, calls use the dispatcher."""

_disable_modes: Final = find("utils._python_dispatch._disable_current_modes")


def without_modes() -> AbstractContextManager[Any]:
    """Hide operators from dispatch modes: selective checkpointing counts those of both runs.

    Raises:
        InputError: there may be modes, and torch cannot disable them.
    """
    if not num_dispatch_modes():
        return nullcontext()
    if _disable_modes is None:
        raise InputError(
            f"torch {torch.__version__} cannot hide an operator from dispatch modes, as a norm in "
            "a selectively checkpointed region needs: checkpoint without context_fn, or install "
            f"torch {_NEWEST}"
        )
    return _disable_modes()  # type: ignore[no-any-return]


class _Refused(torch.autograd.Function):
    """A function of the form that transforms of torch.func reject."""

    @staticmethod
    def forward(ctx: Any) -> None:
        del ctx


are_transforms_active: Final[Callable[[], bool]] = find("_C._are_functorch_transforms_active") or (
    partial(_raises, _Refused.apply)
)
"""Whether this is inside a transform of torch.func."""

in_forward_mode: Final[Callable[[], bool]] = (
    partial(_raises, forward_ad.dual_level)  # levels do not nest
    if find("autograd.forward_ad._current_level") is None
    else lambda: forward_ad._current_level >= 0
)
"""Whether this is inside forward-mode differentiation."""

is_batched: Final[Callable[[Tensor], bool]] = find("_C._functorch.is_legacy_batchedtensor") or (
    lambda _: True  # use the registered op, which is also right for single gradients
)
"""Whether a tensor is a stack of gradients, as of `autograd.grad(…, is_grads_batched=True)`."""


def disable_dynamo(function: _F) -> _F:
    """Exclude a function from compilation; torch's public decorator imports the compiler."""
    disable: Callable[[_F], _F] = find("_compile._disable_dynamo") or torch.compiler.disable
    return disable(function)


def assume_constant(function: _F) -> _F:
    """Let compiled code call a function once, as it is traced.

    torch's public decorator sets the same mark and imports the compiler, a second of every start.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# Tensors.


is_zero_tensor: Final[Callable[[Tensor], bool]] = find("Tensor._is_zerotensor") or (
    lambda tensor: _raises(tensor.data_ptr)
)
"""Whether a tensor is a lazy zero tensor, as autograd makes them."""

is_fake: Final[Callable[[object], bool]] = find("_subclasses.fake_tensor.is_fake") or (
    lambda tensor: any(kind.__name__ == "FakeTensor" for kind in type(tensor).__mro__)
)
"""Whether a tensor has a shape and no values."""


_COUNTS_WRITES: Final = find("Tensor._version") is not None


def version_of(tensor: Tensor) -> int | None:
    """Return the number of writes to a tensor; None if it is not counted.

    Tensors made under inference_mode do not count them.
    """
    return None if tensor.is_inference() or not _COUNTS_WRITES else tensor._version


_set_version: Final = find("_C._autograd._unsafe_set_version_counter")


def restore_version(tensor: Tensor, version: int | None) -> None:
    """Reset a tensor's version counter after writes that changed no value.

    Otherwise selective checkpointing rejects a saved result with an error of torch.
    """
    if _set_version is not None and version is not None:
        _set_version((tensor,), (version,))


# Processes.

resolve_process_group: Final = find("_C._distributed_c10d._resolve_process_group")
"""The process group of a name, which is unique in a process; None if torch does not report it."""
