import pytest

from powernorm.errors import InputError
from powernorm_lab.data.corpus import SPLITS
from powernorm_lab.data.embedded import EMBEDDED, embedded_corpus
from powernorm_lab.data.readers import load_corpus

NUM_DOCUMENTS = {
    "sotu": (210, 12, 11),
    "sotu-sentences": (57300, 3209, 3050),
    "verses-en": (28045, 1484, 1573),
    "verses-de": (28045, 1484, 1573),
    "rt": (7677, 427, 426),
}


@pytest.mark.parametrize("name", EMBEDDED)
def test_splits_have_the_documented_sizes_and_share_no_document(name: str) -> None:
    corpus = embedded_corpus(name)
    assert tuple(len(corpus.documents[split]) for split in SPLITS) == NUM_DOCUMENTS[name]
    assert all(document.strip() for split in SPLITS for document in corpus.documents[split])
    assert corpus.license
    assert corpus.source


def test_the_default_is_the_addresses_in_their_order() -> None:
    corpus = embedded_corpus()
    assert [corpus.num_words(split) for split in SPLITS] == [1_619_562, 89_266, 86_056]
    # The 10th document of the file: 1799, John Adams.
    assert "HOUSE OF REPRESENTATIVES" in corpus.documents["valid"][0].upper()


def test_sentences_are_the_words_of_the_addresses_in_the_same_splits() -> None:
    whole, parts = embedded_corpus("sotu"), embedded_corpus("sotu-sentences")
    for split in SPLITS:
        words = [word for text in whole.documents[split] for word in text.split()]
        assert [word for text in parts.documents[split] for word in text.split()] == words


def test_verses_are_parallel_and_clean() -> None:
    english, german = embedded_corpus("verses-en"), embedded_corpus("verses-de")
    assert english.documents["train"][0].startswith("In the beginning God")
    assert german.documents["train"][0].startswith("Im Anfang schuf Gott")
    assert not any("`" in verse for split in SPLITS for verse in english.documents[split])
    assert not any(verse.endswith(" -") for split in SPLITS for verse in german.documents[split])


def test_reviews_are_not_sorted_by_label() -> None:
    # The first sentence of the file is about "conan" and the 21st century.
    train = embedded_corpus("rt").documents["train"]
    place = next(i for i, text in enumerate(train) if "21st century's new" in text)
    assert place > 0
    assert train == embedded_corpus("rt").documents["train"]


def test_a_name_is_a_corpus_and_a_path_is_a_file() -> None:
    assert load_corpus("rt").name == "rt"
    assert load_corpus(None).name == "lm_sotu"
    with pytest.raises(InputError, match=r"does not exist.*or the name of an embedded corpus"):
        load_corpus("./rt-that-is-not-there")
    with pytest.raises(InputError, match="no embedded corpus 'ptb': choose one of sotu, "):
        embedded_corpus("ptb")
