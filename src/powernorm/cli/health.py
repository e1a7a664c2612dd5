"""What `powernorm doctor` prints. It needs torch alone, for who asks may have nothing else."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from powernorm.ops.inspection import Health


def print_health() -> bool:
    """Print which kernels this machine has, why not the rest, and whether they compute right.

    Returns:
        Whether none computes wrong.
    """
    import torch

    from powernorm.ops.dispatch import explain
    from powernorm.ops.inspection import describe_environment, inspect_backends

    for name, value in describe_environment().items():
        _say(f"{name}: {value}")
    found = inspect_backends()
    for health in found:
        _say("")
        _print_backend(health)
    served = explain(torch.empty(1, 1), "batch_norm")[0].backend
    _say("")
    _say(f"on the CPU your models use: {served}")
    _say("which backend serves one input, and why: powernorm.ops.explain(x)")
    _say("every norm, type, mask and width: powernorm doctor --kernels")
    return not any(health.failures for health in found)


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
