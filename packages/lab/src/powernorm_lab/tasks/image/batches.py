"""Batches of images, with order and augmentation determined by seed and position."""

from collections.abc import Mapping
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_accuracy

from powernorm_lab.data.batch import Batch
from powernorm_lab.data.corpus import EvaluatedSplit, Split
from powernorm_lab.data.orders import generator_of
from powernorm_lab.data.rows import Rows
from powernorm_lab.tasks.image.encoded_images import EncodedImages
from powernorm_lab.tasks.image.image_set import NUM_CLASSES
from powernorm_lab.tasks.image.settings import ImageSettings
from powernorm_lab.training.batches import RowData

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


class ImageData(RowData[ImageSettings]):
    """Batches of images with classes.

    Args:
        encoded: the encoded images.
        config: size of batches and number of steps.
        seed: seed of the order and of augmentation.

    Raises:
        InputError: the train split has fewer images than a batch.
    """

    def __init__(self, encoded: EncodedImages, config: ImageSettings, seed: int) -> None:
        augmentation = config.data.augmentation
        super().__init__(
            config, lambda split: ImageRows(encoded, split, augmentation=augmentation), seed
        )

    def scores(
        self, split: EvaluatedSplit, model: nn.Module, device: torch.device, *, brief: bool = False
    ) -> Mapping[str, float]:
        """Return the accuracy in percent."""
        del brief
        answers, labels = [], []
        for batch in self.evaluation(split):
            logits: Tensor = model(**batch.to(device).inputs())
            answers.append(logits.argmax(-1).cpu())
            labels.append(batch.targets)
        return {"accuracy": accuracy(torch.cat(answers), torch.cat(labels))}


def accuracy(answers: Tensor, labels: Tensor) -> float:
    """Return the accuracy in percent.

    Args:
        answers: predicted classes, int64, (images,).
        labels: int64, (images,).

    >>> accuracy(torch.tensor([1, 2, 3, 3]), torch.tensor([1, 2, 3, 4]))
    75.0
    """
    share = multiclass_accuracy(answers, labels, num_classes=NUM_CLASSES, average="micro")
    return 100 * float(share)
