"""The competitors: this library's norms by backend, torch's, compiled ones; right before fast."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn

from powernorm import InputError, build_norm
from powernorm.ops import eager, explain, use_backend
from powernorm.ops.batch_norm import BatchNormArgs, BatchNormOutput
from powernorm.ops.batch_norm import reference as batch_norm_reference
from powernorm.ops.dispatch import missing_reason, use_functions
from powernorm.ops.running_stats import Update

BASELINE: Final = "torch LayerNorm"
DTYPES: Final = {n: getattr(torch, n) for n in ("float32", "bfloat16", "float16")}
NORMS: Final[dict[str, dict[str, Any]]] = {
    **{name: {"warmup_steps": 0} for name in ("pn-only", "pn", "pn-static")},
    **{name: {} for name in ("pnv", "bn", "rbn", "adanorm", "ln-simple", "rms")},
    "gs": {"groups": 4},
}
"""This library's norms that have kernels, with options: what they are for most of a training."""
TOLERANCE: Final = {"float32": 5e-5, "bfloat16": 5e-2}
"""Largest error that passes, of the largest value that the reference has."""

_OF_OTHERS: Final = ("the output", "the input's gradient")
"""Asked of other libraries: torch's LayerNorm sums γ's gradient in bfloat16, 6 % off."""

Results = dict[str, Tensor]


class Case(NamedTuple):
    """One comparison of all providers."""

    tokens: int
    """Padding included."""
    features: int
    dtype: str = "float32"
    padding: float = 0.0
    """Share of padded tokens; those without a mask treat padding as tokens."""
    direction: str = "forward+backward"
    """`forward` and `forward+backward` in training mode, `evaluation` without gradients."""

    @property
    def num_bytes(self) -> int:
        """Bytes that no implementation can avoid: each matrix once from or to memory."""
        # x, y; and x, the gradients of y and of x.
        matrices = 5 if self.direction == "forward+backward" else 2
        return matrices * self.tokens * self.features * DTYPES[self.dtype].itemsize

    @property
    def label(self) -> str:
        """A short name for tables."""
        padding = f", {self.padding:.0%} padding" if self.padding else ""
        return f"{self.tokens}×{self.features} {self.dtype}{padding}, {self.direction}"


class Provider(NamedTuple):
    """One competitor."""

    name: str
    """Unique label."""
    norm: str
    """Name of what it computes, for finding its rivals."""
    backend: str
    """Name of what serves it."""
    build: Callable[[int], nn.Module]
    """Makes the module for a number of features."""
    takes_mask: bool = False
    """Does its forward take a padding mask?"""
    scope: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered around each call."""


def providers(norms: Collection[str] = NORMS.keys(), *, all_backends: bool) -> list[Provider]:
    """Return all competitors that can run here, torch's LayerNorm first.

    Args:
        norms: names of `NORMS`.
        all_backends: this library's eager reference, and it and LayerNorm through torch.compile.
    """
    found = [
        Provider(BASELINE, "ln", "torch", nn.LayerNorm),
        Provider("torch RMSNorm", "rms", "torch", partial(nn.RMSNorm, eps=1e-5)),
        Provider("torch BatchNorm1d", "bn", "torch", nn.BatchNorm1d),
    ]
    if not missing_reason("cpu"):
        # As users have them: without a scope, whose cost shows in a small norm.
        natural = explain(torch.empty(1, 1), "static_norm")[0].backend == "cpu"
        found += _ours(norms, "cpu", nullcontext if natural else partial(use_backend, "cpu"))
    if all_backends:
        found += _ours(norms, "eager", partial(use_backend, "eager"))
        found += _ours(norms, "compiled", partial(use_functions, _compiled()))
        found.append(Provider("compiled LayerNorm", "ln", "compiled", _compiled_layer_norm))
    return found


def _ours(
    norms: Collection[str], backend: str, scope: Callable[[], AbstractContextManager[None]]
) -> Iterator[Provider]:
    for name in norms:
        build = partial(build_norm, name, **NORMS[name])
        yield Provider(f"{name} ({backend})", name, backend, build, True, scope)


@cache
def _compiled() -> Any:
    """Return the reference functions, each through torch.compile."""
    # Every shape, type and set of options is a graph of its own; past the limit torch runs eagerly.
    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.accumulated_recompile_limit = 10_000
    compiled = {
        name: torch.compile(getattr(eager, name), dynamic=False)
        for name in eager.__all__
        if name not in ("batch_norm", "update_running_stats")
    }
    forward = torch.compile(batch_norm_reference, dynamic=False)

    def batch_norm(args: BatchNormArgs, update: Update | None = None) -> BatchNormOutput:
        output = forward(args)
        if update is not None:
            assert output.sums is not None
            eager.update_running_stats(update, output.sums)
        return output

    moves = eager.update_running_stats
    return SimpleNamespace(**compiled, batch_norm=batch_norm, update_running_stats=moves)


def _compiled_layer_norm(features: int) -> nn.Module:
    return cast(nn.Module, torch.compile(nn.LayerNorm(features), dynamic=False))


def check_providers(found: Sequence[Provider], case: Case) -> None:
    """Compare every provider with the float64 reference, on the case that will be timed.

    Outputs; in training also the gradients of input, γ and β, and the running statistics. The
    reference is this library's eager code in float64.

    Raises:
        InputError: a provider is wrong; it is named.
    """
    exact: dict[tuple[str, bool], Results] = {}
    for provider in found:
        key = (provider.norm, provider.takes_mask and bool(case.padding))
        if key not in exact:
            options = NORMS.get(provider.norm, {})
            reference = build_norm(provider.norm, case.features, **options, dtype=torch.float64)
            with use_backend("eager"):
                exact[key] = _run(reference, case, key[1], torch.float64)
        module = provider.build(case.features).to(DTYPES[case.dtype])
        # A backend that is asked for raises where it cannot serve, instead of leaving it to eager.
        asked = use_backend("cpu") if provider.backend == "cpu" else nullcontext()
        with asked, provider.scope():
            ours = _run(module, case, key[1], DTYPES[case.dtype])
        _compare(provider, case, ours, exact[key])


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
    """Return output, gradients and state after one call, in float64."""
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
