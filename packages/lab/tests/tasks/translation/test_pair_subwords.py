import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powernorm.errors import InputError
from powernorm_lab.data.subwords import END_ID, Subwords

TEXTS = ["the war and the peace", "naïve 日本 n't (Applause.) <unk> <eos>"] * 5
TRAINED = {
    tokenized: Subwords.train(TEXTS, 320, tokenized=tokenized) for tokenized in (False, True)
}


@settings(max_examples=200)
@given(st.lists(st.text(max_size=30), max_size=4), st.booleans())
def test_any_text_comes_back_with_single_spaces(texts: list[str], tokenized: bool) -> None:
    subwords = TRAINED[tokenized]
    ids = subwords.encode(texts)
    assert subwords.decode(ids) == [" ".join(text.split()) for text in texts]
    assert all(END_ID < token < subwords.size for row in ids for token in row)


@pytest.mark.parametrize("text", ["<eos>", "a <eos> b", "<eos><eos>"])
@pytest.mark.parametrize("copied", [False, True])
def test_a_written_end_mark_is_letters(text: str, copied: bool) -> None:
    subwords = Subwords.from_json(TRAINED[False].to_json()) if copied else TRAINED[False]
    (ids,) = subwords.encode([text])
    assert END_ID not in ids
    assert subwords.decode([ids]) == [text]


def test_end_marks_and_broken_characters_decode() -> None:
    subwords = TRAINED[False]
    (ids,) = subwords.encode(["war"])
    assert subwords.decode([[END_ID, *ids, END_ID], []]) == ["war", ""]
    (broken,) = subwords.encode(["é"])
    assert subwords.decode([broken[:-1]]) == ["\ufffd"]


def test_only_spaces_part_the_words_of_tokenized_text() -> None:
    tokens = TRAINED[True].encode(["n't (Applause.)"])[0]
    pieces = TRAINED[False].encode(["n't (Applause.)"])[0]
    assert len(tokens) == 2 < len(pieces)


def test_json_makes_the_same_subwords() -> None:
    for subwords in TRAINED.values():
        again = Subwords.from_json(subwords.to_json())
        assert again.size == subwords.size <= 320
        assert again.encode(TEXTS) == subwords.encode(TEXTS)
        assert again.to_json() == subwords.to_json()
    with pytest.raises(InputError, match="subwords cannot be read"):
        Subwords.from_json("{}")


def test_a_long_word_is_encoded() -> None:
    (ids,) = TRAINED[True].encode(["x" * 100_000])
    assert len(ids) == 100_001  # with the space before it
