from powernorm_lab.data.corpus import Corpus, split_by_position


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
