import math
from collections import Counter
from pathlib import Path

import pytest

from powernorm.errors import InputError
from powernorm_lab.data.corpus import SPLITS
from powernorm_lab.tasks.classify.data import (
    UNKNOWN_ID,
    EncodedTexts,
    WordVocabulary,
    encode_texts,
    words_of,
)
from powernorm_lab.tasks.classify.readers import LabeledText, LabeledTexts, reading
from powernorm_lab.tasks.classify.settings import ClassificationSettings
from powernorm_lab.tasks.classify.task import ClassificationTask


def data_set(**splits: list[tuple[str, str]]) -> LabeledTexts:
    read = {
        split: reading(
            [
                LabeledText(label, text, Path("f"), i)
                for i, (label, text) in enumerate(splits[split], start=1)
            ]
        )
        for split in SPLITS
    }
    return LabeledTexts("t", "the source", "free", read)


SMALL = data_set(
    train=[("b", "The dog saw the cat"), ("a", "the saw"), ("b", "...")],
    valid=[("a", "the bird's saw"), ("b", "")],
    test=[("b", "dog dog cat")],
)


def test_words_are_cut_as_the_penn_treebank_cuts_them() -> None:
    assert words_of("Don't cut O'Brien's 10-year-old's words, we'll see_it!") == [
        *("do", "n't", "cut", "o", "'", "brien", "'s", "10", "-", "year", "-", "old", "'s"),
        *("words", ",", "we", "'ll", "see_it", "!"),
    ]
    assert words_of(" \n ") == []


def test_frequent_words_and_the_classes_of_train_have_ids() -> None:
    encoded = encode_texts(SMALL, vocabulary_size=6, max_length=4)
    # . (3), the (3), saw (2), cat (1, first of the alphabet among its like)
    assert encoded.vocabulary.words == [".", "the", "saw", "cat"]
    assert encoded.labels == ("a", "b")
    train, valid = encoded.splits["train"], encoded.splits["valid"]
    the, saw, cat = 3, 4, 5
    assert [text.tolist() for text in train.texts()[:3]] == [
        [the, UNKNOWN_ID, saw, the],
        [the, saw],
        [2, 2, 2],
    ]
    assert train.labels.tolist() == [1, 0, 1]
    assert [text.tolist() for text in valid.texts()[:2]] == [[the, 1, 1, saw], [UNKNOWN_ID]]
    assert encoded.splits["test"].texts()[0].tolist() == [1, 1, cat]
    assert encoded.num_cut == {"train": 1, "valid": 0, "test": 0}


def test_the_fingerprint_is_that_of_the_ids() -> None:
    def fingerprint(texts: LabeledTexts, size: int = 300, length: int = 9) -> str:
        return encode_texts(texts, vocabulary_size=size, max_length=length).fingerprint

    other = data_set(
        train=[("b", "The dog saw the cat"), ("b", "the saw"), ("a", "...")],
        valid=[("a", "the bird's saw"), ("b", "")],
        test=[("b", "dog dog cat")],
    )
    assert fingerprint(SMALL) == fingerprint(SMALL)
    assert len({fingerprint(SMALL), fingerprint(other), fingerprint(SMALL, 5)}) == 3
    assert fingerprint(SMALL, length=4) != fingerprint(SMALL)


def test_a_part_of_train_is_evenly_spaced() -> None:
    rows = [("ab"[i % 2], f"w{i}") for i in range(10)]
    texts = data_set(train=rows, valid=rows, test=rows)
    encoded = encode_texts(texts, vocabulary_size=300, max_length=9, max_examples=4)
    whole = encode_texts(texts, vocabulary_size=300, max_length=9)
    train = encoded.splits["train"]
    assert [text.tolist() for text in train.texts()[:4]] == [
        whole.splits["train"].texts()[i].tolist() for i in (0, 2, 5, 7)
    ]
    assert train.labels.tolist() == [0, 0, 1, 1]
    assert len(encoded.splits["valid"]) == 10


def test_another_set_is_encoded_with_the_words_and_classes_of_the_first() -> None:
    other = data_set(train=[("b", "cat"), ("a", "new")], valid=[("a", "the")], test=[("a", "saw")])
    own = encode_texts(SMALL, vocabulary_size=300, max_length=9)
    encoded = encode_texts(other, by=SMALL, vocabulary_size=300, max_length=9)
    assert encoded.vocabulary.words == own.vocabulary.words
    assert encoded.splits["train"].texts()[1].tolist() == [UNKNOWN_ID]
    strange = data_set(train=[("b", "x"), ("c", "y")], valid=[("a", "x")], test=[("a", "x")])
    with pytest.raises(InputError, match="f, line 2: the class 'c' is not one of the train split"):
        encode_texts(strange, by=SMALL, vocabulary_size=300, max_length=9)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": []}, "train split of the source has no texts"),
        ({"train": [("a", "x"), ("a", "y")]}, "has only the class 'a'"),
        ({"valid": []}, "the valid split of the source has no texts"),
        ({"test": [("a", "x"), ("c", "y")]}, "f, line 2: the class 'c' is not one of .* a, b"),
    ],
)
def test_sets_that_cannot_be_learned_are_refused(
    splits: dict[str, list[tuple[str, str]]], message: str
) -> None:
    whole = {split: [("a", "x"), ("b", "y")] for split in SPLITS}
    with pytest.raises(InputError, match=message):
        encode_texts(data_set(**{**whole, **splits}), vocabulary_size=300, max_length=9)


def test_the_class_prior_and_naive_bayes_by_hand() -> None:
    texts = data_set(
        train=[("p", "good good film"), ("p", "good"), ("n", "bad film")],
        valid=[("p", "good film"), ("n", "good")],
        test=[("n", "bad bad unseen")],
    )
    encoded: EncodedTexts = encode_texts(texts, vocabulary_size=300, max_length=9)
    scores = ClassificationTask().baselines(encoded, ClassificationSettings())
    found = {each["name"]: each["metrics"] for each in scores}
    # Classes n, p: (1 + 1, 2 + 1) / (3 + 2).
    assert found["unigram"]["valid_loss"] == pytest.approx(-(math.log(3 / 5) + math.log(2 / 5)) / 2)
    assert found["unigram"]["valid_accuracy"] == 50.0
    assert found["unigram"]["test_accuracy"] == 0.0
    # Ids: padding, unknown, good, film, bad. Texts of n with each, + 1: 1 1 1 2 2 = 7; of p:
    # 1 1 3 2 1 = 8.
    good_film = (2 / 5 * 1 / 7 * 2 / 7, 3 / 5 * 3 / 8 * 2 / 8)
    good = (2 / 5 * 1 / 7, 3 / 5 * 3 / 8)
    expected = math.log(good_film[1] / sum(good_film)) + math.log(good[0] / sum(good))
    assert found["naive_bayes"]["valid_loss"] == pytest.approx(-expected / 2)
    assert found["naive_bayes"]["valid_accuracy"] == 50.0
    bad = (2 / 5 * 2 / 7 * 1 / 7, 3 / 5 * 1 / 8 * 1 / 8)
    assert found["naive_bayes"]["test_loss"] == pytest.approx(-math.log(bad[0] / sum(bad)))
    assert found["naive_bayes"]["test_accuracy"] == 100.0


def test_a_vocabulary_numbers_padding_and_the_unknown_word_first() -> None:
    vocabulary = WordVocabulary(Counter("aabbc"), 4)
    assert len(vocabulary) == 4
    assert vocabulary.encode("abcx") == [2, 3, UNKNOWN_ID, UNKNOWN_ID]
