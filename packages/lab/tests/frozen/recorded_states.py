"""States of runs in the middle, in files that do not depend on the format of checkpoints."""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor


@dataclass(frozen=True)
class RecordedState:
    """Complete state from which a run continues.

    Attributes:
        step: number of completed updates, which with the settings determines the next batch.
        weights: parameters and buffers by name.
        optimizer: state of the optimizer by the names of parameters.
        random: state of torch's generator by process.
        memory: memory of earlier batches by lane, for a model that has one.
        scaler: state of the loss scaler in float16.
        losses: losses of micro-batches since the last row of the log, by process.
        valid_losses: losses of all validations so far.
        valid_scores: scores of all scored validations so far.
    """

    step: int
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Mapping[str, Tensor]]
    random: list[Tensor]
    memory: list[dict[str, Tensor]] | None
    scaler: dict[str, Any] | None
    losses: list[list[float]]
    valid_losses: list[float]
    valid_scores: list[float]


_NUMBERS = ("step", "scaler", "losses", "valid_losses", "valid_scores")


def write_state(path: Path, state: RecordedState) -> None:
    """Write a state, compressed."""
    tensors = {("weights", name): tensor for name, tensor in state.weights.items()}
    for name, kept in state.optimizer.items():
        tensors |= {("optimizer", name, key): tensor for key, tensor in kept.items()}
    tensors |= {("random", str(i)): numbers for i, numbers in enumerate(state.random)}
    for i, lane in enumerate(state.memory or []):
        tensors |= {("memory", str(i), key): tensor for key, tensor in lane.items()}
    numbers = {key: getattr(state, key) for key in _NUMBERS} | {"has_memory": bool(state.memory)}
    # Copies, because tied weights share memory.
    whole = {"/".join(key): tensor.clone().contiguous() for key, tensor in tensors.items()}
    packed = save(whole, {"numbers": json.dumps(numbers)})
    path.write_bytes(lzma.compress(packed, preset=9))


def read_state(path: Path, folder: Path) -> RecordedState:
    """Read a state of `write_state`, unpacked into a folder."""
    unpacked = folder / path.stem
    unpacked.write_bytes(lzma.decompress(path.read_bytes()))
    with safe_open(unpacked, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        numbers = json.loads(file.metadata()["numbers"])
    unpacked.unlink()
    tree: dict[str, Any] = {"weights": {}, "optimizer": {}, "random": {}, "memory": {}}
    for path_in_tree, tensor in tensors.items():
        *inner, last = path_in_tree.split("/")
        place = tree
        for key in inner:
            place = place.setdefault(key, {})
        place[last] = tensor
    has_memory = numbers.pop("has_memory")
    return RecordedState(
        weights=tree["weights"],
        optimizer=tree["optimizer"],
        random=[tree["random"][key] for key in sorted(tree["random"], key=int)],
        memory=[tree["memory"][key] for key in sorted(tree["memory"])] if has_memory else None,
        **numbers,
    )
