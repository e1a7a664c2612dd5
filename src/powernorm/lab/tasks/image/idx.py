"""MNIST's own format, idx: four files, plain or packed by gzip.

A file begins with two zero bytes, the type of its numbers (8: unsigned bytes), the number of
dimensions and then, four bytes each with the highest first, the sizes; the numbers follow.
"""

import gzip
import math
import zlib
from pathlib import Path
from typing import IO, Final

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm.lab.tasks.image.image_set import NUM_CLASSES, Images

UNSIGNED_BYTES: Final = 8
IMAGE_SIDE: Final = 28
MAX_ITEMS: Final = 1_000_000
"""A packed file that claims more is not unpacked."""
_GZIP_START: Final = b"\x1f\x8b"


def is_idx_folder(folder: Path) -> bool:
    """Return whether a folder has any of the four files."""
    return any(
        path.exists()
        for part in ("train", "t10k")
        for kind in ("images", "labels")
        for path in _candidates(folder, part, kind)
    )


def read_idx_folder(folder: Path) -> tuple[Images, Images]:
    """Read the training and the test images of a folder with the four official files.

    `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, `t10k-images-idx3-ubyte` and
    `t10k-labels-idx1-ubyte`, with or without `.gz`; some programs write `.idx3` for `-idx3`.

    Raises:
        InputError: a file is missing or damaged, or images and labels do not go together.
    """
    return _read_part(folder, "train"), _read_part(folder, "t10k")


def _read_part(folder: Path, part: str) -> Images:
    image_path, label_path = (_official_file(folder, part, kind) for kind in ("images", "labels"))
    pixels = read_idx(image_path, 3)
    labels = read_idx(label_path, 1)
    if tuple(pixels.shape[1:]) != (IMAGE_SIDE, IMAGE_SIDE):
        raise InputError(
            f"{image_path} has images of {pixels.shape[1]} x {pixels.shape[2]} pixels: expected "
            f"{IMAGE_SIDE} x {IMAGE_SIDE}"
        )
    if len(pixels) != len(labels):
        raise InputError(
            f"{image_path} has {len(pixels)} images and {label_path} {len(labels)} labels: "
            "expected one for each"
        )
    wrong = (labels >= NUM_CLASSES).nonzero().flatten()
    if len(wrong):
        number = int(wrong[0])
        raise InputError(
            f"{label_path}, item {number + 1} (byte {number + 8}): the label {int(labels[number])} "
            f"is none of 0 to {NUM_CLASSES - 1}"
        )
    return Images(pixels[:, None], labels.long())


def _official_file(folder: Path, part: str, kind: str) -> Path:
    candidates = _candidates(folder, part, kind)
    for path in candidates:
        if path.exists():
            return path
    raise InputError(
        f"{folder} has no {candidates[0].name}: expected the four files of MNIST, plain or .gz"
    )


def _candidates(folder: Path, part: str, kind: str) -> list[Path]:
    dimensions = {"images": 3, "labels": 1}[kind]
    stems = [f"{part}-{kind}{mark}idx{dimensions}-ubyte" for mark in "-."]
    return [folder / f"{stem}{ending}" for stem in stems for ending in ("", ".gz")]


def read_idx(path: Path, num_dimensions: int) -> Tensor:
    """Read one file.

    Args:
        path: plain or packed by gzip, whatever its name.
        num_dimensions: 3 for images, 1 for labels.

    Returns:
        uint8, with as many dimensions.

    Raises:
        InputError: it cannot be read, is of another type, or has fewer or more bytes than it says.
    """
    try:
        with path.open("rb") as plain:
            packed = plain.read(2) == _GZIP_START
            plain.seek(0)
            if packed:
                with gzip.open(plain) as unpacked:
                    return _parse(unpacked, path, num_dimensions)
            return _parse(plain, path, num_dimensions)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(
            f"{path} is a damaged gzip file ({error}): fetch or unpack it again"
        ) from error
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}): expected an idx file"
        ) from error


def _parse(file: "IO[bytes] | gzip.GzipFile", path: Path, num_dimensions: int) -> Tensor:
    head = file.read(4 + 4 * num_dimensions)
    magic = bytes([0, 0, UNSIGNED_BYTES, num_dimensions])
    if head[:4] != magic:
        raise InputError(
            f"{path} begins with the bytes {head[:4].hex(' ') or '(none)'}: expected "
            f"{magic.hex(' ')}, an idx file of unsigned bytes with {num_dimensions} "
            f"dimension{'s' if num_dimensions > 1 else ''}"
        )
    if len(head) < 4 + 4 * num_dimensions:
        raise InputError(f"{path} ends after {len(head)} bytes, within its sizes: fetch it again")
    shape = [int.from_bytes(head[at : at + 4], "big") for at in range(4, len(head), 4)]
    sides_fit = all(1 <= side <= 1024 for side in shape[1:])
    if not 1 <= shape[0] <= MAX_ITEMS or not sides_fit:
        raise InputError(
            f"{path} says that its sizes are {' x '.join(map(str, shape))}: expected 1 to "
            f"{MAX_ITEMS} items of at most 1024 x 1024"
        )
    num_bytes = math.prod(shape)
    content = bytearray(file.read(num_bytes + 1))
    if len(content) != num_bytes:
        found = "more" if len(content) > num_bytes else f"only {len(content)}"
        raise InputError(
            f"{path} must have {num_bytes} bytes after its sizes ({' x '.join(map(str, shape))}), "
            f"and has {found}: fetch it again"
        )
    return torch.frombuffer(content, dtype=torch.uint8).reshape(shape)
