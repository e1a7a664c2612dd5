"""Checks of annotated sentences: every word has a head and a relation, and all hang together."""

from powernorm.errors import InputError
from powernorm.lab.data.conllu import DEPREL, HEAD, UNSPECIFIED, Sentence, damage
from powernorm.lab.data.corpus import SPLITS
from powernorm.lab.data.treebanks import Treebank


def check_treebank(treebank: Treebank) -> None:
    """Check that a treebank has trees in each split.

    Several words of a sentence may hang from the root, as some treebanks have it, and arcs may
    cross.

    Raises:
        InputError: a split is empty; or a word has no head or no relation, or is its own ancestor;
            the message names file and line.
    """
    for split in SPLITS:
        if not treebank.sentences[split]:
            raise InputError(f"The {split} split of {treebank.source} has no sentences: give some.")
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
