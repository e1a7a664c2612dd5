"""Extensions of Hugging Face's Trainer: RBN's penalty, TID in the log, calibration, runs."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from powernorm.diagnosis import NormMonitor, Schedule
from powernorm.errors import InputError
from powernorm.inspection.batches import Forward, call_model
from powernorm.integrations.extras import needed_for
from powernorm.integrations.saved_models import note_modules
from powernorm.integrations.trainers import (
    count_labels,
    log_entries,
    loss_scale,
    penalized_layers,
    process_penalty,
)
from powernorm.norms.arguments import check_count, check_function
from powernorm.norms.models import check_num_tokens, forget_penalties, set_loss_scale
from powernorm.norms.preserved_state import preserved_state
from powernorm.surgery.calibration import Way, calibrate, check_calibratable

with needed_for("powernorm.integrations.huggingface"):
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
    from transformers.trainer_utils import IntervalStrategy

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class PenaltyTrainerMixin(_Base):
    """Mixin that adds the penalty of RegularizedBatchNorm to the Trainer's loss, in its units.

    Define `class RegularizedTrainer(PenaltyTrainerMixin, Trainer): ...`; the mixin works in front
    of any subclass of Trainer. λ of Wang et al. 2022 belongs to a cross entropy summed over tokens.
    With k micro-batches in an update, the loss that the backward starts from is one of three kinds,
    and the penalty P_i of micro-batch i follows it:

    - A model that takes `num_items_in_batch`, the tokens of all micro-batches of the update, and
      divides the sum over its tokens by it (or a `compute_loss_func` that does): P_i is divided by
      the same, and the update minimizes `Σ_i (loss sum_i + P_i)/tokens`.
    - A model that takes no such number, so that its loss is the mean over its micro-batch and the
      Trainer divides by k: P_i is divided by the tokens of the micro-batch (labels that are not
      -100; a causal model does not use the first of each row), and the update minimizes
      `(1/k) Σ_i (loss_i + P_i/tokens_i)`.
    - A model that takes `**kwargs` and with them the number, but ignores it (BERT, RoBERTa, T5,
      BART, Marian and more): its loss is the mean over its micro-batch, which the Trainer does
      *not* divide by k, so the update minimizes `Σ_i (loss_i + P_i/tokens_i)`. Gradients are then k
      times as large as in one large batch, with or without this mixin;
      `loss_is_scaled_for_ga = False` in your subclass fixes that and makes it the second kind.

    The first and the third kind are distinguished once, at the first micro-batch with a loss, by
    two forwards without gradients, in evaluation mode, with two different numbers of items. These
    change nothing in the model and no random number. If a subclass sets `loss_is_scaled_for_ga`,
    that value decides instead: True for the first kind, False for a mean that the Trainer divides
    by k.

    The penalty of a batch that gets no backward is dropped. Evaluation adds nothing, and a model
    without such layers is unchanged.

    Raises:
        InputError: there are no labels to count; the loss does not show whether it is divided by
            the number of items; `nn.DataParallel` (several GPUs in one process) is in use.
    """

    _divides: bool | None = None
    """Whether the loss is divided by the number of items; None until a loss has shown it."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the Trainer's loss plus the penalty; arguments and result are the Trainer's."""
        # The Trainer removes the labels from the inputs if it smooths them.
        own_inputs = dict(inputs)
        adds = model.training and bool(penalized_layers(model))
        divides = adds and self._is_divided(model, inputs, num_items_in_batch)
        if adds:
            forget_penalties(model)
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if adds:
            tokens = self._process_tokens(own_inputs, num_items_in_batch, divides)
            added = process_penalty(model, "mean", tokens)
            assert added is not None
            loss = loss + added.to(loss)
        return (loss, outputs) if return_outputs else loss

    def count_loss_tokens(self, inputs: Mapping[str, Any]) -> int | Tensor:
        """Return the number of tokens that the mean loss of a micro-batch is taken over.

        Override it if the loss counts tokens in another way.

        Args:
            inputs: inputs of the model, labels included.

        Raises:
            InputError: no labels.
        """
        if "shift_labels" in inputs:
            return count_labels(inputs["shift_labels"])
        labels = inputs.get("labels")
        if not isinstance(labels, Tensor):
            raise InputError(
                "the penalty needs the number of tokens of the loss, but the inputs have no "
                f"'labels' (they have {', '.join(map(repr, inputs))}): override "
                "count_loss_tokens(inputs) in your Trainer"
            )
        return count_labels(labels[..., 1:] if self._loss_shifts_labels else labels)

    def _process_tokens(
        self, inputs: Mapping[str, Any], num_items: Tensor | int | None, divides: bool
    ) -> int | Tensor:
        """Return the number of tokens that this process's scaled loss is divided by."""
        if divides and num_items is None:
            raise InputError(
                "the loss is declared to be divided by the tokens of the whole update, but the "
                "Trainer could not count them: give the batches 'labels', or set "
                "loss_is_scaled_for_ga = False in your Trainer if it is a mean of the micro-batch"
            )
        tokens = num_items if divides else check_num_tokens(self.count_loss_tokens(inputs))
        assert tokens is not None
        multiplies = self._tells_items(num_items) and self.args.average_tokens_across_devices
        num_copies = self.accelerator.num_processes // self.get_tp_size() if multiplies else 1
        # The Trainer multiplies the loss by num_copies, whatever tokens it averages over.
        return tokens if num_copies == 1 else torch.as_tensor(tokens) / num_copies

    def _tells_items(self, num_items: Tensor | int | None) -> bool:
        """Return whether the model or the loss function receives the number of items."""
        takes = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        return takes and num_items is not None

    def _is_divided(
        self, model: nn.Module, inputs: dict[str, Any], num_items: Tensor | int | None
    ) -> bool:
        """Return whether the loss is a sum divided by the tokens of the whole update."""
        if self.args.n_gpu > 1:
            raise InputError(
                f"{self.args.n_gpu} GPUs in one process run copies of the model, whose penalty "
                "is lost: start one process for each GPU with torchrun or accelerate"
            )
        if self.loss_is_scaled_for_ga is not None:
            return bool(self.loss_is_scaled_for_ga)
        if num_items is None or not self._tells_items(num_items):
            return False
        if self._divides is None:
            with preserved_state(model, ()):
                once = self._loss_of(model, inputs, num_items)
                twice = self._loss_of(model, inputs, 2 * num_items)
            # All processes get the same answer, including those whose batch has no label.
            pairs = self.accelerator.gather(torch.stack([once, twice]).float())
            self._divides = _follows(cast(Tensor, pairs).view(-1, 2))
        # Without a loss the answer does not matter, so use the Trainer's assumption.
        return self._divides is not False

    def _loss_of(self, model: nn.Module, inputs: dict[str, Any], num_items: Tensor | int) -> Tensor:
        loss = super().compute_loss(model, dict(inputs), num_items_in_batch=num_items)
        return cast(Tensor, loss).reshape(())


def _follows(losses: Tensor) -> bool | None:
    """Return whether a loss halves when the number of items doubles.

    Args:
        losses: (processes, 2), for the number and for twice the number.

    Returns:
        None if no loss is a finite number other than 0.

    Raises:
        InputError: the loss neither halves nor stays the same.
    """
    usable = losses[losses.isfinite().all(1) & losses[:, 0].ne(0)]
    if not len(usable):
        return None
    ratios = usable[:, 1] / usable[:, 0]
    for answer, expected in ((True, 0.5), (False, 1.0)):
        # A part of a loss, such as the load balance of experts, may not be divided.
        if bool((ratios - expected).abs().max() < 0.1):
            return answer
    raise InputError(
        f"with twice the num_items_in_batch the loss is {ratios[0].item():.3g} times as large, "
        "which does not show whether it is divided by that number or is a mean over the "
        "micro-batch: set loss_is_scaled_for_ga in your Trainer, to True or False"
    )


class TrainerNormCallback(TrainerCallback):
    """Callback that logs batch statistics, gradients and non-finite values of the norms.

    `trainer.add_callback(TrainerNormCallback(trainer))` adds an entry with
    `norm/<layer>/<quantity>` to the Trainer's log, for the quantities of
    `powernorm.records.NORMS_COLUMNS` that the norm has (`mean_tid`, `gradient_norm`, …; see
    `powernorm.diagnosis.NormMonitor`). It does so at every logging step, right after the entry of
    the loss, or at the steps of a schedule. Other steps are not measured. Gradients are those of
    the loss that the backward starts from, without the loss scale of float16, before any clipping.

    The hooks stay in the model after training, for the next `train()`, and measure nothing until
    then; `detach()` removes them. From a model that the Trainer creates when training begins they
    are removed when training ends.

    Each checkpoint of a model with norms of this library, of Hugging Face or any other, is a folder
    that `powernorm.load` reads.

    The Trainer does not notify callbacks of an exception in `train()`: if the failed step was due
    for logging, the hooks keep measuring until the next `train()` or `detach()`. In float16
    training PowerNorm and MABN follow the Trainer's GradScaler from its start on
    (`powernorm.set_loss_scale`).

    Args:
        trainer: the Trainer whose model is observed. Hooks are attached at once, because the
            Trainer compiles the model later, and compiled code ignores hooks attached afterwards.
        every: updates from one observation to the next, or `log`, `log:N` for N observations per
            decade; None observes whenever the Trainer logs.

    Raises:
        InputError: no Trainer; no schedule; the model is compiled already; without a schedule, a
            logging strategy that is not by steps (raised when training begins).
    """

    def __init__(self, trainer: Trainer, every: Schedule | int | str | None = None) -> None:
        _check_trainer(trainer, "TrainerNormCallback")
        self._trainer = trainer
        self._schedule = None if every is None else Schedule.of(every)
        self._model: nn.Module | None = None
        self._monitor: NormMonitor | None = None
        self._stays = True
        """Whether the hooks stay in the model at the end of training."""
        self._entries: dict[str, float] = {}
        if isinstance(trainer.model, nn.Module):  # else the Trainer creates it when training begins
            self._attach(trainer.model)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach to the model unless that has been done; follow the scaler."""
        strategy = IntervalStrategy(args.logging_strategy)
        if strategy != IntervalStrategy.STEPS and self._schedule is None:
            raise InputError(
                f"logging_strategy is {strategy.value!r}, but TrainerNormCallback has "
                "to know before a step whether it is logged: set logging_strategy='steps', or give "
                "TrainerNormCallback an `every` of its own"
            )
        model = self._trainer.model
        if self._monitor is None or model is not self._model:
            assert isinstance(model, nn.Module)
            self._attach(model)
            self._stays = False
        else:
            self._stop()
        scaler = self._trainer.accelerator.scaler
        if scaler is not None and self._model is not None:
            set_loss_scale(self._model, scaler=scaler)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the observation of a step that will be logged."""
        step = state.global_step + 1
        if self._schedule is not None:
            is_due = self._schedule.is_due(step)
        else:
            is_due = step % state.logging_steps == 0 or (step == 1 and args.logging_first_step)
        if is_due and self._monitor is not None:
            scale = loss_scale(self._trainer.accelerator.scaler, args.device)
            self._monitor.start_step(step, scale)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure after the optimizer's step."""
        if self._monitor is None:
            return
        entries = log_entries(self._monitor.finish_step(state.global_step))
        if entries and self._schedule is not None and not control.should_log:
            self._trainer.log(entries)  # nothing else is logged at this step
        else:
            self._entries = entries

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log after the Trainer's own entry, which would be skipped if ours came first."""
        entries, self._entries = self._entries, {}
        if entries:
            self._trainer.log(entries)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record the model's norms in the checkpoint, if the Trainer's files do not."""
        folder = Path(args.output_dir or "") / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and isinstance(self._trainer.model, nn.Module):
            note_modules(self._trainer.model, folder)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove the hooks from a model that was created for this training."""
        if self._stays:
            self._stop()
        else:
            self.detach()

    def _attach(self, model: nn.Module) -> None:
        self.detach()
        self._monitor = NormMonitor(model, 1)
        self._model = model

    def _stop(self) -> None:
        """Stop measuring until the next step that is due."""
        if self._monitor is not None:
            self._monitor.cancel_step()
        self._entries = {}

    def detach(self) -> None:
        """Remove the hooks from the model; further calls have no effect."""
        if self._monitor is not None:
            self._monitor.detach()
        self._monitor = self._model = None
        self._entries = {}


class TrainerCalibrateCallback(TrainerCallback):
    """Callback that re-estimates running statistics before each evaluation and each save.

    `trainer.add_callback(TrainerCalibrateCallback(trainer))` measures them on training batches
    (`powernorm.calibrate`) at every step at which the Trainer evaluates or saves, before it does,
    and at the end of the training, unless the best checkpoint is loaded then. A checkpoint is
    therefore chosen by its evaluation with its own statistics, and contains them. Norms whose
    running statistics are part of the trained function are not changed.

    The batches are the same every time: the first of the Trainer's loader, drawn when they are
    first needed, without advancing torch's random numbers, and kept on the CPU.

    Args:
        trainer: the Trainer whose model is calibrated.
        num_batches: training batches of each process; a few dozen suffice.
        forward: runs the model on a batch, as in `calibrate`; None calls `model(**batch)`.
        way: as in `calibrate`; `one_pass` is cheaper for deep models.

    Raises:
        InputError: no Trainer, no such number or function; a model without batch statistics
            (raised when training begins).

    Distributed:
        Add it in every process.
    """

    def __init__(
        self,
        trainer: Trainer,
        num_batches: int = 32,
        *,
        forward: Forward | None = None,
        way: Way = "layer_by_layer",
    ) -> None:
        _check_trainer(trainer, "TrainerCalibrateCallback")
        check_function("forward", forward)
        self._trainer = trainer
        self._num_batches = check_count("num_batches", num_batches, 1)
        self._forward = forward or call_model
        self._way = way
        self._batches: list[Any] = []
        self._done_at = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check the model."""
        check_calibratable(self._model)
        self._done_at = state.global_step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Calibrate if the Trainer is about to evaluate or save."""
        if control.should_evaluate or control.should_save:
            self._calibrate(state)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Calibrate if the Trainer is about to evaluate or save."""
        self.on_step_end(args, state, control, **kwargs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Calibrate, unless the model is now that of a checkpoint."""
        if not (args.load_best_model_at_end and state.best_model_checkpoint):
            self._calibrate(state)

    @property
    def _model(self) -> nn.Module:
        return cast(nn.Module, self._trainer.model)

    def _calibrate(self, state: TrainerState) -> None:
        if self._done_at == state.global_step:
            return
        self._done_at = state.global_step
        if not self._batches:
            with torch.random.fork_rng(devices=[]):
                loader = self._trainer.get_train_dataloader()
                # Bypass accelerate's iterator, which would count the batches as the training's.
                is_torchs = isinstance(loader, DataLoader)
                iterator = DataLoader.__iter__(loader) if is_torchs else iter(loader)
                self._batches = list(itertools.islice(iterator, self._num_batches))
        calibrate(self._model, self._batches, self._run, way=self._way)

    def _run(self, model: nn.Module, batch: Any) -> object:
        return self._forward(model, self._trainer._prepare_inputs(batch))


def _check_trainer(trainer: object, name: str) -> None:
    if not isinstance(trainer, Trainer):
        raise InputError(
            f"trainer is {trainer!r}, expected the transformers.Trainer that it is added to: "
            f"trainer.add_callback({name}(trainer))"
        )


class ReportingRun(Protocol):
    """Interface of a comparison's run that `RunCallback` uses."""

    @property
    def should_stop(self) -> bool:
        """Whether to end the training now."""
        ...

    @property
    def is_resumed(self) -> bool:
        """Whether the run resumes from a checkpoint."""
        ...

    def path(self, name: str) -> Path:
        """Return the path of a user's folder in the run's folder."""
        ...

    def track(self, **things: Any) -> None:
        """Save the state of objects in checkpoints."""
        ...

    def checkpoint(self, step: int | None = None) -> None:
        """Write a checkpoint."""
        ...

    def log(self, step: int, **values: float | Tensor | None) -> None:
        """Write values of a step."""
        ...


class RunCallback(TrainerCallback):
    """Callback that connects a Trainer with the run of a comparison.

    The Trainer's log goes to the run's metrics.csv: `loss` as `train_loss`, `eval_loss` as
    `valid_loss`, other numbers of an evaluation by their own names. The Trainer writes its own
    checkpoints, in its `output_dir`; the run records the step of each, so that `--resume` continues
    from it. When a scheduler asks the run to stop, the Trainer saves and ends::

        callback = RunCallback(run)
        trainer = Trainer(..., callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.last_checkpoint)

    Args:
        run: the run; `output_dir` of the Trainer has to be `run.path("trainer")`, or another folder
            in the run's folder.
        folder: name of that folder.
    """

    def __init__(self, run: ReportingRun, folder: str = "trainer") -> None:
        self._run = run
        self._folder: Path = run.path(folder)
        self._step = 0
        run.track(trainer=self)

    @property
    def last_checkpoint(self) -> str | None:
        """The Trainer's checkpoint to resume from; None for a new run."""
        if not self._run.is_resumed:
            return None
        found = {_step_of(path): path for path in self._folder.glob("checkpoint-*")}
        # The Trainer may have deleted the checkpoint of the run's step to free space for the next.
        step = self._step if self._step in found else max(found, default=None)
        return None if step is None else str(found[step])

    def state_dict(self) -> dict[str, int]:
        """Return the step of the Trainer's last checkpoint."""
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore that step."""
        self._step = state["step"]

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save and stop if the run asks for it."""
        if self._run.should_stop:
            control.should_save = control.should_training_stop = True

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record that there is a checkpoint of this step."""
        self._step = state.global_step
        self._run.checkpoint(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Pass the Trainer's log on to the run."""
        values = {_COLUMNS.get(name, name.removeprefix("eval_")): v for name, v in _told(logs)}
        if values:
            self._run.log(state.global_step, **values)


_COLUMNS: Final = {"loss": "train_loss", "eval_loss": "valid_loss"}
_UNTOLD: Final = (
    "epoch",
    "norm/",
    "step",
    "train_",
    "total_flos",
    "runtime",
    "per_second",
    "model_prep",
)
"""Parts of the names of values that the Trainer logs about itself."""


def _told(logs: Mapping[str, Any] | None) -> list[tuple[str, float]]:
    return [
        (name, value)
        for name, value in (logs or {}).items()
        if isinstance(value, int | float) and not any(part in name for part in _UNTOLD)
    ]


def _step_of(path: Path) -> int:
    number = path.name.rpartition("-")[2]
    return int(number) if number.isdigit() else -1
