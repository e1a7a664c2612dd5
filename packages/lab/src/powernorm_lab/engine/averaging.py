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
_FIX: Final = "remove it, or the run's folder to train it anew"
_SNAPSHOT: Final = re.compile(r"step-(?P<step>\d+)\.safetensors")


class Snapshots:
    """Weights of the last validations of a run, in files of safetensors.

    Args:
        folder: the run's checkpoints.
        number: how many are kept, at least 1.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self._folder = folder
        self.number = number

    def paths(self) -> list[Path]:
        """Return the files that there are, oldest first."""
        if not self._folder.is_dir():
            return []
        found = [
            (step_of(path), path) for path in self._folder.iterdir() if step_of(path) is not None
        ]
        return [path for _, path in sorted(found)]

    def keep(self, step: int, weights: dict[str, Tensor]) -> None:
        """Write the weights after an update, and delete what is too old."""
        write_weights(self._folder / f"step-{step}.safetensors", weights)
        remove(*self.paths()[: -self.number])

    def forget_after(self, step: int) -> None:
        """Delete what a run wrote after the checkpoint from which it goes on."""
        remove(*(path for path in self.paths() if (step_of(path) or 0) > step))

    def average(self) -> dict[str, Tensor]:
        """Return the average of the last ones.

        Raises:
            InputError: there is none, or one is damaged.
        """
        paths = self.paths()[-self.number :]
        if not paths:
            raise InputError(f"{self._folder} holds no step-N.safetensors: train the run anew")
        return average_weights([read_weights(path) for path in paths])


def average_weights(checkpoints: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return means over checkpoints, taken in float64; whole numbers are those of the last one.

    Running statistics are averaged like the parameters, which makes them statistics of no network:
    of the mean of two networks the activations do not have the mean of the statistics. Calibrate
    the norms after it, or say that they are averaged.
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
    """Write tensors in one step with their checksum, those that share memory once.

    Raises:
        OSError: the folder cannot be written.
    """
    kept, shared = separate_tensors(weights)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The metadata of safetensors are strings: the second name of a tensor, and its first.
    save_sealed_tensors({name: tensor.cpu() for name, tensor in kept.items()}, path, shared)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file of `write_weights`.

    Raises:
        InputError: it is missing, damaged or something else.
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
