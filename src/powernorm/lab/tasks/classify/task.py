"""Classification of texts: a Transformer encoder that tells the class of each."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from powernorm.lab.data.corpus import SPLITS, Split
from powernorm.lab.settings.comparison import options_of
from powernorm.lab.tasks.classify.baselines import text_baselines
from powernorm.lab.tasks.classify.batches import TextRows
from powernorm.lab.tasks.classify.columns import Columns
from powernorm.lab.tasks.classify.encoded_texts import (
    EncodedTexts,
    encode_texts,
    encode_texts_by,
)
from powernorm.lab.tasks.classify.model import TextClassifier
from powernorm.lab.tasks.classify.settings import ClassificationSettings
from powernorm.lab.tasks.classify.sources import load_texts
from powernorm.lab.training.batches import RowData, RunData
from powernorm.lab.training.norms import UPPER_NORM, norm_factory
from powernorm.lab.training.task import DataSummary, Sizes, Task, TaskModel
from powernorm.runs import Baseline


class ClassifiedTextData(RowData[ClassificationSettings]):
    """Padded texts, each with its class.

    Args:
        encoded: the texts over the ids of words and classes.
        config: lengths, sizes and number of steps.
        seed: of the order of the texts.

    Raises:
        InputError: the train split has fewer texts than a batch.
    """

    selection: ClassVar[str | None] = "accuracy"

    def __init__(self, encoded: EncodedTexts, config: ClassificationSettings, seed: int) -> None:
        self._encoded = encoded
        super().__init__(
            config,
            lambda split: TextRows(encoded.splits[split], batch_tokens=config.data.batch_tokens),
            seed,
        )

    def scores(self, split: Split, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Return the percentage of texts whose class is right."""
        accuracy = MulticlassAccuracy(len(self._encoded.labels), average="micro").to(device)
        for batch in self.evaluation(split):
            moved = batch.to(device)
            accuracy.update(model(**moved.inputs()), moved.targets)
        return {"accuracy": 100 * float(accuracy.compute())}


def _columns(config: ClassificationSettings) -> Columns:
    return Columns(config.data.label_column, config.data.text_columns)


class ClassificationTask(Task[EncodedTexts, ClassificationSettings]):
    """Tell the class of a text; the best checkpoint is that of the highest valid accuracy."""

    units = "words"
    metrics = ("valid_accuracy", "test_accuracy")
    examples = "texts"

    def encode(self, config: ClassificationSettings) -> EncodedTexts:
        """Read the texts and number their words and classes."""
        return encode_texts(
            load_texts(config.data.path, _columns(config)),
            vocabulary_size=config.data.vocabulary_size,
            max_length=config.data.sequence_length,
            max_examples=config.data.max_examples,
        )

    def encode_by(self, source: str, config: ClassificationSettings) -> EncodedTexts:
        """Read `source` with the words and classes of `data.path`."""
        return encode_texts_by(
            load_texts(source, _columns(config)),
            load_texts(config.data.path, _columns(config)),
            vocabulary_size=config.data.vocabulary_size,
            max_length=config.data.sequence_length,
        )

    def data(
        self, encoded: EncodedTexts, config: ClassificationSettings, seed: int
    ) -> RunData[ClassificationSettings]:
        """Return padded texts with their classes."""
        return ClassifiedTextData(encoded, config, seed)

    def baselines(self, encoded: EncodedTexts, config: ClassificationSettings) -> list[Baseline]:
        """Return the frequencies of the classes, and naive Bayes over words."""
        del config
        found = text_baselines(encoded)
        return [Baseline(name=name, metrics=metrics) for name, metrics in found.items()]

    def facts(self, encoded: EncodedTexts) -> dict[str, Any]:
        """Return name, source, licence and sizes of the texts."""
        texts = encoded.texts
        return {
            "name": texts.name,
            "source": texts.source,
            "licence": texts.licence,
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

    def summary(self, encoded: EncodedTexts) -> DataSummary:
        """Return the same in short."""
        num_texts = len(encoded.splits["train"])
        return DataSummary(encoded.texts.name, num_texts, "texts", len(encoded.vocabulary))

    def sizes(self, encoded: EncodedTexts) -> Sizes:
        """Return the numbers of words and of classes."""
        return len(encoded.vocabulary), len(encoded.labels)

    def sizes_of_weights(self, weights: Mapping[str, Tensor]) -> Sizes:
        """Return the same of a model."""
        return len(weights["embedding.weight"]), len(weights["head.weight"])

    def build(
        self, config: ClassificationSettings, norm: str, sizes: Sizes, seed: int
    ) -> TaskModel:
        """Return the model of a run; equal seeds give equal weights to all norms."""
        return build_text_classifier(config, norm, sizes, seed)

    def example_inputs(self, config: ClassificationSettings, sizes: Sizes) -> tuple[Tensor, ...]:
        """Return words of the longest text, (2, length)."""
        generator = torch.Generator().manual_seed(0)
        shape = (2, config.data.sequence_length)
        return (torch.randint(sizes[0], shape, generator=generator),)


def build_text_classifier(
    config: ClassificationSettings, norm: str, sizes: Sizes, seed: int
) -> TextClassifier:
    """Build the model of one run; equal seeds give equal weights to all norms.

    Args:
        config: has the model's shape.
        norm: short name.
        sizes: numbers of words and of classes.
        seed: of the initial weights.

    Raises:
        InputError: unknown norm, or options that do not fit it or the model.
    """
    shape = config.model
    num_words, num_classes = sizes
    return TextClassifier(
        num_words,
        num_classes,
        norm_factory(norm, options_of(config, norm)),
        max_length=config.data.sequence_length,
        num_features=shape.num_features,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        feedforward_features=shape.feedforward_features,
        embedding_features=shape.embedding_features,
        placement=shape.placement,
        activation=shape.activation,
        pooling=shape.pooling,
        dropout=shape.dropout,
        embedding_dropout=(
            shape.dropout if shape.embedding_dropout is None else shape.embedding_dropout
        ),
        attention_dropout=shape.attention_dropout,
        activation_dropout=shape.activation_dropout,
        output_dropout=shape.output_dropout or 0.0,
        initialization=shape.initialization,
        seed=seed,
        num_norm_layers=shape.num_norm_layers,
        upper_norm=norm_factory(UPPER_NORM),
    )
