"""A treebank over the ids of a vocabulary, with its gold transitions."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from powernorm.errors import InputError
from powernorm_lab.data.cache import cache_key
from powernorm_lab.data.conllu import DEPREL, HEAD, UNSPECIFIED, Sentence, Word, damage
from powernorm_lab.data.corpus import SPLITS, Split
from powernorm_lab.data.treebanks import Treebank
from powernorm_lab.tasks.parse.gold import GoldTransitions, gold_transitions
from powernorm_lab.tasks.parse.inventory import Inventory
from powernorm_lab.tasks.parse.trees import NUM_LABEL_MARKS, NUM_MARKS, UNKNOWN_ID, Trees

# The ids of words, tags and labels, and which column the tags are read from.


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


_FORMAT: Final = 1


@dataclass(frozen=True)
class EncodedTreebank:
    """Trees as numbers."""

    name: str
    source: str
    license: str
    vocabulary: TreebankVocabulary
    trees: Mapping[Split, Trees]
    """All sentences; scores are computed on them."""
    gold: Mapping[Split, GoldTransitions]
    """Of the trees that transitions can build, sentence after sentence."""
    fingerprint: str
    """Hash of everything that determines the ids."""

    @property
    def inventory(self) -> Inventory:
        """Return the transitions that there are."""
        return Inventory(len(self.vocabulary.labels))


def encode_trees(
    treebank: Treebank, vocabulary_size: int, other: Treebank | None = None
) -> EncodedTreebank:
    """Number a treebank and derive its gold transitions.

    Args:
        treebank: the sentences.
        vocabulary_size: number of words, with the marks for none, unknown and root.
        other: whose train split gives the ids, such as the treebank that a model was trained with;
            None is `treebank`.

    Raises:
        InputError: a split has no sentences, no tree that transitions can build, or nothing but
            punctuation; or a sentence has no tags or is no tree.
    """
    _check_treebank(treebank)
    vocabulary = TreebankVocabulary.of((other or treebank).sentences["train"], vocabulary_size)
    trees = {split: vocabulary.number(treebank.sentences[split]) for split in SPLITS}
    inventory = Inventory(len(vocabulary.labels))
    encoded = EncodedTreebank(
        name=treebank.name,
        source=treebank.source,
        license=treebank.license,
        vocabulary=vocabulary,
        trees=trees,
        gold={split: gold_transitions(trees[split], inventory) for split in SPLITS},
        fingerprint=_fingerprint(trees, vocabulary),
    )
    for split in SPLITS:
        _check_split(encoded, split)
    return encoded


def _check_split(encoded: EncodedTreebank, split: Split) -> None:
    gold = encoded.gold[split]
    if not len(gold):
        reasons = ", ".join(f"{number} {reason}" for reason, number in gold.left_out.items())
        raise InputError(
            f"no tree of the {split} split of {encoded.source} can be built by transitions: it has "
            f"{reasons}: give one with projective trees and a single root"
        )
    if not encoded.trees[split].is_scored.any():
        raise InputError(
            f"the {split} split of {encoded.source} has nothing but punctuation: give sentences"
        )


def _fingerprint(trees: Mapping[Split, Trees], vocabulary: TreebankVocabulary) -> str:
    digest = hashlib.sha256(repr(vocabulary).encode())
    for split in SPLITS:
        for values in trees[split].values():
            digest.update(values.numpy().tobytes())
            digest.update(b"\x00")
    return cache_key(format=_FORMAT, task="parse", ids=digest.hexdigest())


def _check_treebank(treebank: Treebank) -> None:
    """Check that a treebank has trees in each split.

    Several words of a sentence may hang from the root, as some treebanks have it, and arcs may
    cross.

    Raises:
        InputError: a split is empty; or a word has no head or no relation, or is its own ancestor;
            the message names file and line.
    """
    for split in SPLITS:
        if not treebank.sentences[split]:
            raise InputError(f"the {split} split of {treebank.source} has no sentences: give some")
        for sentence in treebank.sentences[split]:
            _check_annotation(sentence)
            _check_acyclic(sentence)


def _check_annotation(sentence: Sentence) -> None:
    for line, word in zip(sentence.lines, sentence.words, strict=True):
        where = f"{sentence.source}, line {line}"
        if word.head is None:
            raise damage(where, HEAD, UNSPECIFIED, "the number of the word's head, 0 for the root")
        if word.relation == UNSPECIFIED:
            raise damage(where, DEPREL, UNSPECIFIED, "the word's relation to its head")


def _check_acyclic(sentence: Sentence) -> None:
    heads = [0, *(word.head or 0 for word in sentence.words)]
    # The walk up to the root that reached a node first. What an earlier walk met leads to the root,
    # what this one meets again is a circle.
    reached = [0] + [-1] * len(sentence.words)
    for start in range(1, len(heads)):
        node = start
        while reached[node] < 0:
            reached[node] = start
            node = heads[node]
        if node and reached[node] == start:
            expected = "heads that lead to the root; this one leads back to its own word"
            where = f"{sentence.source}, line {sentence.lines[node - 1]}"
            raise damage(where, HEAD, str(heads[node]), expected)
