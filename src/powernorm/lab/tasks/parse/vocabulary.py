"""The ids of words, tags and labels, and which column the tags are read from."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from powernorm.errors import InputError
from powernorm.lab.data.conllu import UNSPECIFIED, Sentence, Word
from powernorm.lab.tasks.parse.trees import NUM_LABEL_MARKS, NUM_MARKS, UNKNOWN_ID, Trees

UNIVERSAL_PUNCTUATION: Final = frozenset({"PUNCT", "."})
"""The full stop is the one tag for it in the universal tags that came before (Petrov et al. 2012),
which treebanks in CoNLL-X have."""
PENN_PUNCTUATION: Final = frozenset({"``", "''", ":", ",", "."})
"""What Chen and Manning (2014) leave out of their scores."""
_UNIVERSAL: Final = frozenset({"NOUN", "VERB", "PUNCT"})


@dataclass(frozen=True)
class TreebankVocabulary:
    """The ids of a train split, and how its tags are read."""

    words: Mapping[str, int]
    """In lower case; the most frequent ones."""
    tags: Mapping[str, int]
    labels: Mapping[str, int]
    is_universal: bool
    """Whether the tags are those of Universal Dependencies, from column UPOS, and not the
    treebank's own, from column XPOS (POSTAG of CoNLL-X) where it has them."""

    @classmethod
    def of(cls, sentences: Iterable[Sentence], size: int) -> "TreebankVocabulary":
        """Number the words, tags and labels of a train split.

        Args:
            sentences: of the train split.
            size: number of words, with the marks for none, unknown and root.

        Raises:
            InputError: a word has no tag.
        """
        words = [word for sentence in sentences for word in sentence.words]
        is_universal = any(word.tag in _UNIVERSAL for word in words)
        counts = Counter(word.form.lower() for word in words)
        # Equally frequent words in the order of the alphabet: ids do not depend on the text's.
        ranked = sorted(counts, key=lambda word: (-counts[word], word))[: size - NUM_MARKS]
        tags = {_tag(word, is_universal=is_universal) for word in words}
        return cls(
            words={word: index for index, word in enumerate(ranked, start=NUM_MARKS)},
            tags={tag: index for index, tag in enumerate(sorted(tags), start=NUM_MARKS)},
            labels={
                label: index
                for index, label in enumerate(
                    sorted({word.relation for word in words}), start=NUM_LABEL_MARKS
                )
            },
            is_universal=is_universal,
        )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return the numbers of ids of words, tags and labels, marks included."""
        return (
            len(self.words) + NUM_MARKS,
            len(self.tags) + NUM_MARKS,
            len(self.labels) + NUM_LABEL_MARKS,
        )

    def number(self, sentences: Iterable[Sentence]) -> Trees:
        """Return sentences as numbers.

        Raises:
            InputError: a word has no tag; the message names file and line.
        """
        kept = list(sentences)
        for sentence in kept:
            self._check_tags(sentence)
        words = [word for sentence in kept for word in sentence.words]
        tags = [_tag(word, is_universal=self.is_universal) for word in words]
        punctuation = UNIVERSAL_PUNCTUATION if self.is_universal else PENN_PUNCTUATION
        return Trees(
            words=torch.tensor([self.words.get(w.form.lower(), UNKNOWN_ID) for w in words]),
            tags=torch.tensor([self.tags.get(tag, UNKNOWN_ID) for tag in tags]),
            heads=torch.tensor([word.head or 0 for word in words]),
            labels=torch.tensor([self.labels.get(w.relation, UNKNOWN_ID) for w in words]),
            is_scored=torch.tensor([tag not in punctuation for tag in tags]),
            lengths=torch.tensor([len(sentence.words) for sentence in kept]),
        )

    def _check_tags(self, sentence: Sentence) -> None:
        for line, word in zip(sentence.lines, sentence.words, strict=True):
            if _tag(word, is_universal=self.is_universal) == UNSPECIFIED:
                columns = "column 4 (UPOS)" if self.is_universal else "columns 4 and 5"
                raise InputError(
                    f"{sentence.source}, line {line}: {word.form!r} has no tag in {columns}; "
                    "expected one for every word"
                )


def _tag(word: Word, *, is_universal: bool) -> str:
    if is_universal or word.fine_tag == UNSPECIFIED:
        return word.tag
    return word.fine_tag
