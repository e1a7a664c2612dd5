"""Hugging Face's Trainer with the penalty of RBN in its loss and TID in its log."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from powernorm.diagnosis import NormMonitor
from powernorm.errors import InputError
from powernorm.training.trainers import (
    count_labels,
    log_entries,
    penalized_layers,
    process_penalty,
)

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class PenaltyTrainerMixin(_Base):
    """Adds the penalty of RegularizedBatchNorm to the Trainer's loss, in its units.

    `class RegularizedTrainer(PenaltyTrainerMixin, Trainer): ...` is all it takes; the mixin works
    in front of any subclass of Trainer. λ of Wang et al. 2022 belongs to a cross entropy summed
    over tokens. The Trainer has two kinds of loss, and the penalty P_i of micro-batch i follows:

    - A model that takes loss kwargs (or a `compute_loss_func`) sums its loss over tokens and
      divides by `num_items_in_batch`, the tokens of all micro-batches of the update: P_i is
      divided by the same, and the update minimises `Σ_i (loss sum_i + P_i)/tokens`.
    - Any other model takes the mean over its micro-batch, and the Trainer divides by the number k
      of micro-batches: P_i is divided by the tokens of the micro-batch (labels that are not -100;
      a causal model has no use for the first of each row), and the update minimises
      `(1/k) Σ_i (loss_i + P_i/tokens_i)`.

    Which of the two it is, the Trainer decides by `model_accepts_loss_kwargs` and
    `loss_is_scaled_for_ga`; set the latter to False in your subclass for a model that takes
    `**kwargs` but ignores the number of items (some classification heads do). Evaluation adds
    nothing, and a model without such layers is left alone.

    Raises:
        InputError: no labels to count, `nn.DataParallel` (several GPUs in one process).
    """

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The Trainer's loss plus the penalty; arguments and result are the Trainer's."""
        # The Trainer takes the labels out of the inputs where it smooths them.
        own_inputs = dict(inputs)
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if model.training and penalized_layers(model):
            tokens = self._process_tokens(own_inputs, num_items_in_batch)
            added = process_penalty(model, "mean", tokens)
            assert added is not None
            loss = loss + added.to(loss)
        return (loss, outputs) if return_outputs else loss

    def count_loss_tokens(self, inputs: Mapping[str, Any]) -> int | Tensor:
        """Number of tokens that the mean loss of a micro-batch is taken over.

        Override it where the loss counts otherwise.

        Args:
            inputs: of the model, labels included.

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
        self, inputs: Mapping[str, Any], num_items: Tensor | int | None
    ) -> int | Tensor:
        """What the loss of this process is the mean of."""
        if self.args.n_gpu > 1:
            raise InputError(
                f"{self.args.n_gpu} GPUs in one process run copies of the model, whose penalty "
                "is lost: start one process for each GPU with torchrun or accelerate"
            )
        normalizes = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if not self._is_scaled(num_items):
            return self.count_loss_tokens(inputs)
        if num_items is None:
            raise InputError(
                "the loss is said to be divided by the tokens of the whole update, but the Trainer "
                "could not count them: give the batches 'labels', or set "
                "loss_is_scaled_for_ga = False in your Trainer if it is a mean of the micro-batch"
            )
        if normalizes and self.args.average_tokens_across_devices:
            # Of all processes, and the loss has been multiplied by their number.
            num_copies: int = self.accelerator.num_processes // self.get_tp_size()
            return torch.as_tensor(num_items) / num_copies
        return num_items

    def _is_scaled(self, num_items: Tensor | int | None) -> bool:
        """Does training_step take the loss for one divided by the tokens of all micro-batches?"""
        if self.loss_is_scaled_for_ga is not None:
            return bool(self.loss_is_scaled_for_ga)
        takes_items = self.model_accepts_loss_kwargs and num_items is not None
        return takes_items or self.compute_loss_func is not None


class NormCallback(TrainerCallback):
    """Logs TID and the distances of every layer with batch statistics, when the Trainer logs.

    `trainer.add_callback(NormCallback(trainer))` adds an entry with `norm/<layer>/mean_tid`,
    `…/var_tid`, … (see `powernorm.diagnosis.NormMonitor`) to the Trainer's log at every logging
    step, right after that of the loss. In between nothing is measured.

    Args:
        trainer: whose model is watched, attached at once: the Trainer compiles it later, and
            compiled code ignores hooks that come after.

    Raises:
        InputError: the model is compiled already; a logging strategy that does not go by steps
            (when training begins).
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._model: nn.Module | None = None
        self._monitor: NormMonitor | None = None
        self._entries: dict[str, float] = {}
        if isinstance(trainer.model, nn.Module):  # else it is made when training begins
            self._attach(trainer.model)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach, where that has not been done."""
        del state, control, kwargs
        strategy = IntervalStrategy(args.logging_strategy)
        if strategy != IntervalStrategy.STEPS:
            raise InputError(
                f"logging_strategy is {strategy.value!r}, but NormCallback has "
                "to know before a step whether it is logged: set logging_strategy='steps'"
            )
        model = self._trainer.model
        if self._monitor is None or model is not self._model:
            assert isinstance(model, nn.Module)
            self._attach(model)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Get ready for a step that will be logged."""
        del control, kwargs
        step = state.global_step + 1
        is_due = step % state.logging_steps == 0 or (step == 1 and args.logging_first_step)
        if is_due and self._monitor is not None:
            self._monitor.start_step(step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure, once the optimiser has stepped."""
        del args, control, kwargs
        if self._monitor is not None:
            self._entries = log_entries(self._monitor.finish_step(state.global_step))

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Follow the Trainer's own entry; before it, ours would use up its turn to log."""
        del args, state, control, kwargs
        entries, self._entries = self._entries, {}
        if entries:
            self._trainer.log(entries)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Detach."""
        del args, state, control, kwargs
        self._detach()

    def _attach(self, model: nn.Module) -> None:
        self._detach()
        self._monitor = NormMonitor(model, 1)
        self._model = model

    def _detach(self) -> None:
        if self._monitor is not None:
            self._monitor.detach()
        self._monitor = self._model = None
        self._entries = {}
