"""Images ready for training: what is used of them, and by what they are normalized."""

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

    Pixels stay bytes until their batch is made, a quarter of what floats take.
    """

    images: ImageSet
    splits: Mapping[Split, Images]
    """As in `images`, but for training images that are left out."""
    mean: Tensor
    """float32, (channels,): of the training pixels, black 0 and white 1."""
    std: Tensor
    """float32, (channels,): their standard deviation."""

    @property
    def fingerprint(self) -> str:
        """Return a hash of everything that the pixels of a batch and their labels depend on."""
        return cache_key(
            format=_FORMAT,
            task="image",
            images=self.images.fingerprint(),
            num_train=len(self.splits["train"].labels),
            mean=self.mean.tolist(),
            std=self.std.tolist(),
        )


def encode_images(images: ImageSet, max_examples: int | None = None) -> EncodedImages:
    """Normalize by the training images that are used.

    Args:
        images: the set.
        max_examples: only so many training images, evenly spaced; None is all.

    Raises:
        InputError: all training images are of one color.
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
    """Normalize images as those that a model was trained with.

    Raises:
        InputError: they have other sizes or other classes.
    """
    for what, own, expected in (
        ("sizes", images.shape, other.images.shape),
        ("classes", images.class_names, other.images.class_names),
    ):
        if own != expected:
            raise InputError(
                f"{images.source} has the {what} {own}, and the model was trained with {expected}"
            )
    return EncodedImages(images, images.splits, other.mean, other.std)


def pixel_statistics(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel, exactly, black 0 and white 1.

    Args:
        pixels: uint8, (images, channels, height, width).

    Returns:
        Both float32, (channels,).
    """
    values = torch.arange(_BRIGHTEST + 1, dtype=torch.float64) / _BRIGHTEST
    means, deviations = [], []
    for channel in pixels.unbind(1):
        # Counts of 256 values instead of a copy of all pixels as floats.
        shares = torch.bincount(channel.flatten(), minlength=len(values)) / channel.numel()
        mean = (shares.double() * values).sum()
        means.append(mean)
        deviations.append((shares.double() * (values - mean).square()).sum().sqrt())
    return torch.stack(means).float(), torch.stack(deviations).float()
