"""Encoded treebanks: columns, refused annotation, and scored words."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from powernorm.errors import InputError
from powernorm_lab.data.batch import IGNORED
from powernorm_lab.tasks.parse.data import EncodedTreebank, TransitionRows, encode_trees
from powernorm_lab.tasks.parse.parsing import (
    GoldTransitions,
    Parsed,
    attachment_scores,
    neighbor_scores,
)
from powernorm_lab.tasks.parse.sources import load_treebank

Row = tuple[str, str, str, int | str, str]
"""Form, coarse tag, fine tag, head, relation."""

PENN: list[Row] = [
    ("He", "PRP", "PRP", 2, "nsubj"),
    ("has", "VBZ", "VBZ", 0, "root"),
    ("good", "JJ", "JJ", 4, "amod"),
    ("control", "NN", "NN", 2, "dobj"),
    (".", ".", ".", 2, "punct"),
]
CROSSING: list[Row] = [
    ("a", "DT", "DT", 3, "det"),
    ("b", "NN", "NN", 0, "root"),
    ("c", "NN", "NN", 2, "dep"),
    ("d", "NN", "NN", 1, "dep"),
]
TWO_ROOTS: list[Row] = [("a", "NN", "NN", 0, "root"), ("b", "NN", "NN", 0, "root")]


def lines(*sentences: Sequence[Row]) -> str:
    return "".join(
        "".join(
            f"{i}\t{form}\t_\t{coarse}\t{fine}\t_\t{head}\t{label}\t_\t_\n"
            for i, (form, coarse, fine, head, label) in enumerate(sentence, start=1)
        )
        + "\n"
        for sentence in sentences
    )


@pytest.fixture
def encode(tmp_path: Path) -> Callable[..., EncodedTreebank]:
    """Encode files with these splits; missing splits are one sentence of PENN."""

    def from_files(
        train: str | None = None, dev: str | None = None, test: str | None = None, size: int = 300
    ) -> EncodedTreebank:
        for split, text in (("train", train), ("dev", dev), ("test", test)):
            (tmp_path / f"{split}.conllx").write_text(text or lines(PENN), encoding="utf-8")
        return encode_trees(load_treebank(str(tmp_path)), size)

    return from_files


def test_conll_x_files_with_penn_tags(encode: Callable[..., EncodedTreebank]) -> None:
    encoded = encode(lines(PENN, CROSSING, TWO_ROOTS, PENN))
    vocabulary = encoded.vocabulary
    assert not vocabulary.is_universal
    assert list(vocabulary.tags) == [".", "DT", "JJ", "NN", "PRP", "VBZ"]
    assert min(vocabulary.tags.values()) == 3
    assert list(vocabulary.labels) == ["amod", "dep", "det", "dobj", "nsubj", "punct", "root"]
    assert list(vocabulary.words)[:4] == [".", "a", "b", "control"]
    trees = encoded.trees["train"]
    assert trees.lengths.tolist() == [5, 4, 2, 5]
    assert trees.heads[:5].tolist() == [2, 0, 4, 2, 2]
    # The full stop is the one word that is not scored.
    assert (~trees.is_scored).nonzero().flatten().tolist() == [4, 15]
    gold = encoded.gold["train"]
    assert dict(gold.left_out) == {"trees with crossing arcs": 1, "trees with several roots": 1}
    assert len(gold) == 2 * 10
    assert gold.states.dtype == torch.int16
    assert torch.equal(gold.targets[:10], gold.targets[10:])


@pytest.mark.parametrize("tag", ["``", "''", ":", ",", "."])
def test_penn_punctuation_is_not_scored(encode: Callable[..., EncodedTreebank], tag: str) -> None:
    sentence = [("a", "NN", "NN", 0, "root"), ("x", tag, tag, 1, "punct")]
    sentence += [("(", "-LRB-", "-LRB-", 1, "punct"), ("$", "$", "$", 1, "dep")]
    assert encode(lines(sentence)).trees["train"].is_scored.tolist() == [True, False, True, True]


def test_the_fine_tags_are_read_where_there_are_such(
    encode: Callable[..., EncodedTreebank],
) -> None:
    coarse = [(form, tag[:1], tag, head, label) for form, tag, _, head, label in PENN]
    assert list(encode(lines(coarse)).vocabulary.tags) == [".", "JJ", "NN", "PRP", "VBZ"]
    without = [(form, tag, "_", head, label) for form, tag, _, head, label in PENN]
    assert list(encode(lines(without)).vocabulary.tags) == [".", "JJ", "NN", "PRP", "VBZ"]


def test_universal_tags_go_before_fine_ones(encode: Callable[..., EncodedTreebank]) -> None:
    sentence = [("a", "NOUN", "NN", 0, "root"), ("!", "PUNCT", "!", 1, "punct")]
    encoded = encode(lines(sentence))
    assert encoded.vocabulary.is_universal
    assert list(encoded.vocabulary.tags) == ["NOUN", "PUNCT"]
    assert encoded.trees["train"].is_scored.tolist() == [True, False]


def test_full_stop_of_the_older_universal_tags_is_not_scored(
    encode: Callable[..., EncodedTreebank],
) -> None:
    sentence = [("a", "NOUN", "NN", 0, "root"), (",", ".", ",", 1, "p")]
    encoded = encode(lines(sentence))
    assert encoded.vocabulary.is_universal
    assert encoded.trees["train"].is_scored.tolist() == [True, False]


def test_what_the_train_split_lacks_is_unknown(encode: Callable[..., EncodedTreebank]) -> None:
    other: list[Row] = [("She", "PRP", "PRP", 2, "agent"), ("has", "VBX", "VBX", 0, "root")]
    encoded = encode(dev=lines(other))
    trees, gold = encoded.trees["valid"], encoded.gold["valid"]
    assert trees.words.tolist() == [1, encoded.vocabulary.words["has"]]
    assert trees.tags.tolist() == [encoded.vocabulary.tags["PRP"], 1]
    assert trees.labels.tolist() == [1, encoded.vocabulary.labels["root"]]
    # SHIFT, SHIFT, LEFT with a label that no transition has, RIGHT with root.
    assert (gold.targets == IGNORED).tolist() == [False, False, True, False]
    (batch,) = TransitionRows(gold).evaluation(batch_size=8)
    assert (batch.num_tokens, batch.num_targets) == (4, 3)
    # An unknown label counts as wrong in the labeled score.
    scores = attachment_scores(trees, Parsed(trees.heads, torch.full_like(trees.labels, 2)))
    assert scores == {"uas": 100.0, "las": 0.0}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("a", "N", "N", 2, "x"), ("b", "N", "N", 1, "x")],
         r"train\.conllx, line 1, column 7 \(HEAD\): '2'; expected heads that lead to the root"),
        ([("a", "N", "N", 0, "x"), ("b", "N", "N", 4, "x"), ("c", "N", "N", 2, "x"),
          ("d", "N", "N", 3, "x"), ("e", "N", "N", 1, "x")],
         r"train\.conllx, line 2, column 7 \(HEAD\): '4'; expected heads that lead to the root"),
        ([("a", "N", "N", 0, "x"), ("b", "N", "N", "_", "x")],
         r"train\.conllx, line 2, column 7 \(HEAD\): '_'; expected the number of the word's head"),
        ([("a", "N", "N", 0, "_")],
         r"train\.conllx, line 1, column 8 \(DEPREL\): '_'; expected the word's relation"),
        ([("a", "_", "_", 0, "x")], r"train\.conllx, line 1: 'a' has no tag in columns 4 and 5"),
        ([("a", "NOUN", "N", 0, "x"), ("b", "_", "N", 1, "x")],
         r"train\.conllx, line 2: 'b' has no tag in column 4 \(UPOS\)"),
        ([("a", "N", "N", 5, "x")], r"train\.conllx, line 1, column 7 \(HEAD\): '5'; expected 0"),
        ([("a", "N", "N", "9" * 5000, "x")], r"line 1, column 7 \(HEAD\): '9+'; expected the num"),
        (CROSSING, r"no tree of the train split of .* 1 trees with crossing arcs"),
        ([(".", ".", ".", 0, "x")], "the train split of .* has only punctuation"),
    ],
)  # fmt: skip
def test_what_is_no_tree_is_refused_with_its_line(
    encode: Callable[..., EncodedTreebank], rows: list[Row], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        encode(lines(rows))


def test_an_empty_split_is_refused(encode: Callable[..., EncodedTreebank]) -> None:
    with pytest.raises(InputError, match=r"the valid split of .* has no sentences"):
        encode(dev="# a note\n")


def test_another_treebank_by_the_ids_of_a_first(
    encode: Callable[..., EncodedTreebank], tmp_path: Path
) -> None:
    own = encode(lines(PENN, TWO_ROOTS))
    other = tmp_path / "other"
    other.mkdir()
    for split in ("train", "valid", "test"):
        (other / f"{split}.conll").write_text(
            lines(
                PENN[:2] + PENN[4:],
            )
        )
    found = encode_trees(load_treebank(str(other)), 300, load_treebank(str(tmp_path)))
    assert found.vocabulary == own.vocabulary
    assert found.trees["test"].words.tolist() == own.trees["train"].words[[0, 1, 4]].tolist()
    assert found.fingerprint != own.fingerprint
    assert encode_trees(load_treebank(str(tmp_path)), 300).fingerprint == own.fingerprint


SAMPLE = lines(PENN, [("x", "NOUN", "_", 0, "root")], CROSSING, TWO_ROOTS) * 4


def mutated(draw: st.DrawFn) -> bytes:
    """Draw a damaged file: bytes changed, lines cut or doubled, columns dropped or swapped."""
    rows = SAMPLE.split("\n")
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(rows) - 1))
        columns = rows[place].split("\t")
        column = draw(st.integers(0, len(columns) - 1))
        match draw(st.sampled_from(["drop", "double", "cut", "column", "value", "swap"])):
            case "drop":
                del rows[place]
            case "double":
                rows.insert(place, rows[place])
            case "cut":
                rows[place] = rows[place][: draw(st.integers(0, len(rows[place])))]
            case "column":
                rows[place] = "\t".join(columns[:column] + columns[column + 1 :])
            case "value":
                columns[column] = draw(
                    st.one_of(st.integers(-3, 12).map(str), st.text(max_size=3), st.just("_"))
                )
                rows[place] = "\t".join(columns)
            case "swap":
                other = draw(st.integers(0, len(rows) - 1))
                rows[place], rows[other] = rows[other], rows[place]
        if not rows:
            return b""
    content = "\n".join(rows).encode("utf-8", "surrogatepass")
    if content and draw(st.booleans()):
        place = draw(st.integers(0, len(content) - 1))
        content = content[:place] + bytes([draw(st.integers(0, 255))]) + content[place + 1 :]
    return content


def check_mutation(folder: Path, content: bytes) -> None:
    path = folder / "mine.conllx"
    path.write_bytes(content)
    try:
        encoded = encode_trees(load_treebank(str(path)), 300)
    except InputError:
        return
    for split, trees in encoded.trees.items():
        gold = encoded.gold[split]
        num_left_out = sum(gold.left_out.values())
        assert num_left_out < len(trees)
        assert len(gold) <= 2 * int(trees.lengths.sum())
        assert 0 <= attachment_scores(trees, Parsed(trees.heads, trees.labels))["las"] <= 100
    perfect = attachment_scores(encoded.trees["train"], Parsed(*_gold(encoded)))
    assert perfect == {"uas": 100.0, "las": 100.0}


def _gold(encoded: EncodedTreebank) -> tuple[torch.Tensor, torch.Tensor]:
    return encoded.trees["train"].heads, encoded.trees["train"].labels


def test_the_undamaged_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.conllx"
    path.write_text(SAMPLE)
    encoded = encode_trees(load_treebank(str(path)), 300)
    assert [len(encoded.trees[split]) for split in ("train", "valid", "test")] == [14, 1, 1]
    assert len(encoded.gold["train"]) == 3 * 10 + 3 * 2


@settings(max_examples=300)
@given(st.composite(mutated)())
def test_damaged_files_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    check_mutation(tmp_path_factory.getbasetemp(), content)


@pytest.mark.slow
@settings(max_examples=10_000)
@given(st.composite(mutated)())
def test_many_damaged_files_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    check_mutation(tmp_path_factory.getbasetemp(), content)


def test_scores_against_a_count_by_hand(encode: Callable[..., EncodedTreebank]) -> None:
    encoded = encode(lines(PENN, TWO_ROOTS))
    trees, labels = encoded.trees["train"], encoded.vocabulary.labels
    # Of "He has good control a b", He has a wrong head and good a wrong label. The head of the full
    # stop is wrong too, but does not count.
    heads = torch.tensor([3, 0, 4, 2, 4, 0, 0])
    names = ["nsubj", "root", "dobj", "dobj", "punct", "root", "root"]
    parsed = Parsed(heads, torch.tensor([labels[name] for name in names]))
    assert attachment_scores(trees, parsed) == {"uas": 100 * 5 / 6, "las": 100 * 4 / 6}


def test_the_neighbor_that_is_the_head_more_often(
    encode: Callable[..., EncodedTreebank],
) -> None:
    chain: list[Row] = [("a", "NN", "NN", 0, "root"), ("b", "NN", "NN", 1, "x")]
    encoded = encode(lines(chain), dev=lines(chain, PENN), test=lines(PENN))
    # Attaching to the previous word: no word of "He has good control" has this head.
    assert neighbor_scores(encoded.trees) == {"valid_uas": 100 * 2 / 6, "test_uas": 0.0}
    backwards: list[Row] = [("a", "NN", "NN", 2, "x"), ("b", "NN", "NN", 0, "root")]
    encoded = encode(lines(backwards), test=lines(PENN))
    # Attaching to the next word: "He" and "good" have this head.
    assert neighbor_scores(encoded.trees)["test_uas"] == 50.0


def gold_of(number: int) -> GoldTransitions:
    """Return transitions whose features and target all equal their number."""
    targets = torch.arange(number)
    return GoldTransitions(targets[:, None].expand(-1, 48).short(), targets, {})


def test_only_about_so_many_transitions_evenly_spaced() -> None:
    batches = TransitionRows(gold_of(30), max_examples=10).training(batch_size=5, seed=0)
    assert batches.batches_per_epoch == 2
    found = torch.cat([batches.batch(i).targets for i in range(2)])
    assert sorted(found.tolist()) == list(range(0, 30, 3))
    evaluation = TransitionRows(gold_of(30)).evaluation(batch_size=4, max_tokens=10)
    assert len(evaluation) == 3
    assert torch.cat([batch.targets for batch in evaluation]).tolist() == list(range(0, 30, 3))
    with pytest.raises(InputError, match="has 3 transitions, fewer than a batch of 5: lower data"):
        TransitionRows(gold_of(30), max_examples=3).training(batch_size=5, seed=0)
