"""The loop of all tasks: updates of the weights, with validations and checkpoints between them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from powernorm.diagnosis import NormMonitor
from powernorm.integrations.trainers import loss_scale
from powernorm.lab.data.batch import Batch
from powernorm.lab.engine.processes import gather, num_processes, rank
from powernorm.lab.engine.run import Run
from powernorm.lab.engine.state import random_states, set_random_states
from powernorm.lab.engine.stopping import Stopped
from powernorm.lab.engine.watching import Monitoring, evaluating
from powernorm.lab.models.stream_memory import merged_states, own_state
from powernorm.lab.settings.comparison import ComparisonSettings, early_step
from powernorm.lab.training.batches import RunData, own_evaluation
from powernorm.lab.training.checkpoints import Checkpoints
from powernorm.lab.training.diagnosing import Diagnosing
from powernorm.lab.training.distribution import (
    accumulating,
    divide_weights,
    load_state,
    load_weights,
    synchronized,
    whole,
    whole_state,
    whole_weights,
)
from powernorm.lab.training.evaluation import gap_cells, summed_nll, word_perplexity
from powernorm.lab.training.losses import Losses, TrainingLoss, batch_penalty
from powernorm.lab.training.optimization import build_optimizer, learning_rate, optimized
from powernorm.lab.training.precision import autocast
from powernorm.lab.training.recording import Recorder
from powernorm.norms import set_loss_scale
from powernorm.norms.models import forget_penalties


@runtime_checkable
class Remembering(Protocol):
    """A model that goes on from what it has seen in earlier batches."""

    def memory_state(self) -> list[dict[str, Tensor]]:
        """Return the memory of the training."""
        ...

    def load_memory_state(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Go on from what `memory_state` returned."""
        ...


class TrainingLoop:
    """Trains a model on the batches of a run.

    Every process makes one and calls the same methods.

    Args:
        run: of the engine, with a `ComparisonSettings` as its settings.
        model: is moved to the run's device and trained in place.
        data: of the run.
        recorder: writes down what happens.
        checkpoints: of the run.

    Attributes:
        step: number of updates that are done.
    """

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        data: RunData[Any],
        recorder: Recorder,
        checkpoints: Checkpoints,
    ) -> None:
        self._config: ComparisonSettings = run.settings
        self._stop = run.stop
        self._device = run.device
        self._model = model.to(run.device)
        self._data = data
        self._recorder = recorder
        self._checkpoints = checkpoints
        self._run = run
        self.step = 0
        self._is_over = False
        training = self._config.training
        is_scaled = training.precision == "float16"
        self._scaler = torch.amp.GradScaler(run.device.type, enabled=is_scaled)
        # Before anything that takes the model's code as it is then, such as a compiler.
        self._monitoring = self._watched() if training.monitor_every else None
        self._diagnosing = (
            Diagnosing(run.folder.name, model, self._config, data.batches, run.device)
            if training.diagnose_every
            else None
        )
        if training.strategy == "fsdp2" and num_processes() > 1:
            divide_weights(model, run.device)
        self._optimizer = build_optimizer(model, self._config.optimizer, fused=self._may_fuse())
        loss = TrainingLoss(model, self._config.label_smoothing, compile=training.compile)
        self._loss = synchronized(loss)
        # The gradients of processes are averaged: each has so many times its share of the loss.
        set_loss_scale(
            model, num_processes(), scaler=self._scaler if self._scaler.is_enabled() else None
        )

    def _watched(self) -> Monitoring:
        return Monitoring(
            NormMonitor(self._model, self._config.training.monitor_every),
            lambda: loss_scale(self._scaler, self._device) * num_processes(),
            self._recorder.record_norm,
        )

    def _may_fuse(self) -> bool:
        # A fused optimizer undoes the loss scale by itself, so nothing can clip before it.
        return self._config.training.precision == "float32" and num_processes() == 1

    # State that survives an interruption

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds; every process calls it, and the first one saves it."""
        model = self._model
        return {
            "step": self.step,
            "weights": whole_weights(model),
            "optimizer": whole_state(self._optimizer, model),
            "scaler": self._scaler.state_dict(),
            "random": gather(random_states()),
            "history": self._recorder.state_dict(),
            "memory": merged_states(gather(model.memory_state()))
            if isinstance(model, Remembering)
            else None,
            "is_over": self._is_over,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned, also in another number of processes.

        Those without random states in it go on with numbers of their own.
        """
        self.step = int(state["step"])
        self._is_over = state["is_over"]
        load_weights(self._model, state["weights"])
        load_state(self._optimizer, self._model, state["optimizer"])
        if state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])
        self._recorder.load_state_dict(state["history"])
        if state["memory"] is not None and isinstance(self._model, Remembering):
            self._model.load_memory_state(own_state(state["memory"], rank(), num_processes()))
        if rank() < len(state["random"]):
            set_random_states({**random_states(), **state["random"][rank()]})

    # Training

    @property
    def is_pruned(self) -> bool:
        """Whether the run is a trial that fell behind at the validation after this step."""
        trial, step = self._run.trial, self.step
        if trial is None or step >= self._config.training.max_steps:
            return False
        return trial.is_behind(self._run.norm, step, self._recorder.best_valid)

    def train(self) -> None:
        """Train to the end, or until patience or the loss is lost.

        Raises:
            Stopped: a scheduler asked for it; the state is saved.
            InputError: a checkpoint cannot be written.
        """
        config = self._config
        self._checkpoints.forget_after(self.step)
        self._model.train()
        self._stop.defer(until_asked=True)
        try:
            if not self._is_over and self.step < config.training.max_steps:
                self._recorder.open(self.step)
                if self.step == 0:
                    self._diagnose()
                first = self.step * config.optimizer.accumulation
                self._update_until_over(iter(self._data.training(self._device, first)))
            self._recorder.summarize_speed()
        finally:
            self._stop.defer(until_asked=False)
            self._recorder.close()
            if self._monitoring is not None:
                self._monitoring.close()

    def _update_until_over(self, batches: Iterator[Batch]) -> None:
        training = self._config.training
        while not self._is_over:
            self._update(batches)
            self._diagnose()
            if self.step == early_step(self._config):
                self._checkpoints.save_early(self.state())
            # The last weights are always measured.
            self._is_over = self.step >= training.max_steps or self._recorder.is_nonfinite
            is_validated = self._is_over or self.step % training.validate_every == 0
            if is_validated:
                self._validate()
            if self._stop.is_requested():
                if not is_validated:
                    self._checkpoints.save(self.state())
                raise Stopped(f"stopped after update {self.step}")

    def _update(self, batches: Iterator[Batch]) -> None:
        """Update the weights by the next micro-batches."""
        config, recorder = self._config, self._recorder
        if self._monitoring is not None:
            self._monitoring.start(self.step + 1)
        self._optimizer.zero_grad()
        for part in reversed(range(config.optimizer.accumulation)):
            batch = next(batches)
            recorder.begin_batch()
            with accumulating(self._loss) if part else nullcontext():
                logged = self._go_back(batch.to(self._device))
            if part == 0:
                rate = self._move_weights()
            recorder.end_batch(batch, logged)
        self.step += 1
        recorder.record_update(self.step, rate)
        if self._monitoring is not None:
            self._monitoring.finish(self.step)

    def _go_back(self, batch: Batch) -> Tensor:
        """Add the gradients of a micro-batch, and return the loss that is logged."""
        forget_penalties(self._model)
        with self._autocast():
            # A tuple again, whatever wraps the module made of it.
            minimized, logged = Losses(*self._loss(batch))
        penalty = batch_penalty(self._model, batch)
        if penalty is not None:
            minimized = minimized + penalty.to(minimized)
        self._scaler.scale(minimized / self._config.optimizer.accumulation).backward()
        return logged

    def _move_weights(self) -> float:
        """Move the weights by the gradients, and return the learning rate."""
        rate = learning_rate(self._config, self.step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._scaler.unscale_(self._optimizer)
        if self._config.optimizer.clip_norm is not None:
            nn.utils.clip_grad_norm_(optimized(self._optimizer), self._config.optimizer.clip_norm)
        # In float16 it leaves out a step whose gradients overflowed.
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return rate

    def _autocast(self) -> AbstractContextManager[Any]:
        return autocast(self._device, self._config.training.precision)

    def _diagnose(self) -> None:
        """Measure batch statistics at the norms, where that is due."""
        if self._diagnosing is not None and self._diagnosing.is_due(self.step):
            self._recorder.pause()
            self._recorder.record_diagnosis(self._diagnosing.diagnose(self.step))

    def _validate(self) -> None:
        """Measure the valid split, and save."""
        data, model, recorder = self._data, self._model, self._recorder
        recorder.pause()
        with evaluating(model), torch.no_grad():
            batches = data.validation()
            with self._autocast():
                nll, num_targets = summed_nll(
                    model, own_evaluation(batches), self._device, torch.float32
                )
            loss = nll / num_targets
            perplexity = word_perplexity(loss, data.words_per_token("valid"))
            score = self._score(loss)
            # The same batches in every process: those of this one alone are fewer in some.
            gap = gap_cells(model, batches, self._device)
        recorder.record_validation(self.step, loss, perplexity, score, gap)
        self._is_over |= recorder.is_out_of_patience() or self.is_pruned
        self._checkpoints.save(self.state(), validated=True, is_best=recorder.is_best)

    def _score(self, loss: float) -> float | None:
        """Return the task's own score at a validation; None where none is due."""
        data, name = self._data, self._config.score_name
        if name is None or name in (derived := data.from_loss(loss)):
            return None if name is None else derived[name]
        is_last = self._is_over or self._recorder.is_out_of_patience(loss)
        if not self._recorder.is_score_due(is_last=is_last):
            return None
        with whole(self._model):
            score = data.scores("valid", self._model, self._device, brief=True)[name]
        # The first one's in all: each may have running statistics of its own.
        return gather(score)[0]
