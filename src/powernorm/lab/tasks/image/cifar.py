"""CIFAR-10's own format: pickled batches of 3,072 bytes an image, in a folder or its archive."""

import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from powernorm.errors import InputError
from powernorm.lab.tasks.image.image_set import NUM_CLASSES, Images
from powernorm.lab.tasks.image.inert_pickles import ByteArray, load_inert

FOLDER: Final = "cifar-10-batches-py"
ARCHIVE: Final = "cifar-10-python.tar.gz"
TRAIN_FILES: Final = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILE: Final = "test_batch"
NAMES_FILE: Final = "batches.meta"
IMAGE_SHAPE: Final = (3, 32, 32)
IMAGE_BYTES: Final = 3 * 32 * 32
MAX_BYTES: Final = 256 * 2**20
"""Of one file; an official one has 31 MB."""

_Read = Callable[[str], tuple[bytes, str]]
"""Returns content and full name of one of the files."""


def is_cifar_folder(folder: Path) -> bool:
    """Return whether a folder, or the official one in it, has any batch, or it has the archive."""
    return _has_batches(folder) or (folder / ARCHIVE).is_file()


def _has_batches(folder: Path) -> bool:
    names = (*TRAIN_FILES, TEST_FILE)
    return any((place / name).exists() for place in (folder, folder / FOLDER) for name in names)


def is_archive(path: Path) -> bool:
    """Return whether a path is called like a tar archive."""
    return path.name.endswith((".tar.gz", ".tgz", ".tar"))


def read_cifar(path: Path) -> tuple[Images, Images, tuple[str, ...]]:
    """Read the training and the test images, and the names of the classes.

    Args:
        path: of `cifar-10-batches-py`, of `cifar-10-python.tar.gz`, which is read without
            unpacking it to the disk, or of a folder that has one of them.

    Raises:
        InputError: a file is missing or damaged, or holds anything but data.
    """
    # What is unpacked is quicker to read, so the archive beside it is not opened.
    if path.is_dir() and not _has_batches(path) and (path / ARCHIVE).is_file():
        return _read_archive(path / ARCHIVE)
    if path.is_dir():
        folder = path / FOLDER if (path / FOLDER).is_dir() else path
        return _read_all(lambda name: _read_file(folder / name))
    return _read_archive(path)


def _read_file(path: Path) -> tuple[bytes, str]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path} has more than {MAX_BYTES} bytes: expected about 31 million.")
        return path.read_bytes(), str(path)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}): expected the files of {FOLDER}, which are "
            f"{', '.join((*TRAIN_FILES, TEST_FILE, NAMES_FILE))}."
        ) from error


def _read_archive(path: Path) -> tuple[Images, Images, tuple[str, ...]]:
    wanted = (*TRAIN_FILES, TEST_FILE, NAMES_FILE)
    try:
        found = _wanted_members(path, wanted)
    except (tarfile.TarError, EOFError, zlib.error, ValueError, OverflowError) as error:
        raise InputError(f"{path} is a damaged archive ({error}): fetch it again.") from error
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror or error}): expected {ARCHIVE}."
        ) from error
    missing = [name for name in wanted if name not in found]
    if missing:
        raise InputError(f"{path} has no {FOLDER}/{missing[0]}: expected the archive {ARCHIVE}.")
    return _read_all(lambda name: (found[name], f"{path}, {FOLDER}/{name}"))


def _wanted_members(path: Path, wanted: tuple[str, ...]) -> dict[str, bytes]:
    """Read the batches; no member is written anywhere, and other ones are passed over."""
    found: dict[str, bytes] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            folder, _, name = member.name.removeprefix("./").rpartition("/")
            if folder != FOLDER or name not in wanted or not member.isfile():
                continue
            if member.size > MAX_BYTES:
                raise ValueError(f"{member.name} has more than {MAX_BYTES} bytes")
            content = archive.extractfile(member)
            found[name] = content.read() if content else b""
    return found


def _read_all(read: _Read) -> tuple[Images, Images, tuple[str, ...]]:
    class_names = _class_names(*read(NAMES_FILE))
    parts = [_images(*read(name)) for name in TRAIN_FILES]
    train = Images(
        torch.cat([part.pixels for part in parts]), torch.cat([part.labels for part in parts])
    )
    return train, _images(*read(TEST_FILE)), class_names


def _images(content: bytes, source: str) -> Images:
    found = _dictionary(content, source)
    data, labels = found.get("data"), found.get("labels")
    if not isinstance(data, ByteArray) or len(data.shape) != 2 or data.shape[1] != IMAGE_BYTES:
        shape = data.shape if isinstance(data, ByteArray) else type(data).__name__
        raise InputError(
            f"{source}: its 'data' is {shape}, expected an array of (images, {IMAGE_BYTES}) bytes."
        )
    if not isinstance(labels, list) or len(labels) != data.shape[0] or not labels:
        number = len(labels) if isinstance(labels, list) else type(labels).__name__
        raise InputError(
            f"{source}: its 'labels' are {number}, expected a list with one for each of the "
            f"{data.shape[0]} images."
        )
    for number, label in enumerate(labels, start=1):
        if type(label) is not int or not 0 <= label < NUM_CLASSES:
            raise InputError(
                f"{source}: label {number} is {label!r:.40}, expected 0 to {NUM_CLASSES - 1}."
            )
    pixels = torch.frombuffer(bytearray(data.content), dtype=torch.uint8)
    return Images(pixels.reshape(-1, *IMAGE_SHAPE), torch.tensor(labels))


def _class_names(content: bytes, source: str) -> tuple[str, ...]:
    names = _dictionary(content, source).get("label_names")
    if not isinstance(names, list) or len(names) != NUM_CLASSES:
        raise InputError(f"{source}: expected a list of {NUM_CLASSES} 'label_names'.")
    return tuple(_text(name) for name in names)


def _dictionary(content: bytes, source: str) -> dict[str, Any]:
    found = load_inert(content, source)
    if not isinstance(found, dict):
        raise InputError(f"{source} holds a {type(found).__name__}: expected a dictionary.")
    return {_text(key): value for key, value in found.items()}


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
