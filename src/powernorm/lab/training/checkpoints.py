"""Checkpoints from which a run goes on exactly as if it had not stopped."""

import math
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn

from powernorm.checksums import check_seal, load_sealed, save_sealed
from powernorm.errors import InputError
from powernorm.lab.engine.averaging import Snapshots
from powernorm.lab.engine.folders import LAST
from powernorm.lab.engine.leases import Lease
from powernorm.lab.engine.processes import gather, is_main, rank
from powernorm.lab.engine.stopping import Stop, Stopped
from powernorm.lab.training.module import TaskModule
from powernorm.norms.buffers import is_optional_key

BEST: Final = "best.ckpt"
EARLY: Final = "early.ckpt"
PREFIX: Final = "model."
"""Of the model's weights among those of the LightningModule."""
_FIX: Final = "remove the run's folder to train it anew"


class Checkpoints(pl.Callback):
    """Writes last.ckpt after every validation, and best.ckpt where it was the best so far.

    On request early.ckpt is kept after an update of the run, for a diagnosis at that time, and the
    weights of the last validations for their average. All are renamed into place, so that an
    interruption leaves the ones before it intact. Has to be the last callback, so that it saves
    what the others made of the validation.

    When a scheduler asks for the end, last.ckpt is written after the update at hand, and `Stopped`
    ends the training.

    Args:
        folder: made where it is missing.
        snapshots: of the weights.
        lease: of the run; None in processes that write nothing.
        stop: what a scheduler asks for.
        early_step: update after which early.ckpt is written; None writes none.
    """

    def __init__(
        self,
        folder: Path,
        snapshots: Snapshots,
        lease: Lease | None,
        stop: Stop,
        *,
        early_step: int | None = None,
    ) -> None:
        self._folder = folder
        self._snapshots = snapshots
        self._lease = lease
        self._stop = stop
        self._early_step = early_step
        self._best_loss = math.inf
        self._is_over = False

    def state_dict(self) -> dict[str, Any]:
        """Return the best loss so far, and whether the run was to stop."""
        return {"best_loss": self._best_loss, "is_over": self._is_over}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._best_loss = state_dict["best_loss"]
        self._is_over = state_dict["is_over"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop a run that had stopped early before it was interrupted."""
        del pl_module
        if is_main():
            self._snapshots.forget_after(trainer.global_step)
        if self._is_over:
            trainer.should_stop = True
        # Lightning answers SIGTERM with an end that looks like success.
        self._stop.install()
        self._stop.defer(until_asked=True)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Save the early checkpoint when its update is done."""
        del pl_module, outputs, batch
        is_last_of_update = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if trainer.global_step == self._early_step and is_last_of_update:
            with _writing(self._folder):
                trainer.save_checkpoint(self._folder / f".{EARLY}")
                if is_main():
                    (self._folder / f".{EARLY}").replace(self._folder / EARLY)
        # A validation saves by itself.
        if is_last_of_update and not _is_validated(trainer, batch_idx):
            self._stop_if_asked(trainer, save=True)

    def _stop_if_asked(self, trainer: pl.Trainer, *, save: bool) -> None:
        if not self._stop.is_requested():
            return
        if save:
            temporary = self._folder / f".{LAST}"
            with _writing(self._folder):
                trainer.save_checkpoint(temporary)
                if is_main():
                    with self._leased():
                        temporary.replace(self._folder / LAST)
        raise Stopped(f"stopped after update {trainer.global_step}")

    @contextmanager
    def _leased(self) -> Iterator[None]:
        if self._lease is None:
            yield
        else:
            with self._lease.writing():
                yield

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save."""
        assert isinstance(pl_module, TaskModule)
        is_best = pl_module.badness < self._best_loss
        if is_best:
            self._best_loss = pl_module.badness
        self._is_over = trainer.should_stop
        # Collected in every process: with divided weights each has a part.
        weights = trainer.strategy.lightning_module_state_dict() if self._snapshots.number else {}
        temporary = self._folder / f".{LAST}"
        with _writing(self._folder):
            trainer.save_checkpoint(temporary)
            if is_main():
                with self._leased():
                    self._put_in_place(trainer.global_step, weights, is_best=is_best)
        self._stop_if_asked(trainer, save=False)

    def _put_in_place(self, step: int, weights: dict[str, Tensor], *, is_best: bool) -> None:
        """Rename what was written; last.ckpt comes last, so that it never is ahead of the rest."""
        self._snapshots.keep(step, model_weights({"state_dict": weights}))
        temporary = self._folder / f".{LAST}"
        if is_best:
            copy = self._folder / f".{BEST}"
            shutil.copyfile(temporary, copy)
            copy.replace(self._folder / BEST)
        temporary.replace(self._folder / LAST)


def _is_validated(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Return whether a validation follows the update at hand."""
    is_last = trainer.global_step >= trainer.max_steps or trainer.should_stop
    return is_last or (batch_idx + 1) % int(trainer.val_check_batch or 1) == 0


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Make the folder, and turn a full disk and its like into an error that says what to do."""
    try:
        if is_main():
            folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        for path in folder.glob(".*"):
            with suppress(OSError):
                path.unlink()
        reason = error.strerror or str(error)
        raise InputError(
            f"{folder} cannot be written ({reason}): make room, then go on with --resume; the "
            "checkpoint before this one is whole."
        ) from error


class DirectFiles(TorchCheckpointIO):
    """Writes a checkpoint where it was asked for, with a checksum in it.

    Lightning's own way leads through the system's folder of temporary files, which may be small or
    in memory, and which keeps what a killed process was writing.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write the file; not in one step."""
        del storage_options
        save_sealed(checkpoint, Path(path))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read the file.

        Raises:
            InputError: it is damaged.
        """
        check_seal(Path(path), _FIX)
        return super().load_checkpoint(path, map_location, weights_only)


class RandomState(pl.Callback):
    """Keeps torch's random numbers in the checkpoint, those of every process; Lightning does not.

    With another number of processes than before, each goes on with numbers of its own.
    """

    def __init__(self) -> None:
        self._restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators of all devices, of all processes."""
        cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
        states = gather({"cpu": torch.get_rng_state(), "cuda": cuda})
        return {**states[0], "others": states[1:]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the states until training starts; what comes in between may draw numbers."""
        self._restored = state_dict

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set the generators."""
        del trainer, pl_module
        if self._restored is None:
            return
        states = [self._restored, *self._restored.get("others", [])]
        self._restored = None
        if rank() < len(states):
            _set_generators(states[rank()])


def _set_generators(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"][0].cpu())


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint.

    Raises:
        InputError: the file is damaged or is none of ours.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about a file that it refuses next
            content = load_sealed(path, _FIX)
        if {"state_dict", "global_step", "loops"} <= set(content):
            return dict(content)
        reason = "it holds something else"
    except InputError:
        raise
    except Exception as error:  # whatever a damaged file makes torch raise
        first_line = str(error).partition("\n")[0]
        reason = f"{type(error).__name__} {first_line.partition('. ')[0]}"
    raise InputError(f"{path} is not a checkpoint of a run ({reason}): {_FIX}")


def check_weights(path: Path, weights: Mapping[str, Tensor], model: nn.Module) -> None:
    """Check that the weights of a file are those of a model, by names and shapes.

    Raises:
        InputError: they are of another one; the message names a weight.
    """
    expected = model.state_dict()
    names = sorted(name for name in expected.keys() ^ weights.keys() if not is_optional_key(name))
    problem = f"{names[0]} is in one of them only" if names else ""
    for name in expected.keys() & weights.keys():
        given, wanted = tuple(weights[name].shape), tuple(expected[name].shape)
        if given != wanted:
            problem = f"{name} is {given} there and {wanted} here"
    if problem:
        raise InputError(
            f"{path} holds the weights of another model ({problem}): remove the run's folder to "
            "train it anew."
        )


def model_weights(content: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the model's weights in what `read_checkpoint` returned."""
    return {
        name.removeprefix(PREFIX): tensor
        for name, tensor in content["state_dict"].items()
        if name.startswith(PREFIX)
    }
