"""A text in three splits."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeVar, get_args

Split = Literal["train", "valid", "test"]
SPLITS: Final[tuple[Split, ...]] = get_args(Split)
EvaluatedSplit = Literal["valid", "test"]
EVALUATED_SPLITS: Final[tuple[EvaluatedSplit, ...]] = get_args(EvaluatedSplit)

_T = TypeVar("_T")


class Period(NamedTuple):
    """Positions, from 0, of the valid and test items in every `length` items."""

    length: int
    valid: int
    test: int


TWENTY: Final = Period(20, valid=9, test=19)
TEN: Final = Period(10, valid=8, test=9)
"""Period for treebanks and entity corpora, which are small."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents in three splits.

    A *word* is a token between white space, and perplexities are per word. If `line_ends_count` is
    set (the official Penn Treebank and WikiText files), each document is one line of a tokenized
    file, and its end counts as a word, `<eos>`, by convention (82,430 words in Penn Treebank's
    test split). Otherwise the end of a document is predicted and contributes to the likelihood, but
    does not count as a word.
    """

    name: str
    source: str
    license: str
    documents: Mapping[Split, tuple[str, ...]]
    line_ends_count: bool

    def num_words(self, split: Split) -> int:
        """Return the number of words over which the split's likelihood is averaged."""
        documents = self.documents[split]
        words = sum(len(document.split()) for document in documents)
        return words + (len(documents) if self.line_ends_count else 0)

    def fingerprint(self) -> str:
        """Return a hash of the splits' text and of `line_ends_count`."""
        digest = hashlib.sha256(str(self.line_ends_count).encode())
        for split in SPLITS:
            for document in self.documents[split]:
                digest.update(document.encode())
                digest.update(b"\x00")
            digest.update(b"\x01")
        return digest.hexdigest()


def split_by_position(items: Sequence[_T], period: Period = TWENTY) -> dict[Split, tuple[_T, ...]]:
    """Split by position: of every 20 items the 10th is valid, the 20th test and the others train.

    >>> {split: len(part) for split, part in split_by_position(range(233)).items()}
    {'train': 210, 'valid': 12, 'test': 11}
    """
    parts: dict[Split, list[_T]] = {split: [] for split in SPLITS}
    for index, item in enumerate(items):
        parts[split_of(index, period)].append(item)
    return {split: tuple(part) for split, part in parts.items()}


def split_of(index: int, period: Period = TWENTY) -> Split:
    """Return the split of an item by its number, from 0."""
    remainder = index % period.length
    if remainder == period.valid:
        return "valid"
    return "test" if remainder == period.test else "train"
