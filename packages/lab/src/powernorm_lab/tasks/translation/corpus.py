"""Sentence pairs in three splits, read lazily."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from powernorm.errors import InputError
from powernorm_lab.data.corpus import SPLITS, Split
from powernorm_lab.data.lines import TextPair, refuse_pieces, require_pieces

EMPTY: Final = "empty"
"""Reason for leaving out a pair with a side without words."""


@dataclass(frozen=True)
class ParallelCorpus:
    """Sentence pairs in three splits, with only a few in memory at a time."""

    name: str
    source: str
    license: str
    source_language: str
    target_language: str
    tokenized: bool
    """Whether the lines are tokenized, with spaces between tokens, as by Moses."""
    read: Callable[[Split], Iterator[TextPair]]
    """Yields all pairs of a split, including those without words."""
    hash_content: Callable[[], str] | None = None
    """Returns a hash of the pairs of `read`, faster than by hashing every pair."""
    is_split: bool = False
    """Whether the words are split into subwords already, as `Hau@@ s`."""
    num_dropped: dict[Split, Mapping[str, int]] = field(default_factory=dict, compare=False)
    """Numbers of left-out pairs by reason, for each split that was read to its end."""

    @property
    def languages(self) -> str:
        """Return source and target language, as `de-en`."""
        return f"{self.source_language}-{self.target_language}"

    def pairs(self, split: Split) -> Iterator[TextPair]:
        """Yield the pairs of a split, except those with a side without words.

        Raises:
            InputError: the data are damaged, no pair is left, or words are split into subwords
                contrary to `is_split`.
        """
        num_kept = num_empty = 0
        check = require_pieces if self.is_split else refuse_pieces
        for pair in check(self.read(split), f"The {split} split of {self.source}"):
            if not pair[0] or pair[0].isspace() or not pair[1] or pair[1].isspace():
                num_empty += 1
                continue
            num_kept += 1
            yield pair
        self.num_dropped[split] = {EMPTY: num_empty}
        if not num_kept:
            raise InputError(
                f"the {split} split of {self.source} has no sentence pairs: give it text in both "
                "languages"
            )

    def fingerprint(self) -> str:
        """Return a hash of the text of all splits, the languages and `tokenized`."""
        content = self._hash_pairs() if self.hash_content is None else self.hash_content()
        parts = f"{self.languages} {self.tokenized} {content}"
        return hashlib.sha256(parts.encode()).hexdigest()

    def _hash_pairs(self) -> str:
        digest = hashlib.sha256()
        for split in SPLITS:
            for source, target in self.read(split):
                # The lengths make the encoding of different pairs different.
                digest.update(f"{len(source)} {len(target)} {source}{target}".encode())
            digest.update(b"end")
        return digest.hexdigest()


def corpus_in_memory(
    name: str,
    pairs: Mapping[Split, Sequence[TextPair]],
    *,
    languages: tuple[str, str],
    source: str,
    license: str,
    tokenized: bool = False,
) -> ParallelCorpus:
    """Return a corpus of pairs in memory.

    Args:
        name: name of the corpus.
        pairs: pairs of each split.
        languages: source and target language.
        source: origin of the pairs.
        license: license of the pairs.
        tokenized: whether the sentences are tokenized, with spaces between tokens.
    """
    return ParallelCorpus(
        name=name,
        source=source,
        license=license,
        source_language=languages[0],
        target_language=languages[1],
        tokenized=tokenized,
        read=lambda split: iter(pairs[split]),
    )
