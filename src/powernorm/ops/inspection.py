"""What is available on this machine, why not the rest, and whether it computes right."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm.ops.batch_norm import BatchNormArgs, batch_norm
from powernorm.ops.dispatch import BACKENDS, VARIABLE, Backend, missing_reason, use_backend
from powernorm.ops.power_norm import PowerNormArgs, power_norm
from powernorm.ops.static_norm import StaticNormArgs, static_norm
from powernorm.ops.token_norm import TokenNormArgs, token_norm

_TYPES: Final[dict[Backend, tuple[torch.dtype, ...]]] = {
    "eager": (torch.float32, torch.bfloat16, torch.float64),
    "cpu": (torch.float32, torch.bfloat16, torch.float64),
    "triton": (torch.float32, torch.bfloat16, torch.float16),
}
_ALLOWED: Final = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    torch.bfloat16: 3e-2,
    torch.float16: 5e-3,
}


@dataclass(frozen=True)
class Health:
    """One backend on this machine.

    Attributes:
        backend: its name.
        available: can it run here?
        detail: what it is, or why it is missing.
        errors: largest error of outputs and gradients against float64, by type and op.
        failures: (type, op) beyond what its type allows.
    """

    backend: Backend
    available: bool
    detail: str
    errors: dict[tuple[str, str], float]
    failures: list[tuple[str, str]]


def inspect_backends() -> list[Health]:
    """Looks at every backend and lets it compute each op once."""
    return [_inspect(backend) for backend in BACKENDS]


def describe_environment() -> dict[str, str]:
    """Versions and settings that matter to the backends."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else "no device",
        "forced backend": os.environ.get(VARIABLE, "none"),
    }


def _inspect(backend: Backend) -> Health:
    missing = missing_reason(backend)
    if missing:
        return Health(backend, False, missing, {}, [])
    errors, failures = {}, []
    device = torch.device("cuda" if backend == "triton" and torch.cuda.is_available() else "cpu")
    for dtype in _TYPES[backend]:
        for op, compute in _OPS.items():
            key = (str(dtype).removeprefix("torch."), op)
            try:
                errors[key] = _error(compute, backend, dtype, device)
            except InputError as error:
                # Triton compiles at its first launch, which is this one.
                return Health(backend, False, missing_reason(backend) or str(error), {}, [])
            if not errors[key] <= _ALLOWED[dtype]:
                failures.append(key)
    return Health(backend, True, _detail(backend), errors, failures)


def _detail(backend: Backend) -> str:
    if backend == "cpu":
        from powernorm.ops.kernels.cpu.loading import load_library

        library = load_library()
        openmp = "torch's OpenMP threads" if library.uses_openmp else "one thread (no OpenMP)"
        return f"C++ kernels, {library.instruction_set}, {openmp}"
    if backend == "triton":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return "Triton kernels" + (", interpreted (slow, for tests)" if interpreted else "")
    return "torch operations, everywhere"


Compute = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _batch_norm(x: Tensor, mask: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean, var = torch.zeros_like(weight), torch.ones_like(weight)
    state = mean, var, None, None
    return batch_norm(BatchNormArgs(x, None, mask, weight, bias, *state, 0, 1e-5, False, "")).y


def _power_norm(x: Tensor, mask: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    state = torch.ones_like(weight), torch.full_like(weight, 0.1), None
    return power_norm(
        PowerNormArgs(x, None, mask, weight, bias, *state, 2, 1e-5, False, 0.0, False, "")
    )[0]


def _token_norm(x: Tensor, _: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return token_norm(TokenNormArgs(x, None, weight, bias, k=0.1))[0]


def _static_norm(x: Tensor, _: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    state = torch.zeros_like(weight), torch.ones_like(weight)
    return static_norm(StaticNormArgs(x, None, weight, bias, *state, 0, 1e-5, False))[0]


_OPS: Final[dict[str, Compute]] = {
    "batch_norm": _batch_norm,
    "power_norm": _power_norm,
    "token_norm": _token_norm,
    "static_norm": _static_norm,
}


def _error(compute: Compute, backend: Backend, dtype: torch.dtype, device: torch.device) -> float:
    generator = torch.Generator().manual_seed(0)
    x, cotangent = (
        torch.randn(67, 18, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
        for _ in range(2)
    )
    mask = torch.rand(67, generator=generator, dtype=torch.float32, device="cpu") < 0.3
    affine = [
        torch.rand(18, generator=generator, dtype=torch.float32, device="cpu") + 0.5
        for _ in range(2)
    ]
    results = []
    for served, kind, place in ((backend, dtype, device), ("eager", torch.float64, "cpu")):
        wide = torch.float64 if kind == torch.float64 else torch.float32
        leaf = x.detach().to(place, kind, copy=True).requires_grad_()
        vectors = (vector.to(place, wide) for vector in affine)
        with use_backend(served):  # type: ignore[arg-type]
            y = compute(leaf, mask.to(place), *vectors)
            y.backward(cotangent.to(place, kind))
        assert leaf.grad is not None
        results.append(torch.stack([y.detach(), leaf.grad]).double().cpu())
    ours, exact = results
    return float((ours - exact).abs().max() / exact.abs().max())
