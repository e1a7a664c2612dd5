"""A user's file, which `mypy --strict` checks against both installed packages; never run."""

from pathlib import Path
from typing import assert_type

import torch
from torch import nn

import powernorm
import powernorm_lab as lab


def train(run: lab.Run, *, learning_rate: float = 1e-3) -> dict[str, float]:
    """Train a small model with the norm of the run."""
    model = run.swap(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    for step, x in run.steps([torch.randn(4, 8) for _ in range(100)]):
        loss = model(x).square().mean() + powernorm.penalty(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(step, train_loss=loss.item())
    return {"loss": float(loss)}


def compare(folder: Path) -> lab.Comparison:
    """Compare two norms, tuned and not."""
    found = lab.compare(train, folder, norms=["ln", "rbn"], seeds=2, goal={"loss": "min"})
    assert_type(found, lab.Comparison)
    return lab.tune(train, folder / "tuned", trials=3, goal={"loss": "min"})


def recipe() -> lab.ComparisonSettings:
    """Return the settings of a built-in task."""
    return lab.override(lab.recipe("lm", "smoke"), ["norms=ln,rbn"])
