"""The task of text classification with a Transformer encoder."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from powernorm_lab.data.corpus import SPLITS
from powernorm_lab.engine.events import DataPrepared
from powernorm_lab.runs import Baseline
from powernorm_lab.settings.comparison import options_of
from powernorm_lab.tasks.classify.baselines import text_baselines
from powernorm_lab.tasks.classify.batches import ClassifiedTextData
from powernorm_lab.tasks.classify.encoded_texts import EncodedTexts, encode_texts, encode_texts_by
from powernorm_lab.tasks.classify.model import TextClassifier
from powernorm_lab.tasks.classify.settings import ClassificationSettings
from powernorm_lab.tasks.classify.sources import load_texts
from powernorm_lab.tasks.classify.tables import Columns
from powernorm_lab.training.batches import RunData
from powernorm_lab.training.losses import TaskModel
from powernorm_lab.training.norms import UPPER_NORM, norm_factory, qk_norm_factory
from powernorm_lab.training.task import BuiltinTask, Sizes


def _columns(config: ClassificationSettings) -> Columns:
    return Columns(config.data.label_column, config.data.text_columns)


class ClassificationTask(BuiltinTask[EncodedTexts, ClassificationSettings]):
    """Classification of texts."""

    name = "classify"
    units = "words"
    metrics = ("valid_accuracy", "test_accuracy")
    examples = "texts"

    def encode(self, config: ClassificationSettings) -> EncodedTexts:
        """Read and encode the texts of `data.path`."""
        return encode_texts(
            load_texts(config.data.path, _columns(config)),
            vocabulary_size=config.data.vocabulary_size,
            max_length=config.data.sequence_length,
            max_examples=config.data.max_examples,
        )

    def encode_by(self, source: str, config: ClassificationSettings) -> EncodedTexts:
        """Read `source` and encode it with the words and classes of `data.path`."""
        return encode_texts_by(
            load_texts(source, _columns(config)),
            load_texts(config.data.path, _columns(config)),
            vocabulary_size=config.data.vocabulary_size,
            max_length=config.data.sequence_length,
        )

    def data(
        self, encoded: EncodedTexts, config: ClassificationSettings, seed: int
    ) -> RunData[ClassificationSettings]:
        """Return the batches of padded texts."""
        return ClassifiedTextData(encoded, config, seed)

    def baselines(self, encoded: EncodedTexts, config: ClassificationSettings) -> list[Baseline]:
        """Return the scores of class frequencies, and of naive Bayes over words."""
        del config
        found = text_baselines(encoded)
        return [Baseline(name=name, metrics=metrics) for name, metrics in found.items()]

    def facts(self, encoded: EncodedTexts) -> dict[str, Any]:
        """Return name, source, license and sizes of the texts."""
        texts = encoded.texts
        return {
            "name": texts.name,
            "source": texts.source,
            "licence": texts.license,
            "vocabulary_size": len(encoded.vocabulary),
            "classes": list(encoded.labels),
            "splits": {
                split: {
                    "texts": len(encoded.splits[split]),
                    "words": encoded.splits[split].words.numel(),
                    "cut": encoded.num_cut[split],
                }
                for split in SPLITS
            },
        }

    def summary(self, encoded: EncodedTexts) -> DataPrepared:
        """Return the event that describes the data."""
        num_texts = len(encoded.splits["train"])
        return DataPrepared(encoded.texts.name, num_texts, "texts", len(encoded.vocabulary))

    def sizes(self, encoded: EncodedTexts) -> Sizes:
        """Return the numbers of words and classes."""
        return len(encoded.vocabulary), len(encoded.labels)

    def sizes_of_weights(self, weights: Mapping[str, Tensor]) -> Sizes:
        """Return the numbers of words and classes from the weights of a model."""
        return len(weights["embedding.weight"]), len(weights["head.weight"])

    def build(
        self, config: ClassificationSettings, norm: str, sizes: Sizes, seed: int
    ) -> TaskModel:
        """Return the model of a run; models of equal seeds have equal weights for all norms."""
        return build_text_classifier(config, norm, sizes, seed)

    def example_inputs(self, config: ClassificationSettings, sizes: Sizes) -> tuple[Tensor, ...]:
        """Return random words with the maximal length, (2, length)."""
        generator = torch.Generator().manual_seed(0)
        shape = (2, config.data.sequence_length)
        return (torch.randint(sizes[0], shape, generator=generator),)


def build_text_classifier(
    config: ClassificationSettings, norm: str, sizes: Sizes, seed: int
) -> TextClassifier:
    """Build the model of one run; models of equal seeds have equal weights for all norms.

    Args:
        config: configuration with the model's shape.
        norm: short name.
        sizes: numbers of words and classes.
        seed: seed of the initial weights.

    Raises:
        InputError: the norm is unknown, or its options do not fit it or the model.
    """
    shape = config.model
    num_words, num_classes = sizes
    return TextClassifier(
        num_words,
        num_classes,
        norm_factory(norm, options_of(config, norm)),
        config.model.shape,
        max_length=config.data.sequence_length,
        embedding_features=shape.embedding_features,
        pooling=shape.pooling,
        embedding_dropout=(
            shape.dropout if shape.embedding_dropout is None else shape.embedding_dropout
        ),
        output_dropout=shape.output_dropout or 0.0,
        seed=seed,
        upper_norm=norm_factory(UPPER_NORM),
        qk_norm=qk_norm_factory(config),
    )
