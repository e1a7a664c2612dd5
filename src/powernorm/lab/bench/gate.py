"""Correctness before speed: nothing is timed that does not compute what it says."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.lab.bench.cases import DTYPES, Case
from powernorm.lab.bench.providers import NORMS, Provider
from powernorm.norms import build_norm
from powernorm.ops import use_backend

TOLERANCE: Final = {"float32": 5e-5, "float64": 1e-10, "bfloat16": 5e-2, "float16": 1e-2}
"""Largest error that passes, of the largest value that the reference has."""

_OF_OTHERS: Final = ("the output", "the input's gradient")
"""What is asked of other libraries: torch's LayerNorm sums γ's gradient in bfloat16, 6 % off."""

Results = dict[str, Tensor]


def check_providers(providers: Sequence[Provider], case: Case) -> None:
    """Compares every provider with the float64 reference, on the case that will be timed.

    Outputs; in training also the gradients of input, γ and β, and the running statistics. The
    reference is this library's eager code in float64.

    Raises:
        InputError: a provider is wrong; it is named.
    """
    exact: dict[tuple[str, bool], Results] = {}
    for provider in providers:
        key = (provider.norm, provider.takes_mask and bool(case.padding))
        if key not in exact:
            with use_backend("eager"):
                exact[key] = _run(_reference(provider, case), case, key[1], torch.float64)
        module = provider.build(case.features).to(DTYPES[case.dtype])
        kernels = provider.backend == "cpu"
        # A backend that is asked for raises where it cannot serve, instead of leaving it to eager.
        asked = use_backend(provider.backend) if kernels else nullcontext()  # type: ignore[arg-type]
        with asked, provider.scope():
            ours = _run(module, case, key[1], DTYPES[case.dtype])
        _compare(provider, case, ours, exact[key])


def _reference(provider: Provider, case: Case) -> nn.Module:
    name, options = NORMS.get(provider.norm, (provider.norm, {}))
    return build_norm(name, case.features, **options, dtype=torch.float64)


def _compare(provider: Provider, case: Case, ours: Results, exact: Results) -> None:
    for name, wanted in exact.items():
        if name not in ours:
            continue  # torch's layers name their state otherwise
        if not provider.takes_mask and name not in _OF_OTHERS:
            continue
        error = float((ours[name] - wanted).abs().max() / wanted.abs().max().clamp(min=1))
        if not error <= TOLERANCE[case.dtype]:
            raise InputError(
                f"{provider.name} is wrong on {case.label}: {name} is off by {error:.1e} of the "
                f"largest value (allowed {TOLERANCE[case.dtype]:.0e}), so nothing is timed"
            )


def _run(module: nn.Module, case: Case, masked: bool, dtype: torch.dtype) -> Results:
    """Output, gradients and state after one call, in float64."""
    generator = torch.Generator().manual_seed(1)
    x, cotangent = (
        (torch.randn(case.tokens, case.features, generator=generator) + offset)
        .to(DTYPES[case.dtype])
        .to(dtype)
        for offset in (0.3, 0.0)
    )
    arguments: tuple[Any, ...] = ()
    if masked:
        arguments = ((torch.rand(case.tokens, generator=generator) < case.padding),)
    module.train(case.direction != "evaluation")
    leaf = x.requires_grad_(case.direction == "forward+backward")
    with torch.set_grad_enabled(leaf.requires_grad):
        y = module(leaf, *arguments)
    results = {"the output": y.detach()}
    if leaf.requires_grad:
        y.backward(cotangent)
        assert leaf.grad is not None
        results["the input's gradient"] = leaf.grad
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                results[f"the gradient of {name}"] = parameter.grad
    results.update((name, b) for name, b in module.named_buffers() if b.is_floating_point())
    return {name: value.detach().double() for name, value in results.items()}
