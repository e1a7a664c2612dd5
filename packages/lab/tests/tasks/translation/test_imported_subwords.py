"""Existing subwords: folders of fairseq's scripts, codes, models of SentencePiece."""

import io
import json
import re
import sys
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
from lab.tests.training.tiny_training import compare
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

from powernorm.errors import InputError
from powernorm.integrations.extras import install_command
from powernorm_lab.data.corpus import SPLITS
from powernorm_lab.recipes import recipe
from powernorm_lab.settings.overrides import override
from powernorm_lab.tasks.registry import task_of
from powernorm_lab.tasks.translation.data import EncodedPairs, PairOptions, encode_pairs
from powernorm_lab.tasks.translation.sources import load_pairs
from powernorm_lab.tasks.translation.translator import load_translator
from powernorm_lab.tasks.translation.vocabulary import (
    Codes,
    Pieces,
    SentencePieces,
    joined,
    read_subwords,
    text_encoder,
)

pytestmark = pytest.mark.usefixtures("own_cache")

SIDES = ("de", "en")
SIZES = {"train": 240, "valid": 20, "test": 20}
OLD_CODES = "e </w>\nn </w>\ne n</w>\nd e\nde r\nder </w>\nu n\nun d\nund </w>\n"
"""A file without a version, in which the end of a word is a separate symbol."""


@cache
def verses() -> dict[tuple[str, str], list[str]]:
    corpus = load_pairs(None, None, False)
    found = {}
    for split, size in SIZES.items():
        pairs = list(corpus.pairs(split))[:size]
        for place, side in enumerate(SIDES):
            found[split, side] = [" ".join(pair[place].split()) for pair in pairs]
    return found


@cache
def codes() -> str:
    text = chain(verses()["train", "de"], verses()["train", "en"])
    out = io.StringIO()
    learn_bpe(io.StringIO("\n".join(text)), out, 200)
    return out.getvalue()


def fairseq_folder(folder: Path, *, with_codes: bool = True) -> Path:
    """Write the files of prepare-iwslt14.sh: the splits, cut by the codes, and the codes."""
    own = BPE(io.StringIO(codes()))
    (folder / "tmp").mkdir(parents=True)
    for (split, side), lines in verses().items():
        cut = [own.process_line(line) for line in lines]
        (folder / f"{split}.{side}").write_text("\n".join(cut) + "\n")
        (folder / "tmp" / f"{split}.{side}").write_text("\n".join(lines) + "\n")
    if with_codes:
        (folder / "code").write_text(codes())
    return folder


def encoded_split(folder: Path, *, is_joint: bool = True) -> EncodedPairs:
    corpus = load_pairs(str(folder), "de-en", False, is_split=True)
    imported = read_subwords("split", corpus, is_joint=is_joint)
    return encode_pairs(corpus, PairOptions(None), imported=imported)


@pytest.mark.parametrize("content", [None, OLD_CODES])
def test_codes_cut_as_subword_nmt_does(content: str | None) -> None:
    content = content or codes()
    own, theirs = Codes(content), BPE(io.StringIO(content))
    lines = [*chain.from_iterable(verses().values()), "und der en n", "éé aé éa 你好 a\u0301", ""]
    assert own.split(lines) == [theirs.process_line(line) for line in lines]
    assert [joined(line) for line in own.split(lines)] == lines


@pytest.mark.parametrize(
    ("content", "line"), [("#version: 0.2\na b\nabc\n", 3), ("a b c\n", 1), ("a b\n\nc d\n", 2)]
)
def test_what_is_no_codes_is_named_by_its_line(content: str, line: int) -> None:
    with pytest.raises(InputError, match=rf"bpe\.32000, line {line}: .* is no pair of symbols"):
        Codes(content, "bpe.32000")


@pytest.mark.parametrize("is_joint", [True, False])
def test_split_files_keep_their_pieces_and_are_scored_as_words(
    tmp_path: Path, is_joint: bool
) -> None:
    folder = fairseq_folder(tmp_path / "iwslt14.tokenized.de-en")
    encoded = encoded_split(folder, is_joint=is_joint)
    assert (encoded.source_subwords is encoded.target_subwords) is is_joint
    source, target = encoded.source_subwords, encoded.target_subwords
    assert isinstance(source, Pieces)
    pieces = [(folder / f"train.{side}").read_text().split() for side in SIDES]
    known = [{*pieces[0], *pieces[1]}] * 2 if is_joint else [{*pieces[0]}, {*pieces[1]}]
    assert [source.size, target.size] == [len(one) + 2 for one in known]
    for split in SPLITS:
        part = encoded.splits[split]
        lines = (folder / f"{split}.de").read_text().splitlines()
        assert part.source.lengths.tolist() == [len(line.split()) + 1 for line in lines]
        texts = source.decode([part.source.row(n).tolist() for n in range(len(part))])
        if split == "train":
            assert texts == verses()[split, "de"]
    assert encoded.references("test") == verses()["test", "en"]
    words = sum(len(line.split()) for line in verses()["test", "en"])
    assert encoded.facts()["splits"]["test"]["target_words"] == words
    # With the codes of the folder, words are cut as the files are.
    assert source.encode(verses()["test", "de"]) == source.encode_split(
        (folder / "test.de").read_text().splitlines()
    )
    again = text_encoder(source.to_json())
    assert again.encode(verses()["valid", "de"]) == source.encode(verses()["valid", "de"])


def test_codes_on_words_give_what_the_split_files_hold(tmp_path: Path) -> None:
    folder = fairseq_folder(tmp_path / "data")
    split = encoded_split(folder)
    corpus = load_pairs(str(folder / "tmp"), "de-en", False)
    imported = read_subwords(str(folder / "code"), corpus, is_joint=True)
    cut = encode_pairs(corpus, PairOptions(None), imported=imported)
    assert cut.fingerprint != split.fingerprint
    for name in SPLITS:
        for side in ("source", "target"):
            ours = getattr(cut.splits[name], side).tokens.tolist()
            assert ours == getattr(split.splits[name], side).tokens.tolist()


def test_vocabularies_of_fairseq_number_the_pieces(tmp_path: Path) -> None:
    folder = fairseq_folder(tmp_path / "data")
    pieces = sorted({*(folder / "train.de").read_text().split()})
    lines = [f"{piece} {9 - n}" if n < 9 else f"{piece} 0" for n, piece in enumerate(pieces)]
    (folder / "dict.de.txt").write_text("\n".join([*lines, "madeupword0000 0"]) + "\n")
    with pytest.raises(InputError, match=r"dict\.en\.txt is missing next to dict\.de\.txt"):
        encoded_split(folder)
    (folder / "dict.en.txt").write_text("the 12\n, 3\n")
    with pytest.raises(InputError, match=r"dict\.en\.txt differ: set data\.joint_vocabulary=false"):
        encoded_split(folder)
    encoded = encoded_split(folder, is_joint=False)
    assert (encoded.vocabulary_size, encoded.target_vocabulary_size) == (len(pieces) + 3, 4)
    assert encoded.target_subwords.decode([[2, 1, 3, 0]]) == ["the <unk> ,"]
    (folder / "dict.en.txt").write_text("the 12\nno count\n")
    with pytest.raises(InputError, match=r"dict\.en\.txt, line 2: 'no count' is no piece with"):
        encoded_split(folder)


def test_wrong_folders_are_refused(tmp_path: Path) -> None:
    folder = fairseq_folder(tmp_path / "data")
    with pytest.raises(InputError, match=r"holds pieces of words.*set data\.subwords=split and"):
        encode_pairs(load_pairs(str(folder), "de-en", False), PairOptions(280))
    words = load_pairs(str(folder / "tmp"), "de-en", False, is_split=True)
    with pytest.raises(InputError, match="needs every split segmented by the same codes"):
        encode_pairs(
            words, PairOptions(None), imported=read_subwords("split", words, is_joint=True)
        )
    (folder / "code").write_text(OLD_CODES)
    with pytest.raises(InputError, match="code next to the split files is not that of their"):
        encoded_split(folder)
    with pytest.raises(InputError, match=r"data\.subwords=bpe: there is no such file; give"):
        read_subwords("bpe", words, is_joint=True)
    (folder / "test.en").unlink()
    with pytest.raises(InputError, match="has no test split in en"):
        load_pairs(str(folder), "de-en", False, is_split=True)


def trained(folder: Path, out: Path, subwords: str) -> Path:
    config = override(
        recipe("translation", "smoke"),
        [
            f"data.path={folder}",
            f"data.subwords={subwords}",
            *("data.languages=de-en", "data.vocabulary_size=none", "norms=ln", "data.max_pairs=99"),
            *("training.max_steps=2", "training.validate_every=1"),
        ],
    )
    compare(config, out)
    return out / "ln-pre-seed0"


def test_a_run_of_split_files_translates_words_elsewhere(tmp_path: Path) -> None:
    folder = fairseq_folder(tmp_path / "data")
    run = trained(folder, tmp_path / "out", "split")
    run = run.rename(tmp_path / "moved")
    for path in folder.glob("*.*"):
        path.unlink()
    translator = load_translator(run)
    words = verses()["test", "de"][:4]
    ranked = translator.translate(words)
    assert ranked == translator.translate(Codes(codes()).split(words))
    assert all("@@" not in text for [(text, _)] in ranked)


def test_a_run_without_codes_asks_for_split_text(tmp_path: Path) -> None:
    folder = fairseq_folder(tmp_path / "data", with_codes=False)
    run = trained(folder, tmp_path / "out", "split")
    with pytest.raises(InputError, match="on split files without their codes: give text that is"):
        load_translator(run)
    line = (folder / "test.de").read_text().splitlines()[0]
    (source,) = load_translator(run, tokens=True).subwords[0].encode([line])
    assert len(source) == len(line.split())


@cache
def sentencepiece_model() -> bytes:
    sentencepiece = pytest.importorskip("sentencepiece")
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=chain(verses()["train", "de"], verses()["train", "en"]),
        model_writer=out,
        vocab_size=300,
        character_coverage=1.0,
        minloglevel=2,
    )
    return out.getvalue()


def test_a_model_of_sentencepiece_cuts_words_and_joins_them(tmp_path: Path) -> None:
    path = tmp_path / "joint.model"
    path.write_bytes(sentencepiece_model())
    own = SentencePieces(sentencepiece_model())
    lines = verses()["train", "de"]
    assert own.decode(own.encode(lines)) == lines
    assert all(0 not in row for row in own.encode(lines))
    assert text_encoder(own.to_json()).encode(lines) == own.encode(lines)
    assert own.size == 301
    run = trained(fairseq_folder(tmp_path / "data") / "tmp", tmp_path / "out", str(path))
    path.unlink()
    assert load_translator(run).subwords[0].encode(lines[:3]) == own.encode(lines[:3])
    with pytest.raises(InputError, match=r"x\.model is no model of SentencePiece"):
        SentencePieces(b"text", "x.model")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(
        InputError, match=re.escape(install_command("powernorm-lab", "sentencepiece"))
    ):
        SentencePieces(b"", "joint.model")


def test_subwords_of_older_runs_are_read(tmp_path: Path) -> None:
    encoded = encode_pairs(
        load_pairs(str(fairseq_folder(tmp_path / "data") / "tmp"), "de-en", False), PairOptions(280)
    )
    content = encoded.source_subwords.to_json()
    assert "words" not in json.loads(content)
    assert text_encoder(content).to_json() == content
    for damaged in ("{}", "[]", '{"words": 3}', '{"words": []}'):
        with pytest.raises(InputError, match="cannot be read"):
            text_encoder(damaged)


def test_the_task_reads_another_text_by_the_same_pieces(tmp_path: Path) -> None:
    folder = fairseq_folder(tmp_path / "data")
    config = override(
        recipe("translation", "smoke"),
        [
            f"data.path={folder}",
            *("data.languages=de-en", "data.subwords=split", "data.vocabulary_size=none"),
            "data.max_pairs=none",
        ],
    )
    task = task_of(config)
    own = task.encode(config)
    other = task.encode(config, str(folder))
    assert other.splits["test"].source.tokens.tolist() == own.splits["test"].source.tokens.tolist()
