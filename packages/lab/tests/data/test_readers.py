from pathlib import Path

import pytest

from powernorm.errors import InputError
from powernorm_lab.data.readers import read_corpus

LINES = "\n".join(f" line number {i} of the text " for i in range(40)) + "\n"


def write(folder: Path, **contents: str | bytes) -> Path:
    """Write files; two underscores in a name mean a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        path = folder / name.replace("__", ".")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@pytest.mark.parametrize("ending", ["txt", "tokens", "raw"])
@pytest.mark.parametrize("prefix", ["ptb__", "wiki__", ""])
def test_official_folder(tmp_path: Path, prefix: str, ending: str) -> None:
    files = {
        f"{prefix}train__{ending}": " a b \n\n c <unk> \n",
        f"{prefix}valid__{ending}": " d \n",
        f"{prefix}test__{ending}": " e f",
    }
    corpus = read_corpus(write(tmp_path / "corpus", **files))
    # The end of every line counts, also of empty ones (as in the word counts of WikiText).
    assert corpus.num_words("train") == 4 + 3
    assert corpus.num_words("valid") == 1 + 1
    assert corpus.num_words("test") == 2 + 1  # no line end at the end of the file
    assert corpus.line_ends_count
    assert corpus.name == (prefix.replace("__", "") or "corpus")


def test_train_file_stands_for_its_folder(tmp_path: Path) -> None:
    text = {f"{name}__{split}__txt": f"{name} {split}\n" for name in ("ptb", "wiki") for split in
            ("train", "valid", "test")}  # fmt: skip
    folder = write(tmp_path, **text)
    assert read_corpus(folder / "wiki.train.txt").documents["test"] == ("wiki test",)
    with pytest.raises(InputError, match=r"several corpora \(ptb, wiki\)"):
        read_corpus(folder)


def test_character_level_copies_beside_penn_treebank_are_passed_over(tmp_path: Path) -> None:
    text = {f"{name}__{split}__txt": f"{name}\n" for name in ("ptb", "ptb__char") for split in
            ("train", "valid", "test")}  # fmt: skip
    assert read_corpus(write(tmp_path, **text)).documents["train"] == ("ptb",)


def test_a_form_feed_is_no_line_end(tmp_path: Path) -> None:
    folder = write(tmp_path, train__txt="a\x0cb\u2028c\n", valid__txt="v\n", test__txt="t\n")
    assert read_corpus(folder).num_words("train") == 3 + 1


def test_windows_files_read_alike(tmp_path: Path) -> None:
    marked = b"\xef\xbb\xbfa b\r\nc\r\n"
    folder = write(tmp_path, train__txt=marked, valid__txt="v\n", test__txt="t\n")
    assert read_corpus(folder).documents["train"] == ("a b", "c")


def test_folder_of_documents(tmp_path: Path) -> None:
    files = {f"doc{i:02}__txt": f"document {i}" for i in range(20)}
    corpus = read_corpus(write(tmp_path / "letters", **files, notes__md="no text"))
    assert corpus.documents["valid"] == ("document 9",)
    assert corpus.documents["test"] == ("document 19",)
    assert not corpus.line_ends_count
    assert corpus.name == "letters"


def test_plain_file_splits_by_paragraph_then_by_line(tmp_path: Path) -> None:
    paragraphs = "\n\n".join(f"paragraph {i}\nsecond line" for i in range(20))
    folder = write(tmp_path, paragraphs__text=paragraphs, lines__text=LINES)
    corpus = read_corpus(folder / "paragraphs.text")
    assert corpus.documents["test"] == ("paragraph 19\nsecond line",)
    corpus = read_corpus(folder / "lines.text")
    assert corpus.documents["test"] == ("line number 19 of the text", "line number 39 of the text")


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        ({}, "missing", "missing does not exist: give a folder"),
        ({}, "", "holds no text: expected"),
        (
            {"train__txt": "a\n", "valid__txt": "b\n"},
            "",
            "one test split of .*, found none: exp",
        ),
        ({"ptb__valid__txt": "a\n"}, "", "one train split of ptb, found none: expected train.txt"),
        (
            {"train__txt": "a", "train__raw": "a", "valid__txt": "b", "test__txt": "c"},
            "",
            "one train split of the data set, found train.raw and train.txt",
        ),
        ({"train__txt": "a", "valid__txt": " \n ", "test__txt": "c"}, "", r"valid.txt is empty"),
        ({"text": b""}, "text", "text is empty: expected text"),
        ({"text": b"good\nbad \xff line\n"}, "text", "line 2: byte 0xff is not UTF-8"),
        ({"text": b"good\n\ngo\x00od\n"}, "text", "line 3: a zero byte"),
        ({"text": "one line"}, "text", "has 1 lines of text: at least 20"),
    ],
)
def test_bad_input_is_named(
    tmp_path: Path, files: dict[str, str | bytes], name: str, message: str
) -> None:
    folder = write(tmp_path / "corpus", **files)
    with pytest.raises(InputError, match=message):
        read_corpus(folder / name)


def test_folder_in_place_of_a_file_cannot_be_read(tmp_path: Path) -> None:
    folder = write(tmp_path, valid__txt="a\n", test__txt="b\n")
    (folder / "train.txt").mkdir()
    with pytest.raises(InputError, match=r"train\.txt cannot be read"):
        read_corpus(folder)
