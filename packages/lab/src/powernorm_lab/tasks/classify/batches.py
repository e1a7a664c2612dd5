"""Batches of padded texts with classes."""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from powernorm_lab.data.batch import MASK, Batch, EvaluationBatches, TrainingBatches
from powernorm_lab.data.corpus import EvaluatedSplit
from powernorm_lab.data.orders import LengthGroups, Order, WithinBudget, spaced_by_tokens
from powernorm_lab.data.rows import PaddedRows
from powernorm_lab.tasks.classify.encoded_texts import EncodedTexts, EncodedTextSplit
from powernorm_lab.tasks.classify.settings import ClassificationSettings
from powernorm_lab.training.batches import RowData

PADDING_ID: Final = 0


class TextRows(PaddedRows):
    """The texts of a split.

    With `batch_tokens`, a batch has texts of similar length; without it, `batch_size` random texts.

    Args:
        split: the encoded split.
        batch_tokens: maximal number of positions of a batch, including padding; a longer text is a
            batch by itself.
    """

    unit = "texts"

    def __init__(self, split: EncodedTextSplit, *, batch_tokens: int | None = None) -> None:
        super().__init__(split.lengths)
        self._split = split
        self._batch_tokens = batch_tokens

    def batch(self, rows: Tensor) -> Batch:
        """Return a batch of texts by number, padded to the longest."""
        places, padding = self.places(rows)
        words = self._split.words[places].long().masked_fill_(padding, PADDING_ID)
        return Batch(
            named={"tokens": words, MASK: padding},
            targets=self._split.labels[rows],
            num_tokens=int(self.lengths[rows].sum()),
            num_targets=rows.numel(),
        )

    def order(self, *, batch_size: int, seed: int) -> Order:
        """Return the order of texts in training."""
        if self._batch_tokens is None:
            return super().order(batch_size=batch_size, seed=seed)
        return WithinBudget(_groups(self.lengths, self._batch_tokens), seed=seed)

    def training(
        self, *, batch_size: int, seed: int, batches_per_update: int = 1
    ) -> TrainingBatches:
        """Return the batches of a training run; all texts of an update have equal weight."""
        order = self.order(batch_size=batch_size, seed=seed)
        if self._batch_tokens is None:
            num_tokens = float(self.lengths.double().mean()) * batch_size
        else:
            num_tokens = float(self.lengths.sum()) / order.batches_per_epoch
        return TrainingBatches(
            order,
            lambda rows, _: self.batch(rows),
            tokens_per_batch=num_tokens,
            num_targets=len,
            batches_per_update=batches_per_update,
        )

    def evaluation(self, *, batch_size: int, max_tokens: int | None = None) -> EvaluationBatches:
        """Return the batches of an evaluation, the shortest texts first."""
        chosen = spaced_by_tokens(self.lengths, max_tokens)
        lengths = self.lengths[chosen]
        if self._batch_tokens is None:
            parts = lengths.argsort(stable=True).split(batch_size)
        else:
            parts = _groups(lengths, self._batch_tokens).batches()
        return EvaluationBatches([chosen[part] for part in parts], self.evaluation_batch)


def _groups(lengths: Tensor, batch_tokens: int) -> LengthGroups:
    return LengthGroups(lengths, lengths, batch_tokens=batch_tokens)


class ClassifiedTextData(RowData[ClassificationSettings]):
    """Batches of padded texts with classes.

    Args:
        encoded: the encoded texts.
        config: lengths, sizes and number of steps.
        seed: seed of the order of the texts.

    Raises:
        InputError: the train split has fewer texts than a batch.
    """

    def __init__(self, encoded: EncodedTexts, config: ClassificationSettings, seed: int) -> None:
        self._encoded = encoded
        super().__init__(
            config,
            lambda split: TextRows(encoded.splits[split], batch_tokens=config.data.batch_tokens),
            seed,
        )

    def scores(
        self, split: EvaluatedSplit, model: nn.Module, device: torch.device, *, brief: bool = False
    ) -> Mapping[str, float]:
        """Return the accuracy in percent."""
        del brief
        accuracy = MulticlassAccuracy(len(self._encoded.labels), average="micro").to(device)
        for batch in self.evaluation(split):
            moved = batch.to(device)
            accuracy.update(model(**moved.inputs()), moved.targets)
        return {"accuracy": 100 * float(accuracy.compute())}
