"""The batches of a run, prepared ahead of the device that computes on them."""

import multiprocessing
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from powernorm_lab.data.batch import Batch, EvaluationBatches, TrainingBatches
from powernorm_lab.data.corpus import EvaluatedSplit, Split
from powernorm_lab.engine.processes import num_processes, rank
from powernorm_lab.engine.stopping import SIGNALS
from powernorm_lab.settings.comparison import ComparisonSettings

Settings = TypeVar("Settings", bound=ComparisonSettings)


def own_evaluation(batches: EvaluationBatches) -> EvaluationBatches:
    """Return of every batch of an evaluation the rows of this process.

    All processes have the same number of batches, some perhaps without rows: divided weights are
    gathered at every call of a layer.
    """
    size = num_processes()
    if size == 1:
        return batches
    return EvaluationBatches(batches, lambda batch, _: batch.shard(rank(), size))


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


class _OwnBatches(Dataset[Batch]):
    """The micro-batches of a run by position, of each the rows of this process."""

    def __init__(self, batches: TrainingBatches) -> None:
        self._batches = batches
        # Asked here, for a worker belongs to no group of processes.
        self._rank, self._size = rank(), num_processes()

    def __getitem__(self, position: int) -> Batch:
        batch = self._batches.batch(position)
        return batch if self._size == 1 else batch.shard(self._rank, self._size)


def _num_loader_workers(device: torch.device) -> int:
    """Return how many processes prepare batches ahead: two beside a GPU, where they can be forked.

    There are none on a CPU, whose cores train.
    """
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    return 2 if device.type == "cuda" and can_fork else 0


def _leave_signals(worker: int) -> None:
    """Let the process that trains decide what a scheduler's signal ends."""
    del worker
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _unchanged(batch: Any) -> Any:
    return batch


class RunData(ABC, Generic[Settings]):
    """The batches of one run, the same for every norm of that seed.

    Args:
        config: lengths, sizes and number of steps.
        batches: of the training, of all processes together.
    """

    def __init__(self, config: Settings, batches: TrainingBatches) -> None:
        self._config = config
        self.batches = batches

    def updates(self, device: torch.device, first: int = 0) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each update, made in workers ahead of the device.

        Args:
            device: that they go to; for a GPU they are in pinned memory.
            first: number of updates that are done.
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
            # Its own, or each loader would take a random number from the training.
            generator=torch.Generator(),
        )
        batches = iter(loader)
        for _ in range(first, num_updates):
            yield list(islice(batches, size))

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

    def scores(
        self, split: EvaluatedSplit, model: nn.Module, device: torch.device, *, brief: bool = False
    ) -> Mapping[str, float]:
        """Return what a split says beyond the likelihood, by name, such as `accuracy`.

        Every process calls it. Nothing is drawn at random.

        Args:
            split: that is scored.
            model: in evaluation mode.
            device: of the model.
            brief: as at the validations of a training: where scoring takes long, of a part of the
                split, and without the scores that nobody asks for there.
        """
        del split, model, device, brief
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
