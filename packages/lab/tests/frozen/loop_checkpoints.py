"""Conversion of a run's checkpoints to the states of recordings, and back.

This is the only file of the recordings that depends on the format of checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recorded_states import RecordedState
from torch import Tensor

from powernorm.records import CONFIG_FILE
from powernorm_lab.engine.averaging import write_weights
from powernorm_lab.engine.distribution import optimized
from powernorm_lab.engine.folders import BEST, LAST, owner_of, read_json
from powernorm_lab.engine.state import random_states, read_checkpoint
from powernorm_lab.engine.state import write_checkpoint as write
from powernorm_lab.runs import CHECKPOINTS_FOLDER
from powernorm_lab.tasks.registry import task_of
from powernorm_lab.tasks.trained_models import run_config
from powernorm_lab.training.optimization import build_optimizer


def state_of_run(run: Path) -> RecordedState:
    """Return the state in the last checkpoint of a run."""
    content = read_checkpoint(run / CHECKPOINTS_FOLDER / LAST)
    states = content["states"]
    _, names = _optimizer_of(run, states["model"])
    return RecordedState(
        step=content["step"],
        weights=states["model"],
        optimizer={names[i]: kept for i, kept in states["optimizer"]["state"].items()},
        random=[one["torch"] for one in content["random"]],
        memory=states["memory"]["lanes"] if "memory" in states else None,
        scaler=states.get("scaler"),
        losses=states["losses"]["by_process"],
        valid_losses=states["validations"]["losses"],
        valid_scores=states["validations"]["scores"],
    )


def write_checkpoint(run: Path, state: RecordedState) -> None:
    """Write a state into the folder of a run, as after a first validation."""
    optimizer, names = _optimizer_of(run, state.weights)
    numbers = {names.index(name): dict(kept) for name, kept in state.optimizer.items()}
    states: dict[str, Any] = {
        "model": dict(state.weights),
        "optimizer": {**optimizer, "state": numbers},
        "losses": {"by_process": state.losses},
        "validations": {"losses": state.valid_losses, "scores": state.valid_scores},
    }
    states |= {} if state.scaler is None else {"scaler": state.scaler}
    states |= {} if state.memory is None else {"memory": {"lanes": state.memory}}
    here = random_states()
    content = {
        "run": owner_of(run),
        "step": state.step,
        "position": [],
        "seconds": 1.0,
        "lost_rows": 0,
        "evaluated_at": state.step,
        "trial": (None, False),
        "best": {"best": min(state.valid_losses), "waited": 0},
        "speed": {"seconds": 1.0, "tokens": 1, "examples": 1},
        "states": states,
        "gradients": {},
        "random": [here | {"torch": numbers} for numbers in state.random],
    }
    (run / CHECKPOINTS_FOLDER).mkdir(exist_ok=True)
    for name in (LAST, BEST):
        with (run / CHECKPOINTS_FOLDER / name).open("w+b") as file:
            write(file, content)
    _write_snapshot(run, state)


def _write_snapshot(run: Path, state: RecordedState) -> None:
    if read_json(run / CONFIG_FILE)["training"]["average_checkpoints"]:
        weights = {f"model.{name}": tensor for name, tensor in state.weights.items()}
        write_weights(run / CHECKPOINTS_FOLDER / f"step-{state.step}.safetensors", weights)


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
