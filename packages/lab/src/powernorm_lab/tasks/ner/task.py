"""The task `ner`: recognition of named entities such as persons, places and dates."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from powernorm_lab.data.baselines import UnigramModel
from powernorm_lab.data.corpus import EVALUATED_SPLITS, SPLITS, Split
from powernorm_lab.engine.events import DataPrepared
from powernorm_lab.runs import Baseline
from powernorm_lab.settings.comparison import options_of
from powernorm_lab.tasks.ner.data import (
    EncodedEntities,
    EntityData,
    encode_entities,
    span_scores,
    thinned,
)
from powernorm_lab.tasks.ner.model import EntityTagger, TagSequences
from powernorm_lab.tasks.ner.settings import EntitySettings
from powernorm_lab.tasks.ner.sources import load_entities
from powernorm_lab.tasks.ner.tag_schemes import legal_transitions, spans_of
from powernorm_lab.training.losses import TaskModel
from powernorm_lab.training.norms import UPPER_NORM, norm_factory
from powernorm_lab.training.task import BuiltinTask, Sizes

_EXAMPLE_CHARACTERS: Final = 8


class EntityTask(BuiltinTask[EncodedEntities, EntitySettings]):
    """Recognition of named entities by tagging every word."""

    name = "ner"
    units = "words"
    metrics = ("test_f1", "test_precision", "test_recall", "valid_f1")
    examples = "sentences"
    data = EntityData

    def encode(self, config: EntitySettings, source: str | None = None) -> EncodedEntities:
        """Read and encode sentences; `source` with the vocabulary of `data.path`."""
        data = config.data
        own = thinned(load_entities(data.path), data.max_examples)
        other = None if source is None else thinned(load_entities(source), data.max_examples)
        return encode_entities(
            other or own,
            vocabulary_size=data.vocabulary_size,
            max_length=data.sequence_length,
            vectors=None if data.vectors is None else Path(data.vectors),
            has_bigrams=config.model.bigram_features is not None,
            bigram_vectors=None if data.bigram_vectors is None else Path(data.bigram_vectors),
            by=own,
        )

    def baselines(self, encoded: EncodedEntities, config: EntitySettings) -> list[Baseline]:
        """Return loss and perplexity per word, F1, precision and recall of two models.

        - `unigram`: frequencies of tags in the train split. The most frequent tag is `O`, so that
          it finds no entity.
        - `word`: the most frequent tag of each word, without context.
        """
        del config
        train = encoded.splits["train"]
        words, tags, num_tags = train.words.long(), train.tags.long(), len(encoded.tags)
        unigram = UnigramModel(tags, num_tags)
        by_word = WordTagModel(words, tags, encoded.num_words, num_tags)
        every_tag = torch.arange(num_tags)
        metrics: dict[str, dict[str, float | None]] = {"unigram": {}, "word": {}}
        for split in EVALUATED_SPLITS:
            part = encoded.splits[split]
            asked, answers = part.words.long(), part.tags.long()
            priors = unigram.probabilities(every_tag).expand(len(asked), -1)
            of_words = by_word.probabilities(asked[:, None], every_tag[None])
            for name, table in (("unigram", priors), ("word", of_words)):
                loss = -float(table.gather(1, answers[:, None]).log().mean())
                metrics[name][f"{split}_perplexity"] = math.exp(loss)
                metrics[name][f"{split}_loss"] = loss
                scores = _scores(encoded, split, table.argmax(dim=1))
                metrics[name] |= {f"{split}_{score}": value for score, value in scores.items()}
        return [Baseline(name=name, metrics=values) for name, values in metrics.items()]

    def facts(self, encoded: EncodedEntities) -> dict[str, Any]:
        """Return name, source, license and sizes of the sentences."""
        corpus = encoded.corpus
        return {
            "name": corpus.name,
            "source": corpus.source,
            "licence": corpus.license,
            "vocabulary_size": encoded.num_words,
            "kinds": list(encoded.kinds),
            "vectors": len(encoded.vectors),
            **(_bigram_facts(encoded) if encoded.num_bigrams else {}),
            "splits": {
                split: {
                    "documents": len(corpus.sentences[split]),
                    "words": encoded.splits[split].words.numel(),
                    "tokens": encoded.splits[split].words.numel(),
                    "entities": sum(len(sentence.spans) for sentence in corpus.sentences[split]),
                }
                for split in SPLITS
            },
        }

    def summary(self, encoded: EncodedEntities) -> DataPrepared:
        """Return the event that describes the data."""
        num_sentences = len(encoded.corpus.sentences["train"])
        return DataPrepared(encoded.corpus.name, num_sentences, "sentences", encoded.num_words)

    def sizes(self, encoded: EncodedEntities) -> Sizes:
        """Return the numbers of ids of words, characters and bigrams (if any), and of tags."""
        bigrams = (encoded.num_bigrams,) if encoded.num_bigrams else ()
        return (encoded.num_words, encoded.num_characters, *bigrams, len(encoded.tags))

    def sizes_of_weights(self, weights: Mapping[str, Tensor]) -> Sizes:
        """Return these numbers from the weights of a model; 0 for a model without characters."""
        characters = weights.get("characters.embedding.weight")
        bigrams = weights.get("bigrams.weight")
        return (
            len(weights["embedding.weight"]),
            0 if characters is None else len(characters),
            *(() if bigrams is None else (len(bigrams),)),
            len(weights["head.weight"]),
        )

    def build(self, config: EntitySettings, norm: str, sizes: Sizes, seed: int) -> TaskModel:
        """Return the model of a run; models of equal seeds have equal weights for all norms."""
        num_words, num_characters, *num_bigrams, num_tags = sizes
        shape = config.model
        return EntityTagger(
            num_words,
            TagSequences(*legal_transitions(num_tags)),
            norm_factory(norm, options_of(config, norm)),
            config.model.shape,
            embedding_features=shape.embedding_features,
            embedding_dropout=shape.embedding_dropout,
            output_dropout=shape.output_dropout or 0.0,
            num_characters=num_characters,
            character_features=shape.character_features or 0,
            character_dropout=shape.character_dropout,
            num_bigrams=sum(num_bigrams),
            bigram_features=shape.bigram_features or 0,
            seed=seed,
            upper_norm=norm_factory(UPPER_NORM),
        )

    def fill(self, model: TaskModel, encoded: EncodedEntities) -> None:
        """Copy the vectors of words and bigrams into the embeddings of a new model."""
        given = {"embedding.weight": encoded.vectors, "bigrams.weight": encoded.bigram_vectors}
        for name, vectors in given.items():
            if vectors:
                ids = torch.tensor(list(vectors))
                with torch.no_grad():
                    weight: Tensor = model.get_parameter(name)
                    weight[ids] = torch.stack(list(vectors.values()))

    def example_inputs(self, config: EntitySettings, sizes: Sizes) -> tuple[Tensor, ...]:
        """Return random ids of words, (2, length), and other inputs in the order of `forward`.

        If the model has bigrams, unused inputs before them have values without effect.
        """
        generator = torch.Generator().manual_seed(0)
        shape = (2, config.data.sequence_length)
        words = torch.randint(1, sizes[0], shape, generator=generator)
        characters = torch.ones(*shape, 1, dtype=torch.int64)
        if config.model.character_features is not None:
            shape_of_characters = (*shape, _EXAMPLE_CHARACTERS)
            characters = torch.randint(1, sizes[1], shape_of_characters, generator=generator)
        if config.model.bigram_features is not None:
            no_padding = torch.zeros(shape, dtype=torch.bool)
            bigrams = torch.randint(1, sizes[2], shape, generator=generator)
            return words, characters, no_padding, bigrams
        return (words,) if config.model.character_features is None else (words, characters)


def _bigram_facts(encoded: EncodedEntities) -> dict[str, int]:
    return {"bigrams": encoded.num_bigrams, "bigram_vectors": len(encoded.bigram_vectors)}


class WordTagModel:
    """p(tag | word) = (count(word, tag) + p(tag)) / (count(word) + 1), without context.

    Args:
        words: ids of the train split, int64, (num_words,).
        tags: tag of each word, from 0, int64, (num_words,).
        num_word_ids: number of distinct words.
        num_tags: number of distinct tags.
    """

    def __init__(self, words: Tensor, tags: Tensor, num_word_ids: int, num_tags: int) -> None:
        pairs = torch.bincount(words * num_tags + tags, minlength=num_word_ids * num_tags)
        counts = pairs.reshape(num_word_ids, num_tags).double()
        prior = UnigramModel(tags, num_tags).probabilities(torch.arange(num_tags))
        self._probabilities = (counts + prior) / (counts.sum(dim=1, keepdim=True) + 1)

    def probabilities(self, words: Tensor, tags: Tensor) -> Tensor:
        """Return p of every word's tag, float64, (num_words,)."""
        return self._probabilities[words, tags]


def _scores(encoded: EncodedEntities, split: Split, tags: Tensor) -> dict[str, float]:
    sentences = encoded.corpus.sentences[split]
    lengths = [len(sentence.words) for sentence in sentences]
    found = [[encoded.tags[tag] for tag in row.tolist()] for row in tags.split(lengths)]
    return span_scores((s.spans for s in sentences), (spans_of(row, "iob") for row in found))
