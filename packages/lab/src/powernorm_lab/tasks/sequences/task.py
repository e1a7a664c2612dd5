"""The task of classifying series of variable length, such as speech or sensor data."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from powernorm_lab.data.baselines import UnigramModel
from powernorm_lab.data.corpus import EVALUATED_SPLITS, SPLITS
from powernorm_lab.engine.events import DataPrepared
from powernorm_lab.runs import Baseline
from powernorm_lab.settings.comparison import options_of
from powernorm_lab.tasks.sequences.data import SequenceData, SeriesSet, load_series
from powernorm_lab.tasks.sequences.model import SequenceClassifier
from powernorm_lab.tasks.sequences.settings import SequenceSettings
from powernorm_lab.training.losses import TaskModel
from powernorm_lab.training.norms import UPPER_NORM, norm_factory, qk_norm_factory
from powernorm_lab.training.task import BuiltinTask, Sizes


class SequenceTask(BuiltinTask[SeriesSet, SequenceSettings]):
    """Classification of series of variable length."""

    name = "sequences"
    units = "classes"
    metrics = (
        *("valid_accuracy", "test_accuracy", "test_macro_f1", "test_calibration_error"),
        *("test_padding_changed", "test_bucket_changed", "test_padding_difference"),
    )
    examples = "series"
    data = SequenceData

    def encode(self, config: SequenceSettings, source: str | None = None) -> SeriesSet:
        """Read and standardize series; `source` by the classes and the scale of `data.path`."""
        own = load_series(config.data.path)
        return own if source is None else load_series(source, own)

    def baselines(self, encoded: SeriesSet, config: SequenceSettings) -> list[Baseline]:
        """Return the scores of class frequencies; the accuracy is of the most frequent class."""
        del config
        unigram = UnigramModel(encoded.splits["train"].labels, len(encoded.classes))
        evaluated = {split: encoded.splits[split].labels for split in EVALUATED_SPLITS}
        metrics = unigram.metrics(evaluated)
        for split, labels in evaluated.items():
            hits = (labels == unigram.most_frequent).double().mean()
            metrics[f"{split}_accuracy"] = 100 * float(hits)
        return [Baseline(name="unigram", metrics=metrics)]

    def facts(self, encoded: SeriesSet) -> dict[str, Any]:
        """Return name, source, license and sizes of the series."""
        return {
            "name": encoded.name,
            "source": encoded.source,
            "licence": encoded.license,
            "features": encoded.num_features,
            "classes": list(encoded.classes),
            "splits": {
                split: {
                    "series": len(part.lengths),
                    "frames": len(part.frames),
                    "shortest": int(part.lengths.min()),
                    "longest": int(part.lengths.max()),
                }
                for split in SPLITS
                for part in [encoded.splits[split]]
            },
        }

    def summary(self, encoded: SeriesSet) -> DataPrepared:
        """Return the event that describes the data."""
        num_train = len(encoded.splits["train"].lengths)
        return DataPrepared(encoded.name, num_train, "series", len(encoded.classes))

    def sizes(self, encoded: SeriesSet) -> Sizes:
        """Return the numbers of features and of classes."""
        return encoded.num_features, len(encoded.classes)

    def sizes_of_weights(self, weights: Mapping[str, Tensor]) -> Sizes:
        """Return the numbers of features and classes from the weights of a model."""
        return weights["up.weight"].shape[1], len(weights["head.weight"])

    def build(self, config: SequenceSettings, norm: str, sizes: Sizes, seed: int) -> TaskModel:
        """Return the model of a run; models of equal seeds have equal weights for all norms."""
        shape = config.model
        num_features, num_classes = sizes
        return SequenceClassifier(
            num_features,
            num_classes,
            norm_factory(norm, options_of(config, norm)),
            shape.shape,
            architecture=shape.architecture,
            kernel_size=shape.kernel_size,
            patch_length=shape.patch_length,
            mask_padding=shape.mask_padding,
            seed=seed,
            upper_norm=norm_factory(UPPER_NORM),
            qk_norm=qk_norm_factory(config),
        )

    def example_inputs(self, config: SequenceSettings, sizes: Sizes) -> tuple[Tensor, ...]:
        """Return two random series, (2, frames, features)."""
        del config
        generator = torch.Generator().manual_seed(0)
        return (torch.randn(2, 16, sizes[0], generator=generator),)
