"""Batches of a run, with prefetching for GPUs."""

import multiprocessing
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from powernorm_lab.data.batch import Batch, EvaluationBatches, TrainingBatches
from powernorm_lab.data.corpus import EvaluatedSplit, Split
from powernorm_lab.engine.processes import num_processes, rank
from powernorm_lab.engine.stopping import SIGNALS
from powernorm_lab.settings.comparison import ComparisonSettings

Encoded = TypeVar("Encoded")
Settings = TypeVar("Settings", bound=ComparisonSettings)


def own_evaluation(batches: EvaluationBatches) -> EvaluationBatches:
    """Return this process's rows of every evaluation batch.

    All processes have the same number of batches, possibly some without rows, because every call
    of a layer with sharded weights is a collective operation.
    """
    size = num_processes()
    if size == 1:
        return batches
    return EvaluationBatches(batches, lambda batch, _: batch.shard(rank(), size))


class BatchSource(Protocol):
    """A split that can be divided into batches."""

    def training(
        self, *, batch_size: int, seed: int, batches_per_update: int = 1
    ) -> TrainingBatches:
        """Return the batches of a training run."""
        ...

    def evaluation(self, *, batch_size: int, max_tokens: int | None = None) -> EvaluationBatches:
        """Return the batches of an evaluation, of all or about `max_tokens` tokens."""
        ...


class _OwnBatches(Dataset[Batch]):
    """This process's rows of the micro-batches of a run, by position."""

    def __init__(self, batches: TrainingBatches) -> None:
        self._batches = batches
        # Read here, because workers of a DataLoader are not in the process group.
        self._rank, self._size = rank(), num_processes()

    def __getitem__(self, position: int) -> Batch:
        batch = self._batches.batch(position)
        return batch if self._size == 1 else batch.shard(self._rank, self._size)


def _num_loader_workers(device: torch.device) -> int:
    """Return the number of processes that prepare batches: two for a GPU if forking is possible.

    A CPU has none, because its cores train.
    """
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    return 2 if device.type == "cuda" and can_fork else 0


def _leave_signals(worker: int) -> None:
    """Ignore a scheduler's signals in a worker: the training process handles them."""
    del worker
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _unchanged(batch: Any) -> Any:
    return batch


class RunData(ABC, Generic[Settings]):
    """The batches of one run, the same for every norm with the run's seed.

    Args:
        config: lengths, sizes and number of steps.
        batches: training batches of all processes together.
    """

    def __init__(self, config: Settings, batches: TrainingBatches) -> None:
        self._config = config
        self.batches = batches

    def updates(self, device: torch.device, first: int = 0) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each update, prefetched for a GPU.

        Args:
            device: device of the training; for a GPU the batches are in pinned memory.
            first: number of updates done.
        """
        config = self._config
        number = _num_loader_workers(device)
        size, num_updates = config.optimizer.accumulation, config.training.max_steps
        loader = DataLoader(
            _OwnBatches(self.batches),
            batch_size=None,
            sampler=range(first * size, num_updates * size),
            num_workers=number,
            collate_fn=_unchanged,
            pin_memory=device.type == "cuda",
            multiprocessing_context="fork" if number else None,
            worker_init_fn=_leave_signals,
            # Without a generator, a loader would draw its seed from the training's.
            generator=torch.Generator(),
        )
        batches = iter(loader)
        for _ in range(first, num_updates):
            yield list(islice(batches, size))

    def validation(self) -> EvaluationBatches:
        """Return the part of the valid split that is evaluated during the run."""
        return self.evaluation("valid", max_tokens=self._config.training.validation_tokens)

    @abstractmethod
    def evaluation(self, split: Split, max_tokens: int | None = None) -> EvaluationBatches:
        """Return the batches of a split, all or about `max_tokens` tokens."""

    def words_per_token(self, split: Split) -> float:
        """Return the divisor that converts nats per token to nats per word, for the perplexity.

        It is 1 if loss and perplexity have the same unit.
        """
        del split
        return 1.0

    def scores(
        self, split: EvaluatedSplit, model: nn.Module, device: torch.device, *, brief: bool = False
    ) -> Mapping[str, float]:
        """Return scores of a split besides the likelihood by name, such as `accuracy`.

        Every process calls it. It draws no random numbers.

        Args:
            split: split to score.
            model: model in evaluation mode.
            device: device of the model.
            brief: whether this is a validation during training: expensive scores are then computed
                on a part of the split, and unused scores are left out.
        """
        del split, model, device, brief
        return {}

    def from_loss(self, loss: float) -> Mapping[str, float]:
        """Return other measures of the same likelihood, by name; the loss is in nats."""
        del loss
        return {}


class RowData(RunData[Settings], Generic[Encoded, Settings]):
    """Batches of a run with a fixed number of rows.

    Args:
        encoded: encoded data of the task.
        config: lengths, sizes and number of steps.
        seed: seed of the order of the rows, and of their augmentation.

    Raises:
        InputError: the train split is shorter than a batch.
    """

    def __init__(self, encoded: Encoded, config: Settings, seed: int) -> None:
        self._encoded, self._config = encoded, config
        # The data settings of every task with rows have these fields.
        data: Any = config.data
        self._evaluation_batch_size = data.evaluation_batch_size
        training = self.rows("train").training(
            batch_size=data.batch_size,
            seed=seed,
            batches_per_update=config.optimizer.accumulation,
        )
        super().__init__(config, training)

    @abstractmethod
    def rows(self, split: Split) -> BatchSource:
        """Return the rows of a split."""

    def evaluation(self, split: Split, max_tokens: int | None = None) -> EvaluationBatches:
        """Return the batches of a split, all or about `max_tokens` tokens."""
        return self.rows(split).evaluation(
            batch_size=self._evaluation_batch_size, max_tokens=max_tokens
        )

    def accuracy(self, split: EvaluatedSplit, model: nn.Module, device: torch.device) -> float:
        """Return the percentage of rows whose class has the largest logit."""
        right: list[Tensor] = []
        for batch in self.evaluation(split):
            moved = batch.to(device)
            right.append(model(**moved.inputs()).argmax(-1) == moved.targets)
        return 100 * float(torch.cat(right).float().mean())
