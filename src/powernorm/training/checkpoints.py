"""Checkpoints from which a run goes on exactly as if it had not stopped."""

import math
import shutil
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm.training.language_modeling import LanguageModeling

LAST: Final = "last.ckpt"
BEST: Final = "best.ckpt"
EARLY: Final = "early.ckpt"


class Checkpoints(pl.Callback):
    """Writes last.ckpt after every validation, and best.ckpt where it was the best so far.

    On request early.ckpt is kept after an update of the run, for a diagnosis at that time. All are
    renamed into place, so that an interruption leaves the ones before it intact. Has to be the last
    callback, so that it saves what the others made of the validation.

    Args:
        folder: made where it is missing.
        early_step: update after which early.ckpt is written; None writes none.
    """

    def __init__(self, folder: Path, *, early_step: int | None = None) -> None:
        self._folder = folder
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
        if self._is_over:
            trainer.should_stop = True

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
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary = self._folder / f".{EARLY}"
            trainer.save_checkpoint(temporary)
            temporary.replace(self._folder / EARLY)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save."""
        assert isinstance(pl_module, LanguageModeling)
        is_best = pl_module.valid_loss < self._best_loss
        if is_best:
            self._best_loss = pl_module.valid_loss
        self._is_over = trainer.should_stop
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / f".{LAST}"
        trainer.save_checkpoint(temporary)
        if is_best:
            copy = self._folder / f".{BEST}"
            shutil.copyfile(temporary, copy)
            copy.replace(self._folder / BEST)
        temporary.replace(self._folder / LAST)


class RandomState(pl.Callback):
    """Keeps torch's random numbers in the checkpoint; Lightning leaves them out."""

    def __init__(self) -> None:
        self._restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the generators of all devices."""
        cuda: list[Tensor] = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return {"cpu": torch.get_rng_state(), "cuda": cuda}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the states until training starts; what comes in between may draw numbers."""
        self._restored = state_dict

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set the generators."""
        del trainer, pl_module
        if self._restored is None:
            return
        torch.set_rng_state(self._restored["cpu"].cpu())
        if self._restored["cuda"]:
            torch.cuda.set_rng_state_all([state.cpu() for state in self._restored["cuda"]])
        self._restored = None


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint.

    Raises:
        InputError: the file is damaged or is none of ours.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if {"state_dict", "global_step", "loops"} <= set(content):
            return dict(content)
        reason = "it holds something else"
    except Exception as error:  # whatever a damaged file makes torch raise
        reason = " ".join([type(error).__name__, *str(error).splitlines()[:1]])
    raise InputError(
        f"{path} is not a checkpoint of a run ({reason}): remove the run's folder to train it anew."
    )
