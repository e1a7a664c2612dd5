import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from powernorm.errors import InputError
from powernorm.lab.data.batch import IGNORED, Batch
from powernorm.lab.data.conllu import Sentence, Word
from powernorm.lab.data.corpus import Split
from powernorm.lab.data.subwords import END_ID
from powernorm.lab.data.treebanks import Treebank
from powernorm.lab.tasks.tag.batches import TaggedSentences
from powernorm.lab.tasks.tag.tagged_words import (
    UNKNOWN_ID,
    EncodedTags,
    encode_treebank,
    encode_treebank_by,
)
from powernorm.lab.tasks.tag.task import tag_metrics


def sentence(text: str) -> Sentence:
    """Words with their tags: `the/DET dog/NOUN`."""
    pairs = [part.split("/") for part in text.split()]
    return Sentence(tuple(Word(form, "_", tag, None, "_") for form, tag in pairs), {})


def treebank(train: list[str], valid: list[str], test: list[str]) -> Treebank:
    parts: dict[Split, list[str]] = {"train": train, "valid": valid, "test": test}
    sentences = {split: tuple(map(sentence, part)) for split, part in parts.items()}
    return Treebank("t", "the source", "free", sentences)


SMALL = treebank(
    ["The/D dog/N saw/V the/D cat/N", "the/D Saw/N rusts/V", "dogs/N run/V"],
    ["The/D bird/N saw/V", "hm/I"],
    ["a/D dog/N"],
)


def words_and_tags(batch: Batch) -> list[tuple[list[int], list[int]]]:
    rows = zip(batch.named["tokens"], batch.targets, ~batch.named["padding_mask"], strict=True)
    return [(words[kept].tolist(), tags[kept].tolist()) for words, tags, kept in rows]


def test_frequent_words_of_the_train_split_have_ids_and_tags_come_after_them() -> None:
    encoded = encode_treebank(SMALL, 5)
    # the (3), saw (2), cat (1, first of the alphabet among its like)
    the, saw, cat, unknown = 2, 3, 4, UNKNOWN_ID
    det, interjection, noun, verb = 5, 6, 7, 8
    assert encoded.tag_names == ("D", "I", "N", "V")
    assert (encoded.num_word_ids, encoded.vocabulary_size) == (5, 9)
    assert encoded.splits["train"].tokens.tolist() == [
        *(the, unknown, saw, the, cat, END_ID),
        *(the, saw, unknown, END_ID),
        *(unknown, unknown, END_ID),
    ]
    assert encoded.tags["train"].tolist() == [
        *(det, noun, verb, det, noun, IGNORED),
        *(det, noun, verb, IGNORED),
        *(noun, verb, IGNORED),
    ]
    # Words that only other splits have are unknown, however large the vocabulary may be.
    large = encode_treebank(SMALL, 100)
    assert large.splits["valid"].tokens.tolist()[1] == UNKNOWN_ID
    assert large.num_word_ids == 2 + 7
    assert encoded.tags["valid"].tolist() == [det, noun, verb, IGNORED, interjection, IGNORED]
    assert encoded.splits["valid"].num_words == encoded.corpus.num_words("valid") == 4


def test_fingerprints_tell_everything_apart_that_matters() -> None:
    retagged = replace(SMALL, sentences={**SMALL.sentences, "test": (sentence("a/D dog/V"),)})
    resized = encode_treebank(SMALL, 6)
    prints = {e.fingerprint for e in (encode_treebank(SMALL, 5), encode_treebank(retagged, 5))}
    assert len(prints | {resized.fingerprint}) == 3
    assert encode_treebank(SMALL, 5).fingerprint in prints


def test_another_treebank_keeps_the_ids() -> None:
    other = treebank(["cat/N the/D zebra/N"], ["saw/V"], ["the/D"])
    encoded = encode_treebank_by(other, SMALL, 5)
    assert encoded.splits["train"].tokens.tolist() == [4, 2, UNKNOWN_ID, END_ID]
    assert encoded.tags["train"].tolist() == [7, 5, 7, IGNORED]
    assert encoded.vocabulary_size == 9
    strange = replace(other, sentences={**other.sentences, "test": (sentence("x/Q"),)})
    with pytest.raises(InputError, match=r"the tag 'Q', which the model does not know: .* D, I, N"):
        encode_treebank_by(strange, SMALL, 5)


def test_missing_tags_and_empty_splits_are_refused() -> None:
    untagged = replace(SMALL, sentences={**SMALL.sentences, "test": (sentence("a/D b/_"),)})
    with pytest.raises(InputError, match="sentence 1 of the test split: 'b' has no tag"):
        encode_treebank(untagged, 5)
    empty = replace(SMALL, sentences={**SMALL.sentences, "valid": ()})
    with pytest.raises(InputError, match="valid split of the source has no sentences"):
        encode_treebank(empty, 5)


def test_baselines_against_counting() -> None:
    encoded = encode_treebank(SMALL, 5)
    pairs = [
        (word if word in ("the", "saw", "cat") else "?", tag)
        for item in SMALL.sentences["train"]
        for word, tag in ((w.form.lower(), w.tag) for w in item.words)
    ]
    counts, tags = Counter(pairs), Counter(tag for _, tag in pairs)
    words = Counter(word for word, _ in pairs)

    def unigram(tag: str) -> float:
        return (tags[tag] + 1) / (len(pairs) + 4)

    asked = [("the", "D"), ("?", "N"), ("saw", "V"), ("?", "I")]
    expected = -sum(math.log(unigram(tag)) for _, tag in asked) / 4
    given_word = [(counts[w, t] + unigram(t)) / (words[w] + 1) for w, t in asked]
    found = tag_metrics(encoded)
    assert found["unigram"]["valid_loss"] == pytest.approx(expected)
    assert found["unigram"]["valid_perplexity"] == pytest.approx(math.exp(expected))
    assert found["word"]["valid_loss"] == pytest.approx(-sum(map(math.log, given_word)) / 4)


def numbered(lengths: list[int]) -> EncodedTags:
    """Sentences of these lengths, in which every word is another and its tag says which."""
    total = iter(range(sum(lengths)))
    texts = [
        " ".join(f"w{i:05}/t{i:05}" for _, i in zip(range(n), total, strict=False)) for n in lengths
    ]
    return encode_treebank(treebank(texts, texts[:1], texts[:1]), sum(lengths) + 2)


def tagged(encoded: EncodedTags, length: int) -> TaggedSentences:
    return TaggedSentences(encoded.splits["train"].tokens, encoded.tags["train"], length=length)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 4))
def test_evaluation_asks_for_every_word_once_with_its_own_tag(
    lengths: list[int], length: int, batch_size: int
) -> None:
    encoded = numbered(lengths)
    data = tagged(encoded, length).evaluation(batch_size=batch_size)
    batches = list(data)
    assert len(batches) == len(data)
    rows = [row for batch in batches for row in words_and_tags(batch)]
    words = [word for row, _ in rows for word in row]
    assert words == list(range(2, 2 + sum(lengths)))
    assert [tag for _, row in rows for tag in row] == [w + sum(lengths) for w in words]
    assert all(1 <= len(row) <= length for row, _ in rows)
    for batch in batches:
        assert torch.equal(batch.targets == IGNORED, batch.named["padding_mask"])
        assert bool((batch.named["tokens"][batch.named["padding_mask"]] == END_ID).all())
        assert batch.num_tokens == batch.num_targets == int((~batch.named["padding_mask"]).sum())


def test_training_order_depends_on_seed_and_position_alone() -> None:
    encoded = numbered([5, 3, 8, 2, 6, 9, 4, 7])

    def rows(seed: int, position: int) -> list[tuple[list[int], list[int]]]:
        data = tagged(encoded, 9).training(
            batch_size=4,
            seed=seed,
        )
        assert data.batches_per_epoch == 2
        assert data.tokens_per_batch == 4 * 44 / 8
        return words_and_tags(data.batch(position))

    assert rows(0, 5) == rows(0, 5)
    assert rows(0, 5) != rows(1, 5)
    for epoch in (0, 3):
        words = [w for i in (0, 1) for row, _ in rows(0, 2 * epoch + i) for w in row]
        assert sorted(words) == list(range(2, 46))
    with pytest.raises(InputError, match="8 documents, fewer than a batch of 9"):
        tagged(encoded, 9).training(batch_size=9, seed=0)


def test_a_part_of_the_evaluation_is_evenly_spaced() -> None:
    encoded = numbered([4] * 100)
    data = tagged(encoded, 4).evaluation(
        batch_size=8,
        max_tokens=40,
    )
    firsts = [row[0] for batch in data for row, _ in words_and_tags(batch)]
    assert firsts == [2 + 40 * i for i in range(10)]
