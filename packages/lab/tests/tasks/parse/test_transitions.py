"""Batched oracle, features and parser equal implementations with lists and loops."""

import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from naive_transitions import LEFT, RIGHT, SHIFT, arcs_cross, naive_oracle, naive_parse
from random_trees import (
    RandomTree,
    any_heads,
    projective_heads,
    put_together,
    trees_of,
)
from torch import Tensor

from covering import some_default
from powernorm_lab.tasks.parse import parsing
from powernorm_lab.tasks.parse import trees as parser_trees
from powernorm_lab.tasks.parse.data import TreebankVocabulary
from powernorm_lab.tasks.parse.parsing import Derivations, Parsed, derive, gold_states, parse
from powernorm_lab.tasks.parse.sources import TREEBANKS, load_treebank
from powernorm_lab.tasks.parse.trees import Configurations, Inventory, Trees

KINDS = {
    parser_trees.SHIFT: SHIFT,
    parser_trees.LEFT: LEFT,
    parser_trees.RIGHT: RIGHT,
}


def rebuilt(trees: Trees, derivations: Derivations) -> Parsed:
    """Rebuild the trees from the derivations alone."""
    heads, labels = torch.full_like(trees.heads, -1), torch.full_like(trees.labels, -1)
    for rows in trees.portions(512):
        whole = Configurations.start(trees, rows)
        begin, ends = 2 * trees.starts[rows], 2 * trees.lengths[rows]
        for step in range(int(ends[0])):
            places = begin[ends > step] + step
            whole.first(len(places)).apply(
                derivations.kinds[places].long(), derivations.labels[places].long()
            )
        assert bool((whole.depth == 1).all())
        assert bool((whole.front > whole.lengths).all())
        is_word, places = trees.places(rows)
        heads[places], labels[places] = whole.heads[is_word], whole.labels[is_word]
    return Parsed(heads, labels)


@pytest.mark.parametrize("name", some_default(TREEBANKS, "turkish"))
def test_every_projective_tree_of_the_embedded_treebanks_is_rebuilt(name: str) -> None:
    sentences = load_treebank(name).sentences
    vocabulary = TreebankVocabulary.of(sentences["train"], 4000)
    for part in sentences.values():
        trees = vocabulary.number(part)
        derivations = derive(trees)
        found = rebuilt(trees, derivations)
        is_wrong = (found.heads != trees.heads) | (found.labels != trees.labels)
        sentence = torch.arange(len(trees)).repeat_interleave(trees.lengths)
        num_wrong = torch.zeros(len(trees)).index_add_(0, sentence, is_wrong.float())
        assert torch.equal(num_wrong == 0, derivations.is_found)
        assert torch.equal(derivations.is_found, ~crossing(trees))


def crossing(trees: Trees) -> Tensor:
    """Return which trees have crossing arcs, by comparing all pairs of arcs."""
    found = []
    for heads in trees.heads.split(trees.lengths.tolist()):
        ends = torch.stack([heads, torch.arange(1, len(heads) + 1)]).sort(dim=0).values
        first, last = ends[0], ends[1]
        inside = (first[:, None] < first) & (first < last[:, None]) & (last[:, None] < last)
        found.append(inside.any())
    return torch.stack(found)


@pytest.mark.slow
@given(trees_of(st.one_of(projective_heads(), any_heads())), st.integers(1, 4))
def test_the_oracle_is_the_naive_one_step_for_step(
    sentences: list[RandomTree], portion: int
) -> None:
    trees = put_together(sentences)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parsing, "GOLD_PORTION", portion)
        derivations = derive(trees)
        states = gold_states(trees, derivations, torch.int64)
    begin = 0
    for sentence, is_found in zip(sentences, derivations.is_found.tolist(), strict=True):
        expected = naive_oracle(sentence.words, sentence.tags, sentence.heads, sentence.labels)
        assert is_found == (expected is not None) == (not arcs_cross(sentence.heads))
        for place, (features, kind, label) in enumerate(expected or [], start=begin):
            assert states[place].tolist() == features
            assert KINDS[int(derivations.kinds[place])] == kind
            assert int(derivations.labels[place]) == label
        begin += 2 * len(sentence.heads)
    assert begin == len(states)


@given(trees_of(projective_heads()))
def test_projective_trees_are_rebuilt(sentences: list[RandomTree]) -> None:
    trees = put_together(sentences)
    derivations = derive(trees)
    assert bool(derivations.is_found.all())
    found = rebuilt(trees, derivations)
    assert torch.equal(found.heads, trees.heads)
    assert torch.equal(found.labels, trees.labels)


@given(trees_of(any_heads()), st.integers(1, 4), st.integers(0, 5))
def test_the_parser_is_the_naive_one_and_makes_trees(
    sentences: list[RandomTree], portion: int, seed: int
) -> None:
    trees = put_together(sentences)
    inventory = Inventory(num_labels=3)

    def scores(features: list[int]) -> list[float]:
        # A hash: features have different scores, and each transition wins for some of them.
        content = bytes([seed, *features])
        return [float(zlib.crc32(content + bytes([i]))) for i in range(len(inventory))]

    def batched(features: Tensor) -> Tensor:
        return torch.tensor([scores(row) for row in features.tolist()], dtype=torch.float64)

    def best(features: list[int], possible: set[str]) -> tuple[str, int]:
        rated = zip(scores(features), inventory.kinds, inventory.labels, strict=True)
        allowed = [(s, int(label), KINDS[int(kind)]) for s, kind, label in rated
                   if KINDS[int(kind)] in possible]  # fmt: skip
        _, label, kind = max(allowed)
        return kind, label

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parsing, "GOLD_PORTION", portion)
        found = parse(trees, batched, inventory)
    lengths = trees.lengths.tolist()
    for sentence, heads, labels in zip(
        sentences, found.heads.split(lengths), found.labels.split(lengths), strict=True
    ):
        expected = naive_parse(sentence.words, sentence.tags, best)
        assert list(zip(heads.tolist(), labels.tolist(), strict=True)) == expected
        check_is_tree(heads.tolist())


def check_is_tree(heads: list[int]) -> None:
    assert heads.count(0) == 1
    assert not arcs_cross(heads)
    for start in range(1, len(heads) + 1):
        node, steps = start, 0
        while node:
            node, steps = heads[node - 1], steps + 1
            assert steps <= len(heads)


def test_the_oracle_of_the_textbook_sentence() -> None:
    # "He has good control .", Chen and Manning (2014), Figure 1, with labels of our own.
    heads = [2, 0, 4, 2, 2]
    trees = put_together([RandomTree(heads, [3, 4, 5, 6, 7], [3, 4, 5, 6, 7], [2, 3, 4, 5, 6])])
    derivations = derive(trees)
    kinds = [KINDS[kind] for kind in derivations.kinds.tolist()]
    assert kinds == [SHIFT, SHIFT, LEFT, SHIFT, SHIFT, LEFT, RIGHT, SHIFT, RIGHT, RIGHT]
    states = gold_states(trees, derivations, torch.int64)
    # Before "good" becomes the modifier of "control": stack root has good control, buffer ".".
    assert states[5, :6].tolist() == [6, 5, 4, 7, 0, 0]
    # Before "control" becomes the object of "has", whose subject is "He".
    assert states[6, :6].tolist() == [6, 4, 2, 7, 0, 0]
    assert states[6, 6:18].tolist() == [5, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0]
    assert states[6, 36:].tolist() == [4, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0]


def test_transitions_are_numbered_both_ways() -> None:
    inventory = Inventory(num_labels=4)
    assert len(inventory) == 9
    assert inventory.ids(inventory.kinds, inventory.labels).tolist() == list(range(9))
    unknown = inventory.ids(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1]))
    assert unknown.tolist() == [0, -100, -100]
