from collections.abc import Mapping

import pytest

from powernorm.errors import InputError
from powernorm_lab.data.corpus import Split
from powernorm_lab.tasks.translation.readers import ParallelCorpus, TextPair, corpus_in_memory


def corpus(
    train: list[TextPair], *, languages: tuple[str, str] = ("de", "en"), tokenized: bool = False
) -> ParallelCorpus:
    pairs: Mapping[Split, list[TextPair]] = {
        "train": train,
        "valid": [("v", "w")],
        "test": [("t", "u")],
    }
    return corpus_in_memory(
        "test",
        pairs,
        languages=languages,
        source="the source",
        license="none",
        tokenized=tokenized,
    )


def test_pairs_with_an_empty_side_are_left_out_and_counted() -> None:
    data = corpus([("a", "b"), ("", "c"), ("d", " \t\u2028"), ("e", "f"), ("", "")])
    for _ in range(2):  # it can be gone through again
        assert list(data.pairs("train")) == [("a", "b"), ("e", "f")]
        assert data.num_dropped == {"train": {"empty": 3}}
    list(data.pairs("test"))
    assert data.num_dropped["test"] == {"empty": 0}


def test_split_without_pairs_is_named() -> None:
    with pytest.raises(InputError, match="train split of the source has no sentence pairs"):
        list(corpus([("", "a"), ("b", " ")]).pairs("train"))


def test_fingerprint_tells_texts_directions_and_tokenization_apart() -> None:
    pairs = [("a b", "c")]
    hashes = {
        corpus(pairs).fingerprint(),
        corpus(pairs, languages=("en", "de")).fingerprint(),
        corpus(pairs, tokenized=True).fingerprint(),
        corpus([("a", "b c")]).fingerprint(),
        corpus([("a b", "c"), ("", "")]).fingerprint(),
        corpus([("a b", "c"), ("d", "e")]).fingerprint(),
        corpus([("a ", "bc")]).fingerprint(),
        corpus([("c", "a b")]).fingerprint(),
    }
    assert len(hashes) == 8
    assert corpus(pairs).fingerprint() == corpus(pairs).fingerprint()
    assert corpus(pairs).languages == "de-en"
