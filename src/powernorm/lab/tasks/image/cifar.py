"""CIFAR-10 as it is published in binary, in a folder or its archive."""

import tarfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import torch

from powernorm.errors import InputError
from powernorm.lab.tasks.image.image_set import NUM_CLASSES, Images

IMAGE_SHAPE: Final = (3, 32, 32)
IMAGE_BYTES: Final = 3 * 32 * 32
MAX_BYTES: Final = 256 * 2**20
"""Of one file; an official one has 31 MB."""

FOLDER: Final = "cifar-10-batches-bin"
ARCHIVE: Final = "cifar-10-binary.tar.gz"
_TRAIN: Final = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_TEST: Final = "test_batch.bin"
_NAMES: Final = "batches.meta.txt"
_FILES: Final = (*_TRAIN, _TEST, _NAMES)

_Read = Callable[[str], tuple[bytes, str]]
"""Returns content and full name of one of the files."""


def is_cifar_folder(folder: Path) -> bool:
    """Return whether a folder, or the official one in it, has any batch, or it has the archive."""
    return _folder_in(folder) is not None or (folder / ARCHIVE).is_file()


def _folder_in(path: Path) -> Path | None:
    """Return the folder with a batch: a path itself or the official one in it; else None."""
    for place in (path, path / FOLDER):
        if any((place / name).exists() for name in (*_TRAIN, _TEST)):
            return place
    return None


def is_archive(path: Path) -> bool:
    """Return whether a path is called like a tar archive."""
    return path.name.endswith((".tar.gz", ".tgz", ".tar"))


def read_cifar(path: Path) -> tuple[Images, Images, tuple[str, ...]]:
    """Read the training and the test images, and the names of the classes.

    Args:
        path: of `cifar-10-batches-bin`, of `cifar-10-binary.tar.gz`, which is read without
            unpacking it to the disk, or of a folder that has one of them.

    Raises:
        InputError: a file is missing or damaged.
    """
    if not path.is_dir():
        return _read_archive(path)
    # What is unpacked is quicker to read, so an archive beside it is not opened.
    folder = _folder_in(path)
    if folder is not None:
        return _read_all(partial(_read_file, folder))
    if not (path / ARCHIVE).is_file():
        raise InputError(f"{path} holds no file of CIFAR-10: expected {FOLDER} or {ARCHIVE}")
    return _read_archive(path / ARCHIVE)


def _read_file(folder: Path, name: str) -> tuple[bytes, str]:
    path = folder / name
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path} has more than {MAX_BYTES} bytes: expected about 31 million")
        return path.read_bytes(), str(path)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}): expected the files of {FOLDER}, which are "
            f"{', '.join(_FILES)}"
        ) from error


def _read_archive(path: Path) -> tuple[Images, Images, tuple[str, ...]]:
    try:
        found = _wanted_members(path)
    except (tarfile.TarError, EOFError, zlib.error, ValueError, OverflowError) as error:
        raise InputError(f"{path} is a damaged archive ({error}): fetch it again") from error
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror or error}): expected {ARCHIVE}"
        ) from error
    missing = [name for name in _FILES if name not in found]
    if missing:
        raise InputError(
            f"{path} has no {FOLDER}/{missing[0]}: expected {ARCHIVE}, the binary version"
        )
    return _read_all(lambda name: (found[name], f"{path}, {FOLDER}/{name}"))


def _wanted_members(path: Path) -> dict[str, bytes]:
    """Read the batches; no member is written anywhere, and other ones are passed over."""
    found: dict[str, bytes] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            folder, _, name = member.name.removeprefix("./").rpartition("/")
            if folder != FOLDER or name not in _FILES or not member.isfile():
                continue
            if member.size > MAX_BYTES:
                raise ValueError(f"{member.name} has more than {MAX_BYTES} bytes")
            content = archive.extractfile(member)
            found[name] = content.read() if content else b""
    return found


def _read_all(read: _Read) -> tuple[Images, Images, tuple[str, ...]]:
    class_names = _class_names(*read(_NAMES))
    parts = [_images(*read(name)) for name in _TRAIN]
    train = Images(
        torch.cat([part.pixels for part in parts]), torch.cat([part.labels for part in parts])
    )
    return train, _images(*read(_TEST)), class_names


def _images(content: bytes, source: str) -> Images:
    """Read images of a byte with the label and 3,072 with the pixels each."""
    size = 1 + IMAGE_BYTES
    if not content or len(content) % size:
        raise InputError(
            f"{source} has {len(content)} bytes, expected {size} for each image (10,000 images)"
        )
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(-1, size)
    labels = rows[:, 0].long()
    wrong = (labels >= NUM_CLASSES).nonzero()
    if len(wrong):
        number = int(wrong[0])
        raise InputError(
            f"{source}: label {number + 1} is {int(labels[number])}, expected 0 to "
            f"{NUM_CLASSES - 1}"
        )
    return Images(rows[:, 1:].reshape(-1, *IMAGE_SHAPE).clone(), labels)


def _class_names(content: bytes, source: str) -> tuple[str, ...]:
    names = content.decode("utf-8", "replace").split()
    if len(names) != NUM_CLASSES:
        raise InputError(
            f"{source} has {len(names)} names, expected one a line for {NUM_CLASSES} classes"
        )
    return tuple(names)
