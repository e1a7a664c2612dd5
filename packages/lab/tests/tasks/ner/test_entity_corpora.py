from pathlib import Path

import pytest
from official_entities import BMES, CONLL_2003, ORIGINAL, SENTENCES

from powernorm.errors import InputError
from powernorm_lab.data.corpus import SPLITS
from powernorm_lab.tasks.ner import sources
from powernorm_lab.tasks.ner.sources import load_entities

pytestmark = pytest.mark.usefixtures("own_cache")


def test_the_embedded_sentences_have_the_documented_sizes() -> None:
    corpus = load_entities(None)
    assert corpus.name == "hironsan"
    assert corpus.license == "MIT"
    assert [len(corpus.sentences[split]) for split in SPLITS] == [400, 50, 50]
    sentences = [sentence for split in SPLITS for sentence in corpus.sentences[split]]
    assert sum(len(sentence.words) for sentence in sentences) == 15_520
    assert sum(len(sentence.spans) for sentence in sentences) == 1_284
    assert corpus.kinds == ["ART", "DAT", "LOC", "MON", "ORG", "PER", "PSN", "TIM"]


@pytest.mark.parametrize(
    "names",
    [
        ("eng.train", "eng.testa", "eng.testb"),
        ("train.txt", "valid.txt", "test.txt"),
        ("train.char.bmes", "dev.char.bmes", "test.char.bmes"),
        ("msra_train.txt", "msra_dev.txt", "msra_test.txt"),
        ("weiboNER_2nd_conll.train", "weiboNER_2nd_conll.dev", "weiboNER_2nd_conll.test"),
        ("train.conll", "dev.conll", "test.conll"),
    ],
)
def test_official_names_are_their_splits(tmp_path: Path, names: tuple[str, str, str]) -> None:
    # Files may have different schemes.
    for name, text in zip(names, (CONLL_2003, ORIGINAL + "\nA X Y O\n", BMES), strict=True):
        (tmp_path / name).write_text(text.replace("\n", "\r\n"))
    for source in (tmp_path, tmp_path / names[0]):
        corpus = load_entities(str(source))
        assert [len(corpus.sentences[split]) for split in SPLITS] == [2, 3, 2]
        assert list(corpus.sentences["train"]) == SENTENCES
        assert corpus.kinds == ["MISC", "ORG", "PER"]


def test_without_a_valid_split_every_tenth_sentence_is_one(tmp_path: Path) -> None:
    lines = [f"w{i} O\n\n" for i in range(25)]
    (tmp_path / "msra_train.txt").write_text("".join(lines))
    (tmp_path / "msra_test.txt").write_text("t S-LOC\n")
    corpus = load_entities(str(tmp_path))
    words = {split: [s.words[0] for s in corpus.sentences[split]] for split in SPLITS}
    assert words["valid"] == ["w9", "w19"]
    assert words["test"] == ["t"]
    assert len(words["train"]) == 23
    assert "set aside as valid" in corpus.source


def test_one_file_is_split_by_sentence(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"  # alone in its folder
    path.write_text("".join(f"w{i} O\n\n" for i in range(25)))
    corpus = load_entities(str(path))
    words = {split: [s.words[0] for s in corpus.sentences[split]] for split in SPLITS}
    assert (words["valid"], words["test"]) == (["w8", "w18"], ["w9", "w19"])


def test_what_holds_no_sentences_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere does not exist.*\(hironsan, conll2003, msra\)"):
        load_entities("nowhere")
    with pytest.raises(InputError, match=r"conll2003 is not here: run `powernorm data get"):
        load_entities("conll2003")
    with pytest.raises(InputError, match=r"holds no sentences with entities: expected eng\.train"):
        load_entities(str(tmp_path))
    (tmp_path / "a_train.txt").write_text("w O\n\n" * 10)
    with pytest.raises(InputError, match="must hold one test split of a, found none"):
        load_entities(str(tmp_path))
    (tmp_path / "a_test.txt").write_text("\n-DOCSTART- O\n")
    with pytest.raises(InputError, match=r"the test split of .* has no sentences"):
        load_entities(str(tmp_path))
    (tmp_path / "a_test.conll").write_text(BMES)
    with pytest.raises(InputError, match=r"found a_test\.conll and a_test\.txt"):
        load_entities(str(tmp_path))
    (tmp_path / "b_test.txt").write_text(BMES)
    with pytest.raises(InputError, match=r"several data sets \(a, b\)"):
        load_entities(str(tmp_path))
    alone = tmp_path / "alone" / "few.iob2"
    alone.parent.mkdir()
    alone.write_text(BMES)
    with pytest.raises(InputError, match="2 sentences: at least 10"):
        load_entities(str(alone))
    alone.write_bytes(b"a O\n\xff O\n")
    with pytest.raises(InputError, match=r"few\.iob2, line 2: byte 0xff is not UTF-8"):
        load_entities(str(alone))


def test_fetched_sets_are_read_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text(CONLL_2003)
    monkeypatch.setattr(sources, "fetched", lambda name: tmp_path / name[:0])
    corpus = load_entities("conll2003")
    assert corpus.name == "conll2003"
    assert corpus.license == "Reuters text, for research only"
    assert list(corpus.sentences["test"]) == SENTENCES
