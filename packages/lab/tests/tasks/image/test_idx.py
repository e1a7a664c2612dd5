import gzip
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from lab.tests.data.byte_mutations import NUM_MUTATIONS, mutated, run_often
from lab.tests.data.official_images import digits, idx, write_mnist

from powernorm.errors import InputError
from powernorm_lab.tasks.image.sources import read_idx, read_idx_folder

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize("mark", ["-", "."])
@pytest.mark.parametrize("packed", [False, True])
def test_four_files(tmp_path: Path, packed: bool, mark: str) -> None:
    train, test = read_idx_folder(write_mnist(tmp_path, packed=packed, mark=mark))
    for seed, (part, number) in enumerate(((train, 24), (test, 6))):
        pixels, labels = digits(number, seed)
        assert torch.equal(part.pixels, pixels[:, None])
        assert torch.equal(part.labels, labels.long())
        assert part.pixels.dtype == torch.uint8


def test_numbers_are_read_with_the_highest_byte_first_and_rows_by_rows(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes.fromhex("00000803 00000001 00000002 00000003 010203040506"))
    assert read_idx(path, 3).tolist() == [[[1, 2, 3], [4, 5, 6]]]


def test_a_packed_file_may_be_called_as_a_plain_one(tmp_path: Path) -> None:
    path = tmp_path / LABELS
    path.write_bytes(gzip.compress(idx(torch.tensor([3, 1], dtype=torch.uint8))))
    assert read_idx(path, 1).tolist() == [3, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"begins with the bytes \(none\)"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x02\x01\x02", "begins with the bytes 00 00 08 01"),
        (b"\x00\x00\x0d\x03" + bytes(12), "expected 00 00 08 03, an idx file of unsigned bytes"),
        (b"\x00\x00\x08\x03\x00\x00", "ends after 6 bytes, within its sizes"),
        (bytes.fromhex("00000803 00000002 0000001c 0000001c") + bytes(1567), "has only 1567"),
        (bytes.fromhex("00000803 00000002 0000001c 0000001c") + bytes(1569), "has more"),
        (bytes.fromhex("00000803 ffffffff 0000001c 0000001c"), "the sizes 4294967295 x 28 x 28"),
        (bytes.fromhex("00000803 00000000 0000001c 0000001c"), "the sizes 0 x 28 x 28"),
        (bytes.fromhex("00000803 00000001 0000001c 0000ffff"), "at most 1024 x 1024"),
        (b"\x1f\x8b\x08\x00", "damaged gzip file"),
        (gzip.compress(bytes(100), mtime=0)[:-5], "damaged gzip file|begins with"),
    ],
)
def test_damaged_files_are_named_with_what_is_wrong(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / IMAGES
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as error:
        read_idx(path, 3)
    assert str(path) in str(error.value)


def test_what_does_not_go_together(tmp_path: Path) -> None:
    folder = write_mnist(tmp_path)
    labels = digits(24)[1]
    (folder / LABELS).write_bytes(idx(labels[:-1]))
    with pytest.raises(InputError, match=r"24 images and .* 23 labels"):
        read_idx_folder(folder)
    labels[5] = 11
    (folder / LABELS).write_bytes(idx(labels))
    with pytest.raises(InputError, match=r"item 6 \(byte 13\): the label 11 is not in 0 to 9"):
        read_idx_folder(folder)
    (folder / LABELS).unlink()
    with pytest.raises(InputError, match=f"has no {LABELS}"):
        read_idx_folder(folder)


def test_images_of_another_size(tmp_path: Path) -> None:
    folder = write_mnist(tmp_path)
    (folder / IMAGES).write_bytes(idx(torch.zeros(24, 16, 28, dtype=torch.uint8)))
    with pytest.raises(InputError, match="images of 16 x 28 pixels: expected 28 x 28"):
        read_idx_folder(folder)


def _check(folder: Path) -> str:
    """Read the folder; return the error's message, or the folder if there is no error."""
    try:
        parts = read_idx_folder(folder)
    except InputError as error:
        return str(error)
    for part in parts:
        assert len(part.pixels) == len(part.labels)
        assert 0 <= int(part.labels.min()) <= int(part.labels.max()) <= 9
    return str(folder)


def _mutations(tmp_path: Path, data: st.DataObject) -> None:
    packed = data.draw(st.booleans())
    folder = tmp_path / ("packed" if packed else "plain")
    if not folder.exists():
        write_mnist(folder, 2, 1, packed=packed)
    name = data.draw(st.sampled_from(sorted(path.name for path in folder.iterdir())))
    original = (folder / name).read_bytes()
    try:
        (folder / name).write_bytes(data.draw(mutated(original, near=24)))
        assert str(folder) in _check(folder)
    finally:
        (folder / name).write_bytes(original)


@NUM_MUTATIONS
def test_mutated_files_are_read_or_refused(tmp_path: Path, number: int) -> None:
    run_often(lambda data: _mutations(tmp_path, data), number)
