"""Encoded treebanks with gold transitions, and their batches.

A row of a batch is a state, with the oracle's transition as its target.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm_lab.data.batch import IGNORED, Batch
from powernorm_lab.data.cache import cache_key
from powernorm_lab.data.corpus import SPLITS, EvaluatedSplit, Split
from powernorm_lab.data.orders import spaced
from powernorm_lab.data.rows import Rows
from powernorm_lab.tasks.parse.parsing import (
    GoldTransitions,
    Parsed,
    attachment_scores,
    gold_transitions,
    parse,
)
from powernorm_lab.tasks.parse.settings import ParsingSettings
from powernorm_lab.tasks.parse.sources import (
    DEPREL,
    HEAD,
    UNSPECIFIED,
    Sentence,
    Treebank,
    Word,
    damage,
)
from powernorm_lab.tasks.parse.trees import NUM_LABEL_MARKS, NUM_MARKS, UNKNOWN_ID, Inventory, Trees
from powernorm_lab.training.batches import RowData

# Ids of words, tags and labels, and the column of tags.


UNIVERSAL_PUNCTUATION: Final = frozenset({"PUNCT", "."})
"""Universal tags of punctuation; `.` is that of the older universal tags (Petrov et al. 2012) in
CoNLL-X treebanks."""
PENN_PUNCTUATION: Final = frozenset({"``", "''", ":", ",", "."})
"""Tags that Chen and Manning (2014) exclude from scores."""
_UNIVERSAL: Final = frozenset({"NOUN", "VERB", "PUNCT"})


@dataclass(frozen=True)
class TreebankVocabulary:
    """The ids of words, tags and labels of a train split."""

    words: Mapping[str, int]
    """Ids of the most frequent words, in lower case."""
    tags: Mapping[str, int]
    labels: Mapping[str, int]
    is_universal: bool
    """Whether tags are read from column UPOS (Universal Dependencies); otherwise from column XPOS
    (POSTAG of CoNLL-X) if it has them."""

    @classmethod
    def of(cls, sentences: Iterable[Sentence], size: int) -> "TreebankVocabulary":
        """Build the vocabulary of a train split.

        Args:
            sentences: sentences of the train split.
            size: number of words, including the marks for none, unknown and root.

        Raises:
            InputError: a word has no tag.
        """
        words = [word for sentence in sentences for word in sentence.words]
        is_universal = any(word.tag in _UNIVERSAL for word in words)
        counts = Counter(word.form.lower() for word in words)
        # Equally frequent words in alphabetical order: ids do not depend on the order of sentences.
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
        """Return the numbers of ids of words, tags and labels, including marks."""
        return (
            len(self.words) + NUM_MARKS,
            len(self.tags) + NUM_MARKS,
            len(self.labels) + NUM_LABEL_MARKS,
        )

    def number(self, sentences: Iterable[Sentence]) -> Trees:
        """Encode sentences as ids.

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
    """A treebank as ids, with gold transitions."""

    name: str
    source: str
    license: str
    vocabulary: TreebankVocabulary
    trees: Mapping[Split, Trees]
    """All sentences, on which scores are computed."""
    gold: Mapping[Split, GoldTransitions]
    """Gold transitions of those trees that transitions can build, sentence by sentence."""
    fingerprint: str
    """Hash of everything that determines the ids."""

    @property
    def inventory(self) -> Inventory:
        """Return the classes of transitions."""
        return Inventory(len(self.vocabulary.labels))


def encode_trees(
    treebank: Treebank, vocabulary_size: int, other: Treebank | None = None
) -> EncodedTreebank:
    """Encode a treebank and derive its gold transitions.

    Args:
        treebank: the sentences.
        vocabulary_size: number of words, including the marks for none, unknown and root.
        other: treebank whose train split defines the ids, such as that of a trained model; None is
            `treebank`.

    Raises:
        InputError: a split has no sentences, no tree that transitions can build, or only
            punctuation; or a sentence has no tags or is not a tree.
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
            f"{reasons}; give a treebank with projective trees and single roots"
        )
    if not encoded.trees[split].is_scored.any():
        raise InputError(
            f"the {split} split of {encoded.source} has only punctuation: give sentences"
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

    Several words of a sentence may have the root as their head, as in some treebanks, and arcs may
    cross.

    Raises:
        InputError: a split is empty, or a word has no head or no relation, or is its own ancestor;
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
    # For each node the start of the first walk to the root that reached it. Nodes of earlier walks
    # lead to the root; a node that the same walk reaches again is part of a cycle.
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


# Batches.


STATES: Final = "states"
"""Name of the model's input."""


class TransitionRows(Rows):
    """The gold transitions of a split.

    Args:
        gold: gold transitions of the split, sentence by sentence.
        max_examples: number of evenly spaced transitions to use; None is all.
    """

    unit = "transitions"

    def __init__(self, gold: GoldTransitions, max_examples: int | None = None) -> None:
        self._gold = gold
        self._chosen = spaced(len(gold), max_examples)
        super().__init__(torch.ones_like(self._chosen))

    def batch(self, rows: Tensor) -> Batch:
        """Return a batch of transitions by number."""
        chosen = self._chosen[rows]
        targets = self._gold.targets[chosen]
        return Batch(
            named={STATES: self._gold.states[chosen].long()},
            targets=targets,
            num_tokens=len(rows),
            num_targets=int((targets != IGNORED).sum()),
        )


class ParsingData(RowData[EncodedTreebank, ParsingSettings]):
    """Batches of the gold transitions; scores are over all trees."""

    def rows(self, split: Split) -> TransitionRows:
        """Return the transitions of a split."""
        kept = self._config.data.max_examples if split == "train" else None
        return TransitionRows(self._encoded.gold[split], kept)

    def scores(
        self, split: EvaluatedSplit, model: nn.Module, device: torch.device, *, brief: bool = False
    ) -> Mapping[str, float]:
        """Return UAS and LAS of all trees of a split, in percent."""
        del brief
        parsed = parse_split(self._encoded, split, model, device)
        return attachment_scores(self._encoded.trees[split], parsed)


def parse_split(
    encoded: EncodedTreebank,
    split: Split,
    model: Callable[[Tensor], Tensor],
    device: torch.device,
) -> Parsed:
    """Parse the sentences of a split with a model in evaluation mode."""
    return parse(encoded.trees[split], model, encoded.inventory, device)
