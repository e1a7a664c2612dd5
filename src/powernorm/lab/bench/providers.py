"""Who competes: this library's norms by backend, torch's, compiled ones, other libraries'."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.norms import build_norm
from powernorm.ops import eager, explain, use_backend
from powernorm.ops.batch_norm import BatchNormArgs, BatchNormOutput
from powernorm.ops.batch_norm import reference as batch_norm_reference
from powernorm.ops.dispatch import missing_reason, use_functions
from powernorm.ops.running_stats import Update

BASELINE: Final = "torch LayerNorm"
COPY: Final = "copy"

NORMS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "pn-only": ("pn-only", {"warmup_steps": 0}),
    "pn": ("pn", {"warmup_steps": 0}),
    "pn-static": ("pn-static", {"warmup_steps": 0}),
    "pnv": ("pnv", {}),
    "bn": ("bn", {}),
    "rbn": ("rbn", {}),
    "adanorm": ("adanorm", {}),
    "ln-simple": ("ln-simple", {}),
    "rms": ("rms", {}),
    "gs": ("gs", {"groups": 4}),
}
"""This library's norms that have kernels: label, short name and options."""


@dataclass(frozen=True)
class Provider:
    """One competitor.

    Attributes:
        name: unique label.
        norm: what it computes, for finding its rivals.
        backend: what serves it.
        build: makes the module for a number of features.
        takes_mask: does its forward take a padding mask?
        scope: entered around each call.
    """

    name: str
    norm: str
    backend: str
    build: Callable[[int], nn.Module]
    takes_mask: bool = False
    scope: Callable[[], AbstractContextManager[None]] = nullcontext


def providers(norms: tuple[str, ...], *, with_eager: bool, with_compiled: bool) -> list[Provider]:
    """All competitors that can run here, torch's LayerNorm first.

    Args:
        norms: names of `NORMS`.
        with_eager: this library's eager reference too.
        with_compiled: the reference and LayerNorm through torch.compile too.

    Raises:
        InputError: an unknown norm.
    """
    unknown = [name for name in norms if name not in NORMS]
    if unknown:
        raise InputError(
            f"norm {unknown[0]!r} has no benchmark; those that have: {', '.join(NORMS)}"
        )
    found = [
        Provider(BASELINE, "ln", "torch", nn.LayerNorm),
        Provider("torch RMSNorm", "rms", "torch", partial(nn.RMSNorm, eps=1e-5)),
        Provider("torch BatchNorm1d", "bn", "torch", nn.BatchNorm1d),
    ]
    if not missing_reason("cpu"):
        # As users have them: without a scope, whose cost shows in a small norm.
        natural = explain(torch.empty(1, 1), "static_norm")[0].backend == "cpu"
        scope = nullcontext if natural else partial(use_backend, "cpu")
        found += _ours(norms, "cpu", scope)
    if with_eager:
        found += _ours(norms, "eager", partial(use_backend, "eager"))
    if with_compiled:
        found += _ours(norms, "compiled", partial(use_functions, _compiled()))
        compiled = Provider("compiled LayerNorm", "ln", "compiled", _compiled_layer_norm)
        found.append(compiled)
    return found


def _ours(
    norms: tuple[str, ...], backend: str, scope: Callable[[], AbstractContextManager[None]]
) -> Iterator[Provider]:
    for label in norms:
        name, options = NORMS[label]
        build = partial(_build, name, options)
        yield Provider(f"{label} ({backend})", label, backend, build, True, scope)


def _build(name: str, options: dict[str, Any], features: int) -> nn.Module:
    return build_norm(name, features, **options)


@cache
def _compiled() -> Any:
    """The reference functions, each through torch.compile."""
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


class CopyMatrix(nn.Module):
    """Copies its input: what the memory allows."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.target = torch.empty_like(like)

    def forward(self, x: Tensor) -> Tensor:
        """The copy."""
        return self.target.copy_(x)
