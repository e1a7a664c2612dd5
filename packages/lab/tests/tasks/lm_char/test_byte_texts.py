import string
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lab.tests.data.byte_mutations import mutated

from powernorm.errors import InputError
from powernorm_lab.data.corpus import SPLITS
from powernorm_lab.data.embedded import embedded_corpus
from powernorm_lab.tasks.lm_char import data as byte_texts
from powernorm_lab.tasks.lm_char.data import MINIMUM, load_bytes, read_bytes

CONTENT = (string.ascii_letters + "\r\n\x00 wörter\n").encode() * 40 + bytes(range(256))


def write(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return folder


def whole(path: Path) -> bytes:
    encoded = read_bytes(path)
    return b"".join(bytes(encoded.splits[split].tolist()) for split in SPLITS)


def test_one_file_is_split_by_place(tmp_path: Path) -> None:
    folder = write(tmp_path, text=CONTENT[:2001])
    encoded = read_bytes(folder / "text")
    assert [encoded.splits[split].numel() for split in SPLITS] == [1800, 100, 101]
    assert [encoded.start_of(split) for split in SPLITS] == [0, 1800, 1900]
    assert whole(folder / "text") == CONTENT[:2001]
    assert all(part.dtype == torch.uint8 for part in encoded.splits.values())
    assert encoded.name == "text"


def test_official_files_have_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_texts, "OFFICIAL_SIZES", {"enwik8": 2000, "text8": 3000})
    folder = write(tmp_path, enwik8=CONTENT[:2000], text8=CONTENT[:2000])
    assert [read_bytes(folder / "enwik8").splits[split].numel() for split in SPLITS] == [
        *(1800, 100, 100)
    ]
    with pytest.raises(InputError, match=r"text8 has 2,000 bytes and should have 3,000: fetch"):
        read_bytes(folder / "text8")
    # A folder with both files: the first one is read.
    assert whole(folder) == CONTENT[:2000]


def test_a_hundred_million_bytes_are_split_as_in_the_literature() -> None:
    size = byte_texts.OFFICIAL_SIZES["enwik8"]
    assert (size * 90 // 100, size * 95 // 100) == (90_000_000, 95_000_000)


def test_folder_of_splits_is_taken_byte_for_byte(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", train__txt=CONTENT, valid__txt=b"\r\n", test__txt=b"\xff\x00")
    encoded = read_bytes(folder)
    assert bytes(encoded.splits["train"].tolist()) == CONTENT
    assert encoded.splits["valid"].tolist() == [13, 10]
    assert encoded.splits["test"].tolist() == [255, 0]
    assert encoded.name == "mine"


def test_folder_of_transformer_xl(tmp_path: Path) -> None:
    numbers = " ".join(str(byte) for byte in CONTENT).encode()
    splits = {f"{split}__txt": numbers for split in SPLITS}
    raw = {f"{split}__txt__raw": CONTENT for split in SPLITS}
    both = write(tmp_path / "both", **splits, **raw)
    assert whole(both) == 3 * CONTENT
    with pytest.raises(InputError, match=r"train\.txt, line 1: bytes written as numbers.*\.raw"):
        read_bytes(write(tmp_path / "numbers", **splits))


@pytest.mark.parametrize("text", [b"9" * 500, b"1 2 3 4 and 5 6 7", b"1,2 " * 90, b"1234 " * 90])
def test_digits_are_text_too(tmp_path: Path, text: bytes) -> None:
    folder = write(tmp_path, train__txt=text, valid__txt=b"a", test__txt=b"b")
    assert whole(folder) == text + b"ab"


def test_embedded_texts_are_split_by_document() -> None:
    encoded = load_bytes(None)
    corpus = embedded_corpus("sotu")
    for split in SPLITS:
        text = bytes(encoded.splits[split].numpy()).decode()
        assert text == "".join(f"{document}\n" for document in corpus.documents[split])
    assert load_bytes("rt").license == "CC BY 4.0"


def test_fingerprint_is_of_the_splits(tmp_path: Path) -> None:
    def fingerprint(name: str, **parts: bytes) -> str:
        return read_bytes(write(tmp_path / name, **parts)).fingerprint

    one = fingerprint("one", train__txt=b"ab", valid__txt=b"c", test__txt=b"d")
    assert fingerprint("other", train__txt=b"a", valid__txt=b"bc", test__txt=b"d") != one
    assert fingerprint("same", train__txt=b"ab", valid__txt=b"c", test__txt=b"d") == one


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        ({}, "missing", "missing does not exist: give a file such as enwik8"),
        ({}, "", "holds no text of bytes: expected train.txt"),
        ({"train__txt": b"a", "test__txt": b"a"}, "", r"has train.txt and test.txt but no valid"),
        ({"train__txt": b"a", "valid__txt": b"", "test__txt": b"a"}, "", r"valid\.txt is empty"),
        ({"text": b"short"}, "text", r"text has 5 bytes: at least 1000 are needed"),
        ({"text": b""}, "text", r"text has 0 bytes: at least 1000"),
        ({"enwik8__zip": CONTENT}, "enwik8.zip", r"enwik8\.zip is packed: unpack it"),
    ],
)
def test_bad_input_is_named(
    tmp_path: Path, files: dict[str, bytes], name: str, message: str
) -> None:
    folder = write(tmp_path / "bytes", **files)
    with pytest.raises(InputError, match=message):
        read_bytes(folder / name)


def test_folder_in_place_of_a_file_cannot_be_read(tmp_path: Path) -> None:
    folder = write(tmp_path, valid__txt=b"a", test__txt=b"b")
    (folder / "train.txt").mkdir()
    with pytest.raises(InputError, match=r"train\.txt cannot be read"):
        read_bytes(folder)


@pytest.mark.parametrize("content", [b"9" * 500, b"12 " * 30 + b"7" * 400, b"1" * 199 + b"x"])
def test_digits_that_are_text_are_told_apart_at_once(tmp_path: Path, content: bytes) -> None:
    folder = write(tmp_path, train__txt=content, valid__txt=b"a", test__txt=b"b")
    assert whole(folder) == content + b"ab"


def some_examples(number: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return settings(
        max_examples=number,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def read_damaged(folder: Path, data: Any) -> None:
    """Check that damaged files give their bytes or a clear error."""
    numbers = " ".join(str(byte) for byte in CONTENT[:300]).encode()
    files = {
        "train.txt": data.draw(st.sampled_from([CONTENT, numbers])),
        "valid.txt": CONTENT[:50],
        "test.txt": CONTENT[:70],
        "text": CONTENT[: MINIMUM + 2],
    }
    damaged = data.draw(st.sampled_from([*files]))
    files[damaged] = data.draw(mutated(files[damaged]))
    write(folder, **files)
    for path in (folder, folder / "text"):
        expected = files["text"] if path.name == "text" else b"".join([*files.values()][:3])
        with suppress(InputError):
            assert whole(path) == expected


@some_examples(200)
@given(data=st.data())
def test_damaged_files(tmp_path: Path, data: st.DataObject) -> None:
    read_damaged(tmp_path / "damaged", data)


@pytest.mark.slow
@some_examples(4000)
@given(data=st.data())
def test_very_many_damaged_files(tmp_path: Path, data: st.DataObject) -> None:
    read_damaged(tmp_path / "damaged", data)
