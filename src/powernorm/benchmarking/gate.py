"""Correctness before speed: nothing is timed that does not compute what it says."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from powernorm.benchmarking.cases import DTYPES
from powernorm.benchmarking.providers import NORMS, Provider
from powernorm.errors import InputError
from powernorm.norms import build_norm
from powernorm.ops import use_backend

_TOKENS, _FEATURES = 130, 68
_TOLERANCE = {"float32": 2e-5, "float64": 1e-10, "bfloat16": 2e-2, "float16": 4e-3}


def check_providers(providers: Sequence[Provider], dtype: str, device: torch.device) -> None:
    """Compares outputs and gradients of this library's providers with the float64 reference.

    Raises:
        InputError: one is wrong; it is named.
    """
    for provider in providers:
        if provider.norm not in NORMS or not provider.takes_mask:
            continue
        error = _error_of(provider, dtype, device)
        if not error <= _TOLERANCE[dtype]:
            raise InputError(
                f"{provider.name} in {dtype} is off by {error:.1e} (allowed "
                f"{_TOLERANCE[dtype]:.0e} of the largest value): not timed"
            )


def _error_of(provider: Provider, dtype: str, device: torch.device) -> float:
    generator = torch.Generator().manual_seed(1)
    x, cotangent = (torch.randn(_TOKENS, _FEATURES, generator=generator) + i for i in range(2))
    x, cotangent = (t.to(device, DTYPES[dtype]) for t in (x, cotangent))
    mask = (torch.rand(_TOKENS, generator=generator) < 0.25).to(device)
    module = provider.build(_FEATURES).to(device, DTYPES[dtype])
    with provider.scope():
        ours = _step(module, x, cotangent, mask)
    name, options = NORMS[provider.norm]
    exact = build_norm(name, _FEATURES, **options, dtype=torch.float64, device=device)
    with use_backend("eager"):
        reference = _step(exact, x.double(), cotangent.double(), mask)
    return max(
        float((a.double() - b).abs().max() / b.abs().max().clamp(min=1))
        for a, b in zip(ours, reference, strict=True)
    )


def _step(module: torch.nn.Module, x: Tensor, cotangent: Tensor, mask: Tensor) -> list[Tensor]:
    leaf = x.detach().clone().requires_grad_()
    y = module(leaf, mask)
    y.backward(cotangent)
    assert leaf.grad is not None
    return [y.detach(), leaf.grad]
