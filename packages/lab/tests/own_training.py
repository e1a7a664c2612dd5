"""Small example of a user's training function: batches in random order, dropout, a monitor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from powernorm_lab.engine.events import Event
from powernorm_lab.engine.grid import Grid
from powernorm_lab.engine.grid_training import compare_grid
from powernorm_lab.engine.run import Run
from powernorm_lab.own_grid import own_grid
from powernorm_lab.runs import RunResult

NUM_TRAINED = 120


class Classifier(nn.Module):
    """Classifier with two hidden layers and norms."""

    def __init__(self, num_features: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(8, num_features)
        self.norm = nn.LayerNorm(num_features)
        self.second = nn.Linear(num_features, num_features)
        self.norm2 = nn.LayerNorm(num_features)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(num_features, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        return self.head(self.dropout(torch.relu(self.norm2(self.second(hidden)))))


def examples() -> tuple[Tensor, Tensor]:
    """Return inputs and classes; the class is whether two of the inputs have the same sign."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 8, generator=generator)
    return x, (x[:, 0] * x[:, 1] > 0).long()


def train(
    run: Run, *, learning_rate: float = 1e-2, steps: int = 20, checkpoint_every: int = 6
) -> dict[str, Any]:
    """Train, and return the accuracy on held-out examples."""
    model = run.swap(Classifier()).to(run.device)
    called = run.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    run.monitor(5)
    x, y = examples()
    pairs = TensorDataset(x[:NUM_TRAINED], y[:NUM_TRAINED])
    loader = DataLoader(pairs, batch_size=32, shuffle=True)

    def evaluate() -> dict[str, Tensor]:
        logits = model(x[NUM_TRAINED:])
        loss = F.cross_entropy(logits, y[NUM_TRAINED:])
        accuracy = (logits.argmax(-1) == y[NUM_TRAINED:]).float().mean()
        return {"valid_loss": loss, "accuracy": accuracy}

    run.evaluate_every(10, evaluate)
    run.keep_last(2)
    for step, (inputs, targets) in run.steps(loader, checkpoint_every=checkpoint_every):
        loss = F.cross_entropy(called(inputs), targets)
        (loss + run.penalty(num_tokens=len(targets))).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        run.log(step, train_loss=loss)
    run.load("average")
    model.eval()
    with torch.no_grad():
        return dict(evaluate())


def tiny_grid(function: Any = train, **changes: Any) -> Grid:
    """Return the grid of a comparison of the function above or another one."""
    chosen: dict[str, Any] = {
        "norms": ["ln", "bn", "rbn", "pn"],
        "seeds": [0],
        "goal": {"accuracy": "max"},
        "settings": {},
        "norm_options": {},
        "device": "cpu",
    }
    return own_grid(function, **{**chosen, **changes})


def trained(
    function: Any,
    out: Path,
    *,
    resume: bool = False,
    on_event: Callable[[Event], None] | None = None,
    **changes: Any,
) -> dict[str, RunResult]:
    """Return the results of a comparison by norm; its goal is the lowest `loss`."""
    grid = tiny_grid(function, **{"goal": {"loss": "min"}, **changes})
    results = compare_grid(grid, out, resume=resume, on_event=on_event)
    return {run.norm: run for run in results.runs}


def run_folders(out: Path) -> Iterator[Path]:
    """Yield the folders of the runs of a comparison by name."""
    yield from sorted(path.parent for path in out.glob("*/config.json"))
