"""The average of the last checkpoints' weights (Vaswani et al. 2017, 6.1; Junczys-Dowmunt 2016)."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from powernorm.checksums import SAFETENSORS_KEY, check_seal, save_sealed_tensors
from powernorm.errors import InputError
from powernorm.files import remove
from powernorm.surgery.saving.storage import separate_tensors

AVERAGE: Final = "average.safetensors"
_FIX: Final = "remove it, or remove the run's folder to train the run again"
_SNAPSHOT: Final = re.compile(r"step-(?P<step>\d+)\.safetensors")


class Snapshots:
    """Weights of the last validations of a run, in files of safetensors.

    Args:
        folder: the run's checkpoints.
        number: number of files to keep, at least 1.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self._folder = folder
        self.number = number

    def paths(self) -> list[Path]:
        """Return the existing files, oldest first."""
        if not self._folder.is_dir():
            return []
        found = [
            (step_of(path), path) for path in self._folder.iterdir() if step_of(path) is not None
        ]
        return [path for _, path in sorted(found)]

    def keep(self, step: int, weights: dict[str, Tensor]) -> None:
        """Write the weights after an update, and delete older files than the last `number`."""
        write_weights(self._folder / f"step-{step}.safetensors", weights)
        remove(*self.paths()[: -self.number])

    def forget_after(self, step: int) -> None:
        """Delete files of later steps than the checkpoint from which the run resumes."""
        remove(*(path for path in self.paths() if (step_of(path) or 0) > step))

    def average(self) -> dict[str, Tensor]:
        """Return the average of the kept weights.

        Raises:
            InputError: there is no file, or one is damaged.
        """
        paths = self.paths()[-self.number :]
        if not paths:
            raise InputError(f"{self._folder} holds no step-N.safetensors: train the run again")
        return average_weights([read_weights(path) for path in paths])


def average_weights(checkpoints: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return means over checkpoints, computed in float64; integers come from the last checkpoint.

    Running statistics are averaged like the parameters, but the activations of the averaged network
    do not have the averaged statistics. Calibrate the norms afterwards, or report that their
    statistics are averages.
    """
    last = checkpoints[-1]
    means: dict[str, Tensor] = {}
    for name, tensor in last.items():
        if tensor.is_floating_point():
            stacked = torch.stack([weights[name].double() for weights in checkpoints])
            means[name] = stacked.mean(0).to(tensor.dtype)
        else:
            means[name] = tensor
    return means


def write_weights(path: Path, weights: dict[str, Tensor]) -> None:
    """Write tensors atomically with their checksum; tensors that share memory are stored once.

    Raises:
        OSError: the folder cannot be written.
    """
    kept, shared = separate_tensors(weights)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The metadata of safetensors are strings: they map further names of a tensor to its first name.
    save_sealed_tensors({name: tensor.cpu() for name, tensor in kept.items()}, path, shared)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file that `write_weights` wrote.

    Raises:
        InputError: the file is missing, damaged or of another kind.
    """
    try:
        check_seal(path, _FIX)
        with safe_open(path, "pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            shared = dict(file.metadata() or {})
        shared.pop(SAFETENSORS_KEY, None)
        return weights | {name: weights[first] for name, first in shared.items()}
    except (OSError, SafetensorError, KeyError) as error:
        raise InputError(f"{path} holds no weights ({error}): {_FIX}") from error


def step_of(path: Path) -> int | None:
    """Return the update after which a file of `Snapshots` was written; None for other files."""
    match = _SNAPSHOT.fullmatch(path.name)
    return int(match["step"]) if match else None
