"""The rows of a split, and the batches of a training and of an evaluation that are made of them."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from powernorm_lab.data.batch import Batch, EvaluationBatches, TrainingBatches
from powernorm_lab.data.orders import Order, Shuffled, spaced_by_tokens


class Rows(ABC):
    """Rows by their numbers; a task says how some of them become a batch.

    Args:
        lengths: what the norms count in each row: tokens, or 1; int64, (rows,).
    """

    unit: ClassVar[str]
    """What a row is, in the plural."""

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
        """Return the batch of a training, which may be changed at random."""
        del seed, position
        return self.batch(rows)

    def evaluation_batch(self, rows: Tensor, number: int) -> Batch:
        """Return the batch of an evaluation, always the same."""
        del number
        return self.batch(rows)

    def order(self, *, batch_size: int, seed: int) -> Order:
        """Return the order of a training.

        Raises:
            InputError: there are fewer rows than a batch has.
        """
        return Shuffled(len(self), batch_size=batch_size, seed=seed, unit=self.unit)

    def training(
        self, *, batch_size: int, seed: int, batches_per_update: int = 1
    ) -> TrainingBatches:
        """Return the batches of a training run.

        Args:
            batch_size: rows in a batch.
            seed: of the order, and of what is changed at random.
            batches_per_update: micro-batches over which the gradient is summed; they count alike.

        Raises:
            InputError: there are fewer rows than a batch has.
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
            max_tokens: only about so many tokens, in evenly spaced rows; None is all.
        """
        chosen = spaced_by_tokens(self.lengths, max_tokens)
        parts = chosen.split(batch_size) if len(chosen) else ()
        return EvaluationBatches(parts, self.evaluation_batch)


class PaddedRows(Rows):
    """Rows of several lengths that follow one another in one stream.

    Args:
        lengths: tokens in each row, int64, (rows,).
    """

    def __init__(self, lengths: Tensor) -> None:
        super().__init__(lengths)
        self._starts = lengths.cumsum(0) - lengths

    def places(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return where in the stream the tokens of rows stand, and what is padding there.

        Args:
            rows: numbers, int64, (batch,).

        Returns:
            int64, 0 at padding, and bool, True = padding, both (batch, length of the longest).
        """
        lengths = self.lengths[rows]
        positions = torch.arange(int(lengths.max()))
        padding = positions >= lengths[:, None]
        return (self._starts[rows][:, None] + positions).masked_fill_(padding, 0), padding
