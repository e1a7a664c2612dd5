"""Images in three splits, as in their files."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from torch import Tensor

from powernorm.errors import InputError
from powernorm_lab.data.corpus import SPLITS, Split

NUM_CLASSES: Final = 10
"""Number of classes of every supported data set."""


class Images(NamedTuple):
    """Images and their classes."""

    pixels: Tensor
    """uint8, (images, channels, height, width)."""
    labels: Tensor
    """int64, (images,)."""

    def part(self, chosen: slice | Tensor) -> "Images":
        """Return some of the images."""
        return Images(self.pixels[chosen], self.labels[chosen])


@dataclass(frozen=True)
class ImageSet:
    """Images in three splits.

    Attributes:
        name: short name.
        source: origin of the images.
        license: license of the images.
        splits: the images.
        class_names: names of the classes, in the order of labels.
        can_be_mirrored: whether a mirrored image keeps its class, such as a cat, but not a digit.
    """

    name: str
    source: str
    license: str
    splits: Mapping[Split, Images]
    class_names: tuple[str, ...]
    can_be_mirrored: bool

    def __post_init__(self) -> None:
        for split in SPLITS:
            if not len(self.splits[split].labels):
                raise InputError(f"the {split} split of {self.source} has no images: give some")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return channels, height and width of an image."""
        _, channels, height, width = self.splits["train"].pixels.shape
        return channels, height, width

    def fingerprint(self) -> str:
        """Return a hash of all images and labels."""
        digest = hashlib.sha256(repr((self.class_names, self.can_be_mirrored)).encode())
        for split in SPLITS:
            pixels, labels = self.splits[split]
            digest.update(repr(tuple(pixels.shape)).encode())
            digest.update(pixels.numpy().tobytes())
            digest.update(labels.numpy().tobytes())
        return digest.hexdigest()


def divided(train: Images, test: Images, period: int) -> dict[Split, Images]:
    """Return three splits; the last 1 / `period` of the training images becomes the valid split.

    Args:
        train: the official training images, at least 2.
        test: the official test images.
        period: 12 for MNIST (55,000 and 5,000), 10 for CIFAR-10 (45,000 and 5,000).

    Raises:
        InputError: there are fewer than 2 training images.
    """
    num_train = len(train.labels)
    if num_train < 2:
        raise InputError(
            f"there is only {num_train} training image: at least 2 are needed to set one aside for "
            "validation"
        )
    first_valid = num_train - max(1, num_train // period)
    return {
        "train": train.part(slice(first_valid)),
        "valid": train.part(slice(first_valid, None)),
        "test": test,
    }
