"""The state of the kernels in the terminal."""

import torch
from rich.console import Console

from powernorm.ops.dispatch import explain
from powernorm.ops.inspection import Health, describe_environment, inspect_backends


def print_health() -> bool:
    """Prints backends, reasons and errors; False where one computes wrongly."""
    console = Console()
    for name, value in describe_environment().items():
        console.print(f"{name}: {value}", highlight=False)
    found = inspect_backends()
    for health in found:
        _print_backend(console, health)
    console.print()
    served = explain(torch.empty(1, 1), "batch_norm")[0].backend
    console.print(f"on the CPU your models use: {served}", highlight=False)
    console.print(
        "which backend serves one input, and why: powernorm.ops.explain(x)", highlight=False
    )
    return not any(health.failures for health in found)


def _print_backend(console: Console, health: Health) -> None:
    console.print()
    if not health.available:
        console.print(f"{health.backend}: not available: {health.detail}", highlight=False)
        return
    console.print(f"{health.backend}: {health.detail}", highlight=False)
    for dtype in dict.fromkeys(dtype for dtype, _ in health.errors):
        errors = {op: error for (kind, op), error in health.errors.items() if kind == dtype}
        worst = max(errors, key=lambda op: errors[op])
        failed = [op for kind, op in health.failures if kind == dtype]
        verdict = f"WRONG: {', '.join(failed)}" if failed else "right"
        console.print(
            f"  {dtype}: {verdict} (largest error against float64: {errors[worst]:.1e}, {worst})",
            highlight=False,
        )
