"""Sentences and their translations in three splits, read as they are needed."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from powernorm.errors import InputError
from powernorm_lab.data.corpus import SPLITS, Split
from powernorm_lab.data.lines import TextPair, refuse_pieces, require_pieces

EMPTY: Final = "empty"
"""Why a pair is left out: one of its sides has no words."""


@dataclass(frozen=True)
class ParallelCorpus:
    """Sentence pairs in three splits, of which no more than a few are in memory at a time."""

    name: str
    source: str
    license: str
    source_language: str
    target_language: str
    tokenized: bool
    """Whether the lines are tokens with spaces between them, as Moses writes them."""
    read: Callable[[Split], Iterator[TextPair]]
    """Goes through a split from its beginning; what has no words is still there."""
    hash_content: Callable[[], str] | None = None
    """A quicker hash of what `read` gives than that of every pair."""
    is_split: bool = False
    """Whether the words are cut into pieces already, as `Hau@@ s`."""
    num_dropped: dict[Split, Mapping[str, int]] = field(default_factory=dict, compare=False)
    """Pairs that were left out, by reason; of each split once it was read to its end."""

    @property
    def languages(self) -> str:
        """Return source and target, as `de-en`."""
        return f"{self.source_language}-{self.target_language}"

    def pairs(self, split: Split) -> Iterator[TextPair]:
        """Go through the pairs of a split; those with a side without words are left out.

        Raises:
            InputError: the data are damaged, no pair is left, or words are cut into pieces where
                they should not be, or the other way round.
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
        """Return a hash of the text of all splits, of its direction and of how it is read."""
        content = self._hash_pairs() if self.hash_content is None else self.hash_content()
        parts = f"{self.languages} {self.tokenized} {content}"
        return hashlib.sha256(parts.encode()).hexdigest()

    def _hash_pairs(self) -> str:
        digest = hashlib.sha256()
        for split in SPLITS:
            for source, target in self.read(split):
                # With the lengths before them, no two different pairs look alike.
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
    """Return a corpus of pairs that are all there.

    Args:
        name: of the corpus.
        pairs: of each split.
        languages: of source and target.
        source: where they are from.
        license: under which they may be used.
        tokenized: whether the sentences are tokens with spaces between them.
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
