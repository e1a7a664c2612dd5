"""Training function with a known result: a valley over its learning rate."""

from __future__ import annotations

import math
from typing import Any

from powernorm_lab.engine.run import Run

BEST = {"ln": -2.0, "bn": -1.5, "rbn": -1.0, "pn": -1.0}
"""Logarithm of the learning rate at the bottom of the valley, by norm."""


def train(
    run: Run, *, learning_rate: float = 1e-4, width: float = 1.0, depth: int = 0, steps: int = 6
) -> dict[str, Any]:
    """Return a valid loss, and a test loss that is best where the valid loss is worst."""
    run.build_norm(4)
    run.track()
    distance = abs(math.log10(learning_rate) - BEST[run.norm]) / width
    valid = 1 + distance + 0.001 * (run.seed % 7) - 0.01 * depth
    for step, _ in run.steps([None] * steps):
        run.log(step, train_loss=valid, valid_loss=valid + 1 / step)
    return {"valid_loss": valid, "test_loss": 10 - valid}


def failing(run: Run, *, learning_rate: float = 1e-4, steps: int = 2) -> dict[str, Any]:
    """Fail always with ln, and at small rates with bn."""
    run.build_norm(4)
    if run.norm == "ln" or learning_rate < 1e-3:
        raise ValueError("no rate is good")
    return {"valid_loss": learning_rate, "test_loss": steps}
