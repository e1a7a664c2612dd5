"""The worked examples of docs/own-models.md run as their first lines say, and resume."""

from __future__ import annotations

import csv
import json
import random
import shutil
from pathlib import Path

import pytest
import torch

import compare_mlm
import compare_tag
import powernorm
from commands import powernorm as run_powernorm

EXAMPLES = Path(__file__).parents[2] / "examples"
WORDS = ("the", "a", "film", "story", "it", "was", "with", "and", "of", "scene", "actor", "plot")
TELLING = {"good": ("great", "lovely", "moving"), "bad": ("dull", "awful", "tedious")}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for example in EXAMPLES.glob("*.py"):
        shutil.copy(example, tmp_path)
    return tmp_path


def write_reviews(path: Path) -> None:
    """Short and long texts, of which a few words tell the class."""
    chance = random.Random(0)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        for _ in range(240):
            label = chance.choice(list(TELLING))
            words = chance.choices(WORDS, k=chance.randint(2, 24)) + chance.choices(
                TELLING[label], k=4
            )
            chance.shuffle(words)
            rows.writerow([" ".join(words), label])


def results(home: Path, *words: str) -> dict[str, dict[str, float]]:
    found = run_powernorm(home, "compare", *words, "--out", "runs")
    assert found.code == 0, found.err
    runs = json.loads((home / "runs" / "results.json").read_text())["runs"]
    assert {run["status"] for run in runs} == {"finished"}, runs
    return {run["norm"]: run["metrics"] for run in runs}


def test_a_gpt_in_a_plain_loop(home: Path) -> None:
    (home / "text.txt").write_text("the cat sat on the mat and the dog sat on the log. " * 80)
    small = ("steps=30", "width=16", "length=16", "layers=1", "text=text.txt", "dropout=0.0")
    changes = [word for change in small for word in ("--set", change)]
    found = results(
        home, "compare_gpt:train", "--norms", "ln,rbn,pn", "--goal", "valid_loss:min", *changes
    )
    assert all(metrics["valid_loss"] < 2.6 for metrics in found.values())  # ln 17 = 2.8
    rows = (home / "runs" / "pn-seed0" / "norms.csv").read_text().splitlines()
    assert len(rows) > 3


@pytest.mark.slow
def test_a_bert_from_csv_by_the_trainer(home: Path) -> None:
    pytest.importorskip("transformers")
    write_reviews(home / "reviews.csv")
    small = ("steps=40", "width=32", "layers=1", "learning_rate=5e-3")
    changes = [word for change in small for word in ("--set", change)]
    found = results(
        home, "compare_bert:train", "--norms", "ln,rbn", "--goal", "accuracy:max", *changes
    )
    assert found["ln"]["accuracy"] > 0.9
    assert found["rbn"]["valid_loss"] < 0.68  # ln 2 = 0.69
    header, *rows = (home / "runs" / "rbn-seed0" / "metrics.csv").read_text().splitlines()
    assert "accuracy" in header.split(",")
    assert [int(step) for step in dict.fromkeys(row.partition(",")[0] for row in rows)] == [
        *range(2, 41, 2)
    ]


def changes(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


@pytest.mark.slow
def test_a_masked_language_model_on_sentences_of_a_text(home: Path) -> None:
    """Every word has one neighbor, which tells it where it is hidden."""
    chance, pairs = random.Random(0), [f"{word} {word}er" for word in WORDS]
    lines = [" ".join(chance.choices(pairs, k=chance.randint(1, 6))) for _ in range(400)]
    (home / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    small = ("text=text.txt", "steps=250", "width=32", "layers=1", "heads=2", "vocabulary=320")
    found = results(
        home, "compare_mlm:train", "--norms", "ln,bn", "--goal", "valid_loss:min", *changes(*small)
    )
    # Of 24 words the frequencies alone leave ln 24 = 3.2.
    assert all(metrics["test_loss"] < 2.0 for metrics in found.values()), found


def test_at_least_one_token_of_each_sentence_is_hidden() -> None:
    rows = [torch.arange(2, 2 + length) for length in (1, 5, 40, 40, 40, 40, 40)]
    tokens, padding, targets = compare_mlm.batch_of(rows)
    hidden = targets != compare_mlm.IGNORED
    assert bool(hidden.any(1).all())
    assert 0.05 < float(hidden[2:].double().mean()) < 0.3
    assert not bool((hidden & padding).any())
    assert bool((tokens[hidden] == compare_mlm.MASK).all())
    for row, whole in zip(torch.where(hidden, targets, tokens), rows, strict=True):
        assert row[row != compare_mlm.PAD].tolist() == whole.tolist()


TAGS = {"the": "DET", "a": "DET", "dog": "NOUN", "cat": "NOUN", "sees": "VERB", "hm": "INTJ"}


def write_treebank(path: Path, number: int, seed: int) -> None:
    """Sentences with a comment, a contraction and an empty node, in which words have one tag."""
    chance, lines = random.Random(seed), []
    for _ in range(number):
        words = chance.choices(list(TAGS), k=chance.randint(1, 9))
        lines += ["# text = …", "1-2\tcontracted\t_\t_\t_\t_\t_\t_\t_\t_"]
        lines += [
            f"{place}\t{word.title()}\t_\t{TAGS[word]}\t_\t_\t_\t_\t_\t_"
            for place, word in enumerate(words, start=1)
        ]
        lines += ["8.1\tempty\t_\tX\t_\t_\t_\t_\t_\t_", ""]
    path.write_text("\n".join(lines), encoding="utf-8")


def test_a_tagger_of_a_treebank(home: Path) -> None:
    (home / "bank").mkdir()
    for part, number in (("train", 200), ("dev", 20), ("test", 30)):
        write_treebank(home / "bank" / f"xx_mine-ud-{part}.conllu", number, len(part))
    small = ("data=bank", "steps=60", "width=16", "layers=1", "placement=post", "length=4")
    found = results(
        home, "compare_tag:train", "--norms", "ln,rbn", "--goal", "valid_loss:min", *changes(*small)
    )
    assert all(metrics["test_accuracy"] > 0.9 for metrics in found.values()), found
    header, *rows = (home / "runs" / "rbn-seed0" / "metrics.csv").read_text().splitlines()
    place = header.split(",").index("valid_accuracy")
    assert len([row for row in rows if row.split(",")[place]]) == 5


def test_one_file_of_a_treebank_is_split(tmp_path: Path) -> None:
    write_treebank(tmp_path / "mine.conllu", 25, 0)
    parts = compare_tag.read(str(tmp_path / "mine.conllu"))
    assert {split: len(part) for split, part in parts.items()} == {
        "train": 21,
        "valid": 2,
        "test": 2,
    }
    assert all(TAGS[word] == tag for part in parts.values() for one in part for word, tag in one)


def test_words_have_ids_by_their_frequency_and_sentences_are_cut() -> None:
    sentence = [("a", "DET"), ("dog", "NOUN"), ("a", "DET"), ("cat", "NOUN"), ("dog", "NOUN")]
    other = [("cat", "NOUN"), ("hm", "INTJ")]
    parts = {"train": [sentence, [("a", "DET")]], "valid": [other], "test": []}
    rows, num_words, num_tags = compare_tag.encode(parts, 4, 3)
    assert (num_words, num_tags) == (4, 3)  # DET, INTJ, NOUN
    train = [row.tolist() for row in rows["train"]]
    assert train == [[[2, 0], [3, 2], [2, 0]], [[1, 2], [3, 2]], [[2, 0]]]
    assert [row.tolist() for row in rows["valid"]] == [[[1, 2], [1, 1]]]
    words, padding, tags = compare_tag.batch_of(rows["train"])
    assert words.tolist() == [[2, 3, 2], [1, 3, 0], [2, 0, 0]]
    assert padding.tolist() == [[False] * 3, [False, False, True], [False, True, True]]
    assert tags[2].tolist() == [0, -100, -100]


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("norm", ["ln", "bn", "pn"])
def test_padding_has_no_say_in_the_padded_examples(norm: str, placement: str) -> None:
    tagger = compare_tag.Tagger(9, 3, 6, 16, 2, placement == "pre")
    masked = compare_mlm.MaskedLanguageModel(9, 6, 16, 2, 4, 0.0)
    words = torch.randint(2, 9, (4, 6))
    padding = torch.arange(6) >= torch.tensor([6, 1, 3, 2])[:, None]
    for model in (tagger, masked):
        powernorm.swap(model, norm)
        model.train()
        before = model(words.masked_fill(padding, 0), padding)[~padding]
        torch.testing.assert_close(model(words.masked_fill(padding, 7), padding)[~padding], before)
        model.eval()
        whole = model(words, padding)
        for row, kept in enumerate(~padding):
            alone = model(words[row : row + 1, kept], padding[row : row + 1, kept])[0]
            torch.testing.assert_close(whole[row, kept], alone, atol=1e-5, rtol=1e-4)
