import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powernorm.errors import InputError
from powernorm_lab.data.files import read_lines
from powernorm_lab.tasks.translation.readers import (
    hash_files,
    read_columns,
    read_line_pairs,
    refuse_pieces,
    require_pieces,
)


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_only_line_feeds_end_lines(tmp_path: Path) -> None:
    content = "a\u2028b\x0bc\x0cd\x85e\rf\r\n\ng\r\n h\ti "
    path = written(tmp_path, "text", "\ufeff" + content)
    assert list(read_lines(path)) == ["a\u2028b\x0bc\x0cd\x85e\rf", "", "g", " h\ti "]


def test_a_byte_order_mark_is_text_after_the_first_line(tmp_path: Path) -> None:
    assert list(read_lines(written(tmp_path, "text", "a\n\ufeffb\n"))) == ["a", "\ufeffb"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "text is empty: expected text"),
        (b"good\nbad \xff line\n", "text, line 2: byte 0xff is not UTF-8"),
        (b"good\n\ngo\x00od\n", "text, line 3: a zero byte"),
        (b"cut off \xc3", "text, line 1: byte 0xc3"),
    ],
)
def test_damaged_lines_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        list(read_lines(written(tmp_path, "text", content)))


def test_folder_in_place_of_a_file_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        list(read_lines(tmp_path))
    with pytest.raises(InputError, match="cannot be read"):
        hash_files([tmp_path])


@pytest.mark.parametrize(("num_source", "num_target"), [(5, 3), (3, 5), (1, 2), (2, 1)])
def test_different_numbers_of_lines_name_both_files(
    tmp_path: Path, num_source: int, num_target: int
) -> None:
    source = written(tmp_path, "train.de", "a\n" * num_source)
    target = written(tmp_path, "train.en", "b\n" * num_target)
    message = f"train.de has {num_source} lines and .*train.en has {num_target}: expected"
    with pytest.raises(InputError, match=message):
        list(read_line_pairs(source, target))


def test_columns(tmp_path: Path) -> None:
    path = written(tmp_path, "pairs.tsv", "a b\tc\n\n \n\td\n")
    assert list(read_columns(path)) == [("a b", "c"), ("", ""), ("", ""), ("", "d")]
    assert list(read_columns(path, has_header=True)) == [("", ""), ("", ""), ("", "d")]


@pytest.mark.parametrize(("line", "tabs"), [("no tab", 0), ("a\tb\tc", 2)])
def test_wrong_number_of_tabs_is_named(tmp_path: Path, line: str, tabs: int) -> None:
    path = written(tmp_path, "pairs.tsv", f"a\tb\n{line}\n")
    with pytest.raises(InputError, match=rf"pairs.tsv, line 2: {tabs} tabs; expected one"):
        list(read_columns(path))


@pytest.mark.parametrize("pair", [("wo@@ rt es", "a b"), ("a", "\u2581wor d")])
def test_pieces_of_words_are_refused(pair: tuple[str, str]) -> None:
    many = [("a", "b"), pair] * 3
    with pytest.raises(InputError, match=r"The text holds pieces of words.*: set data\.subwords"):
        list(refuse_pieces(iter(many), "The text"))
    few = [("a", "b")] * 9 + [pair] + [("c", "d")] * 2000
    assert list(refuse_pieces(iter(few), "The text")) == few


def test_pieces_of_words_are_asked_for() -> None:
    cut = [("wo@@ rt es", "a b")] + [("a", "b")] * 2000
    assert list(require_pieces(iter(cut), "The text")) == cut
    with pytest.raises(InputError, match=r"The text holds no pieces of words .*set data\.subwords"):
        list(require_pieces(iter([("a", "b")] * 3), "The text"))


@given(st.binary(max_size=60))
def test_any_bytes_are_lines_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = written(tmp_path_factory.getbasetemp(), "any-lines", content)
    try:
        lines = list(read_lines(path))
    except InputError:
        assert not content or b"\0" in content or not decodes(content)
        return
    whole = content.decode("utf-8-sig")
    expected = re.sub("\r?\n", "\n", whole).removesuffix("\n").split("\n")
    # At the end of the file a carriage return alone ends the line, too.
    expected[-1] = expected[-1] if whole.endswith("\n") else expected[-1].removesuffix("\r")
    assert lines == expected


def decodes(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(st.lists(st.sampled_from(["a\tb", "", "a", "\t", "a\tb\tc", "\ufeffa\tb"]), max_size=5))
def test_any_table_is_pairs_or_an_error_with_its_line(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    path = written(
        tmp_path_factory.getbasetemp(), "any-table", "".join(f"{line}\n" for line in lines)
    )
    wrong = [n for n, line in enumerate(lines, 1) if line and line.count("\t") != 1]
    try:
        pairs = list(read_columns(path))
    except InputError as error:
        message = str(error)
    else:
        assert not wrong
        assert len(pairs) == len(lines)
        return
    assert f"line {wrong[0]}:" in message if lines else "is empty" in message


def test_hash_is_of_contents_and_their_order(tmp_path: Path) -> None:
    one, two = written(tmp_path, "1", "ab"), written(tmp_path, "2", "c")
    other = [written(tmp_path, "3", "a"), written(tmp_path, "4", "bc")]
    hashes = {hash_files(paths) for paths in ([one, two], [two, one], other, [one])}
    assert len(hashes) == 4
    assert hash_files([one, two]) == hash_files([written(tmp_path, "5", "ab"), two])
