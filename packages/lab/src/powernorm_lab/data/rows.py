"""Rows of a split, and their batches for training and evaluation."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from powernorm_lab.data.batch import Batch, EvaluationBatches, TrainingBatches
from powernorm_lab.data.orders import Order, Shuffled, spaced_by_tokens


class Rows(ABC):
    """Rows by their numbers; subclasses define how rows become a batch.

    Args:
        lengths: tokens of each row, or 1 for rows without tokens; int64, (rows,).
    """

    unit: ClassVar[str]
    """Name of the rows, in the plural."""

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.lengths)

    @abstractmethod
    def batch(self, rows: Tensor) -> Batch:
        """Return rows as a batch, padded to the longest.

        Args:
            rows: numbers of at least one row, int64, (batch,).
        """

    def training_batch(self, rows: Tensor, seed: int, position: int) -> Batch:
        """Return a batch for training; subclasses may augment it at random."""
        del seed, position
        return self.batch(rows)

    def order(self, *, batch_size: int, seed: int) -> Order:
        """Return the order of rows in training.

        Raises:
            InputError: there are fewer rows than `batch_size`.
        """
        return Shuffled(len(self), batch_size=batch_size, seed=seed, unit=self.unit)

    def training(
        self, *, batch_size: int, seed: int, batches_per_update: int = 1
    ) -> TrainingBatches:
        """Return the batches of a training run.

        Args:
            batch_size: rows in a batch.
            seed: seed of the order and of random augmentation.
            batches_per_update: micro-batches over which the gradient is summed, with equal weights.

        Raises:
            InputError: there are fewer rows than `batch_size`.
        """
        del batches_per_update
        return TrainingBatches(
            self.order(batch_size=batch_size, seed=seed),
            lambda rows, position: self.training_batch(rows, seed, position),
            tokens_per_batch=float(self.lengths.double().mean()) * batch_size,
        )

    def evaluation(self, *, batch_size: int, max_tokens: int | None = None) -> EvaluationBatches:
        """Return the batches of an evaluation, in the order of the rows.

        Args:
            batch_size: rows in a batch.
            max_tokens: approximate number of tokens, in evenly spaced rows; None is all.
        """
        chosen = spaced_by_tokens(self.lengths, max_tokens)
        parts = chosen.split(batch_size) if len(chosen) else ()
        return EvaluationBatches(parts, lambda rows, _: self.batch(rows))


class PaddedRows(Rows):
    """Rows of different lengths, concatenated in one stream.

    Args:
        lengths: tokens in each row, int64, (rows,).
    """

    def __init__(self, lengths: Tensor) -> None:
        super().__init__(lengths)
        self._starts = lengths.cumsum(0) - lengths

    def places(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions of rows' tokens in the stream, and their padding mask.

        Args:
            rows: numbers of the rows, int64, (batch,).

        Returns:
            Positions, int64, 0 at padding; and mask, bool, True = padding; both of shape
            (batch, length of the longest row).
        """
        lengths = self.lengths[rows]
        positions = torch.arange(int(lengths.max()))
        padding = positions >= lengths[:, None]
        return (self._starts[rows][:, None] + positions).masked_fill_(padding, 0), padding
