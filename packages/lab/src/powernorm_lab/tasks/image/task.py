"""The task of image classification with convolutional and residual networks."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from powernorm_lab.data.baselines import UnigramModel
from powernorm_lab.data.corpus import EVALUATED_SPLITS, SPLITS
from powernorm_lab.engine.events import DataPrepared
from powernorm_lab.runs import Baseline
from powernorm_lab.settings.comparison import options_of
from powernorm_lab.tasks.image.data import (
    NUM_CLASSES,
    EncodedImages,
    ImageData,
    encode_images,
    encode_images_by,
)
from powernorm_lab.tasks.image.model import (
    CHANNELS,
    HIDDEN_FEATURES,
    RESNET18,
    RESNET20,
    SIDES,
    ConvNet,
    ResNet,
    pooled_side,
)
from powernorm_lab.tasks.image.settings import ImageSettings
from powernorm_lab.tasks.image.sources import load_images
from powernorm_lab.training.losses import TaskModel
from powernorm_lab.training.norms import norm_factory
from powernorm_lab.training.task import BuiltinTask, Sizes

_STAGES: Final = {"resnet20": RESNET20, "resnet18": RESNET18}


class ImageTask(BuiltinTask[EncodedImages, ImageSettings]):
    """Classification of images."""

    name = "image"
    units = "classes"
    metrics = ("valid_accuracy", "test_accuracy")
    examples = "images"
    data = ImageData

    def encode(self, config: ImageSettings, source: str | None = None) -> EncodedImages:
        """Read images, and normalize them by the statistics of those of `data.path`."""
        own = encode_images(load_images(config.data.path), config.data.max_examples)
        return own if source is None else encode_images_by(load_images(source), own)

    def baselines(self, encoded: EncodedImages, config: ImageSettings) -> list[Baseline]:
        """Return the scores of class frequencies; the accuracy is of the most frequent class."""
        del config
        unigram = UnigramModel(encoded.splits["train"].labels, NUM_CLASSES)
        evaluated = {split: encoded.splits[split].labels for split in EVALUATED_SPLITS}
        metrics = unigram.metrics(evaluated)
        for split, labels in evaluated.items():
            hits = (labels == unigram.most_frequent).double().mean()
            metrics[f"{split}_accuracy"] = 100 * float(hits)
        return [Baseline(name="unigram", metrics=metrics)]

    def facts(self, encoded: EncodedImages) -> dict[str, Any]:
        """Return name, source, license and sizes of the images."""
        images = encoded.images
        return {
            "name": images.name,
            "source": images.source,
            "licence": images.license,
            "image_shape": list(images.shape),
            "classes": list(images.class_names),
            "splits": {split: {"images": len(encoded.splits[split].labels)} for split in SPLITS},
        }

    def summary(self, encoded: EncodedImages) -> DataPrepared:
        """Return the event that describes the data."""
        num_train = len(encoded.splits["train"].labels)
        return DataPrepared(encoded.images.name, num_train, "images", NUM_CLASSES)

    def sizes(self, encoded: EncodedImages) -> Sizes:
        """Return the channels and side of the images, and the number of classes."""
        channels, side, _ = encoded.images.shape
        return (channels, side, NUM_CLASSES)

    def sizes_of_weights(self, weights: Mapping[str, Tensor]) -> Sizes:
        """Return the sizes from the weights of a model; for a ResNet the side is the first one.

        A ResNet takes images of every side.
        """
        channels, num_classes = weights["first.weight"].shape[1], len(weights["head.bias"])
        side = SIDES[0]
        if "hidden.weight" in weights:
            num_pixels = weights["hidden.weight"].shape[1] // CHANNELS[-1]
            side = next(one for one in SIDES if pooled_side(one) ** 2 == num_pixels)
        return (channels, side, num_classes)

    def build(self, config: ImageSettings, norm: str, sizes: Sizes, seed: int) -> TaskModel:
        """Return the model of a run; models of equal seeds have equal weights for all norms.

        Raises:
            InputError: the norm is unknown, or its options do not fit it or the network.
        """
        channels, side, num_classes = sizes
        architecture = config.model.architecture
        # Norms over the channels of images, (N, C) or (N, C, H, W).
        make = norm_factory(norm, options_of(config, norm), feature_dim=1)
        if architecture == "convnet":
            return ConvNet(
                make, num_classes=num_classes, num_channels=channels, side=side, seed=seed
            )
        return ResNet(
            make,
            stages=_STAGES[architecture],
            projects=architecture == "resnet18",
            num_classes=num_classes,
            num_channels=channels,
            seed=seed,
        )

    def example_inputs(self, config: ImageSettings, sizes: Sizes) -> tuple[Tensor, ...]:
        """Return two random images, (2, channels, side, side)."""
        del config
        channels, side, _ = sizes
        generator = torch.Generator().manual_seed(0)
        return (torch.randn(2, channels, side, side, generator=generator),)

    def norm_widths(self, config: ImageSettings) -> tuple[int, ...]:
        """Return the channels of the stages, or the hidden size of the convolutional network."""
        stages = _STAGES.get(config.model.architecture, ((HIDDEN_FEATURES, 1),))
        return tuple(channels for channels, _ in stages)
