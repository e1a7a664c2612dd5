from pathlib import Path

import pytest

from powernorm.errors import InputError
from powernorm_lab.data.corpus import SPLITS, split_by_position
from powernorm_lab.tasks.translation.readers import ParallelCorpus
from powernorm_lab.tasks.translation.sources import load_pairs

PAIRS = [(f"s {number}", f"t {number}") for number in range(40)]
ROWS = "".join(f"{source}\t{target}\n" for source, target in PAIRS)


def table(folder: Path, header: str) -> str:
    path = folder / "pairs.txt"
    path.write_text(header + ROWS)
    return str(path)


def contents(corpus: ParallelCorpus) -> list[tuple[tuple[str, str], ...]]:
    return [tuple(corpus.pairs(split)) for split in SPLITS]


@pytest.mark.parametrize(
    ("header", "languages", "expected"),
    [
        ("de\ten\n", None, "de-en"),
        ("\ufeffde\ten\r\n", "de-en", "de-en"),
        ("pt-br\ten\n", "pt_BR-en", "pt-br-en"),
        ("deu\teng\n", "deu-eng", "deu-eng"),
        ("", None, "source-target"),
        ("", "vi-en", "vi-en"),
    ],
)
def test_a_header_names_the_languages_and_is_no_pair(
    tmp_path: Path, header: str, languages: str | None, expected: str
) -> None:
    corpus = load_pairs(table(tmp_path, header), languages, False)
    assert corpus.languages == expected
    assert contents(corpus) == list(split_by_position(PAIRS).values())


@pytest.mark.parametrize("header", ["de\ten\n", "DE\tEN\n"])
def test_a_header_says_which_column_is_the_source(tmp_path: Path, header: str) -> None:
    path = table(tmp_path, header)
    back = load_pairs(path, "en-de", False)
    swapped = [(target, source) for source, target in PAIRS]
    assert contents(back) == list(split_by_position(swapped).values())
    assert back.languages.lower() == "en-de"
    assert back.fingerprint() != load_pairs(path, "de-en", False).fingerprint()


def test_languages_that_are_not_in_the_header_are_refused(tmp_path: Path) -> None:
    message = r"=en-fr: the columns of .*pairs\.txt are de and en .*=de-en or en-de, or fix that"
    with pytest.raises(InputError, match=message):
        load_pairs(table(tmp_path, "de\ten\n"), "en-fr", False)


def test_labels_with_hyphens_need_a_header(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"may be pt and br-en or pt-br and en.*as pt_br"):
        load_pairs(table(tmp_path, ""), "pt-br-en", False)


def test_line_numbers_count_the_header(tmp_path: Path) -> None:
    (tmp_path / "pairs.txt").write_text("de\ten\na\tb\nc\n")
    with pytest.raises(InputError, match=r"line 3: 0 tabs"):
        list(load_pairs(str(tmp_path / "pairs.txt"), None, False).pairs("train"))


def write_splits(folder: Path, headers: tuple[str, str, str]) -> None:
    for split, header in zip(SPLITS, headers, strict=True):
        (folder / f"{split}.tsv").write_text(f"{header}{split} 1\t{split} 2\n")


def test_headers_of_a_folder_of_tables(tmp_path: Path) -> None:
    write_splits(tmp_path, ("de\ten\n",) * 3)
    for path in (tmp_path, tmp_path / "train.tsv"):
        corpus = load_pairs(str(path), "en-de", False)
        assert contents(corpus) == [((f"{split} 2", f"{split} 1"),) for split in SPLITS]


@pytest.mark.parametrize("other", ["", "en\tde\n"])
def test_headers_must_agree(tmp_path: Path, other: str) -> None:
    write_splits(tmp_path, ("de\ten\n", "de\ten\n", other))
    with pytest.raises(InputError, match=r"train\.tsv and .*test\.tsv differ in their first lines"):
        load_pairs(str(tmp_path), "de-en", False)
