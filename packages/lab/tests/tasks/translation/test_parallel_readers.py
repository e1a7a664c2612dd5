import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powernorm.errors import InputError
from powernorm_lab.data.corpus import SPLITS, split_by_position
from powernorm_lab.tasks.translation.readers import TextPair, read_parallel
from powernorm_lab.tasks.translation.sources import load_pairs

pytestmark = pytest.mark.usefixtures("own_cache")

DE_EN = "de-en"

LAYOUTS = {
    "iwslt14": ("train", "valid", "test"),
    "dev": ("train", "dev", "test"),
    "named": ("iwslt14.train", "iwslt14.valid", "iwslt14.test"),
    "raw": ("train.de-en", "val.de-en", "test.de-en"),
    "cleaned": ("train.tok.clean", "valid.tok", "test.tok"),
    "bpe": ("train.tok.clean.bpe.32k", "newstest2013.tok.bpe.32k", "newstest2014.tok.bpe.32k"),
    "wmt": ("train", "newstest2013", "newstest2014"),
    "iwslt15": ("train", "tst2012", "tst2013"),
}  # fmt: skip


def write(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content)
    return folder


def sides(stems: tuple[str, ...], languages: tuple[str, ...] = ("de", "en")) -> dict[str, str]:
    return {
        f"{stem}.{language}": f"{split} {language}\n{split} {language} 2\n"
        for split, stem in zip(SPLITS, stems, strict=True)
        for language in languages
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("given_as", ["folder", "train file"])
def test_official_layouts(tmp_path: Path, layout: str, given_as: str) -> None:
    files = sides(LAYOUTS[layout])
    folder = write(tmp_path / "corpus", files)
    path = folder if given_as == "folder" else folder / f"{LAYOUTS[layout][0]}.en"
    corpus = load_pairs(str(path), "de-en", True)
    for split in SPLITS:
        expected = [(f"{split} de{end}", f"{split} en{end}") for end in ("", " 2")]
        assert list(corpus.pairs(split)) == expected
    assert (corpus.source_language, corpus.target_language) == ("de", "en")
    assert corpus.tokenized
    assert corpus.name == ("iwslt14" if layout == "named" else "corpus")


def test_languages_decide_the_direction(tmp_path: Path) -> None:
    folder = write(tmp_path, sides(LAYOUTS["iwslt14"]))
    forth, back = (read_parallel(folder, pair, tokenized=False) for pair in (DE_EN, "en-de"))
    assert [pair[::-1] for pair in forth.pairs("test")] == list(back.pairs("test"))
    assert forth.fingerprint() != back.fingerprint()
    with pytest.raises(InputError, match=r"set data\.languages=de-en or en-de"):
        read_parallel(folder, None, tokenized=False)
    with pytest.raises(InputError, match=r"set data\.languages=de-en or en-de"):
        read_parallel(folder / "train.de", None, tokenized=False)


def test_nothing_is_guessed_among_three_languages(tmp_path: Path) -> None:
    folder = write(tmp_path, sides(LAYOUTS["iwslt14"], ("de", "en", "zh_CN")))
    with pytest.raises(InputError, match=r"is in de, en, zh_CN.*set data\.languages=") as caught:
        read_parallel(folder, None, tokenized=False)
    pairs = ["de-en", "de-zh_CN", "en-de", "en-zh_CN", "zh_CN-de", "zh_CN-en"]
    assert re.findall(r"\w+-\w+", str(caught.value).partition("set data.languages=")[2]) == pairs
    for pair in pairs:  # whatever is suggested can be pasted
        corpus = read_parallel(folder, pair, tokenized=False)
        assert next(iter(corpus.pairs("valid"))) == tuple(f"valid {x}" for x in pair.split("-"))
    with pytest.raises(InputError, match=r"set data\.languages=de-en, de-zh_CN, en-de or zh_CN-de"):
        read_parallel(folder / "train.de", None, tokenized=False)


def test_a_path_in_neither_language_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, sides(LAYOUTS["iwslt14"], ("de", "en", "fr")))
    message = (
        r"=fr-en: .*train\.de is in de; give the path of train\.en or train\.fr, or a pair .*de"
    )
    with pytest.raises(InputError, match=message):
        read_parallel(folder / "train.de", "fr-en", tokenized=False)
    assert read_parallel(folder / "train.fr", "fr-en", tokenized=False).languages == "fr-en"


def test_own_splits_come_before_the_years(tmp_path: Path) -> None:
    years = sides(("train", "tst2012", "tst2013"))
    folder = write(tmp_path, years | {"dev.de": "own\n", "dev.en": "mine\n"})
    corpus = read_parallel(folder, DE_EN, tokenized=False)
    assert list(corpus.pairs("valid")) == [("own", "mine")]
    assert next(iter(corpus.pairs("test"))) == ("test de", "test en")


def test_train_file_tells_several_corpora_apart(tmp_path: Path) -> None:
    files = sides(("train", "valid", "test")) | {
        name.replace(".", ".tok.", 1): f"tokens of {content}"
        for name, content in sides(("train", "valid", "test")).items()
    }
    folder = write(tmp_path, files | {f"other.{name}": text for name, text in files.items()})
    plain = read_parallel(folder, DE_EN, tokenized=False)
    assert next(iter(plain.pairs("train"))) == ("train de", "train en")
    for start, expected in (("train.de", "test de"), ("train.tok.en", "tokens of test de"),
                            ("other.train.tok.de", "tokens of test de")):  # fmt: skip
        corpus = read_parallel(folder / start, DE_EN, tokenized=False)
        assert next(iter(corpus.pairs("test")))[0] == expected
    assert corpus.name == "other"
    for name in ("train.de", "train.en"):
        (folder / name).unlink()
    with pytest.raises(InputError, match=r"several train splits in de .*give the path of one"):
        read_parallel(folder, DE_EN, tokenized=False)


def test_folder_of_tables(tmp_path: Path) -> None:
    files = {f"{name}.tsv": f"{name}\tb\n" for name in ("train", "dev", "test")}
    folder = write(tmp_path / "tables", files)
    for path in (folder, folder / "train.tsv"):
        corpus = read_parallel(path, None, tokenized=False)
        assert [list(corpus.pairs(split)) for split in SPLITS] == [
            [("train", "b")],
            [("dev", "b")],
            [("test", "b")],
        ]
        assert corpus.languages == "source-target"
        assert corpus.name == "tables"
    assert read_parallel(folder, "vi-en", tokenized=False).source_language == "vi"
    (folder / "test.tsv").unlink()
    with pytest.raises(InputError, match=r"no test split: expected train\.tsv, .* test\.tsv"):
        read_parallel(folder, None, tokenized=False)


@pytest.mark.parametrize("name", ["pairs.tsv", "train.tsv", "pairs"])
def test_one_table_is_split_by_position(tmp_path: Path, name: str) -> None:
    pairs = [(f"s {i}", f"t {i}") for i in range(45)]
    path = write(tmp_path, {name: "".join(f"{a}\t{b}\n" for a, b in pairs)}) / name
    corpus = read_parallel(path, None, tokenized=False)
    expected = split_by_position(pairs)
    assert {split: tuple(corpus.pairs(split)) for split in SPLITS} == expected
    assert corpus.name == Path(name).stem


@pytest.mark.parametrize(
    ("files", "path", "languages", "message"),
    [
        ({}, "missing", "de-en", "missing does not exist: give a folder with train.de"),
        ({"notes.md": "a", "x.txt": "b"}, "", "de-en", "holds no sentence pairs: expected train"),
        ({"pairs.tsv": "a\tb\n" * 19}, "pairs.tsv", None, "has 19 lines: at least 20"),
        ({"pairs.tsv": ""}, "pairs.tsv", None, "pairs.tsv is empty"),
        (sides(("train", "valid", "test")), "", "de-fr", "no train split in fr, only in de, en; "),
        (sides(("train", "valid", "x")), "", "de-en", "no test split in de: expected one of test"),
        (sides(("train", "x", "test")), "", "de-en", "no valid split in de.*tst2012.de"),
        (sides(("x", "valid", "test")), "", "de-en", "no train split in de and en, only in no "),
        (sides(("train", "valid", "test")) | {"dev.de": "a\n", "dev.en": "b\n"}, "",
         "de-en", "several valid .*dev.*keep only one"),
        (sides(("train", "valid", "test")) | {"train.tsv": "a\tb\n"}, "", "de-en", "holds both"),
        (sides(("train", "valid", "test")) | {"test.en": "one\n"}, "", "de-en",
         "test.de has 2 lines and .*test.en has 1"),
        (sides(("train", "valid", "test")) | {"valid.en": ""}, "", "de-en", "valid.en is empty"),
        (sides(("train", "valid", "test")) | {"test.en": "\n \n"}, "", "de-en",
         "the test split of .* has no sentence pairs"),
        ({"train.tsv": "a\tb\n", "valid.tsv": "", "dev.tsv": "", "test.tsv": ""}, "", None,
         "one valid split of .*, found dev.tsv and valid.tsv"),
        ({}, "", "de", "'de' is no pair of languages"),
        ({}, "", "de-de", "'de-de' is no pair of languages"),
        ({"train.de": "a\n", "train.log": "a"}, "", None,
         r"train split in one language only, de \(train.de\): expected its translation in a file"),
        ({"train.de": "a\n"}, "train.de", None, "train split in one language only, de"),
        ({"train.de": "a\n"}, "", "de-en", "no train split in en, only in de; expected train.de"),
        ({"valid.de": "a\n"}, "", None, "has no train split: expected train.de, train.en"),
        ({"train.de": "a\n", "x.train.en": "a\n"}, "", None,
         r"in de and en, but no two .* same split \(train.de, x.train.en\)"),
        ({"train.de": "a\n", "x.train.en": "a\n"}, "", "de-en",
         r"no two files that are sides of the same train split \(train.de, x.train.en\).*train.en"),
        (sides(("train", "valid", "test")), "valid.de", "de-en",
         r"valid.de is one side of the valid split: give the folder .*corpus or its train.de"),
        (sides(("x.train", "x.valid", "newstest2014")), "newstest2014.en", None,
         r"one side of the test split: give the folder .*corpus or its x.train.en"),
        (sides(("train", "valid", "x.test")) | {"x.train.de": "a\n"}, "x.test.de", None,
         "give the folder .*corpus or its x.train.de"),
        ({"test.de": "a\tb\n"}, "test.de", None, "folder .*corpus, with train files in it"),
        ({"train.tsv": "a\tb\n", "dev.tsv": "a\tb\n" * 20}, "dev.tsv", None,
         r"dev.tsv is one split of several: give the folder .*corpus or its train.tsv"),
    ],
)  # fmt: skip
def test_bad_input_is_named(
    tmp_path: Path, files: dict[str, str], path: str, languages: str | None, message: str
) -> None:
    folder = write(tmp_path / "corpus", files)
    with pytest.raises(InputError, match=message):
        whole(str(folder / path), languages)


def whole(path: str, languages: str | None) -> list[list[TextPair]]:
    corpus = load_pairs(path, languages, False)
    return [list(corpus.pairs(split)) for split in SPLITS]


def test_a_table_of_its_own_may_be_called_test(tmp_path: Path) -> None:
    files = {"test.tsv": "a\tb\n" * 20, "valid.tsv": "", "dev.tsv": "", "pairs.tsv": "a\tb\n" * 20}
    folder = write(tmp_path, files)
    assert list(read_parallel(folder / "pairs.tsv", None, tokenized=False).pairs("test"))
    for name in ("valid.tsv", "dev.tsv"):
        (folder / name).unlink()
    assert list(read_parallel(folder / "test.tsv", None, tokenized=False).pairs("test"))


def test_languages_with_hyphens(tmp_path: Path) -> None:
    folder = write(tmp_path, sides(LAYOUTS["raw"], ("pt-br", "zh-CN", "pt", "es-419")))
    with pytest.raises(InputError, match=r"set data\.languages=es-419-pt, ") as caught:
        read_parallel(folder, None, tokenized=False)
    suggested = str(caught.value).partition("data.languages=")[2]
    pairs = suggested.removesuffix(".").replace(" or ", ", ").split(", ")
    assert len(pairs) == 12
    for pair in pairs:
        corpus = load_pairs(str(folder), pair, False)
        texts = tuple(f"train {x}" for x in (corpus.source_language, corpus.target_language))
        assert next(iter(corpus.pairs("train"))) == texts
        assert corpus.languages == pair
        assert load_pairs(str(folder), corpus.languages, False).languages == pair
    with pytest.raises(InputError, match=r"=pt-br-en: .* no train split in en, only in es-419, pt"):
        load_pairs(str(folder), "pt-br-en", False)


def test_portuguese_is_no_file_of_weights(tmp_path: Path) -> None:
    folder = write(tmp_path, sides(LAYOUTS["iwslt14"], ("pt", "en")))
    assert load_pairs(str(folder), "pt-en", False).languages == "pt-en"


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2", ".zst"])
def test_compressed_files_are_named(tmp_path: Path, suffix: str) -> None:
    plain = sides(LAYOUTS["iwslt14"])
    packed = write(tmp_path / "packed", {f"{name}{suffix}": "?" for name in plain})
    write(packed, {f"pairs.tsv{suffix}": "?"})
    for name in (f"train.de{suffix}", "train.de", f"pairs.tsv{suffix}"):
        file = name.removesuffix(suffix) + suffix
        with pytest.raises(InputError, match=rf"{file} is compressed: decompress it"):
            load_pairs(str(packed / name), "de-en", False)
    for languages in ("de-en", None):
        with pytest.raises(InputError, match=rf"decompress pairs\.tsv{suffix}, test\.de{suffix}, "):
            load_pairs(str(packed), languages, False)
    for name in ("train.en", "valid.de", "test.en"):
        folder = write(tmp_path / name, plain | {f"{name}{suffix}": "?"})
        assert load_pairs(str(folder), "de-en", False).languages == "de-en"
        (folder / f"valid.en{suffix}").write_text("of a file that is there")
        (folder / name).unlink()
        for languages in ("de-en", None) if name == "train.en" else ("de-en",):
            with pytest.raises(InputError, match=rf"decompress {name}{suffix}"):
                load_pairs(str(folder), languages, False)
    tables = {"train.tsv": "a\tb\n", f"valid.tsv{suffix}": "?", "test.tsv": "a\tb\n"}
    with pytest.raises(InputError, match=rf"no valid split.* decompress valid\.tsv{suffix}"):
        load_pairs(str(write(tmp_path / "tables", tables)), None, False)


def test_odd_separators_within_a_line_stay(tmp_path: Path) -> None:
    text = " a\tb\u2028c\x0bd\x0ce\x85f\xa0 \u3000g\t"
    files = {name: f"{text}\n{name}\n" for name in sides(LAYOUTS["iwslt14"])}
    corpus = load_pairs(str(write(tmp_path, files)), "de-en", True)
    assert list(corpus.pairs("test")) == [(text, text), ("test.de", "test.en")]


@settings(max_examples=60)
@given(st.data())
def test_mutated_files_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "mutated"
    content = {name: text.encode() for name, text in sides(("train", "valid", "test")).items()}
    name = data.draw(st.sampled_from(sorted(content)))
    place = data.draw(st.integers(0, len(content[name])))
    width = data.draw(st.integers(0, 4))
    change = data.draw(st.binary(max_size=4))
    folder.mkdir(exist_ok=True)
    for key, text in content.items():
        whole = text[:place] + change + text[place + width :] if key == name else text
        (folder / key).write_bytes(whole)
    corpus = read_parallel(folder, DE_EN, tokenized=False)
    message = ""
    try:
        found = {split: list(corpus.pairs(split)) for split in SPLITS}
    except InputError as error:
        message = str(error)
    if message:
        assert name in message or "has no sentence pairs" in message
        return
    for split in SPLITS:
        texts = [
            (folder / f"{split}.{language}").read_bytes().decode() for language in ("de", "en")
        ]
        lines = [text.removesuffix("\n").split("\n") for text in texts]
        assert len(lines[0]) == len(lines[1])
        kept = [pair for pair in zip(*lines, strict=True) if pair[0].strip() and pair[1].strip()]
        assert len(found[split]) == len(kept)
        assert corpus.num_dropped[split] == {"empty": len(lines[0]) - len(kept)}
