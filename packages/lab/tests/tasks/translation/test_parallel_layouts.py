from pathlib import Path

import pytest

from powernorm.errors import InputError
from powernorm_lab.data.corpus import SPLITS
from powernorm_lab.tasks.translation.readers import read_parallel

IWSLT14_SETS = ("TED.dev2010", "TED.tst2010", "TED.tst2011", "TED.tst2012", "TEDX.dev2012")
IWSLT14 = (
    *(f"{split}.{language}" for split in SPLITS for language in ("de", "en")),
    *(f"train.tags.de-en{step}.{language}"
      for step in ("", ".tok", ".clean") for language in ("de", "en")),
    *(f"IWSLT14.{name}.de-en.{language}{end}"
      for name in IWSLT14_SETS for language in ("de", "en") for end in ("", ".xml")),
    "train.en-de",
)  # fmt: skip
"""Files that fairseq's prepare-iwslt14.sh writes into its folder tmp."""

WMT14 = (
    *(f"{start}{split}.{language}"
      for start in ("", "bpe.") for split in SPLITS for language in ("en", "de")),
    *(f"train.tags.en-de.tok.{language}" for language in ("en", "de")),
    "train.de-en",
    "code",
)  # fmt: skip
"""Files that fairseq's prepare-wmt14en2de.sh writes into its folder tmp, with its BPE codes."""

OFFICIAL = [("iwslt14", IWSLT14, "de-en", "train.en-de"), ("wmt14", WMT14, "en-de", "train.de-en")]


def prepared(folder: Path, names: tuple[str, ...]) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text(f"{name}\n")
    return folder


@pytest.mark.parametrize(("name", "files", "languages", "joined"), OFFICIAL)
def test_folders_of_official_scripts(
    tmp_path: Path, name: str, files: tuple[str, ...], languages: str, joined: str
) -> None:
    folder = prepared(tmp_path / name, files)
    source, target = languages.split("-")
    for path in (folder, folder / f"train.{target}"):
        corpus = read_parallel(path, languages, tokenized=True)
        for split in SPLITS:
            assert list(corpus.pairs(split)) == [(f"{split}.{source}", f"{split}.{target}")]
        assert corpus.name == name
        with pytest.raises(InputError, match=r"set data\.languages=de-en or en-de$"):
            read_parallel(path, None, tokenized=True)
    for pair in (languages, None):
        with pytest.raises(InputError, match=rf"{joined} .*two languages.*train\.de or train\.en"):
            read_parallel(folder / joined, pair, tokenized=True)


def test_earlier_steps_are_read_where_their_path_is_given(tmp_path: Path) -> None:
    folder = prepared(tmp_path / "iwslt14", IWSLT14)
    corpus = read_parallel(folder / "train.tags.de-en.clean.de", "de-en", tokenized=True)
    stem = "train.tags.de-en.clean"
    assert list(corpus.pairs("train")) == [(f"{stem}.de", f"{stem}.en")]
    assert list(corpus.pairs("test")) == [("test.de", "test.en")]


def test_both_sides_are_of_the_same_step(tmp_path: Path) -> None:
    names = ("train.de", "train.tok.de", "train.tok.en", "valid.de", "valid.en", "test.de")
    folder = prepared(tmp_path / "folder", (*names, "test.tok.de", "test.tok.en"))
    corpus = read_parallel(folder, "de-en", tokenized=True)
    assert list(corpus.pairs("train")) == [("train.tok.de", "train.tok.en")]
    assert list(corpus.pairs("test")) == [("test.tok.de", "test.tok.en")]


def test_a_hyphen_alone_joins_nothing(tmp_path: Path) -> None:
    """A code with a hyphen means two languages only if files of both languages exist."""
    names = tuple(f"{split}.{language}" for split in SPLITS for language in ("zh-CN", "zh", "en"))
    folder = prepared(tmp_path / "folder", (*names, "train.zh-CN-en"))
    corpus = read_parallel(folder / "train.zh-CN", "zh-CN-en", tokenized=False)
    assert list(corpus.pairs("valid")) == [("valid.zh-CN", "valid.en")]
    with pytest.raises(InputError, match="two languages in one file"):
        read_parallel(folder / "train.zh-CN-en", "zh-CN-en", tokenized=False)
