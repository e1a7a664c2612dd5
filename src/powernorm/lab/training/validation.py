"""Validations of a run of a built-in task, and what came of those so far."""

from collections.abc import Mapping
from typing import Any

import torch

from powernorm.lab.engine.distribution import whole
from powernorm.lab.engine.processes import gather
from powernorm.lab.engine.run import Run
from powernorm.lab.settings.comparison import ComparisonSettings
from powernorm.lab.training.batches import RunData, own_evaluation
from powernorm.lab.training.evaluation import gap_cells, summed_nll, word_perplexity
from powernorm.lab.training.losses import TaskModel
from powernorm.lab.training.precision import autocast


class Validations:
    """Measures the valid split during the training; a checkpoint keeps what came of it.

    Args:
        run: of the engine, with a `ComparisonSettings` as its settings.
        model: that trains.
        data: of the run.

    Attributes:
        losses: of every validation of the run so far, nats per token.
        scores: of those at which the task's own score was told.
    """

    def __init__(self, run: Run, model: TaskModel, data: RunData[Any]) -> None:
        self._run = run
        self._config: ComparisonSettings = run.settings
        self._model = model
        self._data = data
        self.losses: list[float] = []
        self.scores: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        """Return what a run that resumes has to know."""
        return {"losses": list(self.losses), "scores": list(self.scores)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` returned."""
        self.losses, self.scores = list(state["losses"]), list(state["scores"])

    def tokens(self, step: int) -> dict[str, float]:
        """Return the cell of how many tokens so many updates have trained on."""
        per_update = self._data.batches.tokens_per_batch * self._config.optimizer.accumulation
        return {"tokens": round(step * per_update)}

    def validate(self) -> dict[str, float]:
        """Return the cells of metrics.csv that a validation fills; in evaluation mode."""
        data, model, device = self._data, self._model, self._run.device
        batches = data.validation()
        with autocast(device, self._config.training.precision):
            own = own_evaluation(batches)
            nll, num_targets = summed_nll(model, own, device, torch.float32)
        loss = nll / num_targets
        cells = self.tokens(self._run.step) | {
            "valid_loss": loss,
            "valid_perplexity": word_perplexity(loss, data.words_per_token("valid")),
        }
        score = self._score(loss)
        self.losses.append(loss)
        if score is not None:
            self.scores.append(score)
            cells["valid_score"] = score
        # The same batches in every process: those of this one alone are fewer in some.
        return cells | gap_cells(model, batches, device)

    def _score(self, loss: float) -> float | None:
        """Return the task's own score; None where none is due."""
        data, name, every = self._data, self._config.score_name, self._config.score_every
        if name is None or name in (derived := data.from_loss(loss)):
            return None if name is None else derived[name]
        is_last = self._run.is_last_evaluation(valid_loss=loss)
        if not every or not (is_last or (len(self.losses) + 1) % every == 0):
            return None
        with whole(self._model):
            score = data.scores("valid", self._model, self._run.device, brief=True)[name]
        # The first one's in all: each may have running statistics of its own.
        return gather(score)[0]
