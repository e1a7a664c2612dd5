"""Batches of tagged sentences; the target of each word is its tag."""

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm_lab.data.batch import IGNORED, MASK, Batch
from powernorm_lab.data.corpus import EvaluatedSplit
from powernorm_lab.data.orders import Order, ShuffledByLength
from powernorm_lab.data.rows import PaddedRows
from powernorm_lab.tasks.ner.encoding import PADDING_ID, EncodedEntities, EncodedSentences
from powernorm_lab.tasks.ner.model import EntityTagger
from powernorm_lab.tasks.ner.scores import span_scores
from powernorm_lab.tasks.ner.settings import EntitySettings
from powernorm_lab.tasks.ner.tag_schemes import spans_of
from powernorm_lab.training.batches import RowData


class TaggedRows(PaddedRows):
    """The sentences of a split with the tag of each word.

    Args:
        sentences: encoded sentences of the split.
        has_characters: whether batches hold the characters of words.
        has_bigrams: whether batches hold bigrams.
    """

    unit = "sentences"

    def __init__(
        self, sentences: EncodedSentences, *, has_characters: bool, has_bigrams: bool = False
    ) -> None:
        super().__init__(sentences.lengths)
        self._sentences = sentences
        self._has_characters = has_characters
        self._has_bigrams = has_bigrams

    def order(self, *, batch_size: int, seed: int) -> Order:
        """Return the order of sentences in training, with similar lengths in a batch."""
        return ShuffledByLength(self.lengths, batch_size=batch_size, seed=seed, unit=self.unit)

    def batch(self, rows: Tensor) -> Batch:
        """Return a batch of rows by number, padded to the longest."""
        places, padding = self.places(rows)
        num_words = int(self.lengths[rows].sum())
        named = {
            "tokens": self._sentences.words[places].long().masked_fill(padding, PADDING_ID),
            MASK: padding,
        }
        if self._has_characters:
            named["characters"] = self._characters(places, padding)
        if self._has_bigrams:
            named["bigrams"] = (
                self._sentences.bigrams[places].long().masked_fill(padding, PADDING_ID)
            )
        return Batch(
            named=named,
            targets=self._sentences.tags[places].long().masked_fill(padding, IGNORED),
            num_tokens=num_words,
            num_targets=num_words,
            # The minimized loss is a mean over sentences, the logged loss over words.
            loss_targets=float(rows.numel()),
            logged_targets=float(num_words),
        )

    def _characters(self, places: Tensor, padding: Tensor) -> Tensor:
        found = self._sentences.characters[places].long()
        found = found.masked_fill(padding[..., None], PADDING_ID)
        longest = int((found != PADDING_ID).any(dim=0).any(dim=0).sum())
        return found[..., : max(longest, 1)]


class EntityData(RowData[EntitySettings]):
    """Batches of padded sentences with tags.

    Args:
        encoded: the encoded sentences.
        config: lengths, sizes and number of steps.
        seed: seed of the order of the sentences.

    Raises:
        InputError: the train split has fewer sentences than a batch, or vectors and the model's
            embeddings differ in size.
    """

    def __init__(self, encoded: EncodedEntities, config: EntitySettings, seed: int) -> None:
        _check_vectors(encoded, config)
        self._encoded = encoded
        super().__init__(
            config,
            lambda split: TaggedRows(
                encoded.splits[split],
                has_characters=config.model.character_features is not None,
                has_bigrams=config.model.bigram_features is not None,
            ),
            seed,
        )

    def scores(
        self, split: EvaluatedSplit, model: nn.Module, device: torch.device, *, brief: bool = False
    ) -> Mapping[str, float]:
        """Return F1, precision and recall of the entities of a split, in percent."""
        del brief
        if not isinstance(model, EntityTagger):
            raise TypeError(f"expected an EntityTagger, got {type(model).__name__}")
        names = self._encoded.tags
        rows: list[list[str]] = []
        for batch in self.evaluation(split):
            moved = batch.to(device)
            decoded = model.decode(model(**moved.inputs()), moved.named[MASK])
            rows += [[names[tag] for tag in tags] for tags in decoded]
        # The gold entities of a divided sentence are whole.
        gold = (sentence.spans for sentence in self._encoded.corpus.sentences[split])
        whole = _put_together(rows, self._encoded.splits[split])
        return span_scores(gold, (spans_of(tags, "iob") for tags in whole))


def _put_together(rows: Sequence[Sequence[str]], sentences: EncodedSentences) -> list[list[str]]:
    """Return the tags of each sentence from the tags of its rows."""
    numbers: list[int] = sentences.rows_per_sentence.tolist()
    left = iter(rows)
    return [list(chain.from_iterable(next(left) for _ in range(number))) for number in numbers]


def _check_vectors(encoded: EncodedEntities, config: EntitySettings) -> None:
    shape, data = config.model, config.data
    wanted = shape.embedding_features or shape.num_features
    _check_size(data.vectors, encoded.vectors, wanted, "model.embedding_features")
    wanted = shape.bigram_features or 0
    _check_size(data.bigram_vectors, encoded.bigram_vectors, wanted, "model.bigram_features")


def _check_size(file: str | None, vectors: Mapping[int, Tensor], wanted: int, key: str) -> None:
    size = next((vector.numel() for vector in vectors.values()), wanted)
    if size != wanted:
        raise InputError(
            f"{file} has vectors of {size} numbers, but the model's embeddings have {wanted}: set "
            f"{key}={size}"
        )
