"""Output of `powernorm doctor`. It needs torch only, as nothing else may be installed."""

import os
import platform
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from powernorm.norms.kernel_check import Outcome
    from powernorm.ops.dispatch import Backend

_SHOWN: Final = 5
"""Number of wrong calls that are printed in full."""


def print_health() -> bool:
    """Print which kernels this machine has, and whether these and the layers compute right.

    Returns:
        Whether all of them run and compute right.
    """
    import torch

    from powernorm.norms import kernel_check
    from powernorm.ops.dispatch import BACKENDS, VARIABLE, explain
    from powernorm.ops.torch_private import untested_note

    _say(f"python: {platform.python_version()}")
    _say(f"torch: {torch.__version__}")
    _say(f"threads: {torch.get_num_threads()}")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no device"
    _say(f"cuda: {device}")
    _say(f"forced backend: {os.environ.get(VARIABLE, 'none')}")
    if note := untested_note():
        _say(f"warning: {note}")
    with warnings.catch_warnings():  # of an untested torch, which has been printed
        warnings.simplefilter("ignore")
        outcomes = kernel_check.run_cases(kernel_check.quick_cases(), BACKENDS)
    for backend in BACKENDS:
        _say("")
        _print_backend(backend, outcomes)
    _print_wrong(outcomes)
    failed = _failing_layers()
    _say("")
    for name, error in failed.items():
        _say(f"{name}: FAILED: {error}")
    if not failed:
        _say("every layer runs forward and backward, alone and under activation checkpointing")
    served = explain(torch.empty(1, 1), "batch_norm")[0].backend
    _say("")
    _say(f"on the CPU your models use: {served}")
    _say("which backend serves one input, and why: powernorm.ops.explain(x)")
    _say("every norm, type and mask: powernorm doctor --kernels")
    return not failed and not any(outcome.problems for outcome in outcomes)


def print_kernel_check() -> bool:
    """Run every kind of call on all kernels, and print their errors by backend and type.

    Returns:
        Whether all of them are right.
    """
    from powernorm.norms import kernel_check
    from powernorm.ops.dispatch import BACKENDS

    kernels = BACKENDS[1:]
    outcomes = kernel_check.run_cases(kernel_check.select_cases(), kernels)
    for backend in kernels:
        _print_backend(backend, outcomes)
    _print_wrong(outcomes)
    wrong = sum(bool(outcome.problems) for outcome in outcomes)
    _say(
        "\nAn error of 1 is allowed: twice that of eager torch in the same type, and 32 roundings."
    )
    _say(f"{wrong} of {len(outcomes)} calls are WRONG" if wrong else "all calls are right")
    return not wrong


def _print_backend(backend: "Backend", outcomes: "Sequence[Outcome]") -> None:
    """Print a backend, or why it is missing, and its largest error in each type."""
    from powernorm.ops.dispatch import missing_reason

    if missing := missing_reason(backend):
        _say(f"{backend}: not available: {missing}")
        return
    found = [outcome for outcome in outcomes if outcome.backend == backend]
    _say(f"{backend}: {_detail(backend)}, {len(found)} calls")
    for dtype in dict.fromkeys(outcome.case.dtype for outcome in found):
        of_type = [outcome for outcome in found if outcome.case.dtype == dtype]
        worst = max(of_type, key=lambda outcome: outcome.error)
        norms = {outcome.case.setting.norm for outcome in of_type if outcome.problems}
        verdict = f"WRONG: {', '.join(sorted(norms))}" if norms else "right"
        largest = f"largest error: {worst.error:.2f} of what is allowed, {worst.case.setting.norm}"
        _say(f"  {str(dtype).removeprefix('torch.')}: {verdict} ({largest})")


def _detail(backend: "Backend") -> str:
    if backend == "cpu":
        from powernorm.ops.kernels.cpu.loading import load_library

        library = load_library()
        openmp = "torch's OpenMP threads" if library.uses_openmp else "one thread (no OpenMP)"
        return f"C++ kernels, {library.instruction_set}, {openmp}"
    if backend == "triton":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return "Triton kernels" + (", interpreted (slow, for tests)" if interpreted else "")
    return "torch operations, everywhere"


def _print_wrong(outcomes: "Sequence[Outcome]") -> None:
    for outcome in [outcome for outcome in outcomes if outcome.problems][:_SHOWN]:
        _say(f"\nWRONG on {outcome.backend}: {outcome.case}")
        for name, problem in outcome.problems.items():
            _say(f"  {name} {problem}")


def _failing_layers() -> dict[str, str]:
    """Train each norm on a tiny input; return the errors of those that fail, by short name."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from powernorm.norms import NORMS, build_norm

    failed = {}
    x = torch.linspace(-1, 1, 48).view(2, 3, 8)
    for name in NORMS:
        try:
            with warnings.catch_warnings():  # of an untested torch, which has been printed
                warnings.simplefilter("ignore")
                norm = build_norm(name, 8)
                for _ in range(2):
                    leaf = x.clone().requires_grad_()
                    y = norm(leaf).tanh() + checkpoint(norm, leaf, use_reentrant=False)
                    y.sum().backward()
                    if leaf.grad is None or not leaf.grad.isfinite().all():
                        raise ArithmeticError("the gradient is not finite")
        except Exception as error:  # an unknown torch may raise anything
            failed[name] = f"{type(error).__name__}: {error}"
    return failed


def _say(line: str) -> None:
    print(line)  # noqa: T201
