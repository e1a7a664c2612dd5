"""What `powernorm doctor` prints. It needs torch alone, for who asks may have nothing else."""

import warnings
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from powernorm.ops.inspection import Health

_SHOWN: Final = 5
"""Wrong calls that are printed in full."""


def print_health() -> bool:
    """Print which kernels this machine has, and whether these and the layers compute right.

    Returns:
        Whether none computes wrong or fails.
    """
    import torch

    from powernorm.ops.dispatch import explain
    from powernorm.ops.inspection import describe_environment, inspect_backends
    from powernorm.ops.torch_private import untested_note

    for name, value in describe_environment().items():
        _say(f"{name}: {value}")
    if note := untested_note():
        _say(f"warning: {note}")
    found = inspect_backends()
    for health in found:
        _say("")
        _print_backend(health)
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
    return not failed and not any(health.failures for health in found)


def print_kernel_check() -> bool:
    """Let all kernels compute every kind of call, and print their errors by backend and type.

    Returns:
        Whether all of them are right.
    """
    from powernorm.norms import kernel_check
    from powernorm.ops.dispatch import BACKENDS, missing_reason

    backends = kernel_check.kernels_here()
    outcomes = [
        outcome
        for case in (kernel_check.select_cases() if backends else [])
        if (able := [name for name in backends if kernel_check.takes(name, case)])
        for outcome in kernel_check.check_case(case, able)
    ]
    wrong = [outcome for outcome in outcomes if outcome.problems]
    for backend in BACKENDS[1:]:
        found = [outcome for outcome in outcomes if outcome.backend == backend]
        missing = missing_reason(backend)
        _say(f"{backend}: " + (f"not available: {missing}" if missing else f"{len(found)} calls"))
        for dtype in dict.fromkeys(outcome.case.dtype for outcome in found):
            worst = max((o for o in found if o.case.dtype == dtype), key=lambda o: o.error)
            norms = {o.case.setting.norm for o in found if o.case.dtype == dtype and o.problems}
            verdict = f"WRONG: {', '.join(sorted(norms))}" if norms else "right"
            largest = f"largest error: {worst.error:.2f}, {worst.case.setting.norm}"
            _say(f"  {str(dtype).removeprefix('torch.')}: {verdict} ({largest})")
    for outcome in wrong[:_SHOWN]:
        _say(f"\nWRONG on {outcome.backend}: {outcome.case}")
        for name, problem in outcome.problems.items():
            _say(f"  {name} {problem}")
    _say(
        "\nAn error of 1 is allowed: twice that of eager torch in the same type, and 32 roundings."
    )
    _say(f"{len(wrong)} of {len(outcomes)} calls are WRONG" if wrong else "all calls are right")
    return not wrong


def _failing_layers() -> dict[str, str]:
    """Let each norm train on a tiny input; return the errors of those that fail, by short name."""
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
        except Exception as error:  # anything, of a torch that is not known yet
            failed[name] = f"{type(error).__name__}: {error}"
    return failed


def _print_backend(health: "Health") -> None:
    if not health.available:
        _say(f"{health.backend}: not available: {health.detail}")
        return
    _say(f"{health.backend}: {health.detail}")
    for dtype in dict.fromkeys(dtype for dtype, _ in health.errors):
        errors = {op: error for (kind, op), error in health.errors.items() if kind == dtype}
        worst = max(errors, key=lambda op: errors[op])
        failed = [op for kind, op in health.failures if kind == dtype]
        verdict = f"WRONG: {', '.join(failed)}" if failed else "right"
        _say(f"  {dtype}: {verdict} (largest error against float64: {errors[worst]:.1e}, {worst})")


def _say(line: str) -> None:
    print(line)  # noqa: T201
