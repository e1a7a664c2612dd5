from pathlib import Path

import pytest
from hypothesis import strategies as st
from lab.tests.data.byte_mutations import NUM_MUTATIONS, mutated, run_often
from lab.tests.data.official_images import (
    CIFAR_FILES,
    CLASS_NAMES,
    cifar_contents,
    write_archive,
    write_cifar,
)

from powernorm.errors import InputError
from powernorm_lab.tasks.image.sources import read_cifar

FOLDER = "cifar-10-batches-bin"


def _given(tmp_path: Path, given_as: str, contents: dict[str, bytes] | None = None) -> Path:
    if given_as == "folder":
        return write_cifar(tmp_path / FOLDER, contents)
    if given_as == "parent":
        return write_cifar(tmp_path / "data" / FOLDER, contents).parent
    return write_archive(tmp_path / "cifar.tar.gz", contents)


@pytest.mark.parametrize("given_as", ["folder", "parent", "archive"])
def test_batches(tmp_path: Path, given_as: str) -> None:
    train, test, names = read_cifar(_given(tmp_path, given_as))
    assert train.pixels.shape == (10, 3, 32, 32)
    assert test.pixels.shape == (2, 3, 32, 32)
    assert train.labels.tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    assert test.labels.tolist() == [5, 6]
    assert names == tuple(name.decode() for name in CLASS_NAMES)


def test_an_image_is_all_red_then_all_green_then_all_blue_rows_by_rows(tmp_path: Path) -> None:
    contents = cifar_contents()
    row = bytearray(3073)
    row[1 + 1024 + 2 * 32 + 5] = 77
    contents["test_batch.bin"] = bytes(row) + bytes(3073)
    _, test, _ = read_cifar(_given(tmp_path, "folder", contents))
    assert test.pixels.nonzero().tolist() == [[0, 1, 2, 5]]
    assert int(test.pixels[0, 1, 2, 5]) == 77


@pytest.mark.parametrize("name", CIFAR_FILES)
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    contents = cifar_contents()
    del contents[name]
    with pytest.raises(InputError, match=name):
        read_cifar(_given(tmp_path, "folder", contents))
    with pytest.raises(InputError, match=f"has no {FOLDER}/{name}"):
        read_cifar(_given(tmp_path, "archive", contents))


def test_an_archive_writes_nothing_and_other_members_are_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "inner" / "deep"
    folder.mkdir(parents=True)
    path = write_archive(folder / "a.tar.gz", {"../../outside": b"x", **cifar_contents()})
    before = sorted(tmp_path.rglob("*"))
    assert read_cifar(path)[0].labels.numel() == 10
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_no_archive(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(b"not an archive")
    with pytest.raises(InputError, match="damaged archive"):
        read_cifar(path)


def _check(path: Path) -> str:
    """Read the images; return the error's message, or the path if there is no error."""
    try:
        train, test, names = read_cifar(path)
    except InputError as error:
        return str(error)
    assert len(names) == 10
    for part in (train, test):
        assert part.pixels.shape == (len(part.labels), 3, 32, 32)
        assert 0 <= int(part.labels.min()) <= int(part.labels.max()) <= 9
    return str(path)


def _mutations(tmp_path: Path, data: st.DataObject) -> None:
    given_as = data.draw(st.sampled_from(["folder", "archive", "tar"]))
    contents = cifar_contents(1)
    if given_as == "folder":
        name = data.draw(st.sampled_from(CIFAR_FILES))
        contents[name] = data.draw(mutated(contents[name]))
        path = write_cifar(tmp_path / FOLDER, contents)
    else:
        path = write_archive(tmp_path / "a.tar", contents, "w:gz" if given_as == "archive" else "w")
        path.write_bytes(data.draw(mutated(path.read_bytes(), near=600)))
    assert str(path) in _check(path)


@NUM_MUTATIONS
def test_mutated_files_are_read_or_refused(tmp_path: Path, number: int) -> None:
    run_often(lambda data: _mutations(tmp_path, data), number)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data_batch_2.bin", b"", "has 0 bytes, expected 3073 for each image"),
        ("data_batch_2.bin", bytes(3073 + 5), "has 3078 bytes, expected 3073"),
        ("test_batch.bin", bytes(3073) + b"\x0a" + bytes(3072), "label 2 is 10, expected 0 to 9"),
        ("batches.meta.txt", b"one\ntwo\n", "has 2 names, expected one on each line for 10"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    folder = write_cifar(tmp_path / FOLDER, cifar_contents() | {name: content})
    with pytest.raises(InputError, match=message) as caught:
        read_cifar(folder)
    assert name in str(caught.value)
    (folder / name).unlink()
    with pytest.raises(
        InputError, match=rf"{name} cannot be read .* files of cifar-10-batches-bin"
    ):
        read_cifar(folder)
