"""The Lightning side of the data: loaders that know where they are."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import lightning.pytorch as pl
import torch
from torch import nn

from powernorm.lab.data.batch import Batch, EvaluationBatches, TrainingBatches
from powernorm.lab.data.corpus import Split
from powernorm.lab.engine.processes import num_processes, rank
from powernorm.lab.settings.comparison import ComparisonSettings

Settings = TypeVar("Settings", bound=ComparisonSettings)


def own_part(batch: Batch) -> Batch:
    """Return the rows of this process; the batch itself where it is alone."""
    size = num_processes()
    return batch if size == 1 else batch.shard(rank(), size)


def own_evaluation(batches: EvaluationBatches) -> EvaluationBatches:
    """Return of every batch of an evaluation the rows of this process.

    All processes have the same number of batches, some perhaps without rows: divided weights are
    gathered at every call of a layer.
    """
    return EvaluationBatches(batches, lambda batch, _: own_part(batch))


class BatchSource(Protocol):
    """A split that can be cut into batches."""

    def training(
        self, *, batch_size: int, seed: int, batches_per_update: int = 1
    ) -> TrainingBatches:
        """Return the batches of a training run."""
        ...

    def evaluation(self, *, batch_size: int, max_tokens: int | None = None) -> EvaluationBatches:
        """Return the batches of an evaluation, of all or about so many tokens."""
        ...


class RunLoader:
    """All micro-batches of a run as one pass, which can go on from any of them.

    To Lightning the whole run is one epoch: where the text begins anew is the business of
    `TrainingBatches`, and a checkpoint in the middle of an epoch is no special case.

    Args:
        segments: the batches by position.
        num_batches: micro-batches of the whole run.
    """

    def __init__(self, segments: TrainingBatches, num_batches: int) -> None:
        self.segments = segments
        self._num_batches = num_batches
        self._position = 0

    def __len__(self) -> int:
        """Return the number of micro-batches of the whole run."""
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        """Yield the micro-batches that are still to come, of each the rows of this process."""
        while self._position < self._num_batches:
            batch = own_part(self.segments.batch(self._position))
            self._position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return the position, for the checkpoint."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the checkpoint's position."""
        self._position = state["position"]


class RunData(pl.LightningDataModule, ABC, Generic[Settings]):
    """The batches of one run, the same for every norm of that seed.

    Args:
        config: lengths, sizes and number of steps.
        segments: the batches of the training, of all processes together.
    """

    selection: ClassVar[str | None] = None
    """Which of the scores chooses the best checkpoint, higher is better; None is the loss."""

    def __init__(self, config: Settings, segments: TrainingBatches) -> None:
        super().__init__()
        self._config = config
        self.segments = segments

    def train_dataloader(self) -> RunLoader:
        """Return the micro-batches of the run."""
        config = self._config
        return RunLoader(self.segments, config.training.max_steps * config.optimizer.accumulation)

    def val_dataloader(self) -> EvaluationBatches:
        """Return this process's share of what is read of the valid split during the run."""
        return own_evaluation(self.validation())

    def validation(self) -> EvaluationBatches:
        """Return the part of the valid split that is read during the run."""
        return self.evaluation("valid", max_tokens=self._config.training.validation_tokens)

    @abstractmethod
    def evaluation(self, split: Split, max_tokens: int | None = None) -> EvaluationBatches:
        """Return the batches of a split, whole or about `max_tokens` of it."""

    def words_per_token(self, split: Split) -> float:
        """Return the ratio that turns nats per token into those that the perplexity is of.

        1 where the perplexity is of what the loss is of.
        """
        del split
        return 1.0

    def scores(self, split: Split, model: nn.Module, device: torch.device) -> Mapping[str, float]:
        """Return what a split says beyond the likelihood, by name, such as `accuracy`.

        Args:
            split: `valid` or `test`, read as a whole.
            model: in evaluation mode.
            device: of the model.
        """
        del split, model, device
        return {}

    def from_loss(self, loss: float) -> Mapping[str, float]:
        """Return other measures of the same likelihood, by name; the loss is in nats."""
        del loss
        return {}


class RowData(RunData[Settings]):
    """The batches of a run that have a number of rows each.

    Args:
        config: lengths, sizes and number of steps.
        rows: gives the rows of a split.
        seed: of the order.

    Raises:
        InputError: the train split is shorter than a batch.
    """

    def __init__(self, config: Settings, rows: Callable[[Split], BatchSource], seed: int) -> None:
        self._rows = rows
        # The settings of every such task have these numbers.
        data: Any = config.data
        self._evaluation_batch_size = data.evaluation_batch_size
        training = rows("train").training(
            batch_size=data.batch_size,
            seed=seed,
            batches_per_update=config.optimizer.accumulation,
        )
        super().__init__(config, training)

    def evaluation(self, split: Split, max_tokens: int | None = None) -> EvaluationBatches:
        """Return the batches of a split, whole or about `max_tokens` of it."""
        return self._rows(split).evaluation(
            batch_size=self._evaluation_batch_size, max_tokens=max_tokens
        )
