"""Data sets of images by name, and readers of the user's files.

MNIST has four files in the format idx, plain or compressed by gzip. A file begins with two zero
bytes, the type of its numbers (8: unsigned bytes), the number of dimensions, and the sizes in four
bytes each, most significant first; the numbers follow.

`drawn-digits` are synthetic digits for offline tests: seven-segment digits in 28 x 28 gray pixels,
randomly shifted, thickened and faded, with noise. A network classifies nearly all of them after a
minute of training, so that scores on them say nothing about norms on real images.
"""

import gzip
import math
import tarfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from powernorm.errors import InputError
from powernorm_lab.data.catalog import data_set
from powernorm_lab.data.fetching import fetched
from powernorm_lab.data.files import USER_LICENSE
from powernorm_lab.tasks.image.data import NUM_CLASSES, Images, ImageSet, divided

SIDE: Final = 28
NUM_TRAIN: Final = 3000
NUM_OTHER: Final = 500
_SEGMENTS: Final = (
    "abcdef",
    "bc",
    "abdeg",
    "abcdg",
    "bcfg",
    "acdfg",
    "acdefg",
    "abc",
    "abcdefg",
    "abcdfg",
)
"""Segments of each digit: a is the top, b to f follow clockwise, g is the middle."""
_PLACES: Final = {
    # rows and columns in a box of 17 x 9
    "a": (slice(0, 1), slice(0, 9)),
    "b": (slice(0, 9), slice(8, 9)),
    "c": (slice(8, 17), slice(8, 9)),
    "d": (slice(16, 17), slice(0, 9)),
    "e": (slice(8, 17), slice(0, 1)),
    "f": (slice(0, 9), slice(0, 1)),
    "g": (slice(8, 9), slice(0, 9)),
}
_HEIGHT: Final = 17
_WIDTH: Final = 9
_SEED: Final = 20191116


def drawn_digits() -> tuple[Images, Images]:
    """Return synthetic training and test images, the same at every call."""
    generator = torch.Generator().manual_seed(_SEED)
    train = _draw(NUM_TRAIN + NUM_OTHER, generator)
    return train, _draw(NUM_OTHER, generator)


def _draw(num_images: int, generator: torch.Generator) -> Images:
    def draw(high: int) -> Tensor:
        return torch.randint(high, (num_images,), generator=generator)

    labels = draw(10)
    top, left = draw(SIDE - _HEIGHT + 1), (SIDE - _WIDTH) // 4 + draw((SIDE - _WIDTH) // 2 + 1)
    rows = torch.arange(SIDE) - top[:, None]
    columns = torch.arange(SIDE) - left[:, None]
    inside = ((rows >= 0) & (rows < _HEIGHT))[:, :, None] & ((columns >= 0) & (columns < _WIDTH))[
        :, None, :
    ]
    ink = _glyphs()[
        labels[:, None, None],
        rows.clamp(0, _HEIGHT - 1)[:, :, None],
        columns.clamp(0, _WIDTH - 1)[:, None, :],
    ]
    image = (ink * inside)[:, None]
    thick = F.max_pool2d(image, 3, stride=1, padding=1)
    image = torch.where(draw(2).bool()[:, None, None, None], thick, image)
    strength = 0.4 + 0.6 * torch.rand(num_images, 1, 1, 1, generator=generator)
    noise = 0.15 * torch.randn(image.shape, generator=generator)
    pixels = (255 * (image * strength + noise)).round().clamp(0, 255).to(torch.uint8)
    return Images(pixels, labels)


def _glyphs() -> Tensor:
    glyphs = torch.zeros(10, _HEIGHT, _WIDTH)
    for digit, segments in enumerate(_SEGMENTS):
        for segment in segments:
            rows, columns = _PLACES[segment]
            glyphs[digit, rows, columns] = 1
    return glyphs


UNSIGNED_BYTES: Final = 8
IMAGE_SIDE: Final = 28
MAX_ITEMS: Final = 1_000_000
"""Maximal number of items; a compressed file that declares more is not decompressed."""
_GZIP_START: Final = b"\x1f\x8b"


def is_idx_folder(folder: Path) -> bool:
    """Return whether a folder has any of the four files of MNIST."""
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
        InputError: a file is missing or damaged, or the numbers of images and labels differ.
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
            f"is not in 0 to {NUM_CLASSES - 1}"
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
    """Read an idx file.

    Args:
        path: path of the file, plain or compressed by gzip, regardless of its name.
        num_dimensions: 3 for images, 1 for labels.

    Returns:
        uint8, with `num_dimensions` dimensions.

    Raises:
        InputError: the file cannot be read, is of another type, or its length does not fit its
            header.
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
            f"{path} is a damaged gzip file ({error}): fetch or decompress it again"
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
            f"{path} declares the sizes {' x '.join(map(str, shape))}: expected 1 to "
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


# The binary version of CIFAR-10, in a folder or its archive.


IMAGE_SHAPE: Final = (3, 32, 32)
IMAGE_BYTES: Final = 3 * 32 * 32
MAX_BYTES: Final = 256 * 2**20
"""Maximal size of a file; official ones have 31 MB."""

FOLDER: Final = "cifar-10-batches-bin"
ARCHIVE: Final = "cifar-10-binary.tar.gz"
_TRAIN: Final = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_TEST: Final = "test_batch.bin"
_NAMES: Final = "batches.meta.txt"
_FILES: Final = (*_TRAIN, _TEST, _NAMES)

_Read = Callable[[str], tuple[bytes, str]]
"""Returns the content and the full name of one of the files."""


def is_cifar_folder(folder: Path) -> bool:
    """Return whether a folder has the archive, or it or `FOLDER` in it has a batch."""
    return _folder_in(folder) is not None or (folder / ARCHIVE).is_file()


def _folder_in(path: Path) -> Path | None:
    """Return the folder with a batch: the path itself or `FOLDER` in it; None without one."""
    for place in (path, path / FOLDER):
        if any((place / name).exists() for name in (*_TRAIN, _TEST)):
            return place
    return None


def is_archive(path: Path) -> bool:
    """Return whether a path has the suffix of a tar archive."""
    return path.name.endswith((".tar.gz", ".tgz", ".tar"))


def read_cifar(path: Path) -> tuple[Images, Images, tuple[str, ...]]:
    """Read the training and the test images, and the names of the classes.

    Args:
        path: path of `cifar-10-batches-bin`, of `cifar-10-binary.tar.gz`, which is read without
            unpacking it to disk, or of a folder with one of them.

    Raises:
        InputError: a file is missing or damaged.
    """
    if not path.is_dir():
        return _read_archive(path)
    # Unpacked files are faster to read than an archive next to them.
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
    """Read the batches into memory, skipping other members of the archive."""
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
    """Parse images: one byte for the label and 3,072 for the pixels of each."""
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
            f"{source} has {len(names)} names, expected one on each line for {NUM_CLASSES} classes"
        )
    return tuple(names)


DEFAULT: Final = "mnist"
DRAWN: Final = "drawn-digits"
IMAGE_SETS: Final = (DEFAULT, DRAWN)
"""Names of the data sets that need no path."""
MNIST_PERIOD: Final = 12
CIFAR_PERIOD: Final = 10
_DIGITS: Final = tuple(map(str, range(NUM_CLASSES)))


def load_images(source: str | None) -> ImageSet:
    """Return the images that a configuration names.

    - `mnist`: the fetched images, 55,000 / 5,000 / 10,000
    - `drawn-digits`: synthetic digits for offline tests, 3,209 / 291 / 500
    - a folder with MNIST's four idx files (or others of that format, with labels 0 to 9)
    - `cifar-10-batches-bin`, its archive, or the folder that has one of them: 45,000 / 5,000 /
      10,000

    The valid split is the end of the official training images: the last twelfth of idx files,
    the last tenth of CIFAR-10's.

    Args:
        source: one of these; None is `mnist`. (Use `./mnist` for a folder of this name.)

    Raises:
        InputError: there are no such images, or a file is damaged.
    """
    name = DEFAULT if source is None else source
    if name == DRAWN:
        splits = divided(*drawn_digits(), MNIST_PERIOD)
        return ImageSet(name, "drawn by powernorm", "none is needed", splits, _DIGITS, False)
    if name == DEFAULT:
        entry = data_set(DEFAULT)
        return _digits(fetched(DEFAULT), DEFAULT, entry.origin, entry.license)
    return _read(Path(name))


def _digits(folder: Path, name: str, source: str, license: str) -> ImageSet:
    splits = divided(*read_idx_folder(folder), MNIST_PERIOD)
    return ImageSet(name, source, license, splits, _DIGITS, False)


def _read(path: Path) -> ImageSet:
    if path.is_dir() and is_idx_folder(path):
        return _digits(path, path.resolve().name, str(path), USER_LICENSE)
    if (path.is_dir() and is_cifar_folder(path)) or (path.is_file() and is_archive(path)):
        train, test, class_names = read_cifar(path)
        splits = divided(train, test, CIFAR_PERIOD)
        return ImageSet("cifar10", str(path), USER_LICENSE, splits, class_names, True)
    problem = "holds no images" if path.exists() else "does not exist"
    raise InputError(
        f"{path} {problem}: expected a folder with MNIST's "
        f"four idx files, {FOLDER}, {ARCHIVE}, a folder with one of these, or one of "
        f"{', '.join(IMAGE_SETS)}"
    )
