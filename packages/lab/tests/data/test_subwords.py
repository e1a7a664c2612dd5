import random
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from powernorm.errors import InputError
from powernorm_lab.data import subwords
from powernorm_lab.data.cache import cache_folder
from powernorm_lab.data.corpus import SPLITS, Corpus
from powernorm_lab.data.subwords import (
    END_ID,
    UNKNOWN_ID,
    Subwords,
    Words,
    encode_corpus,
)


def corpus(*, line_ends_count: bool = False, train: tuple[str, ...] | None = None) -> Corpus:
    rng = random.Random(0)
    words = ["war", "peace", "naïve", "<eos>", "<unk>", "(Applause.)", "n't", "1790", "日本"]
    documents = train or tuple(" ".join(rng.choices(words, k=30)) for _ in range(20))
    splits = {"train": documents, "valid": ("peace  war\n n't",), "test": ("unseen ~ words 🙂",)}
    return Corpus("test", "a test", "none", splits, line_ends_count)


def tokenizer() -> Tokenizer:
    (path,) = cache_folder().glob("*.tokens.safetensors")
    with safe_open(path, "pt") as file:
        return Tokenizer.from_str(file.metadata()["subwords"])


@pytest.mark.parametrize("line_ends_count", [False, True])
def test_streams_spell_the_words_and_end_every_document(line_ends_count: bool) -> None:
    text = corpus(line_ends_count=line_ends_count)
    encoded = encode_corpus(text, 280)
    decode = tokenizer()
    for split in SPLITS:
        tokens = encoded.splits[split].tokens
        assert tokens[-1] == END_ID
        assert int((tokens == END_ID).sum()) == len(text.documents[split])
        pieces = "".join(
            " <end>" if i == END_ID else decode.id_to_token(i) for i in tokens.tolist()
        )
        written = bytes_of(pieces.replace(" <end>", "")).decode()
        assert written.split() == " ".join(text.documents[split]).split()


def bytes_of(pieces: str) -> bytes:
    """Undo the byte alphabet of GPT-2."""
    from tokenizers.decoders import ByteLevel

    return str(ByteLevel().decode([pieces])).encode()


def test_official_words_are_not_cut_at_punctuation() -> None:
    encode_corpus(corpus(line_ends_count=True), 400)
    assert {"Ġ<unk>", "Ġn't", "Ġ(Applause.)"} <= set(tokenizer().get_vocab())


def test_second_start_finds_the_cache() -> None:
    first = encode_corpus(corpus(), 280)
    with patch.object(subwords, "_train", side_effect=AssertionError("trained again")):
        second = encode_corpus(corpus(), 280)
    assert second.vocabulary_size == first.vocabulary_size == 280
    assert second.fingerprint == first.fingerprint
    for split in SPLITS:
        assert torch.equal(first.splits[split].tokens, second.splits[split].tokens)
        assert first.splits[split].tokens.dtype == torch.int32


def test_portions_change_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = encode_corpus(corpus(), 280)
    monkeypatch.setattr(subwords, "PORTION", 3)
    monkeypatch.setenv("POWERNORM_CACHE", str(tmp_path / "other"))
    parts = encode_corpus(corpus(), 280)
    assert torch.equal(whole.splits["train"].tokens, parts.splits["train"].tokens)


def test_cache_tells_settings_and_texts_apart() -> None:
    keys = {
        encode_corpus(corpus(), 280).fingerprint,
        encode_corpus(corpus(), 281).fingerprint,
        encode_corpus(corpus(line_ends_count=True), 280).fingerprint,
        encode_corpus(corpus(train=("war and peace",)), 280).fingerprint,
    }
    assert len(keys) == 4


def test_cache_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POWERNORM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "powernorm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "powernorm"


def test_subwords_are_trained_on_the_train_split_only() -> None:
    encode_corpus(corpus(train=("war war peace",) * 5), 400)
    vocabulary = set(tokenizer().get_vocab())
    assert "Ġwar" in vocabulary
    assert not any("words" in token for token in vocabulary)


def test_split_without_words_is_named() -> None:
    empty = Corpus("t", "the source", "none", {"train": ("a",), "valid": (), "test": ("b",)}, False)
    with pytest.raises(InputError, match="valid split of the source has no words"):
        encode_corpus(empty, 280)


def test_words_are_numbered_by_frequency_and_others_are_unknown() -> None:
    train = ("b a <unk> b <eos> c", "b a d")
    text = corpus(line_ends_count=True, train=train)
    encoded = encode_corpus(text, 5, Words)
    # <eos>, <unk>, b, a, and alphabetically the first of the words that occur once.
    assert encoded.vocabulary_size == 5
    assert encoded.splits["train"].tokens.tolist() == [2, 3, 1, 2, 1, 4, 0, 2, 3, 1, 0]
    assert encoded.splits["test"].tokens.tolist() == [1, 1, 1, 1, 0]
    assert encoded.unknown_id == UNKNOWN_ID
    assert encode_corpus(text, 99, Words).vocabulary_size == 6
    again = encode_corpus(text, 5, Words)
    assert again.splits["train"].tokens.tolist() == encoded.splits["train"].tokens.tolist()
    assert again.fingerprint == encoded.fingerprint
    assert encode_corpus(text, 257).fingerprint != encode_corpus(text, 257, Words).fingerprint
    other = encode_corpus(corpus(train=("d b",)), 5, Words, by=text)
    assert other.splits["train"].tokens.tolist() == [1, 2, 0]


def test_every_token_over_words_counts_as_a_word_in_official_files() -> None:
    """The perplexity is then exp of the loss, as in the papers."""
    text = corpus(line_ends_count=True)
    for split in encode_corpus(text, 99, Words).splits.values():
        assert split.num_tokens == split.num_words


# Subwords that are decoded, too

TEXTS = ["the war and the peace", "naïve 日本 n't (Applause.) <unk> <eos>"] * 5
TRAINED = {
    tokenized: Subwords.train(TEXTS, 320, tokenized=tokenized) for tokenized in (False, True)
}


@settings(max_examples=200)
@given(st.lists(st.text(max_size=30), max_size=4), st.booleans())
def test_any_text_comes_back_with_single_spaces(texts: list[str], tokenized: bool) -> None:
    trained = TRAINED[tokenized]
    ids = trained.encode(texts)
    assert trained.decode(ids) == [" ".join(text.split()) for text in texts]
    assert all(END_ID < token < trained.size for row in ids for token in row)


@pytest.mark.parametrize("text", ["<eos>", "a <eos> b", "<eos><eos>"])
@pytest.mark.parametrize("copied", [False, True])
def test_a_written_end_mark_is_letters(text: str, copied: bool) -> None:
    trained = Subwords.from_json(TRAINED[False].to_json()) if copied else TRAINED[False]
    (ids,) = trained.encode([text])
    assert END_ID not in ids
    assert trained.decode([ids]) == [text]


def test_end_marks_and_broken_characters_decode() -> None:
    trained = TRAINED[False]
    (ids,) = trained.encode(["war"])
    assert trained.decode([[END_ID, *ids, END_ID], []]) == ["war", ""]
    (broken,) = trained.encode(["é"])
    assert trained.decode([broken[:-1]]) == ["\ufffd"]


def test_only_spaces_part_the_words_of_tokenized_text() -> None:
    tokens = TRAINED[True].encode(["n't (Applause.)"])[0]
    pieces = TRAINED[False].encode(["n't (Applause.)"])[0]
    assert len(tokens) == 2 < len(pieces)


def test_json_makes_the_same_subwords() -> None:
    for trained in TRAINED.values():
        again = Subwords.from_json(trained.to_json())
        assert again.size == trained.size <= 320
        assert again.encode(TEXTS) == trained.encode(TEXTS)
        assert again.to_json() == trained.to_json()
    with pytest.raises(InputError, match="subwords cannot be read"):
        Subwords.from_json("{}")


def test_a_long_word_is_encoded() -> None:
    (ids,) = TRAINED[True].encode(["x" * 100_000])
    assert len(ids) == 100_001  # with the space before it
