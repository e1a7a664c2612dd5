"""CIFAR-10 as it is published, for Python (pickles) and in binary, in a folder or its archive."""

import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from powernorm.errors import InputError
from powernorm.lab.tasks.image.image_set import NUM_CLASSES, Images
from powernorm.lab.tasks.image.inert_pickles import ByteArray, load_inert

IMAGE_SHAPE: Final = (3, 32, 32)
IMAGE_BYTES: Final = 3 * 32 * 32
MAX_BYTES: Final = 256 * 2**20
"""Of one file; an official one has 31 MB."""

_Read = Callable[[str], tuple[bytes, str]]
"""Returns content and full name of one of the files."""


@dataclass(frozen=True)
class _Version:
    """One of the forms in which the set is published; the images are the same.

    Attributes:
        folder: of its files.
        archive: that the folder comes in.
        train: files of training images, in their order.
        test: file of test images.
        names: file with the names of the classes.
        images: reads a file of images, given its content and full name.
        class_names: reads the file of names.
    """

    folder: str
    archive: str
    train: tuple[str, ...]
    test: str
    names: str
    images: Callable[[bytes, str], Images]
    class_names: Callable[[bytes, str], tuple[str, ...]]

    @property
    def files(self) -> tuple[str, ...]:
        """Return the names of all files."""
        return (*self.train, self.test, self.names)

    def folder_in(self, path: Path) -> Path | None:
        """Return the folder with a batch: a path itself or the official one in it; else None."""
        for place in (path, path / self.folder):
            if any((place / name).exists() for name in (*self.train, self.test)):
                return place
        return None


def is_cifar_folder(folder: Path) -> bool:
    """Return whether a folder, or the official one in it, has any batch, or it has an archive."""
    return any(
        version.folder_in(folder) is not None or (folder / version.archive).is_file()
        for version in _VERSIONS
    )


def is_archive(path: Path) -> bool:
    """Return whether a path is called like a tar archive."""
    return path.name.endswith((".tar.gz", ".tgz", ".tar"))


def read_cifar(path: Path) -> tuple[Images, Images, tuple[str, ...]]:
    """Read the training and the test images, and the names of the classes.

    Args:
        path: of `cifar-10-batches-bin` or `cifar-10-batches-py`, of `cifar-10-binary.tar.gz` or
            `cifar-10-python.tar.gz`, which are read without unpacking them to the disk, or of a
            folder that has one of them. The binary version holds no pickles.

    Raises:
        InputError: a file is missing or damaged, or holds anything but data.
    """
    if not path.is_dir():
        return _read_archive(path)
    # What is unpacked is quicker to read, so an archive beside it is not opened.
    for version in _VERSIONS:
        folder = version.folder_in(path)
        if folder is not None:
            return _read_all(version, partial(_read_file, version, folder))
    archives = [path / version.archive for version in _VERSIONS]
    found = next((archive for archive in archives if archive.is_file()), None)
    if found is None:
        raise InputError(f"{path} holds no file of CIFAR-10: expected {FOLDERS} or their archives")
    return _read_archive(found)


def _read_file(version: _Version, folder: Path, name: str) -> tuple[bytes, str]:
    path = folder / name
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path} has more than {MAX_BYTES} bytes: expected about 31 million")
        return path.read_bytes(), str(path)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}): expected the files of {version.folder}, "
            f"which are {', '.join(version.files)}"
        ) from error


def _read_archive(path: Path) -> tuple[Images, Images, tuple[str, ...]]:
    try:
        found = _wanted_members(path)
    except (tarfile.TarError, EOFError, zlib.error, ValueError, OverflowError) as error:
        raise InputError(f"{path} is a damaged archive ({error}): fetch it again") from error
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror or error}): expected {ARCHIVES}"
        ) from error
    held = {folder for folder, _ in found}
    version = next((one for one in _VERSIONS if one.folder in held), _PYTHON)
    missing = [name for name in version.files if (version.folder, name) not in found]
    if missing:
        raise InputError(f"{path} has no {version.folder}/{missing[0]}: expected {ARCHIVES}")
    return _read_all(
        version,
        lambda name: (found[version.folder, name], f"{path}, {version.folder}/{name}"),
    )


def _wanted_members(path: Path) -> dict[tuple[str, str], bytes]:
    """Read the batches; no member is written anywhere, and other ones are passed over."""
    wanted = {(version.folder, name) for version in _VERSIONS for name in version.files}
    found: dict[tuple[str, str], bytes] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            folder, _, name = member.name.removeprefix("./").rpartition("/")
            if (folder, name) not in wanted or not member.isfile():
                continue
            if member.size > MAX_BYTES:
                raise ValueError(f"{member.name} has more than {MAX_BYTES} bytes")
            content = archive.extractfile(member)
            found[folder, name] = content.read() if content else b""
    return found


def _read_all(version: _Version, read: _Read) -> tuple[Images, Images, tuple[str, ...]]:
    class_names = version.class_names(*read(version.names))
    parts = [version.images(*read(name)) for name in version.train]
    train = Images(
        torch.cat([part.pixels for part in parts]), torch.cat([part.labels for part in parts])
    )
    return train, version.images(*read(version.test)), class_names


def _pickled_images(content: bytes, source: str) -> Images:
    found = _dictionary(content, source)
    data, labels = found.get("data"), found.get("labels")
    if not isinstance(data, ByteArray) or len(data.shape) != 2 or data.shape[1] != IMAGE_BYTES:
        shape = data.shape if isinstance(data, ByteArray) else type(data).__name__
        raise InputError(
            f"{source}: its 'data' is {shape}, expected an array of (images, {IMAGE_BYTES}) bytes"
        )
    if not isinstance(labels, list) or len(labels) != data.shape[0] or not labels:
        number = len(labels) if isinstance(labels, list) else type(labels).__name__
        raise InputError(
            f"{source}: its 'labels' are {number}, expected a list with one for each of the "
            f"{data.shape[0]} images"
        )
    for number, label in enumerate(labels, start=1):
        if type(label) is not int or not 0 <= label < NUM_CLASSES:
            raise InputError(
                f"{source}: label {number} is {label!r:.40}, expected 0 to {NUM_CLASSES - 1}"
            )
    pixels = torch.frombuffer(bytearray(data.content), dtype=torch.uint8)
    return Images(pixels.reshape(-1, *IMAGE_SHAPE), torch.tensor(labels))


def _pickled_class_names(content: bytes, source: str) -> tuple[str, ...]:
    names = _dictionary(content, source).get("label_names")
    if not isinstance(names, list) or len(names) != NUM_CLASSES:
        raise InputError(f"{source}: expected a list of {NUM_CLASSES} 'label_names'")
    return tuple(_text(name) for name in names)


def _binary_images(content: bytes, source: str) -> Images:
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


def _listed_class_names(content: bytes, source: str) -> tuple[str, ...]:
    names = content.decode("utf-8", "replace").split()
    if len(names) != NUM_CLASSES:
        raise InputError(
            f"{source} has {len(names)} names, expected one a line for {NUM_CLASSES} classes"
        )
    return tuple(names)


def _dictionary(content: bytes, source: str) -> dict[str, Any]:
    found = load_inert(content, source)
    if not isinstance(found, dict):
        raise InputError(f"{source} holds a {type(found).__name__}: expected a dictionary")
    return {_text(key): value for key, value in found.items()}


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


_BINARY: Final = _Version(
    "cifar-10-batches-bin",
    "cifar-10-binary.tar.gz",
    tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    "test_batch.bin",
    "batches.meta.txt",
    _binary_images,
    _listed_class_names,
)
_PYTHON: Final = _Version(
    "cifar-10-batches-py",
    "cifar-10-python.tar.gz",
    tuple(f"data_batch_{number}" for number in range(1, 6)),
    "test_batch",
    "batches.meta",
    _pickled_images,
    _pickled_class_names,
)
_VERSIONS: Final = (_BINARY, _PYTHON)
"""The one without pickles first: where both are there it is read."""
FOLDERS: Final = " or ".join(version.folder for version in _VERSIONS)
ARCHIVES: Final = " or ".join(version.archive for version in _VERSIONS)
