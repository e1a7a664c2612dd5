"""English sentences out of the embedded corpora, for what needs text and no labels."""

from powernorm.lab.data.corpus import SPLITS, Split, split_by_position
from powernorm.lab.data.embedded import address_sentences, english_chapters, review_sentences

SHORTEST, LONGEST = 20, 400
"""Characters of a sentence that is kept."""


def embedded_sentences() -> dict[Split, list[str]]:
    """Sentences of 20 to 400 characters, from addresses, verses and film reviews.

    Split by address, by chapter and by review sentence: of every 20 the 10th is valid, the 20th
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


def _split(documents: list[list[str]]) -> list[tuple[Split, list[str]]]:
    parts = split_by_position(documents)
    return [(split, document) for split in SPLITS for document in parts[split]]
