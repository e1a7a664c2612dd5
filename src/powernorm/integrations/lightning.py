"""Callbacks for any LightningModule: the penalty of RBN, TID in the log, calibration, ν in float16.

In float16 the gradients are multiplied by a loss scale, in whose units ν of PowerNorm and MABN is.
`LossScaleFollower(model, scaler)` makes them follow it in any LightningModule. Create the scaler
yourself, so that Lightning and the callback share it:

    scaler = torch.amp.GradScaler("cuda")
    pl.Trainer(
        plugins=[MixedPrecision("16-mixed", "cuda", scaler)],
        callbacks=[LossScaleFollower(module, scaler)],
    )
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from powernorm.diagnosis import NormMonitor, NormRow, Schedule
from powernorm.errors import InputError
from powernorm.inspection.batches import Forward
from powernorm.integrations.extras import needed_for
from powernorm.integrations.trainers import (
    count_labels,
    log_entries,
    loss_scale,
    process_penalty,
)
from powernorm.norms import set_loss_scale
from powernorm.norms.arguments import check_count, check_function, check_model, check_number
from powernorm.norms.models import Reduction, forget_penalties
from powernorm.surgery.calibration import Way, calibrate, check_calibratable

with needed_for("powernorm.integrations.lightning"):
    import lightning.pytorch as pl

__all__ = ["CalibrateCallback", "LossScaleFollower", "NormCallback", "NumTokens", "PenaltyCallback"]

NumTokens = Callable[[Any], int | Tensor]
"""Function that returns the number of tokens over which the loss of a batch is averaged."""


class PenaltyCallback(pl.Callback):
    """Callback that adds the penalty of RegularizedBatchNorm to the loss of `training_step`.

    λ of Wang et al. 2022 belongs to a cross entropy summed over tokens. With N tokens in the
    micro-batch, k micro-batches in an update and a mean loss, the update minimizes
    `(1/k) Σ_i (loss_i + penalty_i/N_i)`, where penalty_i is that of micro-batch i; with
    `reduction="token_sum"` it minimizes `(1/k) Σ_i (loss_i + penalty_i)`. The penalty is added just
    before the backward, after Lightning has divided the loss by k and a GradScaler has scaled it,
    and it is divided and scaled like the loss. The logged loss does not include it, evaluation is
    without it, and a model without such layers is unchanged. The penalty of a batch whose
    `training_step` returns None is dropped.

    Args:
        num_tokens: number of tokens that the loss of a batch is the mean of: a function of the
            batch, or the key (or attribute) of its labels, of which those that are not -100
            count. Needed for `mean`.
        reduction: how `training_step` reduces its loss: `mean` over tokens, or `token_sum`.

    Raises:
        InputError: num_tokens is missing, superfluous or returns no number of at least 1; manual
            optimization; a batch without that key.

    Distributed:
        See `powernorm.integrations.trainers.process_penalty`: each process counts the tokens of its
        own batch.
    """

    def __init__(
        self, num_tokens: NumTokens | str | None = None, *, reduction: Reduction = "mean"
    ) -> None:
        if reduction not in ("mean", "token_sum"):
            raise InputError(f"reduction is {reduction!r}, expected 'mean' or 'token_sum'")
        if reduction == "mean" and num_tokens is None:
            raise InputError(
                "reduction='mean' needs num_tokens, the number of tokens that the loss of a batch "
                "is the mean of: a function of the batch or the key of its labels; for a loss "
                "summed over tokens pass reduction='token_sum'"
            )
        if reduction == "token_sum" and num_tokens is not None:
            raise InputError(
                "reduction='token_sum' does not use num_tokens: leave it out, or pass "
                "reduction='mean' if the loss is a mean over tokens"
            )
        if not isinstance(num_tokens, str):
            check_function("num_tokens", num_tokens)
        self._num_tokens = num_tokens
        self._reduction = reduction
        self._batch: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise an InputError for manual optimization."""
        if not pl_module.automatic_optimization:
            raise InputError(
                f"{type(pl_module).__name__} optimizes manually, so no callback can know which "
                "loss the penalty belongs to: leave out PenaltyCallback and add "
                "powernorm.penalty(model, …) to the loss"
            )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Keep the batch, to count its tokens later; drop the penalty of a skipped batch."""
        forget_penalties(pl_module)
        self._batch = batch

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Add the penalty in place to the tensor that Lightning starts the backward from."""
        tokens = self._count() if self._reduction == "mean" else None
        added = process_penalty(pl_module, self._reduction, tokens)
        if added is None:
            return
        added = added / trainer.accumulate_grad_batches
        scaler = _scaler_of(trainer)
        if scaler is not None:
            added = scaler.scale(added)
        loss.add_(added.to(loss))

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Release the batch."""
        self._batch = None

    def _count(self) -> int | Tensor:
        assert self._num_tokens is not None
        if not isinstance(self._num_tokens, str):
            return self._num_tokens(self._batch)
        key = self._num_tokens
        if isinstance(self._batch, Mapping):
            labels = self._batch.get(key)
        else:
            labels = getattr(self._batch, key, None)
        if not isinstance(labels, Tensor):
            raise InputError(
                f"num_tokens is {key!r}, but the batch, a {type(self._batch).__name__}, has no "
                "tensor of labels under that key: give the right key, or a function of the batch"
            )
        return count_labels(labels)


class NormCallback(pl.Callback):
    """Callback that logs batch statistics, gradients and non-finite values of the norms.

    It sends `norm/<layer>/<quantity>` directly to the loggers, for the quantities of
    `powernorm.records.NORMS_COLUMNS` that the norm has (`mean_tid`, `gradient_norm`, …; see
    `powernorm.diagnosis.NormMonitor`), with the number of the update as step. Values that are not
    finite are left out, and other steps are not measured. Gradients are those of the loss that the
    backward starts from: divided by `accumulate_grad_batches`, without the loss scale of float16,
    before any clipping.

    Args:
        every: updates from one observation to the next, ≥ 1, or `log`, `log:N` for N observations
            per decade.
        model: the model to observe, attached at once and until `detach`, over several trainings:
            needed if it is compiled before `fit`, because compiled code ignores later hooks. None
            observes the whole LightningModule from the start of each training to its end.
        on_rows: also called with all observations: a row of `NORMS_COLUMNS` for each norm.
        loss_scale: the loss of the backward divided by the loss whose gradients are logged,
            for example the number of processes if each has its part of a sum over all and the
            gradients are averaged.

    Raises:
        InputError: `every` is not a schedule; `model` is not a model or is compiled already;
            `on_rows` is not a function; `loss_scale` is not positive.

    Distributed:
        Add it in every process; see `powernorm.diagnosis.NormMonitor`.
    """

    def __init__(
        self,
        every: Schedule | int | str = 100,
        *,
        model: nn.Module | None = None,
        on_rows: Callable[[Sequence[NormRow]], object] | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        self._every = Schedule.of(every)
        if model is not None:
            check_model(model)
        if on_rows is not None:
            check_function("on_rows", on_rows)
        check_number("loss_scale", loss_scale, above=0)
        self._on_rows = on_rows
        self._loss_scale = loss_scale
        self._model = model
        self._monitor = None if model is None else NormMonitor(model, self._every)
        self._update: int | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach to the module unless a model is attached already."""
        if self._monitor is None:
            self._monitor = NormMonitor(self._model or pl_module, self._every)
        self._update = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the observation at the first micro-batch of an update."""
        if self._monitor is not None and self._update is None:
            self._update = trainer.global_step + 1
            scale = loss_scale(_scaler_of(trainer), pl_module.device)
            self._monitor.start_step(self._update, scale * self._loss_scale)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log after the last micro-batch of an update, when Lightning has counted the step."""
        if self._monitor is None or self._update is None or trainer.global_step < self._update:
            return
        rows = self._monitor.finish_step(self._update)
        self._update = None
        if rows:
            if self._on_rows is not None:
                self._on_rows(rows)
            entries = log_entries(rows)
            for logger in trainer.loggers:
                logger.log_metrics(entries, step=trainer.global_step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Detach from a LightningModule; stay attached to a given model."""
        self._stop()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Detach from a LightningModule; stay attached to a given model."""
        self._stop()

    def detach(self) -> None:
        """Remove the hooks from the model; further calls have no effect."""
        if self._monitor is not None:
            self._monitor.detach()
        self._monitor = self._update = None

    def _stop(self) -> None:
        if self._model is None or self._monitor is None:
            self.detach()
        else:  # it may be compiled now, which would prevent attaching again
            self._monitor.cancel_step()
            self._update = None


class CalibrateCallback(pl.Callback):
    """Callback that re-estimates running statistics before each validation and each checkpoint.

    It measures them on the last training batches (`powernorm.calibrate`): before a validation, at
    the end of an epoch and so of the training, and before a checkpoint of any other step. A
    checkpoint is therefore chosen by its evaluation with its own statistics, and contains them.
    Norms whose running statistics are part of the trained function are not changed. The batches are
    kept on the device.

    Args:
        num_batches: training batches of each process; a few dozen suffice.
        forward: `forward(module, batch)` runs the model on a training batch; None calls
            the module as `calibrate` calls a model.
        way: as in `calibrate`; `one_pass` is cheaper for deep models.

    Raises:
        InputError: no such number or function; a module without batch statistics (raised when
            training begins).

    Distributed:
        Add it in every process.
    """

    def __init__(
        self,
        num_batches: int = 32,
        *,
        forward: Forward | None = None,
        way: Way = "layer_by_layer",
    ) -> None:
        check_function("forward", forward)
        self._batches: deque[Any] = deque(maxlen=check_count("num_batches", num_batches, 1))
        self._forward = forward
        self._way = way
        self._done_at = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the module."""
        check_calibratable(pl_module)
        self._batches.clear()
        self._done_at = trainer.global_step

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Keep the batch."""
        self._batches.append(batch)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Calibrate, in a training."""
        self._calibrate(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Calibrate, if no validation came before."""
        self._calibrate(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Calibrate, and replace the state that Lightning has collected already."""
        if self._calibrate(trainer, pl_module):
            checkpoint["state_dict"] = trainer.strategy.lightning_module_state_dict()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Calibrate, if the last epoch did not end; drop the batches."""
        self._calibrate(trainer, pl_module)
        self._batches.clear()

    def _calibrate(self, trainer: pl.Trainer, module: pl.LightningModule) -> bool:
        """Calibrate unless there was no step since the last time; return whether it was done."""
        if not self._batches or self._done_at == trainer.global_step:
            return False
        self._done_at = trainer.global_step
        calibrate(module, self._batches, self._forward, way=self._way)
        return True


class LossScaleFollower(pl.Callback):
    """Callback that sets the factor of the loss for PowerNorm and MABN.

    Their moving averages of the gradient (ν) are in units of the loss, and a GradScaler changes
    these (`powernorm.set_loss_scale`). The gradients of W processes are averaged: each has W times
    its share of the loss.

    Args:
        model: the model with the norms.
        scaler: the GradScaler of the precision plugin; None without one.
    """

    def __init__(self, model: nn.Module, scaler: torch.amp.GradScaler | None) -> None:
        self._model = model
        self._scaler = scaler

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Follow the scaler, now that the model is on its device."""
        set_loss_scale(self._model, trainer.world_size, scaler=self._scaler)


def _scaler_of(trainer: pl.Trainer) -> Any:
    """Return the GradScaler of float16 training, or None."""
    return getattr(trainer.precision_plugin, "scaler", None)
