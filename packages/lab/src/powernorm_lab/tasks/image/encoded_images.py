"""Images for training, with the statistics that normalize them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm_lab.data.cache import cache_key
from powernorm_lab.data.corpus import Split
from powernorm_lab.data.orders import spaced
from powernorm_lab.tasks.image.image_set import Images, ImageSet

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
