"""Words of a text, and their ids."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

UNKNOWN_ID: Final = 1
"""Of a word that the vocabulary does not have; 0 stands at padding."""
NUM_MARKS: Final = 2
_WORD: Final = re.compile(r"\w+(?=n't\b)|n't\b|'(?:s|re|ve|ll|d|m)\b|\w+|[^\w\s]")


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case.

    A word is a run of letters, digits and underscores; every other sign is one of its own. English
    contractions are cut where the Penn Treebank cuts them, so that texts which come as tokens (RT,
    SST-5) and others are treated alike.

    >>> words_of("It isn't Jackson's best-known film.")
    ['it', 'is', "n't", 'jackson', "'s", 'best', '-', 'known', 'film', '.']
    """
    return _WORD.findall(text.lower())


class Vocabulary:
    """The ids of words: the most frequent ones first, equally frequent ones by the alphabet.

    Args:
        counts: how often each word occurs in the train split.
        size: number of ids at most, padding and the unknown word included.
    """

    def __init__(self, counts: Counter[str], size: int) -> None:
        ranked = sorted(counts, key=lambda word: (-counts[word], word))[: size - NUM_MARKS]
        self._ids = {word: index for index, word in enumerate(ranked, start=NUM_MARKS)}

    def __len__(self) -> int:
        """Return the number of ids."""
        return len(self._ids) + NUM_MARKS

    @property
    def words(self) -> Sequence[str]:
        """Return the words in the order of their ids."""
        return list(self._ids)

    def encode(self, words: Iterable[str]) -> list[int]:
        """Return the ids of words."""
        return [self._ids.get(word, UNKNOWN_ID) for word in words]
