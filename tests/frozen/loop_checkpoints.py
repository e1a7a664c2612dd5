"""Checkpoints of today's training loop as the states that recordings keep, and back.

It is the only file of the recordings that knows the loop: a loop that takes its place has another.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from recorded_states import RecordedState
from torch import Tensor

from powernorm.lab.engine.averaging import Snapshots
from powernorm.lab.engine.folders import LAST, read_json
from powernorm.lab.tasks.registry import task_of
from powernorm.lab.tasks.trained_models import run_config
from powernorm.lab.training.checkpoints import Checkpoints, read_checkpoint
from powernorm.lab.training.optimization import build_optimizer, optimized
from powernorm.runs import CHECKPOINTS_FOLDER, CONFIG_FILE

_HISTORY: Final = ("losses", "valid_losses", "valid_scores")


def state_of_run(run: Path) -> RecordedState:
    """Return the state in the last checkpoint of a run."""
    content = read_checkpoint(run / CHECKPOINTS_FOLDER / LAST)
    _, names = _optimizer_of(run, content["weights"])
    return RecordedState(
        step=content["step"],
        weights=content["weights"],
        optimizer={names[i]: kept for i, kept in content["optimizer"]["state"].items()},
        random=[states["torch"] for states in content["random"]],
        memory=content["memory"],
        scaler=content["scaler"] or None,
        **{key: content["history"][key] for key in _HISTORY},
    )


def write_checkpoint(run: Path, state: RecordedState) -> None:
    """Write a state into the folder of a run, as it is after a first validation."""
    optimizer, names = _optimizer_of(run, state.weights)
    content = {
        "step": state.step,
        "weights": dict(state.weights),
        "optimizer": {
            **optimizer,
            "state": {names.index(name): dict(kept) for name, kept in state.optimizer.items()},
        },
        "scaler": state.scaler,
        "random": [{"torch": numbers, "cuda": []} for numbers in state.random],
        "history": {
            **{key: getattr(state, key) for key in _HISTORY},
            **dict.fromkeys(("seconds", "measured_seconds"), 1.0),
            **dict.fromkeys(("measured_tokens", "measured_examples"), 1),
        },
        "memory": state.memory,
        "is_over": False,
    }
    folder = run / CHECKPOINTS_FOLDER
    kept = read_json(run / CONFIG_FILE)["training"]["average_checkpoints"]
    checkpoints = Checkpoints(folder, Snapshots(folder, kept), None)
    checkpoints.save(content, validated=True, is_best=True)


def _optimizer_of(run: Path, weights: Mapping[str, Tensor]) -> tuple[dict[str, Any], list[str]]:
    """Return the state of a new optimizer of a run, and its parameters' names in its order."""
    settings = read_json(run / CONFIG_FILE)
    config, task = run_config(settings), task_of(run_config(settings))
    sizes = tuple(task.sizes_of_weights(weights))
    model = task.build(config, settings["norm"], sizes, settings["seed"])
    fused = config.training.precision == "float32"  # as the loop has it in one process
    optimizer = build_optimizer(model, config.optimizer, fused=fused)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return optimizer.state_dict(), [names[id(parameter)] for parameter in optimized(optimizer)]
