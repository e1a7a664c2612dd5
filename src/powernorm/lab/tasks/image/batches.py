"""Batches of images, in an order and with changes that seed and position determine."""

from collections.abc import Iterator
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from powernorm.errors import InputError
from powernorm.lab.data.corpus import Split
from powernorm.lab.data.examples import Examples
from powernorm.lab.data.segments import SEED_STRIDE
from powernorm.lab.tasks.image.encoded_images import EncodedImages
from powernorm.lab.tasks.image.image_set import Images

PIXELS: Final = "pixels"
"""Name of the model's input, float32, (images, channels, height, width)."""
CROP_PADDING: Final = 4
"""Pixels by which an image is moved at most (He et al. 2016)."""
_AUGMENTATION_SEED: Final = 2**40
"""Keeps the generators of the changes apart from those of the order."""


class TrainingImages:
    """The batches of a training run.

    Each epoch shuffles the images; what does not fill a batch waits for the next one. Any batch can
    be made at any time and is always the same, so that a run goes on exactly where it stopped.

    Args:
        encoded: the images.
        batch_size: images in a batch.
        seed: of the order and of the changes.
        augmentation: whether the images are changed: padded by 4 pixels on each side and cut to
            their size at a random place, and half of them mirrored where that is sensible for the
            set. What is padded has the mean colour of the training images.

    Raises:
        InputError: there are fewer images than a batch has.
    """

    def __init__(
        self, encoded: EncodedImages, *, batch_size: int, seed: int, augmentation: bool = False
    ) -> None:
        num_images = len(encoded.splits["train"].labels)
        if num_images < batch_size:
            raise InputError(
                f"The train split has {num_images} images, fewer than a batch of {batch_size}: "
                "lower data.batch_size."
            )
        self._encoded = encoded
        self._images = encoded.splits["train"]
        self._batch_size = batch_size
        self._seed = seed
        self._augmentation = augmentation
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.long)

    @property
    def batches_per_epoch(self) -> int:
        """Return the number of batches after which the images begin anew."""
        return len(self._images.labels) // self._batch_size

    @property
    def tokens_per_batch(self) -> float:
        """Return the number of images in a batch."""
        return float(self._batch_size)

    def batch(self, position: int) -> Examples:
        """Return the batch at `position`, counted from the start of the run over all epochs."""
        epoch, index = divmod(position, self.batches_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * SEED_STRIDE + epoch)
            self._order = torch.randperm(len(self._images.labels), generator=generator)
            self._epoch = epoch
        first = index * self._batch_size
        chosen = self._images.part(self._order[first : first + self._batch_size])
        pixels = normalised(chosen.pixels, self._encoded)
        if self._augmentation:
            generator = torch.Generator().manual_seed(
                _AUGMENTATION_SEED + self._seed * SEED_STRIDE + position
            )
            pixels = augmented(pixels, generator, mirror=self._encoded.images.can_be_mirrored)
        return _examples(pixels, chosen)


class EvaluationImages:
    """The batches of an evaluation, in the order of the files, unchanged.

    Args:
        encoded: the images.
        split: which of them.
        batch_size: images in a batch.
        max_images: only so many, evenly spaced; None is all.
    """

    def __init__(
        self,
        encoded: EncodedImages,
        split: Split,
        *,
        batch_size: int,
        max_images: int | None = None,
    ) -> None:
        images = encoded.splits[split]
        total = len(images.labels)
        kept = total if max_images is None else min(total, max_images)
        self._encoded = encoded
        self._images = images
        self._chosen = torch.arange(kept) * total // kept
        self._batch_size = batch_size

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-self._chosen.numel() // self._batch_size)

    def __iter__(self) -> Iterator[Examples]:
        """Yield the batches."""
        for chosen in self._chosen.split(self._batch_size):
            images = self._images.part(chosen)
            yield _examples(normalised(images.pixels, self._encoded), images)


def normalised(pixels: Tensor, encoded: EncodedImages) -> Tensor:
    """Return bytes as numbers of mean 0 and variance 1 over the training images.

    Args:
        pixels: uint8, (images, channels, height, width).
        encoded: has mean and standard deviation of each channel.

    Returns:
        float32, the same sizes, with the channels last in memory.
    """
    scale = 1 / (255 * encoded.std)
    shift = -encoded.mean / encoded.std
    floats = pixels.to(torch.float32, memory_format=torch.channels_last)
    return floats.mul_(scale[:, None, None]).add_(shift[:, None, None])


def augmented(pixels: Tensor, generator: torch.Generator, *, mirror: bool) -> Tensor:
    """Return images cut out of padded ones at random places, perhaps mirrored.

    Args:
        pixels: float32, (images, channels, height, width); what is padded is 0.
        generator: of the places.
        mirror: whether half of the images are mirrored, left to right.

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


def _examples(pixels: Tensor, images: Images) -> Examples:
    num_images = len(images.labels)
    return Examples(
        named={PIXELS: pixels},
        targets=images.labels,
        num_tokens=num_images,
        num_targets=num_images,
    )
