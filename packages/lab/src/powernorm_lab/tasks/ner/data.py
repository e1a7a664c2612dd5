"""Sentences with entities as ids of words, characters, bigrams and tags, and their batches."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm_lab.data.batch import IGNORED, MASK, Batch
from powernorm_lab.data.cache import cache_key
from powernorm_lab.data.corpus import SPLITS, EvaluatedSplit, Split
from powernorm_lab.data.orders import Order, ShuffledByLength, spaced
from powernorm_lab.data.rows import PaddedRows
from powernorm_lab.tasks.ner.model import EntityTagger
from powernorm_lab.tasks.ner.settings import EntitySettings
from powernorm_lab.tasks.ner.sources import EntityCorpus, TaggedSentence, read_vectors
from powernorm_lab.tasks.ner.tag_schemes import Span, spans_of, tag_names, tags_of
from powernorm_lab.training.batches import RowData

PADDING_ID: Final = 0
UNKNOWN_ID: Final = 1
"""Id of words, characters and bigrams that are not in the vocabulary."""
NUM_MARKS: Final = 2
LEAST_COUNT: Final = 2
"""Minimal number of occurrences in the train split for the vocabulary. Rarer items are unknown in
the train split, too, so that the unknown id is trained; words with a vector are always known."""
WORD_LENGTH: Final = 20
"""Maximal number of characters of a word that are encoded."""
END: Final = "<eos>"
"""Second part of the bigram of the last character of a sentence."""
_MOST_LONGER: Final = 0.1
"""Maximal fraction of training words that are longer than a character, for bigrams."""
_FORMAT: Final = 1


@dataclass(frozen=True)
class EncodedSentences:
    """A split, divided into rows; a sentence longer than the maximal row becomes several rows."""

    words: Tensor
    """int32, (number of words,): ids of words."""
    characters: Tensor
    """int32, (number of words, characters of the longest), `PADDING_ID` after a word's end."""
    bigrams: Tensor
    """int32, (number of words,): ids of each word with the next one of its sentence; (0,) without
    bigrams."""
    tags: Tensor
    """int32, (number of words,): ids by `tag_names`; a row begins and ends outside of entities, so
    that an entity in two rows becomes two entities."""
    lengths: Tensor
    """int64, (number of rows,): number of words of each row."""
    rows_per_sentence: Tensor
    """int64, (number of sentences,): number of rows of each sentence."""


@dataclass(frozen=True)
class EntityVocabulary:
    """The ids of words, characters and bigrams, and the kinds of entities."""

    words: Mapping[str, int]
    """Ids of words, increasing from `NUM_MARKS`."""
    characters: Mapping[str, int]
    """Ids of characters, increasing from `NUM_MARKS`."""
    bigrams: Mapping[str, int] | None
    """Ids of bigrams, increasing from `NUM_MARKS`; None if they are not used."""
    kinds: tuple[str, ...]
    """Kinds of entities, in the order of the tags (`tag_names`)."""
    vectors: Mapping[int, Tensor]
    """Vectors of words by id, float32; empty if they are not used."""
    bigram_vectors: Mapping[int, Tensor]
    """Vectors of bigrams by id, float32; empty if they are not used."""

    @property
    def num_words(self) -> int:
        """Return the number of ids of words."""
        return NUM_MARKS + len(self.words)

    @property
    def num_characters(self) -> int:
        """Return the number of ids of characters."""
        return NUM_MARKS + len(self.characters)

    @property
    def num_bigrams(self) -> int:
        """Return the number of ids of bigrams; 0 if they are not used."""
        return 0 if self.bigrams is None else NUM_MARKS + len(self.bigrams)

    @property
    def tags(self) -> list[str]:
        """Return the tags in the order of their ids."""
        return tag_names(self.kinds)


@dataclass(frozen=True)
class EncodedEntities(EntityVocabulary):
    """Encoded sentences with entities."""

    corpus: EntityCorpus
    splits: Mapping[Split, EncodedSentences]
    fingerprint: str
    """A hash of everything that determines the ids."""


def encode_entities(
    corpus: EntityCorpus,
    *,
    vocabulary_size: int,
    max_length: int,
    vectors: Path | None = None,
    has_bigrams: bool = False,
    bigram_vectors: Path | None = None,
    by: EntityCorpus | None = None,
) -> EncodedEntities:
    """Encode words in lower case, characters, bigrams and tags.

    The vocabulary has the most frequent words of the train split, and all words of all splits that
    have a vector; all other words are unknown. The bigram of a word is the concatenation of this
    and the next word of the sentence (`END` for the last one), in lower case; bigrams that occur
    twice in the train split or have a vector are known. The kinds of entities are those of all
    splits.

    Args:
        corpus: the sentences.
        vocabulary_size: number of words, including padding and the unknown word, without the words
            added for their vectors.
        max_length: maximal number of words in a row.
        vectors: text file of word vectors.
        has_bigrams: whether to encode bigrams.
        bigram_vectors: text file of vectors of bigrams.
        by: corpus that defines words, characters and kinds, such as that of a trained model; None
            is `corpus`.

    Raises:
        InputError: a file of vectors is damaged, `by` lacks a kind of entities or has none, or
            bigrams are used and the words are not characters.
    """
    own = by or corpus
    ids = _ids(own, vocabulary_size, vectors)
    if has_bigrams:
        _check_characters(corpus)
        ids = _with_bigrams(ids, own, bigram_vectors)
    _check_kinds(corpus, own)
    splits = {split: _encoded(corpus.sentences[split], ids, max_length) for split in SPLITS}
    fingerprint = _fingerprint(ids, splits)
    return EncodedEntities(**vars(ids), corpus=corpus, splits=splits, fingerprint=fingerprint)


def thinned(corpus: EntityCorpus, max_examples: int | None) -> EntityCorpus:
    """Return a corpus with only `max_examples` evenly spaced training sentences; None is all."""
    train = corpus.sentences["train"]
    if max_examples is None or max_examples >= len(train):
        return corpus
    kept = tuple(train[index] for index in spaced(len(train), max_examples).tolist())
    return EntityCorpus(
        corpus.name, corpus.source, corpus.license, {**corpus.sentences, "train": kept}
    )


def _ids(corpus: EntityCorpus, vocabulary_size: int, vectors: Path | None) -> EntityVocabulary:
    train = corpus.sentences["train"]
    words = _ranked(word.lower() for sentence in train for word in sentence.words)
    words = words[: vocabulary_size - NUM_MARKS]
    found = {} if vectors is None else read_vectors(vectors, _forms(corpus))
    words += sorted(set(found) - set(words))
    characters = _ranked(
        character for sentence in train for word in sentence.words for character in word
    )
    word_ids = _numbered(words)
    return EntityVocabulary(
        words=word_ids,
        characters=_numbered(characters),
        bigrams=None,
        kinds=tuple(corpus.kinds),
        vectors={word_ids[word]: vector for word, vector in found.items()},
        bigram_vectors={},
    )


def _with_bigrams(
    ids: EntityVocabulary, corpus: EntityCorpus, vectors: Path | None
) -> EntityVocabulary:
    known = _ranked(name for item in corpus.sentences["train"] for name in bigrams_of(item))
    found: dict[str, Tensor] = {}
    if vectors is not None:
        forms = {name for part in corpus.sentences.values() for s in part for name in bigrams_of(s)}
        found = read_vectors(vectors, forms)
    bigrams = _numbered([*known, *sorted(set(found) - set(known))])
    of_ids = {bigrams[name]: vector for name, vector in found.items()}
    return replace(ids, bigrams=bigrams, bigram_vectors=of_ids)


def bigrams_of(sentence: TaggedSentence) -> list[str]:
    """Return each word of a sentence concatenated with the next one, in lower case."""
    words = [word.lower() for word in sentence.words]
    return [first + second for first, second in zip(words, [*words[1:], END], strict=True)]


def _check_characters(corpus: EntityCorpus) -> None:
    words = [word for sentence in corpus.sentences["train"] for word in sentence.words]
    longer = [word for word in words if len(word) > 1]
    if len(longer) > _MOST_LONGER * len(words):
        raise InputError(
            f"{corpus.source} has words such as {longer[0][:40]!r}, and bigrams are of neighboring "
            "characters: set model.bigram_features=none, or use data whose words are characters, "
            "such as train.char.bmes of Resume"
        )


def _ranked(items: Iterable[str]) -> list[str]:
    """Return the items with at least `LEAST_COUNT` occurrences, sorted by frequency, then name."""
    counts = Counter(items)
    kept = [item for item, count in counts.items() if count >= LEAST_COUNT]
    return sorted(kept, key=lambda item: (-counts[item], item))


def _numbered(items: Sequence[str]) -> dict[str, int]:
    return {item: index for index, item in enumerate(items, start=NUM_MARKS)}


def _forms(corpus: EntityCorpus) -> set[str]:
    return {
        word.lower() for part in corpus.sentences.values() for item in part for word in item.words
    }


def _check_kinds(corpus: EntityCorpus, own: EntityCorpus) -> None:
    if not own.kinds:
        raise InputError(
            f"{own.source} has no entities: every tag is O; expected at least one entity"
        )
    for kind in corpus.kinds:
        if kind not in own.kinds:
            raise InputError(
                f"{corpus.source} has entities of the kind {kind!r}, which the model does not "
                f"know: expected one of {', '.join(own.kinds)}"
            )


def _encoded(
    sentences: Sequence[TaggedSentence], ids: EntityVocabulary, max_length: int
) -> EncodedSentences:
    tag_ids = {tag: index for index, tag in enumerate(ids.tags)}
    words: list[int] = []
    tags: list[int] = []
    lengths: list[int] = []
    rows: list[int] = []
    for sentence in sentences:
        words += [ids.words.get(word.lower(), UNKNOWN_ID) for word in sentence.words]
        cuts = range(0, len(sentence.words), max_length)
        for start in cuts:
            end = min(start + max_length, len(sentence.words))
            tags += [tag_ids[tag] for tag in tags_of(_within(sentence, start, end), end - start)]
            lengths.append(end - start)
        rows.append(len(cuts))
    return EncodedSentences(
        words=torch.tensor(words, dtype=torch.int32),
        characters=_characters(sentences, ids.characters),
        bigrams=_bigrams(sentences, ids.bigrams),
        tags=torch.tensor(tags, dtype=torch.int32),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        rows_per_sentence=torch.tensor(rows, dtype=torch.int64),
    )


def _within(sentence: TaggedSentence, start: int, end: int) -> list[Span]:
    """Return the entities of a part of a sentence, truncated at its ends."""
    return [
        Span(span.kind, max(span.start, start) - start, min(span.end, end) - start)
        for span in sentence.spans
        if span.start < end and span.end > start
    ]


def _characters(sentences: Sequence[TaggedSentence], ids: Mapping[str, int]) -> Tensor:
    forms = [word[:WORD_LENGTH] for sentence in sentences for word in sentence.words]
    # Every distinct word once: texts have about ten times as many words as distinct ones.
    numbers = {form: number for number, form in enumerate(dict.fromkeys(forms))}
    longest = max(map(len, numbers), default=1)
    padding = [PADDING_ID] * longest
    rows = [
        [*(ids.get(character, UNKNOWN_ID) for character in form), *padding[len(form) :]]
        for form in numbers
    ]
    table = torch.tensor(rows, dtype=torch.int32).reshape(len(rows), longest)
    return table[torch.tensor([numbers[form] for form in forms], dtype=torch.int64)]


def _bigrams(sentences: Sequence[TaggedSentence], ids: Mapping[str, int] | None) -> Tensor:
    if ids is None:
        return torch.empty(0, dtype=torch.int32)
    found = [ids.get(name, UNKNOWN_ID) for item in sentences for name in bigrams_of(item)]
    return torch.tensor(found, dtype=torch.int32)


def _fingerprint(ids: EntityVocabulary, splits: Mapping[Split, EncodedSentences]) -> str:
    digest = hashlib.sha256("\n".join([*ids.words, "", *ids.characters, "", *ids.kinds]).encode())
    for part in splits.values():
        for values in (part.words, part.characters, part.tags, part.lengths):
            digest.update(values.numpy().tobytes())
    for vectors in (ids.vectors, ids.bigram_vectors):
        for index, vector in sorted(vectors.items(), key=lambda item: item[0]):
            digest.update(str(index).encode() + vector.numpy().tobytes())
    if ids.bigrams is not None:
        digest.update("\n".join(ids.bigrams).encode())
        for part in splits.values():
            digest.update(part.bigrams.numpy().tobytes())
    return cache_key(format=_FORMAT, task="ner", ids=digest.hexdigest())


# Batches; the target of each word is its tag.


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


class EntityData(RowData[EncodedEntities, EntitySettings]):
    """Batches of padded sentences with tags.

    Raises:
        InputError: the train split has fewer sentences than a batch, or vectors and the model's
            embeddings differ in size.
    """

    def __init__(self, encoded: EncodedEntities, config: EntitySettings, seed: int) -> None:
        _check_vectors(encoded, config)
        super().__init__(encoded, config, seed)

    def rows(self, split: Split) -> TaggedRows:
        """Return the sentences of a split."""
        shape = self._config.model
        return TaggedRows(
            self._encoded.splits[split],
            has_characters=shape.character_features is not None,
            has_bigrams=shape.bigram_features is not None,
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


def span_scores(
    gold: Iterable[Sequence[Span]], found: Iterable[Sequence[Span]]
) -> dict[str, float]:
    """Return `f1`, `precision` and `recall` over the entities of all sentences, 0 to 100.

    A predicted entity is correct if a gold entity of the sentence has the same first word, last
    word and kind, as in conlleval. 0 / 0 is defined as 0.

    Args:
        gold: gold entities of each sentence.
        found: predicted entities of each sentence.
    """
    num_right = num_gold = num_found = 0
    for wanted, got in zip(gold, found, strict=True):
        num_right += len(set(wanted) & set(got))
        num_gold += len(wanted)
        num_found += len(got)
    precision, recall = num_right / max(num_found, 1), num_right / max(num_gold, 1)
    f1 = 2 * precision * recall / ((precision + recall) or 1)
    return {"f1": 100 * f1, "precision": 100 * precision, "recall": 100 * recall}


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
