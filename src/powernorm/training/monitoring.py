"""A Lightning callback that puts the statistics of the norms on record."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import nn

from powernorm.diagnosis import NormMonitor
from powernorm.integrations.lightning import scaler_of
from powernorm.integrations.trainers import log_entries, loss_scale
from powernorm.runs import NORMS_COLUMNS, NORMS_FILE
from powernorm.training.logs import CsvLog
from powernorm.training.processes import is_main, num_processes


class NormLog(pl.Callback):
    """Fills norms.csv and the run's TensorBoard folder with what the monitor sees.

    Args:
        model: the model inside the LightningModule, so that layers have its names for them.
        folder: the run's.
        every: updates from one observation to the next; 0 leaves the file with its header only.
        accumulation: micro-batches in an update.
    """

    def __init__(self, model: nn.Module, folder: Path, *, every: int, accumulation: int) -> None:
        self._model = model
        self._path = folder / NORMS_FILE
        self._every = every
        self._accumulation = accumulation
        self._monitor: NormMonitor | None = None
        self._csv: CsvLog | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the file and attach the monitor."""
        del pl_module
        step = trainer.global_step
        if is_main():
            self._csv = CsvLog(self._path, NORMS_COLUMNS, step if step else None)
        # In every process, since statistics are exchanged.
        if self._every:
            self._monitor = NormMonitor(self._model, self._every)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Arm the monitor at the first micro-batch of an update."""
        del batch
        if self._monitor is not None and batch_idx % self._accumulation == 0:
            # What is averaged over processes is as many times the loss of one alone.
            scale = loss_scale(scaler_of(trainer), pl_module.device) * num_processes()
            self._monitor.start_step(trainer.global_step + 1, scale)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Write what was seen, after the last micro-batch of an update."""
        del pl_module, outputs, batch
        if self._monitor is None or (batch_idx + 1) % self._accumulation:
            return
        rows = self._monitor.finish_step(trainer.global_step)
        if self._csv is not None:
            for row in rows:
                self._csv.write(row)
        if rows:
            entries = {name: v for name, v in log_entries(rows).items() if math.isfinite(v)}
            for logger in trainer.loggers:
                logger.log_metrics(entries, trainer.global_step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Detach and close."""
        del trainer, pl_module
        self._close()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Detach and close."""
        del trainer, pl_module, exception
        self._close()

    def _close(self) -> None:
        if self._monitor is not None:
            self._monitor.detach()
        if self._csv is not None:
            self._csv.close()
        self._monitor = self._csv = None
