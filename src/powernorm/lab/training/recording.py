"""Writes down what happens while a run trains, and says when its loss is lost."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from powernorm.integrations.trainers import log_entries
from powernorm.lab.data.batch import Batch
from powernorm.lab.engine.events import Listener, StepsDone, Validated
from powernorm.lab.engine.logs import CsvLog, JsonLinesLog, MergedLog
from powernorm.lab.engine.processes import gather, is_main, num_processes, rank, summed
from powernorm.lab.settings.comparison import ComparisonSettings
from powernorm.lab.training.batches import RunData
from powernorm.lab.training.throughput import Throughput
from powernorm.runs import (
    DIAGNOSES_FILE,
    METRICS_COLUMNS,
    METRICS_FILE,
    NORMS_COLUMNS,
    NORMS_FILE,
    DiagnosisRecord,
)

TENSORBOARD_FOLDER: Final = "tensorboard"


class Recorder:
    """Fills the logs of a run and TensorBoard, tells the listener and keeps the run's history.

    A run whose loss was NaN or infinite at every micro-batch between two rows of the log is
    lost: single ones happen in float16, where the step is skipped, but broken weights stay.

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
        batches = data.batches
        self._batches_per_epoch = batches.batches_per_epoch
        self._tokens_per_update = batches.tokens_per_batch * config.optimizer.accumulation
        self._listener = listener
        self._throughput = Throughput()
        self._seconds_before = 0.0
        self._started = time.perf_counter()
        self._csv: CsvLog | None = None
        self._norms_csv: CsvLog | None = None
        self._diagnoses: JsonLinesLog | None = None
        self._log: MergedLog | None = None
        self._board: SummaryWriter | None = None
        self._losses: list[Tensor] = []
        self._tokens_per_second: float | None = None
        self.valid_losses: list[float] = []
        """Of every validation of the run so far, earlier sittings included."""
        self.valid_scores: list[float] = []
        """Of those at which the task's own score was told."""
        self.is_best = False
        """Whether the latest validation is the best one."""
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

    @property
    def best_valid(self) -> float | None:
        """Return the best value so far of what the best checkpoint is best by."""
        if self._config.selects_by_score:
            sign = -1 if self._config.score and self._config.score["direction"] == "max" else 1
            return min(self.valid_scores, key=lambda score: sign * score, default=None)
        return min(filter(math.isfinite, self.valid_losses), default=None)

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
        self.valid_scores = list(state_dict["valid_scores"])
        self._throughput.examples = state_dict["measured_examples"]

    def open(self, step: int) -> None:
        """Open the logs; a run that goes on keeps the rows up to its checkpoint.

        Args:
            step: number of updates that are done.
        """
        if not is_main():
            return
        kept = step or None
        self._csv = CsvLog(self._folder / METRICS_FILE, METRICS_COLUMNS, kept)
        self._log = MergedLog(self._csv)
        self._norms_csv = CsvLog(self._folder / NORMS_FILE, NORMS_COLUMNS, kept)
        self._diagnoses = JsonLinesLog(self._folder / DIAGNOSES_FILE, kept)
        self._board = SummaryWriter(str(self._folder / TENSORBOARD_FOLDER), purge_step=kept)

    def begin_batch(self) -> None:
        """Start the clock."""
        self._throughput.begin_batch()

    def end_batch(self, batch: Batch, loss: Tensor) -> None:
        """Gather the loss of a micro-batch.

        Args:
            batch: of this process.
            loss: that is logged, 0-d; it is read from the device when a row is due.
        """
        self._throughput.end_batch(batch.num_tokens, len(batch.targets))
        self._losses.append(loss)

    def pause(self) -> None:
        """Stop the clock."""
        self._throughput.pause()

    def record_update(self, step: int, learning_rate: float) -> None:
        """Write a row where one is due after an update.

        Args:
            step: number of updates that are done.
            learning_rate: of this one.
        """
        settings = self._config.training
        if step % settings.log_every and step < settings.max_steps:
            return
        losses = torch.stack([loss.to(self._losses[-1].device) for loss in self._losses])
        self._losses.clear()
        total, num_finite = summed([float(losses.mean()), float(losses.isfinite().sum())])
        loss = total / num_processes()
        last_batch = step * self._config.optimizer.accumulation - 1
        epoch = last_batch // self._batches_per_epoch
        cells = {"epoch": epoch, "learning_rate": learning_rate, "train_loss": loss}
        self._write(step, cells)
        self._listener(StepsDone(self._norm, self._seed, step, loss))
        self.is_nonfinite = not math.isfinite(loss) and not num_finite

    def is_score_due(self, *, is_last: bool) -> bool:
        """Return whether the validation that is going on tells the task's score.

        Args:
            is_last: whether it is the run's last one.
        """
        every = self._config.score_every
        return every > 0 and (is_last or (len(self.valid_losses) + 1) % every == 0)

    def record_validation(
        self,
        step: int,
        loss: float,
        perplexity: float,
        score: float | None,
        gap: Mapping[str, float],
    ) -> None:
        """Write a validation and tell the listener.

        Args:
            step: number of updates that are done.
            loss: nats per token.
            perplexity: per word.
            score: of the task; None where it has none, or none was due.
            gap: cells that compare running with batch statistics.
        """
        self.valid_losses.append(loss)
        cells = {"valid_loss": loss, "valid_perplexity": perplexity}
        named = None
        name = self._config.score_name
        if score is not None and name is not None:
            self.valid_scores.append(score)
            cells["valid_score"] = score
            named = (name, score)
        selects = score is not None or not self._config.selects_by_score
        self.is_best = selects and self._waited(self.valid_losses) == 0
        self._write(step, cells | dict(gap))
        if self._log is not None:
            self._log.flush()
        self._listener(Validated(self._norm, self._seed, step, loss, perplexity, named))

    def is_out_of_patience(self, next_loss: float | None = None) -> bool:
        """Return whether the run has waited long enough for a better validation.

        Args:
            next_loss: of a validation that is not recorded yet.
        """
        patience = self._config.training.patience
        losses = self.valid_losses if next_loss is None else [*self.valid_losses, next_loss]
        return patience is not None and self._waited(losses) >= patience

    def _waited(self, losses: Sequence[float]) -> int:
        """Return the number of validations after the best one, of what selects."""
        if self._config.selects_by_score:
            losses = [-score for score in self.valid_scores]
        best, waited = math.inf, 0
        for loss in losses:
            # NaN is no better than anything.
            best, waited = (loss, 0) if loss < best else (best, waited + 1)
        return waited

    def record_norm(self, row: Mapping[str, Any]) -> None:
        """Append what was seen of a norm in an update to norms.csv."""
        if self._norms_csv is not None:
            self._norms_csv.write(row)
            self._show(row["step"], log_entries([row]))

    def record_diagnosis(self, record: DiagnosisRecord) -> None:
        """Append a diagnosis to diagnoses.jsonl."""
        if self._diagnoses is not None:
            self._diagnoses.write(record)

    def summarize_speed(self) -> None:
        """Add up the tokens and examples of all processes; every one of them calls it."""
        self._throughput.pause()
        speed, rows = self._throughput.tokens_per_second, self._throughput.examples_per_second
        total, total_rows = summed([speed or 0.0, rows or 0.0])
        self._tokens_per_second = total if speed is not None else None
        self._examples_per_second = total_rows if rows is not None else None

    def close(self) -> None:
        """Close the logs with what there is."""
        self._throughput.pause()
        with ExitStack() as closing:  # also where the last row cannot be written
            for file in (self._csv, self._norms_csv, self._board):
                if file is not None:
                    closing.callback(file.close)
            log, self._log = self._log, None
            self._csv = self._norms_csv = self._board = self._diagnoses = None
            if log is not None:
                log.flush()

    def _write(self, step: int, cells: Mapping[str, float]) -> None:
        tokens = round(step * self._tokens_per_update)
        position = {"tokens": tokens, "seconds": round(self.seconds, 3)}
        if self._log is not None:
            self._log.add(step, {**position, **cells})
        self._show(step, cells)

    def _show(self, step: int, cells: Mapping[str, float]) -> None:
        if self._board is not None:
            for name, value in cells.items():
                if math.isfinite(value):
                    self._board.add_scalar(name, value, step)
