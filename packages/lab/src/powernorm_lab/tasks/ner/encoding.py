"""Sentences with entities as numbers: ids of words, characters, bigrams, and of the tags."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm_lab.data.cache import cache_key
from powernorm_lab.data.corpus import SPLITS, Split
from powernorm_lab.data.orders import spaced
from powernorm_lab.tasks.ner.columns import TaggedSentence
from powernorm_lab.tasks.ner.corpora import EntityCorpus
from powernorm_lab.tasks.ner.tag_schemes import Span, tag_names, tags_of
from powernorm_lab.tasks.ner.vectors import read_vectors

PADDING_ID: Final = 0
UNKNOWN_ID: Final = 1
"""Of a word, a character or a bigram that the vocabulary has not."""
NUM_MARKS: Final = 2
LEAST_COUNT: Final = 2
"""What occurs less often in the train split is unknown there, too, so that the unknown is learned;
but a word with a vector is always known."""
WORD_LENGTH: Final = 20
"""Characters of a word that are looked at."""
END: Final = "<eos>"
"""Stands after the last character of a sentence in its bigram."""
_MOST_LONGER: Final = 0.1
"""Share of the training words that may be longer than a character where there are bigrams."""
_FORMAT: Final = 1


@dataclass(frozen=True)
class EncodedSentences:
    """A split, cut into rows; a sentence longer than the longest row makes several."""

    words: Tensor
    """int32, (number of words,): ids."""
    characters: Tensor
    """int32, (number of words, characters of the longest), `PADDING_ID` after a word's end."""
    bigrams: Tensor
    """int32, (number of words,): ids of each word with the next one of its sentence; (0,) where
    there are no bigrams."""
    tags: Tensor
    """int32, (number of words,): ids by `tag_names`; a row begins and ends outside of entities, so
    one that lies across a cut is two here."""
    lengths: Tensor
    """int64, (number of rows,): words of each row."""
    rows_per_sentence: Tensor
    """int64, (number of sentences,)."""


@dataclass(frozen=True)
class EntityVocabulary:
    """Known words, characters, bigrams and kinds of entities with their ids."""

    words: Mapping[str, int]
    """In the order of their ids, from `NUM_MARKS` on."""
    characters: Mapping[str, int]
    """In the same way."""
    bigrams: Mapping[str, int] | None
    """In the same way; None where none were asked for."""
    kinds: tuple[str, ...]
    """Of entities, in the order of the tags (`tag_names`)."""
    vectors: Mapping[int, Tensor]
    """Vector of some words by id, float32; empty where none were asked for."""
    bigram_vectors: Mapping[int, Tensor]
    """The same of bigrams."""

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
        """Return the number of ids of bigrams; 0 where none were asked for."""
        return 0 if self.bigrams is None else NUM_MARKS + len(self.bigrams)

    @property
    def tags(self) -> list[str]:
        """Return the tags in the order of their ids."""
        return tag_names(self.kinds)


@dataclass(frozen=True)
class EncodedEntities(EntityVocabulary):
    """Sentences with entities over their words, characters and tags."""

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
    """Number the words, in lower case, the characters, as they are, bigrams, and the tags.

    The words are the most frequent ones of the train split, and all words of all splits that have
    a vector; the others are one unknown word. The bigram of a word is it and the next one of its
    sentence, in lower case and written together (`END` after the last); known are those that the
    train split has twice and those with a vector. The kinds of entities are those of all splits.

    Args:
        corpus: the sentences.
        vocabulary_size: number of words, padding and the unknown word included, those with a vector
            left out.
        max_length: words in a row at most.
        vectors: text file of word vectors.
        has_bigrams: number bigrams, too.
        bigram_vectors: text file of vectors of bigrams.
        by: corpus whose words, characters and kinds are taken, which a model was trained with; None
            is `corpus`.

    Raises:
        InputError: a file of vectors is damaged; or there is a kind of entities that `by` has not,
            or none at all; or bigrams are asked for and the words are not characters.
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
    """Return a corpus of which only so many training sentences are left, evenly spaced."""
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
    """Return each word of a sentence with the next one, in lower case and written together."""
    words = [word.lower() for word in sentence.words]
    return [first + second for first, second in zip(words, [*words[1:], END], strict=True)]


def _check_characters(corpus: EntityCorpus) -> None:
    words = [word for sentence in corpus.sentences["train"] for word in sentence.words]
    longer = [word for word in words if len(word) > 1]
    if len(longer) > _MOST_LONGER * len(words):
        raise InputError(
            f"{corpus.source} has words such as {longer[0][:40]!r}, and bigrams are of neighboring "
            "characters: set model.bigram_features=none, or take data whose words are characters, "
            "as train.char.bmes of Resume"
        )


def _ranked(items: Iterable[str]) -> list[str]:
    """Return what occurs often enough, the most frequent first, the equally frequent by name."""
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
        raise InputError(f"{own.source} has no entities: every tag is O; expected some")
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
    """Return the entities of a part of a sentence, cut where it is."""
    return [
        Span(span.kind, max(span.start, start) - start, min(span.end, end) - start)
        for span in sentence.spans
        if span.start < end and span.end > start
    ]


def _characters(sentences: Sequence[TaggedSentence], ids: Mapping[str, int]) -> Tensor:
    forms = [word[:WORD_LENGTH] for sentence in sentences for word in sentence.words]
    # Every different word once: texts have ten times as many words as different ones.
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
