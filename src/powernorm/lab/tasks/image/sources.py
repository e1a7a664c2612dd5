"""The sets of images by name, and the user's own files."""

from pathlib import Path
from typing import Final

from powernorm.errors import InputError
from powernorm.lab.data.fetching import fetched
from powernorm.lab.data.readers import USER_LICENSE
from powernorm.lab.data.sets.catalog import data_set
from powernorm.lab.tasks.image.cifar import (
    ARCHIVE,
    FOLDER,
    is_archive,
    is_cifar_folder,
    read_cifar,
)
from powernorm.lab.tasks.image.drawn_digits import drawn_digits
from powernorm.lab.tasks.image.idx import is_idx_folder, read_idx_folder
from powernorm.lab.tasks.image.image_set import NUM_CLASSES, ImageSet, divided

DEFAULT: Final = "mnist"
DRAWN: Final = "drawn-digits"
IMAGE_SETS: Final = (DEFAULT, DRAWN)
"""Names of those that need no path."""
MNIST_PERIOD: Final = 12
CIFAR_PERIOD: Final = 10
_DIGITS: Final = tuple(map(str, range(NUM_CLASSES)))


def load_images(source: str | None) -> ImageSet:
    """Return the images that a configuration names.

    - `mnist`: the fetched ones, 55,000 / 5,000 / 10,000
    - `drawn-digits`: digits that the program draws, 3,209 / 291 / 500, to try things out offline
    - a folder with MNIST's four idx files (or others of that format, with labels 0 to 9)
    - `cifar-10-batches-bin`, its archive, or the folder that has one of them: 45,000 / 5,000 /
      10,000

    The valid split is the end of the official training images: the last twelfth of idx files,
    the last tenth of CIFAR-10's.

    Args:
        source: one of these; None is `mnist`. (Write `./mnist` for a folder of that name.)

    Raises:
        InputError: there are no such images, or a file is damaged.
    """
    name = DEFAULT if source is None else source
    if name == DRAWN:
        splits = divided(*drawn_digits(), MNIST_PERIOD)
        return ImageSet(name, "drawn by powernorm", "none is needed", splits, _DIGITS, False)
    if name == DEFAULT:
        entry = data_set(DEFAULT)
        source = f"{entry.summary}, {entry.source}"
        return _digits(fetched(DEFAULT), DEFAULT, source, entry.license)
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
