"""Treebanks as numbers: the ids of words, and at every word the id of its part of speech.

One table of ids holds the words and, after them, the tags, so that a language model's tied head
can tag without any change. That spends scores on words that no target asks for; a head of its own
would be smaller, and this is enough to compare norms.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm.lab.data.batch import IGNORED
from powernorm.lab.data.cache import cache_key
from powernorm.lab.data.conllu import UNSPECIFIED, Sentence
from powernorm.lab.data.corpus import SPLITS, Corpus, Split
from powernorm.lab.data.subwords import END_ID, EncodedCorpus, EncodedSplit
from powernorm.lab.data.treebanks import Treebank

UNKNOWN_ID: Final = 1
"""Of a word that the train split does not have, or too seldom."""
NUM_MARKS: Final = 2
_FORMAT: Final = 1


@dataclass(frozen=True)
class EncodedTags(EncodedCorpus):
    """A treebank over its words and tags; `vocabulary_size` counts both."""

    tags: Mapping[Split, Tensor]
    """int32, (num_tokens,): the id of the tag at every word, `IGNORED` at end marks."""
    num_word_ids: int
    """Where the ids of the tags begin."""
    tag_names: tuple[str, ...]
    """In the order of their ids."""


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    words: Mapping[str, int]
    tags: Mapping[str, int]
    num_word_ids: int


def encode_treebank(treebank: Treebank, vocabulary_size: int) -> EncodedTags:
    """Number the words, in lower case, and the tags of a treebank.

    The words are the most frequent ones of the train split; all others are one unknown word. The
    tags are those of all splits. Nothing is cached: it takes half as long as reading the files.

    Args:
        treebank: the sentences.
        vocabulary_size: number of words, the end mark and the unknown word included.

    Raises:
        InputError: a split has no sentences, or a word has no tag.
    """
    return _encoded(treebank, _vocabulary(treebank, vocabulary_size), vocabulary_size)


def encode_treebank_by(treebank: Treebank, other: Treebank, vocabulary_size: int) -> EncodedTags:
    """Encode a treebank with the words and tags of another, which a model was trained with.

    Raises:
        InputError: as `encode_treebank`; or it has a tag that the other has not.
    """
    return _encoded(treebank, _vocabulary(other, vocabulary_size), vocabulary_size)


def _vocabulary(treebank: Treebank, vocabulary_size: int) -> _Vocabulary:
    _check(treebank)
    train = treebank.sentences["train"]
    counts = Counter(word.form.lower() for sentence in train for word in sentence.words)
    # Equally frequent words in the order of the alphabet: the ids shall not depend on the text's.
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary_size - NUM_MARKS]
    size = len(ranked) + NUM_MARKS
    names = {
        word.tag for part in treebank.sentences.values() for item in part for word in item.words
    }
    return _Vocabulary(
        words={word: index for index, word in enumerate(ranked, start=NUM_MARKS)},
        tags={name: index for index, name in enumerate(sorted(names), start=size)},
        num_word_ids=size,
    )


def _check(treebank: Treebank) -> None:
    for split in SPLITS:
        if not treebank.sentences[split]:
            raise InputError(f"the {split} split of {treebank.source} has no sentences: give some")
        for number, sentence in enumerate(treebank.sentences[split], start=1):
            for word in sentence.words:
                if word.tag == UNSPECIFIED:
                    raise InputError(
                        f"{treebank.source}, sentence {number} of the {split} split: "
                        f"{word.form!r} has no tag in column UPOS; expected one for every word"
                    )


def _encoded(treebank: Treebank, vocabulary: _Vocabulary, vocabulary_size: int) -> EncodedTags:
    _check(treebank)
    _check_tags(treebank, vocabulary)
    corpus = Corpus(
        name=treebank.name,
        source=treebank.source,
        license=treebank.license,
        documents={split: tuple(map(_text, treebank.sentences[split])) for split in SPLITS},
        line_ends_count=False,
    )
    streams = {split: _streams(treebank.sentences[split], vocabulary) for split in SPLITS}
    splits = {
        split: EncodedSplit(words, int((words != END_ID).sum()))
        for split, (words, _) in streams.items()
    }
    digest = hashlib.sha256("\n".join([*vocabulary.words, "", *vocabulary.tags]).encode())
    for words, tags in streams.values():
        digest.update(words.numpy().tobytes() + tags.numpy().tobytes())
    return EncodedTags(
        corpus=corpus,
        vocabulary_size=vocabulary.num_word_ids + len(vocabulary.tags),
        splits=splits,
        fingerprint=cache_key(
            format=_FORMAT,
            task="tag",
            text=corpus.fingerprint(),
            ids=digest.hexdigest(),
            vocabulary_size=vocabulary_size,
        ),
        tags={split: tags for split, (_, tags) in streams.items()},
        num_word_ids=vocabulary.num_word_ids,
        tag_names=tuple(vocabulary.tags),
    )


def _check_tags(treebank: Treebank, vocabulary: _Vocabulary) -> None:
    for part in treebank.sentences.values():
        for sentence in part:
            for word in sentence.words:
                if word.tag not in vocabulary.tags:
                    raise InputError(
                        f"{treebank.source} has the tag {word.tag!r}, which the model does not "
                        f"know: expected one of {', '.join(vocabulary.tags)}"
                    )


def _text(sentence: Sentence) -> str:
    return " ".join(word.form for word in sentence.words)


def _streams(sentences: tuple[Sentence, ...], vocabulary: _Vocabulary) -> tuple[Tensor, Tensor]:
    """Return words and tags, every sentence followed by an end mark, which has no tag."""
    words: list[int] = []
    tags: list[int] = []
    for sentence in sentences:
        words += [vocabulary.words.get(word.form.lower(), UNKNOWN_ID) for word in sentence.words]
        tags += [vocabulary.tags[word.tag] for word in sentence.words]
        words.append(END_ID)
        tags.append(IGNORED)
    return torch.tensor(words, dtype=torch.int32), torch.tensor(tags, dtype=torch.int32)
