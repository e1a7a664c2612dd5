from pathlib import Path

import pytest
import torch

from powernorm.errors import InputError
from powernorm_lab.data.batch import IGNORED, Batch
from powernorm_lab.tasks.ner.data import (
    NUM_MARKS,
    PADDING_ID,
    UNKNOWN_ID,
    EncodedEntities,
    TaggedRows,
    bigrams_of,
    encode_entities,
    thinned,
)
from powernorm_lab.tasks.ner.sources import EntityCorpus, TaggedSentence
from powernorm_lab.tasks.ner.tag_schemes import Span


def sentence(text: str, *spans: tuple[str, int, int]) -> TaggedSentence:
    return TaggedSentence(tuple(text.split()), tuple(Span(*span) for span in spans))


def corpus(*train: TaggedSentence, test: TaggedSentence | None = None) -> EntityCorpus:
    other = test or sentence("the EU")
    return EntityCorpus("toy", "toy", "none", {"train": train, "valid": (other,), "test": (other,)})


TOY = corpus(
    sentence("The EU and the EU", ("ORG", 1, 2), ("ORG", 4, 5)),
    sentence("the the and Peter Paul Blackburn", ("PER", 3, 6)),
    sentence("a"),
    sentence("and a b"),
)


def encode(toy: EntityCorpus = TOY, *, max_length: int = 8, **changes: object) -> EncodedEntities:
    settings = {"vocabulary_size": 100, "max_length": max_length, **changes}
    return encode_entities(toy, **settings)  # type: ignore[arg-type]


def test_words_are_numbered_by_frequency_in_lower_case() -> None:
    encoded = encode()
    # Words that occur once are unknown.
    assert tuple(encoded.words) == ("the", "and", "a", "eu")
    ids = {word: index for index, word in enumerate(encoded.words, start=NUM_MARKS)}
    train = encoded.splits["train"]
    first = ["the", "eu", "and", "the", "eu"]
    assert train.words[:5].tolist() == [ids[word] for word in first]
    assert train.words[8:11].tolist() == [UNKNOWN_ID] * 3
    assert tuple(encode(vocabulary_size=NUM_MARKS + 2).words) == ("the", "and")
    assert encoded.tags[:5] == ["O", "B-ORG", "I-ORG", "E-ORG", "S-ORG"]
    assert [encoded.tags[tag] for tag in train.tags[5:11].tolist()] == [
        *("O", "O", "O", "B-PER", "I-PER", "E-PER")
    ]


def test_characters_keep_their_case() -> None:
    encoded = encode()
    ids = {item: index for index, item in enumerate(encoded.characters, start=NUM_MARKS)}
    rows = encoded.splits["train"].characters
    assert rows.shape == (15, len("Blackburn"))
    assert rows[0].tolist() == [UNKNOWN_ID, ids["h"], ids["e"], *[PADDING_ID] * 6]
    assert rows[1].tolist() == [ids["E"], ids["U"], *[PADDING_ID] * 7]
    assert rows[3, 0] == ids["t"]


def test_long_sentences_make_several_rows_and_cut_entities() -> None:
    encoded = encode(max_length=4)
    train = encoded.splits["train"]
    assert train.lengths.tolist() == [4, 1, 4, 2, 1, 3]
    assert train.rows_per_sentence.tolist() == [2, 2, 1, 1]
    names = [encoded.tags[tag] for tag in train.tags.tolist()]
    assert names[8:11] == ["S-PER", "B-PER", "E-PER"]


def test_words_with_a_vector_are_known(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text("peter 0 3\nthe 2 0\nelsewhere 1 1\nunseen 0 1\n")
    toy = corpus(*TOY.sentences["train"], test=sentence("Unseen EU"))
    encoded = encode(toy, vectors=path)
    assert tuple(encoded.words) == ("the", "and", "a", "eu", "peter", "unseen")
    words = list(encoded.words)
    found = {words[index - NUM_MARKS]: v.tolist() for index, v in encoded.vectors.items()}
    assert found == {"the": [1, 0], "peter": [0, 1], "unseen": [0, 1]}
    assert encoded.fingerprint != encode(toy).fingerprint
    # Vectors of words that are not in the data change nothing.
    path.write_text("new 5 5\n" + path.read_text())
    assert encode(toy, vectors=path).fingerprint == encoded.fingerprint


def test_another_text_is_encoded_by_the_first() -> None:
    own = encode()
    other = corpus(sentence("x the x", ("PER", 0, 1)))
    encoded = encode(other, by=TOY)
    assert encoded.words == own.words
    assert encoded.splits["train"].words.tolist() == [UNKNOWN_ID, NUM_MARKS, UNKNOWN_ID]
    with pytest.raises(InputError, match=r"entities of the kind 'LOC', .* one of ORG, PER$"):
        encode(corpus(sentence("x", ("LOC", 0, 1))), by=TOY)
    with pytest.raises(InputError, match="toy has no entities: every tag is O"):
        encode(corpus(sentence("x")))


def test_fewer_examples_are_evenly_spaced() -> None:
    many = corpus(*[sentence(f"w{i}") for i in range(10)])
    kept = thinned(many, 5).sentences["train"]
    assert [item.words[0] for item in kept] == ["w0", "w2", "w4", "w6", "w8"]
    assert thinned(many, None) is thinned(many, 10) is many
    assert thinned(many, 5).sentences["test"] == many.sentences["test"]


def test_batches_hold_their_rows_and_nothing_else() -> None:
    encoded = encode()
    rows = TaggedRows(encoded.splits["train"], has_characters=True)
    batch = rows.batch(torch.tensor([1, 2]))
    assert batch.named["tokens"].shape == batch.targets.shape == (2, 6)
    assert batch.named["padding_mask"].tolist() == [[False] * 6, [False] + [True] * 5]
    assert (batch.num_tokens, batch.num_targets, batch.loss_targets) == (7, 7, 2.0)
    assert batch.logged_targets == 7
    assert batch.named["tokens"][1].tolist() == [NUM_MARKS + 2, *[PADDING_ID] * 5]
    assert batch.targets[1].tolist() == [0, *[IGNORED] * 5]
    assert batch.named["characters"].shape == (2, 6, len("Blackburn"))
    # No wider than the batch's longest word.
    assert rows.batch(torch.tensor([2, 3])).named["characters"].shape == (2, 3, len("and"))
    assert set(batch.inputs()) == {"tokens", "padding_mask", "characters"}
    plain = TaggedRows(encoded.splits["train"], has_characters=False).batch(torch.tensor([0]))
    assert set(plain.inputs()) == {"tokens", "padding_mask"}


def check_equal(ours: Batch, theirs: Batch) -> None:
    assert ours.named.keys() == theirs.named.keys()
    assert all(torch.equal(value, theirs.named[name]) for name, value in ours.named.items())
    assert torch.equal(ours.targets, theirs.targets)
    assert ours[2:] == theirs[2:]


def test_batches_of_other_lengths_are_joined() -> None:
    rows = TaggedRows(encode().splits["train"], has_characters=True)
    first, second = rows.batch(torch.tensor([2])), rows.batch(torch.tensor([0, 1]))
    check_equal(first.joined_with([second]), rows.batch(torch.tensor([2, 0, 1])))


RESUME = corpus(
    sentence("张 三 丰 , 张 三 A", ("NAME", 0, 3)),
    sentence("三 丰 a B"),
    test=sentence("丰 张 三"),
)


def test_bigrams_are_a_character_and_the_next_one_of_its_sentence(tmp_path: Path) -> None:
    file = tmp_path / "bi.vec"
    file.write_text("2 2\n丰张 0 2\nxy 1 1\n三A 3 0\n")
    encoded = encode(RESUME, has_bigrams=True, bigram_vectors=file, max_length=4)
    first = RESUME.sentences["train"][0]
    assert bigrams_of(first) == ["张三", "三丰", "丰,", ",张", "张三", "三a", "a<eos>"]
    # Bigrams that occur twice in training, then those with a vector in any split.
    assert tuple(encoded.bigrams or ()) == ("三丰", "张三", "三a", "丰张")
    one, two, three, four = range(NUM_MARKS, NUM_MARKS + 4)
    train = encoded.splits["train"].bigrams.tolist()
    assert train == [two, one, *[UNKNOWN_ID] * 2, two, three, UNKNOWN_ID, one, *[UNKNOWN_ID] * 3]
    assert encoded.splits["test"].bigrams.tolist() == [four, two, UNKNOWN_ID]
    vectors = {index: vector.tolist() for index, vector in encoded.bigram_vectors.items()}
    assert vectors == {three: [1, 0], four: [0, 1]}
    rows = TaggedRows(encoded.splits["train"], has_characters=False, has_bigrams=True)
    batch = rows.batch(torch.tensor([0, 1]))  # The last bigram has the word after the cut.
    assert batch.named["bigrams"].tolist() == [
        [two, one, UNKNOWN_ID, UNKNOWN_ID],
        [two, three, UNKNOWN_ID, PADDING_ID],
    ]


def test_bigrams_tell_data_apart_and_their_absence_does_not() -> None:
    plain, asked = encode(RESUME), encode(RESUME, has_bigrams=True)
    assert plain.bigrams is None
    assert plain.num_bigrams == plain.splits["train"].bigrams.numel() == 0
    assert plain.fingerprint != asked.fingerprint
    rare = encode(corpus(sentence("张 三", ("NAME", 0, 2))), has_bigrams=True)
    assert (rare.bigrams, rare.num_bigrams) == ({}, NUM_MARKS)


def test_bigrams_of_words_are_refused() -> None:
    with pytest.raises(InputError, match=r"words such as 'The', .* set model.bigram_features=none"):
        encode(has_bigrams=True)
