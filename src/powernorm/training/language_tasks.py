"""The tasks of one text: language modelling, masked language modelling, tagging."""

import math
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from powernorm.data.baselines import BigramModel, UnigramModel, baseline_metrics, tag_metrics
from powernorm.data.batch import IGNORED
from powernorm.data.corpus import SPLITS
from powernorm.data.readers import load_corpus
from powernorm.data.subwords import EncodedCorpus, encode_by, encode_corpus
from powernorm.data.tagged_words import (
    NUM_MARKS,
    EncodedTags,
    encode_treebank,
    encode_treebank_by,
)
from powernorm.data.treebanks import load_treebank
from powernorm.runs import Baseline
from powernorm.training.batches import (
    LanguageModelData,
    MaskedSentenceData,
    RunData,
    TaggedSentenceData,
)
from powernorm.training.config import ComparisonConfig, DataConfig
from powernorm.training.language_modeling import build_language_model
from powernorm.training.language_settings import check_architecture
from powernorm.training.task import DataSummary, Sizes, Task, TaskModel

_Text = TypeVar("_Text", bound=EncodedCorpus)

SEES_FUTURE: Final = "sees the future"
"""Marks what a language model came to whose causal mask was left out."""


class TextTask(Task[_Text]):
    """A task whose model reads one text and says something at every position."""

    uses = frozenset({"model.num_norm_layers"})
    num_extra_tokens = 0
    """Ids after those of the vocabulary, such as the mask token."""

    def facts(self, encoded: _Text) -> dict[str, Any]:
        """Return name, source, licence and sizes of the text."""
        corpus = encoded.corpus
        return {
            "name": corpus.name,
            "source": corpus.source,
            "licence": corpus.licence,
            "vocabulary_size": encoded.vocabulary_size,
            "splits": {
                split: {
                    "documents": len(corpus.documents[split]),
                    "words": encoded.splits[split].num_words,
                    "tokens": encoded.splits[split].num_tokens,
                }
                for split in SPLITS
            },
        }

    def summary(self, encoded: _Text) -> DataSummary:
        """Return the same in short."""
        num_words = encoded.splits["train"].num_words
        return DataSummary(encoded.corpus.name, num_words, "words", encoded.vocabulary_size)

    def sizes(self, encoded: _Text) -> Sizes:
        """Return the number of ids."""
        return (encoded.vocabulary_size + self.num_extra_tokens,)

    def sizes_of_weights(self, weights: Mapping[str, Tensor]) -> Sizes:
        """Return the number of ids of a model."""
        # Of an adaptive softmax's model it is one level down.
        name = "embedding.weight"
        return (len(weights[name] if name in weights else weights[f"model.{name}"]),)

    def build(self, config: ComparisonConfig, norm: str, sizes: Sizes, seed: int) -> TaskModel:
        """Return the model of a run; equal seeds give equal weights to all norms."""
        return build_language_model(config, norm, sizes[-1], seed)

    def example_inputs(self, config: ComparisonConfig, sizes: Sizes) -> tuple[Tensor, ...]:
        """Return tokens of the model's length, (2, length)."""
        generator = torch.Generator().manual_seed(0)
        shape = (2, config.data.sequence_length)
        return (torch.randint(sizes[-1], shape, generator=generator),)


class LanguageModelTask(TextTask[EncodedCorpus]):
    """Predict each token from those before it."""

    uses = TextTask.uses | {
        "model.architecture",
        "model.head_features",
        "model.sees_future",
        "model.adaptive_cutoffs",
    }

    def encode(self, data: DataConfig) -> EncodedCorpus:
        """Read the text and number its subwords."""
        return encode_corpus(load_corpus(data.path), data.vocabulary_size)

    def encode_by(self, source: str, data: DataConfig) -> EncodedCorpus:
        """Read `source` with the subwords of `data.path`."""
        return encode_by(load_corpus(source), load_corpus(data.path), data.vocabulary_size)

    def data(self, encoded: EncodedCorpus, config: ComparisonConfig, seed: int) -> RunData:
        """Return segments of a stream of text."""
        return LanguageModelData(encoded, config, seed)

    def baselines(self, encoded: EncodedCorpus, config: ComparisonConfig) -> list[Baseline]:
        """Return unigram and bigram."""
        del config
        train, valid = encoded.splits["train"].tokens, encoded.splits["valid"].tokens
        size = encoded.vocabulary_size
        unigram = baseline_metrics(UnigramModel(train, size), encoded)
        bigram = baseline_metrics(BigramModel(train, valid, size), encoded)
        return [Baseline(name="unigram", metrics=unigram), Baseline(name="bigram", metrics=bigram)]

    def check(self, config: ComparisonConfig, norm: str) -> None:
        """Check that the settings fit the architecture, and the likelihood."""
        super().check(config, norm)
        check_architecture(config)

    def remark(self, config: ComparisonConfig) -> str:
        """Say that a model without its causal mask is none."""
        return SEES_FUTURE if config.model.sees_future else super().remark(config)


class MaskedLanguageModelTask(LanguageModelTask):
    """Predict masked tokens from all others."""

    uses = TextTask.uses
    num_extra_tokens = 1

    def data(self, encoded: EncodedCorpus, config: ComparisonConfig, seed: int) -> RunData:
        """Return padded sentences with masks."""
        return MaskedSentenceData(encoded, config, seed)

    def baselines(self, encoded: EncodedCorpus, config: ComparisonConfig) -> list[Baseline]:
        """Return the unigram at the masked positions; a bigram would see masked neighbours."""
        unigram = UnigramModel(encoded.splits["train"].tokens, encoded.vocabulary_size)
        data = MaskedSentenceData(encoded, config, seed=0)
        metrics: dict[str, float | None] = {}
        for split in ("valid", "test"):
            targets = torch.cat([batch.targets.flatten() for batch in data.evaluation(split)])
            loss = -float(unigram.probabilities(targets[targets != IGNORED]).log().mean())
            metrics[f"{split}_perplexity"] = math.exp(loss)
            metrics[f"{split}_loss"] = loss
        return [Baseline(name="unigram", metrics=metrics)]


class TaggingTask(TextTask[EncodedTags]):
    """Predict the part of speech of every word.

    The ids of the tags are part of the treebank's vocabulary.
    """

    units = "words and tags"
    least_vocabulary = NUM_MARKS + 1

    def encode(self, data: DataConfig) -> EncodedTags:
        """Read the treebank and number its words and tags."""
        return encode_treebank(load_treebank(data.path), data.vocabulary_size)

    def encode_by(self, source: str, data: DataConfig) -> EncodedTags:
        """Read `source` with the words and tags of `data.path`."""
        own = load_treebank(data.path)
        return encode_treebank_by(load_treebank(source), own, data.vocabulary_size)

    def data(self, encoded: EncodedTags, config: ComparisonConfig, seed: int) -> RunData:
        """Return padded sentences with tags."""
        return TaggedSentenceData(encoded, config, seed)

    def baselines(self, encoded: EncodedTags, config: ComparisonConfig) -> list[Baseline]:
        """Return the most frequent tag, and that of each word."""
        del config
        return [Baseline(name=name, metrics=found) for name, found in tag_metrics(encoded).items()]
