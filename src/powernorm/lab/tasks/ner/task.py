"""The task `ner`: find names, places, dates and the like in sentences."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.lab.data.batch import MASK
from powernorm.lab.data.corpus import SPLITS, Split
from powernorm.lab.settings.comparison import options_of
from powernorm.lab.tasks.ner.baselines import entity_baselines
from powernorm.lab.tasks.ner.batches import TaggedRows
from powernorm.lab.tasks.ner.corpora import EntityCorpus, load_entities
from powernorm.lab.tasks.ner.encoding import (
    EncodedEntities,
    EncodedSentences,
    encode_entities,
    thinned,
)
from powernorm.lab.tasks.ner.model import EntityTagger
from powernorm.lab.tasks.ner.settings import EntityDataSettings, EntitySettings
from powernorm.lab.tasks.ner.span_scores import span_scores
from powernorm.lab.tasks.ner.tag_schemes import legal_transitions, tags_of
from powernorm.lab.tasks.ner.tag_sequences import TagSequences
from powernorm.lab.training.batches import RowData, RunData
from powernorm.lab.training.norms import UPPER_NORM, norm_factory
from powernorm.lab.training.task import DataSummary, Sizes, Task, TaskModel
from powernorm.runs import Baseline

_EXAMPLE_CHARACTERS: Final = 8


class EntityData(RowData[EntitySettings]):
    """Padded sentences, in which the tag of every word is asked for.

    Args:
        encoded: the sentences over their words and tags.
        config: lengths, sizes and number of steps.
        seed: of the order of the sentences.

    Raises:
        InputError: the train split has fewer sentences than a batch, or the word vectors are of
            another size than the model's embeddings.
    """

    selection = "f1"

    def __init__(self, encoded: EncodedEntities, config: EntitySettings, seed: int) -> None:
        _check_vectors(encoded, config)
        self._encoded = encoded
        has_characters = config.model.character_features is not None
        super().__init__(
            config,
            lambda split: TaggedRows(encoded.splits[split], has_characters=has_characters),
            seed,
        )

    def scores(self, split: Split, model: nn.Module, device: torch.device) -> Mapping[str, float]:
        """Return F1, precision and recall of the entities of a split, in percent."""
        if not isinstance(model, EntityTagger):
            raise TypeError(f"expected a tagger, got {type(model).__name__}")
        names = self._encoded.tags
        rows: list[list[str]] = []
        for batch in self.evaluation(split):
            moved = batch.to(device)
            decoded = model.decode(model(**moved.inputs()), moved.named[MASK])
            rows += [[names[tag] for tag in tags] for tags in decoded]
        # Where a sentence was cut, its gold entities are still whole.
        gold = [
            tags_of(sentence.spans, len(sentence.words))
            for sentence in self._encoded.corpus.sentences[split]
        ]
        return span_scores(gold, _put_together(rows, self._encoded.splits[split]))


def _put_together(rows: Sequence[Sequence[str]], sentences: EncodedSentences) -> list[list[str]]:
    """Return the tags of each sentence out of those of its rows."""
    numbers: list[int] = sentences.rows_per_sentence.tolist()
    left = iter(rows)
    return [list(chain.from_iterable(next(left) for _ in range(number))) for number in numbers]


def _check_vectors(encoded: EncodedEntities, config: EntitySettings) -> None:
    for vector in encoded.vectors.values():
        wanted = config.model.embedding_features or config.model.num_features
        if vector.numel() != wanted:
            raise InputError(
                f"{config.data.vectors} has vectors of {vector.numel()} numbers, the model's "
                f"embeddings have {wanted}: set model.embedding_features={vector.numel()}."
            )
        return


class EntityTask(Task[EncodedEntities, EntitySettings]):
    """Find the entities of a sentence: the tag of every word, with a probability of them all."""

    units = "words"
    metrics = ("test_f1", "test_precision", "test_recall", "valid_f1")
    examples = "sentences"

    def encode(self, config: EntitySettings) -> EncodedEntities:
        """Read the sentences and number their words, characters and tags."""
        return _encoded(_corpus(config.data.path, config.data), None, config.data)

    def encode_by(self, source: str, config: EntitySettings) -> EncodedEntities:
        """Read `source` with the words, characters and tags of `data.path`."""
        data = config.data
        return _encoded(_corpus(source, data), _corpus(data.path, data), data)

    def data(
        self, encoded: EncodedEntities, config: EntitySettings, seed: int
    ) -> RunData[EntitySettings]:
        """Return padded sentences with tags."""
        return EntityData(encoded, config, seed)

    def baselines(self, encoded: EncodedEntities, config: EntitySettings) -> list[Baseline]:
        """Return the frequencies of the tags, and the most frequent tag of each word."""
        del config
        return entity_baselines(encoded)

    def facts(self, encoded: EncodedEntities) -> dict[str, Any]:
        """Return name, source, licence and sizes of the sentences."""
        corpus = encoded.corpus
        return {
            "name": corpus.name,
            "source": corpus.source,
            "licence": corpus.licence,
            "vocabulary_size": encoded.num_words,
            "kinds": list(encoded.kinds),
            "vectors": len(encoded.vectors),
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

    def summary(self, encoded: EncodedEntities) -> DataSummary:
        """Return the same in short."""
        num_sentences = len(encoded.corpus.sentences["train"])
        return DataSummary(encoded.corpus.name, num_sentences, "sentences", encoded.num_words)

    def sizes(self, encoded: EncodedEntities) -> Sizes:
        """Return the numbers of ids of words and characters, and of tags."""
        return (encoded.num_words, encoded.num_characters, len(encoded.tags))

    def sizes_of_weights(self, weights: Mapping[str, Tensor]) -> Sizes:
        """Return the same of a model; 0 where it has no characters."""
        characters = weights.get("characters.embedding.weight")
        return (
            len(weights["embedding.weight"]),
            0 if characters is None else len(characters),
            len(weights["head.weight"]),
        )

    def build(self, config: EntitySettings, norm: str, sizes: Sizes, seed: int) -> TaskModel:
        """Return the model of a run; equal seeds give equal weights to all norms."""
        num_words, num_characters, num_tags = sizes
        shape = config.model
        return EntityTagger(
            num_words,
            TagSequences(*legal_transitions(num_tags)),
            norm_factory(norm, options_of(config, norm)),
            num_features=shape.num_features,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            feedforward_features=shape.feedforward_features,
            placement=shape.placement,
            activation=shape.activation,
            dropout=shape.dropout,
            attention_dropout=shape.attention_dropout,
            activation_dropout=shape.activation_dropout,
            embedding_features=shape.embedding_features,
            embedding_dropout=shape.embedding_dropout,
            output_dropout=shape.output_dropout or 0.0,
            num_characters=num_characters,
            character_features=shape.character_features or 0,
            character_dropout=shape.character_dropout,
            initialization=shape.initialization,
            seed=seed,
            num_norm_layers=shape.num_norm_layers,
            upper_norm=norm_factory(UPPER_NORM),
        )

    def start(self, model: TaskModel, encoded: EncodedEntities) -> None:
        """Put the word vectors into the embeddings of a new model."""
        if encoded.vectors:
            ids = torch.tensor(list(encoded.vectors))
            with torch.no_grad():
                weight: Tensor = model.get_parameter("embedding.weight")
                weight[ids] = torch.stack(list(encoded.vectors.values()))

    def example_inputs(self, config: EntitySettings, sizes: Sizes) -> tuple[Tensor, ...]:
        """Return ids of words, (2, length), and of their characters where the model has them."""
        generator = torch.Generator().manual_seed(0)
        shape = (2, config.data.sequence_length)
        words = torch.randint(1, sizes[0], shape, generator=generator)
        if config.model.character_features is None:
            return (words,)
        shape_of_characters = (*shape, _EXAMPLE_CHARACTERS)
        return words, torch.randint(1, sizes[1], shape_of_characters, generator=generator)


def _corpus(source: str | None, data: EntityDataSettings) -> EntityCorpus:
    return thinned(load_entities(source), data.max_examples)


def _encoded(
    corpus: EntityCorpus, by: EntityCorpus | None, data: EntityDataSettings
) -> EncodedEntities:
    return encode_entities(
        corpus,
        vocabulary_size=data.vocabulary_size,
        max_length=data.sequence_length,
        vectors=None if data.vectors is None else Path(data.vectors),
        by=by,
    )
