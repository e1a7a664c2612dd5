"""Batches of padded series with classes, and the sensitivity of predictions to padding."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torchmetrics.functional.classification import (
    multiclass_accuracy,
    multiclass_calibration_error,
    multiclass_f1_score,
)

from powernorm_lab.data.batch import MASK, Batch
from powernorm_lab.data.corpus import EvaluatedSplit
from powernorm_lab.data.orders import Order, ShuffledByLength
from powernorm_lab.data.rows import PaddedRows
from powernorm_lab.tasks.sequences.reading import SeriesSet, SeriesSplit
from powernorm_lab.tasks.sequences.settings import SequenceSettings
from powernorm_lab.training.batches import RowData

SERIES: Final = "series"
"""Name of the model's input, float32, (rows, frames, features)."""


class SeriesRows(PaddedRows):
    """The series of a split.

    Args:
        part: the series.
        by_length: whether training batches have series of similar length.
    """

    unit = "series"

    def __init__(self, part: SeriesSplit, *, by_length: bool = False) -> None:
        super().__init__(part.lengths)
        self._part = part
        self._by_length = by_length

    def batch(self, rows: Tensor) -> Batch:
        """Return a batch of series by number, padded to the longest."""
        places, padding = self.places(rows)
        return Batch(
            named={
                SERIES: self._part.frames[places].masked_fill_(padding[..., None], 0),
                MASK: padding,
            },
            targets=self._part.labels[rows],
            num_tokens=int(self.lengths[rows].sum()),
            num_targets=len(rows),
            positional=(SERIES,),
        )

    def order(self, *, batch_size: int, seed: int) -> Order:
        """Return the order of series in training."""
        if not self._by_length:
            return super().order(batch_size=batch_size, seed=seed)
        return ShuffledByLength(self.lengths, batch_size=batch_size, seed=seed, unit=self.unit)


class SequenceData(RowData[SequenceSettings]):
    """Batches of padded series with classes.

    Args:
        series: the series of all splits.
        config: size of batches and number of steps.
        seed: seed of the order of the series.

    Raises:
        InputError: the train split has fewer series than a batch.
    """

    def __init__(self, series: SeriesSet, config: SequenceSettings, seed: int) -> None:
        self._series = series
        by_length = config.data.by_length
        super().__init__(
            config, lambda split: SeriesRows(series.splits[split], by_length=by_length), seed
        )

    def scores(
        self, split: EvaluatedSplit, model: nn.Module, device: torch.device, *, brief: bool = False
    ) -> Mapping[str, float]:
        """Return accuracy, F1, calibration error, and the sensitivity of predictions to padding.

        All series are evaluated in three ways: in batches in the order of the file, in batches of
        similar length, and alone. The sensitivity is the percentage of predictions that differ from
        those alone, and the largest difference of a logit.
        """
        part, size = self._series.splits[split], self._evaluation_batch_size
        rows = SeriesRows(part)
        number = len(part.labels)
        padded = _logits(model, rows, torch.arange(number).split(size), device)
        accuracy = multiclass_accuracy(
            padded.argmax(1), part.labels, padded.shape[1], average="micro"
        )
        scores = {"accuracy": 100 * float(accuracy)}
        if brief:
            return scores
        by_length = part.lengths.argsort(stable=True)
        bucket = _logits(model, rows, by_length.split(size), device)
        alone = _logits(model, rows, _without_padding(part.lengths, size), device)
        f1 = multiclass_f1_score(padded.argmax(1), part.labels, padded.shape[1], average="macro")
        error = multiclass_calibration_error(padded.softmax(1), part.labels, padded.shape[1])
        return scores | {
            "macro_f1": 100 * float(f1),
            "calibration_error": 100 * float(error),
            "padding_changed": 100 * _share_changed(padded, alone),
            "bucket_changed": 100 * _share_changed(bucket, alone),
            "padding_difference": max(
                float((other - alone).abs().max()) for other in (padded, bucket)
            ),
        }


@torch.no_grad()
def _logits(
    model: nn.Module, rows: SeriesRows, parts: Iterable[Tensor], device: torch.device
) -> Tensor:
    """Return the logits of all series, float32 on the CPU, computed in the given batches."""
    found = [(part, model(**rows.batch(part).to(device).inputs()).float().cpu()) for part in parts]
    logits = torch.empty(len(rows), found[0][1].shape[1])
    for part, values in found:
        logits[part] = values
    return logits


def _without_padding(lengths: Tensor, size: int) -> Iterator[Tensor]:
    """Yield batches of series of equal length, equivalent to each alone but faster."""
    for length in lengths.unique():
        yield from torch.nonzero(lengths == length)[:, 0].split(size)


def _share_changed(logits: Tensor, alone: Tensor) -> float:
    return float((logits.argmax(1) != alone.argmax(1)).double().mean())
