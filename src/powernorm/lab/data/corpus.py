"""A text in three splits."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar, get_args

Split = Literal["train", "valid", "test"]
SPLITS: Final[tuple[Split, ...]] = get_args(Split)
EvaluatedSplit = Literal["valid", "test"]
EVALUATED_SPLITS: Final[tuple[EvaluatedSplit, ...]] = get_args(EvaluatedSplit)

SPLIT_PERIOD: Final = 20
VALID_REMAINDER: Final = 9
TEST_REMAINDER: Final = 19

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents in three splits.

    A *word* is a token between white space, and perplexities are per word. Where `line_ends_count`
    is set (the official Penn Treebank and WikiText files), each document is one line of an already
    tokenized file, and its end counts as one more word, `<eos>`, which is the convention of the
    field (82,430 words in Penn Treebank's test). Otherwise the end of a document is predicted, so
    that its cost is in the likelihood, but it does not count as a word.
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
        """Return a hash of the splits' text and of how it is counted."""
        digest = hashlib.sha256(str(self.line_ends_count).encode())
        for split in SPLITS:
            for document in self.documents[split]:
                digest.update(document.encode())
                digest.update(b"\x00")
            digest.update(b"\x01")
        return digest.hexdigest()


def split_by_position(items: Sequence[_T]) -> dict[Split, tuple[_T, ...]]:
    """Split by position: of every 20 the 10th is valid, the 20th test and the others train.

    >>> {split: len(part) for split, part in split_by_position(range(233)).items()}
    {'train': 210, 'valid': 12, 'test': 11}
    """
    parts: dict[Split, list[_T]] = {split: [] for split in SPLITS}
    for index, item in enumerate(items):
        parts[_split_of(index)].append(item)
    return {split: tuple(part) for split, part in parts.items()}


def _split_of(index: int) -> Split:
    remainder = index % SPLIT_PERIOD
    if remainder == VALID_REMAINDER:
        return "valid"
    return "test" if remainder == TEST_REMAINDER else "train"
