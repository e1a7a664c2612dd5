"""The task of text classification with a Transformer encoder."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from powernorm_lab.data.baselines import UnigramModel
from powernorm_lab.data.corpus import EVALUATED_SPLITS, SPLITS, Split
from powernorm_lab.engine.events import DataPrepared
from powernorm_lab.runs import Baseline
from powernorm_lab.settings.comparison import options_of
from powernorm_lab.tasks.classify.data import (
    ClassifiedTextData,
    EncodedTexts,
    EncodedTextSplit,
    encode_texts,
)
from powernorm_lab.tasks.classify.model import TextClassifier
from powernorm_lab.tasks.classify.settings import ClassificationSettings
from powernorm_lab.tasks.classify.sources import Columns, load_texts
from powernorm_lab.training.losses import TaskModel
from powernorm_lab.training.norms import UPPER_NORM, norm_factory, qk_norm_factory
from powernorm_lab.training.task import BuiltinTask, Sizes


class ClassificationTask(BuiltinTask[EncodedTexts, ClassificationSettings]):
    """Classification of texts."""

    name = "classify"
    units = "words"
    metrics = ("valid_accuracy", "test_accuracy")
    examples = "texts"
    data = ClassifiedTextData

    def encode(self, config: ClassificationSettings, source: str | None = None) -> EncodedTexts:
        """Read and encode texts; `source` with the words and classes of `data.path`."""
        data = config.data
        columns = Columns(data.label_column, data.text_columns)
        own = load_texts(data.path, columns)
        return encode_texts(
            own if source is None else load_texts(source, columns),
            vocabulary_size=data.vocabulary_size,
            max_length=data.sequence_length,
            max_examples=data.max_examples if source is None else None,
            by=own,
        )

    def baselines(self, encoded: EncodedTexts, config: ClassificationSettings) -> list[Baseline]:
        """Return loss (nats per text) and accuracy of class frequencies, and of naive Bayes."""
        del config
        bayes = NaiveBayes(encoded.splits["train"], len(encoded.vocabulary), len(encoded.labels))
        found: dict[str, dict[str, float | None]] = {"unigram": {}, "naive_bayes": {}}
        for split in EVALUATED_SPLITS:
            part = encoded.splits[split]
            prior = bayes.log_prior.expand(len(part), -1)
            found["unigram"] |= _metrics(split, prior, part.labels)
            found["naive_bayes"] |= _metrics(split, bayes.log_probabilities(part), part.labels)
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
        """Return the model of a run; models of equal seeds have equal weights for all norms.

        Raises:
            InputError: the norm is unknown, or its options do not fit it or the model.
        """
        shape = config.model
        num_words, num_classes = sizes
        dropout = shape.dropout if shape.embedding_dropout is None else shape.embedding_dropout
        return TextClassifier(
            num_words,
            num_classes,
            norm_factory(norm, options_of(config, norm)),
            shape.shape,
            max_length=config.data.sequence_length,
            embedding_features=shape.embedding_features,
            pooling=shape.pooling,
            embedding_dropout=dropout,
            output_dropout=shape.output_dropout or 0.0,
            seed=seed,
            upper_norm=norm_factory(UPPER_NORM),
            qk_norm=qk_norm_factory(config),
        )

    def example_inputs(self, config: ClassificationSettings, sizes: Sizes) -> tuple[Tensor, ...]:
        """Return random words with the maximal length, (2, length)."""
        generator = torch.Generator().manual_seed(0)
        shape = (2, config.data.sequence_length)
        return (torch.randint(sizes[0], shape, generator=generator),)


# Baselines.


class NaiveBayes:
    """p(class | text) ∝ p(class) Π p(word | class) over the distinct words of the text.

    Each word counts once in a text: p(word | class) = (texts of the class with it + 1) / (the same
    summed over all words). The model is overconfident, because words are not independent: its
    accuracy is meaningful, its loss is not.

    Args:
        split: training texts.
        num_words: number of ids of words.
        num_classes: number of classes.
    """

    def __init__(self, split: EncodedTextSplit, num_words: int, num_classes: int) -> None:
        self._num_words = num_words
        texts, words = self._pairs(split)
        places = split.labels[texts] * num_words + words
        counts = torch.bincount(places, minlength=num_classes * num_words).double() + 1
        table = counts.view(num_classes, num_words)
        self._log_words = (table / table.sum(1, keepdim=True)).log().T.contiguous()
        self.log_prior = (
            UnigramModel(split.labels, num_classes).probabilities(torch.arange(num_classes)).log()
        )
        """Log-probability of each class, float64, (classes,)."""

    def log_probabilities(self, split: EncodedTextSplit) -> Tensor:
        """Return log p of the classes of each text, float64, (number of texts, classes)."""
        texts, words = self._pairs(split)
        scores = self.log_prior.repeat(len(split), 1)
        scores.index_add_(0, texts, self._log_words[words])
        return scores.log_softmax(dim=1)

    def _pairs(self, split: EncodedTextSplit) -> tuple[Tensor, Tensor]:
        """Return the distinct pairs of texts and words."""
        texts = torch.arange(len(split)).repeat_interleave(split.lengths)
        pairs = torch.unique(texts * self._num_words + split.words)
        return pairs // self._num_words, pairs % self._num_words


def _metrics(split: Split, log_probabilities: Tensor, labels: Tensor) -> dict[str, float | None]:
    right = (log_probabilities.argmax(dim=1) == labels).double().mean()
    return {
        f"{split}_loss": float(F.nll_loss(log_probabilities, labels)),
        f"{split}_accuracy": 100 * float(right),
    }
