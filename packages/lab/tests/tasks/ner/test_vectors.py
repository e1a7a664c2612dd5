from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lab.tests.data.byte_mutations import mutated

from powernorm.errors import InputError
from powernorm_lab.tasks.ner.sources import read_vectors

GLOVE = "the 3 4 0\nEU 0 -2e0 0\n. . . 1 0 0\neu 0 0 5\nunused 1 1 1\nzero 0 0 0\n"
WORDS = {"the", "eu", "zero", ". . .", "missing"}


def write(folder: Path, text: str) -> Path:
    path = folder / "vectors.txt"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("header", ["", "6 3\n"])
@pytest.mark.parametrize("end", ["\n", " \n", "\t\n", "\r\n"])
def test_vectors_of_the_words_that_are_wanted(tmp_path: Path, header: str, end: str) -> None:
    path = tmp_path / "vectors.txt"
    path.write_bytes((header + GLOVE).replace("\n", end).encode())
    found = read_vectors(path, WORDS)
    expected = {"the": [0.6, 0.8, 0], "eu": [0, 0, 1.0], "zero": [0, 0, 0], ". . .": [1, 0, 0]}
    assert found.keys() == expected.keys()
    for word, vector in found.items():
        torch.testing.assert_close(vector, torch.tensor(expected[word], dtype=torch.float32))


def test_words_with_other_blanks_are_words(tmp_path: Path) -> None:
    found = read_vectors(write(tmp_path, "a\xa0b 0 1\n  1 0\n"), {"a\xa0b", " "})
    assert {word: vector.tolist() for word, vector in found.items()} == {
        "a\xa0b": [0, 1],
        " ": [1, 0],
    }


def test_a_word_in_other_letter_case_stands_in(tmp_path: Path) -> None:
    found = read_vectors(write(tmp_path, "EU 1 0\nEu 0 1\n"), {"eu"})
    assert found["eu"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 1 2\nb 1\n", r"line 2 has 2 columns: expected a word and 2 numbers"),
        ("a 1 2\nb 1 2 3\n", r"line 2 has 4 columns: expected a word and 2 numbers"),
        ("2 2\na 1 2\nb 1\n", r"line 3 has 2 columns"),
        ("a 1 2\nthe x 2\n", r"line 2, column 2: 'x'; expected a finite number"),
        ("a 1 2\nthe 1 nan\n", r"line 2, column 3: 'nan'; expected a finite number"),
        ("word\n", r"line 1, column 1: 'word'; expected a word and its numbers"),
        ("a 1 2\n\nb 1 2\n", r"line 2 is empty"),
        ("a 1 2\n", r"a vector for none of the 5 words"),
        ("", r" is empty: expected a word and its numbers"),
        ("6 3\n", r"has no vector after its first line: expected a word and its numbers"),
        ("the\t1 2 3 4\neu 1 2 3 4\n", r"line 1 has a tab: .* put one space in place of each"),
        ("the\t3\t4\n", r"line 1 has a tab"),
        ("1\t2\nthe 3 4\n", r"line 1 has a tab"),
        ("a 1 2\nthe\t1 2 3\n", r"line 2 has a tab"),
        ("a 1  2 3\nthe 1 2 3\n", r"line 1 has two consecutive spaces: expected .* single spaces"),
        ("a 1 2\nthe  1 2\n", r"line 2 has two consecutive spaces"),
    ],
)
def test_damage_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InputError, match=r"vectors\.txt.*" + message):
        read_vectors(path, WORDS)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.txt cannot be read \(No such file"):
        read_vectors(tmp_path / "none.txt", WORDS)
    path = tmp_path / "latin.txt"
    path.write_bytes(b"a 1 2\n\xe9 1 2\n")
    with pytest.raises(InputError, match=r"latin\.txt, line 2: byte 0xe9 is not UTF-8"):
        read_vectors(path, WORDS)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.sampled_from([GLOVE, "6 3\n" + GLOVE]).flatmap(lambda t: mutated(t.encode())))
def test_damaged_files_give_a_clean_error_or_vectors(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "vectors.txt"
    path.write_bytes(content)
    try:
        found = read_vectors(path, WORDS)
    except InputError:
        return
    sizes = {vector.shape for vector in found.values()}
    assert len(sizes) == 1
    assert all(vector.isfinite().all() for vector in found.values())
