"""The table of cases that drives all generic suites: a new norm is tested by one line here."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import powernorm
from powernorm.norms import NORMS, BatchStatisticsNorm


def uses_batch_statistics(name: str) -> bool:
    """Whether the training of a norm uses statistics over the tokens of a batch."""
    layer = NORMS[name].layer
    return inspect.isclass(layer) and issubclass(layer, BatchStatisticsNorm)


@dataclass(frozen=True)
class Case:
    """A norm with options, and what to expect of its gradient."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    exact_gradient: bool = True
    """Is its backward the derivative of its forward (in the state it starts in)?"""

    @property
    def id(self) -> str:
        return self.name + "".join(f"-{k}={v}" for k, v in self.options.items())

    def build(self, num_features: int = 8, **more: Any) -> nn.Module:
        """The layer with γ and β that are not 1 and 0."""
        norm = powernorm.build_norm(self.name, num_features, **{**self.options, **more})
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in norm.parameters():
                noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(noise.to(parameter.dtype) - 0.5)
        return norm

    @property
    def stateful(self) -> bool:
        return uses_batch_statistics(self.name)


CASES = (
    Case("ln"),
    Case("ln-simple"),
    Case("ln-simple", {"variant": "released"}),
    Case("ln-simple", {"affine": True}),
    Case("detach", {}, False),
    Case("detach", {"detach_mean": False}, False),
    Case("detach", {"detach_std": False}, False),
    Case("adanorm", {}, False),
    Case("adanorm", {"variant": "released", "scale": 2.0}, False),
    Case("rms"),
    Case("gs", {"groups": 2}),
    Case("gn", {"groups": 4}),
    Case("dyt"),
    Case("derf"),
    Case("dyisru"),
    Case("seednorm", {"num_heads": 2}),
    Case("scalenorm"),
    Case("biasnorm"),
    Case("gatednorm", {"rank": 2}),
    Case("none"),
    Case("none", {"affine": True}),
    Case("bn"),
    Case("bn", {"affine": False}),
    Case("bn", {"groups": 2}),
    Case("bn", {"momentum": None}),
    Case("bn", {"variant": "released"}),
    Case("rbn"),
    Case("rbn", {"variant": "released", "groups": 1}),
    Case("rbn", {"momentum": None}),
    Case("rbn", {"penalty": "diff2", "variant": "released"}),
    Case("rbn", {"penalty": "relative"}),
    Case("rbn", {"penalty": "jeffreys", "groups": 2}),
    Case("brn", {"warmup_steps": 0, "ramp_steps": 3}, False),
    Case("mabn", {"window": 2, "warmup_steps": 2, "ratio_start": 4}),
    Case("mabn", {"window": 1, "warmup_steps": 0, "ratio_start": 0, "groups": 2}, False),
    Case("un", {"window": 2, "warmup_steps": 2, "ratio_start": 4}, False),
    Case("un", {"window": [2, 3], "warmup_steps": 3, "filter_outliers": True}, False),
    Case("un", {"window": 1, "warmup_steps": 0}),
    Case("un", {"window": 2, "warmup_steps": 0, "variant": "released"}, False),
    Case("repbn"),
    Case("repbn", {"variant": "released", "eta": 0.0}),
    Case("prepbn", {"decay_steps": 3}),
    Case("prepbn", {"decay_steps": 5, "warmup_steps": 1, "evaluation": "blend", "kind": "rms"}),
    Case("taper", {"start_step": 2, "end_step": 5, "kind": "ln"}),
    Case("taper", {"start_step": 1, "end_step": 3}),
    Case("pnv"),
    Case("pnv", {"variant": "released"}),
    Case("pnv", {"groups": 4}),
    Case("pn", {"warmup_steps": 0}, False),
    Case("pn", {"warmup_steps": 3, "groups": 4}, False),
    Case("pn", {"warmup_steps": 2, "affine": False}, False),
    Case("pn", {"warmup_steps": 2, "variant": "released"}, False),
    Case("pn-only", {"warmup_steps": 0}, False),
    Case("pn-static", {"warmup_steps": 0}, False),
    Case("pn-static", {"warmup_steps": 2, "max_ratio": None, "decay": "floored"}, False),
)
ONE_EACH = tuple({case.name: case for case in reversed(CASES)}.values())
"""The first case of each norm."""
STATEFUL = tuple(case for case in CASES if case.stateful)
KEEPING_STATE = tuple(case for case in CASES if case.stateful or case.name == "taper")
"""Norms with buffers that training changes, batch statistics or not."""
PAPER = tuple(case for case in STATEFUL if case.options.get("variant") != "released")
"""The released variants treat padding in ways of their own (SPEC 4, 6.1, 6.3)."""
LAYOUTS = (
    ((2, 8, 3, 4), 1),
    ((3, 8, 5), 1),
    ((6, 8), 1),
    ((8, 5), 0),
    ((2, 3, 8, 4), -2),
    ((2, 8, 2, 3, 2), -4),
)
"""Shapes of inputs with 8 features in another dimension than the last, and that `feature_dim`."""
BATCH_FORWARD = tuple(case for case in STATEFUL if case.name in ("bn", "repbn", "pnv"))
"""Cases whose running statistics move in the forward."""


def case_id(case: Case) -> str:
    return case.id


def step(norm: nn.Module, x: torch.Tensor, mask: torch.Tensor | None, seed: int = 0) -> Any:
    """One training step with random cotangents: (y, grad_x)."""
    x = x.detach().clone().requires_grad_()
    y = norm(x, mask)
    generator = torch.Generator().manual_seed(seed)
    cotangent = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y)
    if mask is not None:
        cotangent = cotangent.masked_fill(mask.unsqueeze(-1), 0.0)
    (y * cotangent).sum().backward()
    return y.detach(), x.grad


def states(norm: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in norm.named_buffers()}


def is_stateful(norm: nn.Module) -> bool:
    return isinstance(norm, BatchStatisticsNorm)
