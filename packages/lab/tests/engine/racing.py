"""A training with random results: norms differ by known gaps, and seeds have a shared effect."""

from __future__ import annotations

import torch
from torch import nn

from powernorm_lab.engine.run import Run

GAPS = {"ln": 0.2, "bn": 1.0, "rbn": 0.0, "pn": 0.01}


def train(run: Run, *, steps: int = 2, scatter: float = 0.01) -> dict[str, float]:
    """Train trivially, and return a loss that is drawn by norm and seed."""
    model = run.swap(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    run.track(model=model)
    for step, batch in run.steps([torch.ones(2, 4)]):
        run.log(step, train_loss=model(batch).square().mean() * step / steps)
    shared, own = (
        torch.Generator().manual_seed(number)
        for number in (run.seed, 10_000 + 100 * run.seed + ord(run.norm[0]))
    )
    value = 2 + torch.randn((), generator=shared) + GAPS[run.norm]
    return {"loss": float(value + scatter * torch.randn((), generator=own))}
