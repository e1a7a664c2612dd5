import json
import random
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from powernorm.errors import InputError
from powernorm_lab.data.cache import cache_folder
from powernorm_lab.data.corpus import EVALUATED_SPLITS, SPLITS
from powernorm_lab.data.subwords import Subwords
from powernorm_lab.tasks.translation import data as pair_data
from powernorm_lab.tasks.translation.data import EncodedPairs, PairOptions, encode_pairs
from powernorm_lab.tasks.translation.readers import ParallelCorpus, TextPair, corpus_in_memory
from powernorm_lab.tasks.translation.sources import load_pairs

pytestmark = pytest.mark.usefixtures("own_cache")

OPTIONS = PairOptions(vocabulary_size=280, max_length=40)


def sentence(rng: random.Random, words: str) -> str:
    return " ".join(rng.choices(words.split(), k=rng.randint(1, 6)))


def corpus(*, tokenized: bool = False, extra: tuple[TextPair, ...] = ()) -> ParallelCorpus:
    rng = random.Random(0)
    pairs = [
        (sentence(rng, "Haus Krieg n't naïve <eos>"), sentence(rng, "house  war peace (Applause.)"))
        for _ in range(60)
    ]
    return corpus_in_memory(
        "test",
        {"train": [*pairs[:40], *extra], "valid": pairs[40:50], "test": pairs[50:]},
        languages=("de", "en"),
        source="a test",
        license="none",
        tokenized=tokenized,
    )


def with_evaluated(pairs: list[TextPair]) -> ParallelCorpus:
    """Return the same training pairs with other valid and test pairs."""
    return corpus_in_memory(
        "test",
        {"train": list(corpus().pairs("train")), "valid": pairs, "test": pairs},
        languages=("de", "en"),
        source="a test",
        license="none",
    )


def texts(encoded: EncodedPairs, split: pair_data.Split) -> list[TextPair]:
    part = encoded.splits[split]
    sides = (
        subwords.decode([lists.row(number).tolist() for number in range(len(lists))])
        for subwords, lists in (
            (encoded.source_subwords, part.source),
            (encoded.target_subwords, part.target),
        )
    )
    return list(zip(*sides, strict=True))


def normalized(pairs: list[TextPair]) -> list[TextPair]:
    return [(" ".join(source.split()), " ".join(target.split())) for source, target in pairs]


@pytest.mark.parametrize("tokenized", [False, True])
@pytest.mark.parametrize("target_size", [None, 270])
def test_ids_spell_the_pairs(tokenized: bool, target_size: int | None) -> None:
    data = corpus(tokenized=tokenized)
    encoded = encode_pairs(data, PairOptions(280, target_size, max_length=99))
    for split in SPLITS:
        assert texts(encoded, split) == normalized(list(data.pairs(split)))
        assert len(encoded.splits[split]) == len(list(data.pairs(split)))
    # A small text may yield fewer subwords than requested.
    assert 257 < encoded.vocabulary_size <= 280
    assert 257 < encoded.target_vocabulary_size <= (target_size or 280)
    assert (encoded.source_subwords is encoded.target_subwords) == (target_size is None)
    assert encoded.references("test") == [target for _, target in data.pairs("test")]
    assert encoded.sources("valid") == [source for source, _ in data.pairs("valid")]


def test_joint_subwords_are_of_both_languages_and_own_ones_of_one() -> None:
    joint = encode_pairs(corpus(), PairOptions(400)).source_subwords
    own = encode_pairs(corpus(), PairOptions(400, 400))
    words = [["Krieg"], ["war"]]
    assert [len(joint.encode(word)[0]) for word in words] == [1, 1]
    assert [len(own.source_subwords.encode(word)[0]) for word in words] == [1, 4]
    assert len(own.target_subwords.encode(["Krieg"])[0]) > 1


def test_subwords_are_trained_on_the_train_split_only() -> None:
    data = corpus()
    rare = with_evaluated([("zzz", "zzz")] * 99)
    encoded = encode_pairs(rare, PairOptions(500))
    assert len(encoded.splits["test"].source.row(0)) == 5
    known = encode_pairs(data, PairOptions(500)).source_subwords
    assert encoded.source_subwords.to_json() == known.to_json()


LONG = " ".join(["Haus"] * 100_000)


def test_long_and_uneven_training_pairs_are_left_out_and_counted() -> None:
    extra = ((LONG, "house"), ("Haus", LONG), ("Haus", "house war peace peace war"), ("", "war"))
    data = corpus(extra=extra)
    options = PairOptions(400, max_length=40, max_length_ratio=4)
    encoded = encode_pairs(data, options)
    kept = texts(encoded, "train")
    plain = list(corpus().pairs("train"))
    sizes = [[len(ids) for ids in encoded.source_subwords.encode(list(pair))] for pair in plain]
    expected = [pair for pair, size in zip(plain, sizes, strict=True) if max(size) <= 4 * min(size)]
    assert kept == normalized(expected)
    uneven = 1 + len(plain) - len(expected)
    assert encoded.dropped["train"] == {"empty": 1, "too long": 2, "length ratio": uneven}
    assert encoded.cut["train"] == {"source": 0, "target": 0}


def test_the_limit_counts_the_end_mark() -> None:
    three = encode_pairs(corpus(extra=(("x y z", "x y z"),)), PairOptions(280, max_length=7))
    assert ("x y z", "x y z") in texts(three, "train")
    two = encode_pairs(corpus(extra=(("x y z", "x y z"),)), PairOptions(280, max_length=6))
    assert ("x y z", "x y z") not in texts(two, "train")
    assert max(int(two.splits[split].source.lengths.max()) for split in SPLITS) <= 6


def test_evaluated_pairs_are_all_kept_but_cut() -> None:
    pairs = [("Haus", "house"), (LONG, "war"), ("Krieg", LONG)]
    data = with_evaluated(pairs)
    encoded = encode_pairs(data, PairOptions(400, max_length=10, max_length_ratio=1.5))
    for split in SPLITS[1:]:
        part = encoded.splits[split]
        assert len(part) == 3
        assert part.source.lengths.tolist() == [2, 10, 2]
        assert part.target.lengths.tolist() == [2, 2, 10]
        assert texts(encoded, split)[1] == (" ".join(["Haus"] * 9), "war")
        assert encoded.cut[split] == {"source": 1, "target": 1}
        assert encoded.dropped[split] == {"empty": 0}
    assert encoded.references("test")[2] == LONG


@pytest.mark.parametrize(("max_pairs", "numbers"), [(4, [0, 10, 20, 30]), (39, None), (99, None)])
def test_a_part_of_the_training_pairs_is_evenly_spaced(
    max_pairs: int, numbers: list[int] | None
) -> None:
    data = corpus()
    encoded = encode_pairs(data, PairOptions(280, max_pairs=max_pairs))
    pairs = normalized(list(data.pairs("train")))
    kept = min(max_pairs, 40)
    expected = numbers or [index * 40 // kept for index in range(kept)]
    assert texts(encoded, "train") == [pairs[number] for number in expected]


def test_second_start_finds_the_cache() -> None:
    first = encode_pairs(corpus(extra=(("", "a"),)), OPTIONS)
    with patch.object(pair_data, "_train", side_effect=AssertionError("trained again")):
        second = encode_pairs(corpus(extra=(("", "a"),)), OPTIONS)
    assert second.fingerprint == first.fingerprint
    assert second.facts() == first.facts()
    assert second.source_subwords.to_json() == first.source_subwords.to_json()
    for split in SPLITS:
        assert torch.equal(first.splits[split].source.tokens, second.splits[split].source.tokens)
        assert first.splits[split].source.tokens.dtype == torch.int32


def test_what_is_scored_is_what_was_encoded(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    odd = " a\tb\u2028c\x0bd\x85 \u3000"
    for name in ("train", "valid", "test"):
        for language in ("de", "en"):
            (folder / f"{name}.{language}").write_text(f"{name} {odd}{language}\n\n{language}\n")
    encoded = encode_pairs(load_pairs(str(folder), "de-en", True), OPTIONS)
    again = encode_pairs(load_pairs(str(folder), "de-en", True), OPTIONS)
    # Later the files are changed or gone, and so is the cache.
    (folder / "test.en").write_text("other\n")
    (folder / "valid.de").unlink()
    for path in cache_folder().iterdir():
        path.unlink()
    for pairs in (encoded, again):
        for split in EVALUATED_SPLITS:
            assert pairs.sources(split) == [f"{split} {odd}de", "de"]
            assert pairs.references(split) == [f"{split} {odd}en", "en"]
            assert len(pairs.splits[split]) == 2


def test_the_text_of_each_evaluated_split_is_found_again() -> None:
    encode_pairs(corpus(), OPTIONS)
    again = encode_pairs(corpus(), OPTIONS)
    for split in EVALUATED_SPLITS:
        kept = list(zip(again.sources(split), again.references(split), strict=True))
        assert kept == list(corpus().pairs(split))


def test_cache_tells_everything_apart_that_determines_ids() -> None:
    foreign = Subwords.train(["a b c"] * 3, 260, tokenized=False)
    fingerprints = {
        encode_pairs(corpus(), OPTIONS).fingerprint,
        encode_pairs(corpus(tokenized=True), OPTIONS).fingerprint,
        encode_pairs(corpus(extra=(("a", "b"),)), OPTIONS).fingerprint,
        encode_pairs(corpus(), OPTIONS, (foreign, foreign)).fingerprint,
        *(
            encode_pairs(corpus(), options).fingerprint
            for options in (
                PairOptions(281, max_length=40),
                PairOptions(280, 280, max_length=40),
                PairOptions(280, max_length=41),
                PairOptions(280, max_length=40, max_length_ratio=9),
                PairOptions(280, max_length=40, max_pairs=40),
            )
        ),
    }
    assert len(fingerprints) == 9


def test_portions_change_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = encode_pairs(corpus(), OPTIONS)
    monkeypatch.setattr(pair_data, "PORTION", 3)
    monkeypatch.setenv("POWERNORM_CACHE", str(tmp_path / "other"))
    parts = encode_pairs(corpus(), OPTIONS)
    assert whole.facts() == parts.facts()
    assert torch.equal(whole.splits["train"].target.tokens, parts.splits["train"].target.tokens)


def test_known_subwords_encode_another_text() -> None:
    known = encode_pairs(corpus(), OPTIONS)
    subwords = (known.source_subwords, known.target_subwords)
    for _ in range(2):
        other = encode_pairs(corpus(extra=(("Neues", "news"),)), OPTIONS, subwords)
        assert other.source_subwords is other.target_subwords
        assert other.source_subwords.to_json() == known.source_subwords.to_json()
        assert texts(other, "train")[-1] == ("Neues", "news")


def test_facts_are_json_and_count() -> None:
    data = corpus(extra=(("Haus", " "),))
    facts = encode_pairs(data, PairOptions(280, max_length=99)).facts()
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["name"], facts["languages"], facts["licence"]) == ("test", "de-en", "none")
    assert facts["vocabulary_size"] == facts["target_vocabulary_size"] == 280
    assert facts["joint_vocabulary"]
    for split in SPLITS:
        pairs = list(data.pairs(split))
        counts = facts["splits"][split]
        assert counts["pairs"] == len(pairs)
        assert counts["source_words"] == sum(len(source.split()) for source, _ in pairs)
        assert counts["target_words"] == sum(len(target.split()) for _, target in pairs)
    assert facts["splits"]["train"]["dropped"] == {"empty": 1, "too long": 0, "length ratio": 0}
    subwords = encode_pairs(data, PairOptions(280, max_length=99)).splits["test"].source.lengths - 1
    assert facts["splits"]["test"]["source_subwords"] == int(subwords.sum())


def test_filters_that_leave_nothing_are_named() -> None:
    with pytest.raises(InputError, match=r"no training pair of a test is .*sequence_length=2"):
        encode_pairs(corpus(), PairOptions(257, max_length=2))
    assert not cache_folder().exists()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("vocabulary_size", 256, "256 subwords is too small: give at least 257"),
        ("target_vocabulary_size", 0, "0 subwords is too small"),
        ("max_length", 1, "max_length=1 leaves room for no subword"),
        ("max_length_ratio", 0.5, "max_length_ratio=0.5 must be 1 or more"),
        ("max_length_ratio", float("nan"), "max_length_ratio=nan must be"),
        ("max_pairs", 0, "max_pairs=0 must be 1 or more"),
    ],
)
def test_options_are_checked(name: str, value: float, message: str) -> None:
    with pytest.raises(InputError, match=message):
        PairOptions(**{"vocabulary_size": 300, name: value})


def test_damaged_text_leaves_no_cache(tmp_path: Path) -> None:
    for name in ("train", "valid", "test"):
        for language in ("de", "en"):
            (tmp_path / f"{name}.{language}").write_text("a b\nc\n")
    (tmp_path / "test.en").write_bytes(b"a b\n\xff\n")
    with pytest.raises(InputError, match=r"test\.en, line 2: byte 0xff"):
        encode_pairs(load_pairs(str(tmp_path), "de-en", True), OPTIONS)
    assert not cache_folder().exists()


MEASURED = """
import resource, sys
from powernorm_lab.tasks.translation.data import PairOptions, encode_pairs
from powernorm_lab.tasks.translation.sources import load_pairs
from powernorm_lab.tasks.translation.batches import training_pairs
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
encoded = encode_pairs(load_pairs(sys.argv[1], "de-en", True), PairOptions(2000, max_length=999))
training_pairs(encoded.splits["train"], batch_tokens=4096, seed=0,
               batches_per_update=1).batch(0)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(len(encoded.splits["train"]), after - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    peaks = []
    for num_pairs in (50_000, 300_000):
        folder = tmp_path / str(num_pairs)
        write_synthetic(folder, num_pairs)
        output = subprocess.run(
            [sys.executable, "-c", MEASURED, str(folder)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        assert int(output[0]) == num_pairs
        peaks.append(int(output[1]) / 1024)
    # 250,000 more pairs take over 300 MiB as Python strings and lists. Their lengths and their
    # order, which are in memory, take about 40 MiB.
    assert peaks[1] - peaks[0] < 120


def write_synthetic(folder: Path, num_pairs: int) -> None:
    folder.mkdir()
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(5000)]
    for split, size in (("train", num_pairs), ("valid", 100), ("test", 100)):
        for language in ("de", "en"):
            with (folder / f"{split}.{language}").open("w") as file:
                for _ in range(size):
                    file.write(" ".join(rng.choices(words, k=rng.randint(5, 40))) + "\n")
