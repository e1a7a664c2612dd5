"""The corpora of the distribution `powernorm-data`, by name."""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, groupby
from types import MappingProxyType
from typing import Final

from powernorm.errors import InputError
from powernorm_lab.data.catalog import data_set, embedded_texts
from powernorm_lab.data.corpus import SPLITS, Corpus, Split, split_by_position

_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s+")
SHORTEST, LONGEST = 20, 400
"""Minimal and maximal number of characters of a kept sentence."""


def addresses() -> list[str]:
    """Return the State of the Union addresses in chronological order."""
    return [str(json.loads(line)["text"]) for line in _lines("sotu")]


def address_sentences() -> list[list[str]]:
    """Return the sentences of each address, split at white space after `.`, `!` or `?`."""
    return [[part for part in _SENTENCE_END.split(text) if part.strip()] for text in addresses()]


def english_chapters() -> list[list[str]]:
    """Return the English verses of each chapter."""
    return [[english.replace("`", "'") for _, english, _ in chapter] for chapter in _chapters()]


def german_chapters() -> list[list[str]]:
    """Return the German verses of each chapter."""
    # Some lines end in a stray dash.
    return [[german.removesuffix(" -") for _, _, german in chapter] for chapter in _chapters()]


def review_sentences() -> list[str]:
    """Return the sentences of film reviews, shuffled by a fixed seed."""
    sentences = [line.split("\t")[1] for line in _lines("rt")]
    # The file is sorted by label.
    random.Random(0).shuffle(sentences)
    return sentences


def embedded_sentences() -> dict[Split, list[str]]:
    """Return sentences of 20 to 400 characters from addresses, verses and film reviews, by split.

    They are split by address, chapter and review sentence: of every 20 the 10th is valid, the 20th
    test and the others train.

    >>> {split: len(part) for split, part in embedded_sentences().items()}
    {'train': 89326, 'valid': 4924, 'test': 4880}
    """
    documents = [
        *_split(address_sentences()),
        *_split(english_chapters()),
        *_split([[sentence] for sentence in review_sentences()]),
    ]
    return {
        split: [
            sentence
            for part, document in documents
            if part == split
            for sentence in map(str.strip, document)
            if SHORTEST <= len(sentence) <= LONGEST
        ]
        for split in SPLITS
    }


VERSES: Final = "verses"
"""Name of the data set of sentence pairs."""

_CORPORA: Final[Mapping[str, Callable[[], Sequence[Sequence[str]]]]] = MappingProxyType(
    {
        "sotu": lambda: [[address] for address in addresses()],
        "sotu-sentences": address_sentences,
        "verses-en": english_chapters,
        "verses-de": german_chapters,
        "rt": lambda: [[sentence] for sentence in review_sentences()],
    }
)
"""Functions that return groups of documents; a group is not divided between splits."""

EMBEDDED: Final = tuple(_CORPORA)
"""Names of the embedded corpora."""


def embedded_corpus(name: str = "sotu") -> Corpus:
    """Return an embedded corpus.

    - `sotu`: State of the Union addresses, one document each
    - `sotu-sentences`: the sentences of the addresses, one document each
    - `verses-en`, `verses-de`: the verses of the Bible, one document each
    - `rt`: sentences of film reviews

    Addresses, chapters and review sentences are split by `split_by_position`, so that the two forms
    of the addresses have the same text in each split.

    Raises:
        InputError: there is no such corpus.
    """
    if name not in _CORPORA:
        raise InputError(
            f"there is no embedded corpus {name!r}: choose one of {', '.join(EMBEDDED)}"
        )
    about = data_set(name)
    parts = split_by_position(_CORPORA[name]())
    documents: dict[Split, tuple[str, ...]] = {
        split: tuple(chain.from_iterable(groups)) for split, groups in parts.items()
    }
    return Corpus(
        name="lm_sotu" if name == "sotu" else name,
        source=about.origin,
        license=about.license,
        documents=documents,
        line_ends_count=False,
    )


def _chapters() -> list[list[list[str]]]:
    verses = [line.split("\t") for line in _lines("verses")]
    chapters = groupby(verses, key=lambda verse: verse[0].rpartition(".")[0])
    return [list(chapter) for _, chapter in chapters]


def _lines(name: str) -> list[str]:
    (text,) = embedded_texts(data_set(name))
    return text.rstrip("\n").split("\n")


def _split(documents: list[list[str]]) -> list[tuple[Split, list[str]]]:
    parts = split_by_position(documents)
    return [(split, document) for split in SPLITS for document in parts[split]]
