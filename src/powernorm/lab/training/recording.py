"""Writes down what happens while a run trains, and stops it when its loss is lost."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from powernorm.diagnosis import NormRow
from powernorm.lab.data.batch import Batch
from powernorm.lab.engine.events import Listener, StepsDone, Validated
from powernorm.lab.engine.logs import CsvLog, MergedLog
from powernorm.lab.engine.processes import gather, is_main, num_processes, rank, summed
from powernorm.lab.settings.comparison import ComparisonSettings
from powernorm.lab.training.batches import RunData
from powernorm.lab.training.evaluation import finite_or_none, gap_cells
from powernorm.lab.training.module import TaskModule
from powernorm.lab.training.throughput import Throughput
from powernorm.runs import METRICS_COLUMNS, METRICS_FILE, NORMS_COLUMNS, NORMS_FILE


class Recorder(pl.Callback):
    """Fills metrics.csv, norms.csv and TensorBoard, tells the listener and keeps the run's history.

    A run whose loss was NaN or infinite at every micro-batch between two rows of the log is
    stopped: single ones happen in float16, where the step is skipped, but broken weights stay.

    Args:
        folder: the run's.
        config: of the comparison.
        norm: short name or label, for the events.
        seed: of the run, for the events.
        data: the batches of the run.
        listener: is told about steps and validations.
    """

    def __init__(
        self,
        folder: Path,
        config: ComparisonSettings,
        norm: str,
        seed: int,
        data: RunData[Any],
        listener: Listener,
    ) -> None:
        self._folder = folder
        self._config = config
        self._norm = norm
        self._seed = seed
        self._data = data
        segments = data.segments
        self._batches_per_epoch = segments.batches_per_epoch
        self._tokens_per_update = segments.tokens_per_batch * config.optimizer.accumulation
        self._listener = listener
        self._throughput = Throughput()
        self._seconds_before = 0.0
        self._started = time.perf_counter()
        self._csv: CsvLog | None = None
        self._norms_csv: CsvLog | None = None
        self._log: MergedLog | None = None
        self._losses: list[Tensor] = []
        self._tokens_per_second: float | None = None
        self._learning_rate = 0.0
        self.valid_losses: list[float] = []
        """Of every validation of the run so far, earlier sittings included."""
        self.valid_scores: list[float] = []
        """The same of the score, where the task has one."""
        self._examples_per_second: float | None = None
        self.is_nonfinite = False

    @property
    def seconds(self) -> float:
        """Return the seconds that the run took so far, over all its sittings."""
        return self._seconds_before + time.perf_counter() - self._started

    @property
    def tokens_per_second(self) -> float | None:
        """Return the speed of training steps in this run, of all processes together."""
        return self._tokens_per_second

    @property
    def examples_per_second(self) -> float | None:
        """Return the speed of training in rows of the batches, of all processes together."""
        return self._examples_per_second

    def state_dict(self) -> dict[str, Any]:
        """Return what a run that goes on has to know; every process calls it."""
        return {
            # Of micro-batches since the last row of the log, by process.
            "losses": gather([float(loss) for loss in self._losses]),
            "seconds": self.seconds,
            "valid_losses": list(self.valid_losses),
            "valid_scores": list(self.valid_scores),
            "measured_seconds": self._throughput.seconds,
            "measured_tokens": self._throughput.tokens,
            "measured_examples": self._throughput.examples,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        losses: list[list[float]] = state_dict.get("losses") or [[]]
        if len(losses) == num_processes():
            own = losses[rank()]
        else:
            own = [sum(values) / len(values) for values in zip(*losses, strict=True)]
        self._losses = [torch.tensor(loss) for loss in own]
        self._seconds_before = state_dict["seconds"]
        self.valid_losses = list(state_dict["valid_losses"])
        self._throughput.seconds = state_dict["measured_seconds"]
        self._throughput.tokens = state_dict["measured_tokens"]
        # Not in checkpoints from before there were scores.
        self.valid_scores = list(state_dict.get("valid_scores", []))
        self._throughput.examples = state_dict.get("measured_examples", 0)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the logs; a run that goes on keeps the rows up to its checkpoint."""
        del pl_module
        if not is_main():
            return
        step = trainer.global_step or None
        self._csv = CsvLog(self._folder / METRICS_FILE, METRICS_COLUMNS, step)
        self._log = MergedLog(self._csv)
        self._norms_csv = CsvLog(self._folder / NORMS_FILE, NORMS_COLUMNS, step)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Start the clock."""
        del trainer, pl_module, batch, batch_idx
        self._throughput.begin_batch()

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Note the rate of this update; the schedule moves on before the row is written."""
        del trainer, pl_module
        self._learning_rate = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Gather the loss; write a row where one is due."""
        del pl_module
        self._throughput.end_batch(batch.num_tokens, len(batch.targets))
        self._losses.append(outputs["cross_entropy"])
        if (batch_idx + 1) % self._config.optimizer.accumulation:
            return
        settings = self._config.training
        is_last = trainer.global_step >= settings.max_steps
        if trainer.global_step % settings.log_every == 0 or is_last:
            self._write_training(trainer, batch_idx)
        if is_last:
            # Lightning validates before it obeys, so that the last weights are always measured.
            trainer.should_stop = True

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock."""
        del trainer, pl_module
        self._throughput.pause()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the validation and tell the listener."""
        assert isinstance(pl_module, TaskModule)
        loss, perplexity = pl_module.valid_loss, pl_module.valid_perplexity
        self.valid_losses.append(loss)
        cells = {"valid_loss": loss, "valid_perplexity": perplexity}
        score = None
        if pl_module.valid_score is not None and self._data.selection is not None:
            self.valid_scores.append(pl_module.valid_score)
            cells["valid_score"] = pl_module.valid_score
            score = (self._data.selection, pl_module.valid_score)
        # The same batches in every process: those of this one alone are fewer in some.
        cells |= gap_cells(pl_module.model, self._data.validation(), pl_module.device)
        self._write(trainer, trainer.global_step, cells)
        if self._log is not None:
            self._log.flush()
        step = trainer.global_step
        self._listener(Validated(self._norm, self._seed, step, loss, perplexity, score))

    def record_norms(self, rows: Sequence[NormRow]) -> None:
        """Append what was seen of the norms to norms.csv."""
        if self._norms_csv is not None:
            for row in rows:
                self._norms_csv.write(row)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close the logs and count the tokens of all processes."""
        del trainer, pl_module
        self._throughput.pause()
        speed, rows = self._throughput.tokens_per_second, self._throughput.examples_per_second
        total, total_rows = summed([speed or 0.0, rows or 0.0])
        self._tokens_per_second = total if speed is not None else None
        self._examples_per_second = total_rows if rows is not None else None
        self._close()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Close the logs with what there is."""
        del trainer, pl_module, exception
        self._close()

    def _write_training(self, trainer: pl.Trainer, batch_idx: int) -> None:
        losses = torch.stack([loss.to(self._losses[-1].device) for loss in self._losses])
        self._losses.clear()
        total, num_finite = summed([float(losses.mean()), float(losses.isfinite().sum())])
        loss = total / num_processes()
        step = trainer.global_step
        cells = {
            "epoch": batch_idx // self._batches_per_epoch,
            "learning_rate": self._learning_rate,
            "train_loss": loss,
        }
        self._write(trainer, step, cells)
        self._listener(StepsDone(self._norm, self._seed, step, loss))
        if not math.isfinite(loss) and not num_finite:
            self.is_nonfinite = True
            trainer.should_stop = True

    def _write(self, trainer: pl.Trainer, step: int, cells: Mapping[str, float]) -> None:
        tokens = round(step * self._tokens_per_update)
        position = {"tokens": tokens, "seconds": round(self.seconds, 3)}
        if self._log is not None:
            self._log.add(step, {**position, **cells})
        shown = {name: value for name, value in cells.items() if finite_or_none(value) is not None}
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.log_metrics(shown, step)

    def _close(self) -> None:
        self._throughput.pause()
        with ExitStack() as closing:  # also where the last row cannot be written
            for file in (self._csv, self._norms_csv):
                if file is not None:
                    closing.callback(file.close)
            log, self._log, self._csv, self._norms_csv = self._log, None, None, None
            if log is not None:
                log.flush()
