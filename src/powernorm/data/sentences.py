"""English sentences out of the embedded corpora, for what needs text and no labels."""

import json
import lzma
import random
import re
from importlib.resources import files
from itertools import groupby
from typing import Final

from powernorm.data.corpus import SPLITS, Split, split_by_position

SHORTEST, LONGEST = 20, 400
"""Characters of a sentence that is kept."""

_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s+")


def embedded_sentences() -> dict[Split, list[str]]:
    """Sentences of 20 to 400 characters, from addresses, verses and film reviews.

    Split by address, by chapter and by review sentence: of every 20 the 10th is valid, the 20th
    test and the others train.

    >>> {split: len(part) for split, part in embedded_sentences().items()}
    {'train': 89326, 'valid': 4924, 'test': 4880}
    """
    addresses = [json.loads(line)["text"] for line in _lines("lm_sotu.jsonl.xz")]
    documents = [
        *_split([_SENTENCE_END.split(text) for text in addresses]),
        *_split(_chapters()),
        *_split([[sentence] for sentence in _review_sentences()]),
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


def _split(documents: list[list[str]]) -> list[tuple[Split, list[str]]]:
    parts = split_by_position(documents)
    return [(split, document) for split in SPLITS for document in parts[split]]


def _chapters() -> list[list[str]]:
    verses = [line.split("\t") for line in _lines("mt_en-de_web-elberfelder.tsv.xz")]
    chapters = groupby(verses, key=lambda verse: verse[0].rpartition(".")[0])
    return [[english.replace("`", "'") for _, english, _ in chapter] for _, chapter in chapters]


def _review_sentences() -> list[str]:
    sentences = [line.split("\t")[1] for line in _lines("cls_rt_sentences.tsv.xz")]
    # The file is sorted by label.
    random.Random(0).shuffle(sentences)
    return sentences


def _lines(name: str) -> list[str]:
    packed = files("powernorm.data").joinpath("corpora", name).read_bytes()
    return lzma.decompress(packed).decode().rstrip("\n").split("\n")
