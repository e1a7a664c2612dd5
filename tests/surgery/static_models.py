"""Models with calibrated static norms to be folded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import powernorm
from powernorm.inspection.rows import NormRow
from powernorm.norms import BatchStatisticsNorm
from surgery.foreign_models import FAMILIES, PADDED

STATIC = ("bn", "rbn", "brn", "mabn", "un", "repbn", "prepbn", "pnv", "pn-only", "pn-static")
"""Every norm that is static in evaluation."""


def left_of(row: NormRow) -> str:
    """Result of folding for a norm: `fold` (nothing remains), `multiply-add` or `keep`."""
    return row.into[0] if row.action == "simplify" else row.action


def static_family(name: str, to: str = "bn") -> tuple[nn.Module, dict[str, Any]]:
    """A model of `FAMILIES` with static norms everywhere, calibrated, and its arguments."""
    model, inputs = FAMILIES[name]()
    powernorm.swap(model, to=to, where="*")
    settle(model)
    calls = [PADDED[name](0)] if name in PADDED else [inputs]
    powernorm.calibrate(model, calls)
    return model.eval(), calls[0]


def settle(model: nn.Module, seed: int = 3) -> nn.Module:
    """γ, β and statistics that are not at their start, as after training."""
    generator = torch.Generator().manual_seed(seed)

    def draw(like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)

    with torch.no_grad():
        for norm in model.modules():
            if not isinstance(norm, BatchStatisticsNorm) or hasattr(norm, "is_prepared"):
                continue
            norm.num_batches_tracked.fill_(5)
            for name, buffer in norm.named_buffers():
                if name.endswith(("var", "second_moment")):
                    buffer.copy_(draw(buffer) + 0.5)
                elif name.endswith("mean"):
                    buffer.copy_(2 * draw(buffer) - 1)
            if norm.weight is not None:
                norm.weight.copy_(draw(norm.weight) + 0.5)
                norm.bias.copy_(draw(norm.bias) - 0.5)
    return model.eval()
