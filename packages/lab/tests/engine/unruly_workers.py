"""Training functions that workers import and that end their worker or fail."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch.nn import functional as F

from own_training import Classifier, examples
from powernorm_lab.engine.run import Run


def _trained(run: Run, steps: int, die_after: int | None = None) -> dict[str, Any]:
    """Train for some steps with a checkpoint after each; end the worker once after one of them."""
    model = run.swap(Classifier())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.track(model=model, optimizer=optimizer)
    x, y = examples()
    for step, _ in run.steps([None] * steps, checkpoint_every=1):
        mark = run.folder / "died"
        if die_after is not None and step == die_after and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(step, train_loss=loss)
    # Evaluated after the loop: a run that was lost after its last step does not enter it again.
    with torch.no_grad():
        return {"accuracy": -F.cross_entropy(model.eval()(x), y).item()}


def killed_once(run: Run, *, steps: int = 12, after: int = 9) -> dict[str, Any]:
    """Train, and kill the worker after some steps of the first attempt; 0 means never."""
    return _trained(run, steps, after)


def killed_with_pn(run: Run, *, steps: int = 3) -> dict[str, Any]:
    """Train, and always end the worker for PowerNorm."""
    if run.path("x").parent.name.startswith("pn"):
        os.kill(os.getpid(), signal.SIGKILL)
    return _trained(run, steps)


def failing_with_pn(run: Run, *, steps: int = 3) -> dict[str, Any]:
    """Train, but always raise an error for PowerNorm, and record the attempts."""
    if run.folder.name.startswith("pn"):
        with (run.folder.parent / "calls").open("a") as file:
            file.write("pn\n")
        raise ValueError("no pn today")
    return _trained(run, steps)


def without_goal(run: Run, *, steps: int = 3) -> dict[str, Any]:
    """Train, and return metrics without the goal."""
    _trained(run, steps)
    return {"loss": 0.0}


def counted(run: Run, *, steps: int = 4) -> dict[str, Any]:
    """Train, and record that the run has ended."""
    found = _trained(run, steps)
    with (run.folder.parent / "ends").open("a") as file:
        file.write(f"{run.folder.name}\n")
    return found
