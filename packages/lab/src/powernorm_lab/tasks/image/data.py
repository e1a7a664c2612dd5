"""Images in three splits, normalized by their statistics, and their batches.

Order and augmentation of the batches are determined by seed and position.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm_lab.data.batch import Batch
from powernorm_lab.data.cache import cache_key
from powernorm_lab.data.corpus import SPLITS, EvaluatedSplit, Split
from powernorm_lab.data.orders import generator_of, spaced
from powernorm_lab.data.rows import Rows
from powernorm_lab.tasks.image.settings import ImageSettings
from powernorm_lab.training.batches import RowData

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


# Images for training, with the statistics that normalize them.


_FORMAT: Final = 1
_BRIGHTEST: Final = 255


@dataclass(frozen=True)
class EncodedImages:
    """Images in three splits, and the statistics that normalize them.

    Pixels are bytes until a batch is made, which take a quarter of the memory of floats.
    """

    images: ImageSet
    splits: Mapping[Split, Images]
    """The splits of `images`, without training images that are left out."""
    mean: Tensor
    """float32, (channels,): mean of the training pixels, black 0 and white 1."""
    std: Tensor
    """float32, (channels,): standard deviation of the training pixels."""

    @property
    def fingerprint(self) -> str:
        """Return a hash of all data of the batches."""
        return cache_key(
            format=_FORMAT,
            task="image",
            images=self.images.fingerprint(),
            num_train=len(self.splits["train"].labels),
            mean=self.mean.tolist(),
            std=self.std.tolist(),
        )


def encode_images(images: ImageSet, max_examples: int | None = None) -> EncodedImages:
    """Prepare images, with statistics of the selected training images.

    Args:
        images: the images.
        max_examples: number of evenly spaced training images to use; None is all.

    Raises:
        InputError: all training pixels of a channel are equal.
    """
    train = images.splits["train"]
    if max_examples is not None and max_examples < len(train.labels):
        train = train.part(spaced(len(train.labels), max_examples))
    mean, std = pixel_statistics(train.pixels)
    if not bool((std > 0).all()):
        raise InputError(
            f"the training images of {images.source} all have the same pixels: they cannot be "
            "normalized"
        )
    return EncodedImages(images, {**images.splits, "train": train}, mean, std)


def encode_images_by(images: ImageSet, other: EncodedImages) -> EncodedImages:
    """Prepare images with the statistics of those that a model was trained on.

    Raises:
        InputError: the images have other sizes or other classes.
    """
    for what, own, expected in (
        ("sizes", images.shape, other.images.shape),
        ("classes", images.class_names, other.images.class_names),
    ):
        if own != expected:
            raise InputError(
                f"{images.source} has the {what} {own}, but the model was trained with {expected}"
            )
    return EncodedImages(images, images.splits, other.mean, other.std)


def pixel_statistics(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the exact mean and standard deviation of each channel, with black 0 and white 1.

    Args:
        pixels: uint8, (images, channels, height, width).

    Returns:
        Both float32, (channels,).
    """
    values = torch.arange(_BRIGHTEST + 1, dtype=torch.float64) / _BRIGHTEST
    means, deviations = [], []
    for channel in pixels.unbind(1):
        # From counts of the 256 values, without a copy of all pixels as floats.
        shares = torch.bincount(channel.flatten(), minlength=len(values)) / channel.numel()
        mean = (shares.double() * values).sum()
        means.append(mean)
        deviations.append((shares.double() * (values - mean).square()).sum().sqrt())
    return torch.stack(means).float(), torch.stack(deviations).float()


# Batches.


PIXELS: Final = "pixels"
"""Name of the model's input, float32, (images, channels, height, width)."""
CROP_PADDING: Final = 4
"""Maximal shift of an image in pixels (He et al. 2016)."""
_AUGMENTATION_SEED: Final = 2**40
"""Offset of the seeds of augmentation, so that they differ from those of the order."""


class ImageRows(Rows):
    """The images of a split.

    Args:
        encoded: the encoded images.
        split: split of the rows.
        augmentation: whether to augment training images: pad them by 4 pixels on each side, with
            the mean color of the training images, crop them to their size at a random position, and
            mirror half of them if the data set allows it.
    """

    unit = "images"

    def __init__(self, encoded: EncodedImages, split: Split, *, augmentation: bool = False) -> None:
        self._encoded = encoded
        self._images = encoded.splits[split]
        self._augmentation = augmentation
        super().__init__(torch.ones_like(self._images.labels))

    def batch(self, rows: Tensor, generator: torch.Generator | None = None) -> Batch:
        """Return a batch of images by number, augmented if a generator is given."""
        chosen = self._images.part(rows)
        pixels = normalized(chosen.pixels, self._encoded)
        if generator is not None:
            pixels = augmented(pixels, generator, mirror=self._encoded.images.can_be_mirrored)
        num_images = len(rows)
        return Batch(
            named={PIXELS: pixels},
            targets=chosen.labels,
            num_tokens=num_images,
            num_targets=num_images,
        )

    def training_batch(self, rows: Tensor, seed: int, position: int) -> Batch:
        """Return a training batch, augmented by seed and position."""
        if not self._augmentation:
            return self.batch(rows)
        return self.batch(rows, generator_of(seed, _AUGMENTATION_SEED + position))


def normalized(pixels: Tensor, encoded: EncodedImages) -> Tensor:
    """Standardize bytes to mean 0 and variance 1 over the training images.

    Args:
        pixels: uint8, (images, channels, height, width).
        encoded: images with mean and standard deviation of each channel.

    Returns:
        float32, the same sizes, with the channels last in memory.
    """
    scale = 1 / (255 * encoded.std)
    shift = -encoded.mean / encoded.std
    floats = pixels.to(torch.float32, memory_format=torch.channels_last)
    return floats.mul_(scale[:, None, None]).add_(shift[:, None, None])


def augmented(pixels: Tensor, generator: torch.Generator, *, mirror: bool) -> Tensor:
    """Return random crops of padded images, optionally mirrored.

    Args:
        pixels: float32, (images, channels, height, width); the padding is 0.
        generator: generator of the positions.
        mirror: whether to mirror half of the images, left to right.

    Returns:
        float32, the same sizes, with the channels last in memory.
    """
    num_images, _, height, width = pixels.shape
    places = torch.randint(2 * CROP_PADDING + 1, (2, num_images, 1), generator=generator)
    rows = places[0] + torch.arange(height)
    columns = places[1] + torch.arange(width)
    if mirror:
        flipped = torch.rand(num_images, 1, generator=generator) < 0.5
        columns = torch.where(flipped, columns.flip(1), columns)
    padded = F.pad(pixels, (CROP_PADDING,) * 4).permute(0, 2, 3, 1)
    number = torch.arange(num_images)[:, None, None]
    return padded[number, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class ImageData(RowData[EncodedImages, ImageSettings]):
    """Batches of images with classes."""

    def rows(self, split: Split) -> ImageRows:
        """Return the images of a split."""
        return ImageRows(self._encoded, split, augmentation=self._config.data.augmentation)

    def scores(
        self, split: EvaluatedSplit, model: nn.Module, device: torch.device, *, brief: bool = False
    ) -> Mapping[str, float]:
        """Return the accuracy in percent."""
        del brief
        return {"accuracy": self.accuracy(split, model, device)}
