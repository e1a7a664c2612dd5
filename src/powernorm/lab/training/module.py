"""The LightningModule of all tasks: loss, optimiser, validation."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from powernorm.integrations.lightning import PenaltyCallback
from powernorm.lab.data.batch import Batch
from powernorm.lab.engine.processes import num_processes, summed
from powernorm.lab.settings.comparison import ComparisonSettings
from powernorm.lab.settings.training import OptimizerSettings
from powernorm.lab.training.batches import RunData
from powernorm.lab.training.evaluation import word_perplexity
from powernorm.lab.training.losses import outputs_nll, training_losses
from powernorm.lab.training.schedules import rate_factor
from powernorm.lab.training.sharding import shard_weights


def loss_tokens(batch: Batch) -> float:
    """Return what the summed loss of a batch is divided by.

    Of one of several processes: its share of all targets, which may be below 1.
    """
    return batch.num_targets if batch.loss_targets is None else batch.loss_targets


def penalty_callback() -> PenaltyCallback:
    """Return what adds the penalty of RBN layers to the loss that `training_step` returns."""
    # A tensor: no number of tokens is below 1, but the share of one process may be.
    return PenaltyCallback(lambda batch: torch.tensor(loss_tokens(batch)))


class TaskModule(pl.LightningModule):
    """Trains a model by its mean negative log-likelihood.

    Lightning divides what `training_step` returns by the number of accumulated micro-batches, so
    that an update sees (Σ cross entropies) / (tokens of the update). Where batches say by
    `loss_targets` what to divide by, that is so for micro-batches of unequal sizes and over all
    processes, too. `penalty_callback` adds the penalty of RBN layers likewise.

    Args:
        model: gives logits, or what its own `nll` takes.
        config: optimiser, schedule and smoothing.
        data: of the run, for the perplexity and the scores of its valid split.
    """

    def __init__(self, model: nn.Module, config: ComparisonSettings, data: RunData[Any]) -> None:
        super().__init__()
        self.model = model
        self._config = config
        self._data = data
        self._valid_nll = torch.zeros(())
        self._valid_tokens = 0
        self.valid_loss = float("nan")
        """Nats per token of the latest validation."""
        self.valid_perplexity = float("nan")
        self.valid_score: float | None = None
        """Of the latest validation, where the task has one by which checkpoints are chosen."""

    @property
    def badness(self) -> float:
        """Return what the best checkpoint has least of: the loss, or the score's negative."""
        return self.valid_loss if self.valid_score is None else -self.valid_score

    def configure_model(self) -> None:
        """Divide the weights among the processes, where the strategy is to."""
        if self._config.training.strategy == "fsdp2" and num_processes() > 1:
            shard_weights(self.model, self.device_mesh)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return `loss`, which is minimised, and `cross_entropy`, which is logged."""
        del batch_idx
        outputs = self.model(**batch.inputs())
        smoothing = self._config.label_smoothing
        minimised, plain = training_losses(self.model, outputs, batch.targets, smoothing)
        tokens = loss_tokens(batch)
        return {
            "loss": minimised / tokens,
            # Some minimise a mean over sentences and report one over words.
            "cross_entropy": plain / (batch.logged_targets or tokens),
        }

    def on_validation_epoch_start(self) -> None:
        """Begin new sums."""
        self._valid_nll = torch.zeros((), device=self.device)
        self._valid_tokens = 0

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to the sums."""
        del batch_idx
        self._valid_nll += outputs_nll(self.model, self.model(**batch.inputs()), batch.targets)
        self._valid_tokens += batch.num_targets

    def on_validation_epoch_end(self) -> None:
        """Publish the loss per token, the perplexity per word and the score."""
        nll, num_tokens = summed([float(self._valid_nll), float(self._valid_tokens)])
        self.valid_loss = nll / num_tokens
        self.valid_perplexity = word_perplexity(
            self.valid_loss, self._data.words_per_token("valid")
        )
        if self._data.selection is not None:
            scores = self._data.scores("valid", self.model, self.device)
            self.valid_score = scores[self._data.selection]
        self.log("valid_loss", self.valid_loss, logger=False)
        self.log("badness", self.badness, logger=False)

    def configure_optimizers(self) -> Any:
        """Return the optimiser and the schedule, which moves with every update."""
        optimizer = build_optimizer(self.model, self._config.optimizer, fused=self._may_fuse())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._factor())
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def _factor(self) -> Callable[[int], float]:
        config = self._config
        return lambda step: rate_factor(config.schedule, step, config.training.max_steps)

    def _may_fuse(self) -> bool:
        # A fused Adam undoes the loss scale by itself, so Lightning refuses to clip before it under
        # autocast.
        return self._config.training.precision == "float32" and num_processes() == 1


def build_optimizer(
    model: nn.Module, config: OptimizerSettings, *, fused: bool = False
) -> torch.optim.Optimizer:
    """Return the optimiser over all parameters.

    Weight decay applies to matrices only: it would pull the weights of a norm towards 0, which
    means another thing for every norm.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        return torch.optim.SGD(
            groups, lr=config.learning_rate, momentum=config.momentum, fused=fused
        )
    if config.name == "adagrad":
        return torch.optim.Adagrad(groups, lr=config.learning_rate, eps=config.eps)
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=fused,
    )
