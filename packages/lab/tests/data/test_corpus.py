from powernorm_lab.data.corpus import SPLITS, Corpus, split_by_position
from powernorm_lab.data.embedded import embedded_corpus


def test_embedded_corpus_has_the_documented_split() -> None:
    corpus = embedded_corpus()
    assert {split: len(corpus.documents[split]) for split in SPLITS} == {
        "train": 210,
        "valid": 12,
        "test": 11,
    }
    assert sum(corpus.num_words(split) for split in SPLITS) == 1_794_884
    # The 10th and the 20th document of the file: 1799, John Adams and 1809, James Madison.
    assert "HOUSE OF REPRESENTATIVES" in corpus.documents["valid"][0].upper()
    assert corpus.num_words("valid") == 89_266
    assert corpus.num_words("test") == 86_056
    assert corpus.license


def test_split_by_position_keeps_order_and_loses_nothing() -> None:
    parts = split_by_position(range(61))
    assert parts["valid"] == (9, 29, 49)
    assert parts["test"] == (19, 39, 59)
    assert sorted(parts["train"] + parts["valid"] + parts["test"]) == list(range(61))


def test_a_line_end_counts_where_the_corpus_says_so() -> None:
    documents = {"train": ("a b", "", "c"), "valid": ("d",), "test": ("e",)}
    official = Corpus("t", "t", "t", documents, True)
    plain = Corpus("t", "t", "t", documents, False)
    assert official.num_words("train") == 6
    assert plain.num_words("train") == 3


def test_fingerprint_sees_text_borders_and_convention() -> None:
    def corpus(train: tuple[str, ...], *, ends: bool = False) -> str:
        documents = {"train": train, "valid": ("d",), "test": ("e",)}
        return Corpus("t", "t", "t", documents, ends).fingerprint()

    assert corpus(("a b",)) == corpus(("a b",))
    others = [corpus(("a", "b")), corpus(("a c",)), corpus(("a b",), ends=True)]
    assert len({corpus(("a b",)), *others}) == 4
