from pathlib import Path

import pytest

from powernorm.errors import InputError
from powernorm_lab.data.corpus import SPLITS
from powernorm_lab.tasks.parse.sources import TREEBANKS, load_treebank

SIZES = {"petrogold": (8247, 441, 439), "turkish": (3881, 485, 485)}
NUM_WORDS = {"petrogold": 253_640, "turkish": 81_370}


def conllu(*words: str) -> str:
    lines = [f"{i}\t{word}\t_\tX\t_\t_\t_\t_\t_\t_" for i, word in enumerate(words, start=1)]
    return "\n".join([*lines, "", ""])


@pytest.mark.parametrize("name", TREEBANKS)
def test_embedded_treebanks_have_the_documented_sizes(name: str) -> None:
    bank = load_treebank(name)
    assert tuple(len(bank.sentences[split]) for split in SPLITS) == SIZES[name]
    sentences = [sentence for split in SPLITS for sentence in bank.sentences[split]]
    assert sum(len(sentence.words) for sentence in sentences) == NUM_WORDS[name]
    # Every tree is in one split, and once.
    ids = [sentence.comments["sent_id"] for sentence in sentences]
    assert len(set(ids)) == len(ids)
    assert all(word.tag != "_" for sentence in sentences for word in sentence.words)
    assert bank.license
    assert "PyPI" in bank.source


def test_no_document_of_petrogold_is_in_two_splits() -> None:
    bank = load_treebank(None)
    assert bank.name == "petrogold"
    documents = [
        {sentence.comments["sent_id"].rpartition("-")[0] for sentence in bank.sentences[split]}
        for split in SPLITS
    ]
    assert [len(part) for part in documents] == [16, 2, 1]
    assert len(set().union(*documents)) == 19


@pytest.mark.parametrize("names", ["x.{}.conllu", "x-ud-{}.conllu", "{}.conllu"])
@pytest.mark.parametrize("valid", ["dev", "valid"])
def test_official_files_are_their_splits(tmp_path: Path, names: str, valid: str) -> None:
    for split, word in (("train", "a"), (valid, "b"), ("test", "c")):
        (tmp_path / names.format(split)).write_text(conllu(word).replace("\n", "\r\n"))
    for source in (tmp_path, tmp_path / names.format("train")):
        bank = load_treebank(str(source))
        forms = [[w.form for s in bank.sentences[split] for w in s.words] for split in SPLITS]
        assert forms == [["a"], ["b"], ["c"]]


def test_one_file_is_split_by_sentence(tmp_path: Path) -> None:
    path = tmp_path / "mine.conllu"
    path.write_text("".join(conllu(str(i)) for i in range(25)))
    bank = load_treebank(str(path))
    forms = {split: [s.words[0].form for s in bank.sentences[split]] for split in SPLITS}
    assert forms["valid"] == ["8", "18"]
    assert forms["test"] == ["9", "19"]
    assert len(forms["train"]) == 21


@pytest.mark.parametrize("ending", ["conllx", "conll"])
def test_every_ending_that_is_read_is_named(tmp_path: Path, ending: str) -> None:
    named = rf"\*\.test\.conllu \(or .*\.{ending}\b"
    with pytest.raises(InputError, match=f"does not exist: give a folder with .*{named}"):
        load_treebank(str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match=f"holds no treebank: expected .*{named}"):
        load_treebank(str(tmp_path))
    for split in ("train", "dev"):
        (tmp_path / f"{split}.{ending}").write_text(conllu("a"))
    with pytest.raises(InputError, match=f"must hold one test split of .*expected .*{named}"):
        load_treebank(str(tmp_path))
    (tmp_path / f"test.{ending}").write_text(conllu("a"))
    assert len(load_treebank(str(tmp_path)).sentences["test"]) == 1


def test_what_is_no_treebank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"rt does not exist.*treebank \(petrogold, turkish\)"):
        load_treebank("rt")
    with pytest.raises(InputError, match="holds no treebank: expected"):
        load_treebank(str(tmp_path))
    (tmp_path / "a.train.conllu").write_text(conllu("a"))
    with pytest.raises(InputError, match="one valid split of a, found none"):
        load_treebank(str(tmp_path))
    (tmp_path / "a.dev.conllu").write_text(conllu("a"))
    (tmp_path / "a.valid.conllu").write_text(conllu("a"))
    with pytest.raises(InputError, match=r"found a\.dev\.conllu and a\.valid\.conllu"):
        load_treebank(str(tmp_path))
    (tmp_path / "b.test.conllu").write_text(conllu("a"))
    with pytest.raises(InputError, match=r"several treebanks \(a, b\)"):
        load_treebank(str(tmp_path))
    short = tmp_path / "short.conllu"
    short.write_text(conllu("a") * 9)
    with pytest.raises(InputError, match="9 sentences: at least 10"):
        load_treebank(str(short))
    damaged = tmp_path / "damaged.conllu"
    damaged.write_text(conllu("a") * 12 + "1\ta\n")
    with pytest.raises(InputError, match=r"damaged\.conllu, line 25 has 2 columns"):
        load_treebank(str(damaged))
    damaged.write_bytes(b"1\t\xff")
    with pytest.raises(InputError, match="line 1: byte 0xff is not UTF-8"):
        load_treebank(str(damaged))
