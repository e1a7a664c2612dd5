"""The task of classifying images: MNIST, CIFAR-10, convolutional and residual networks."""

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_accuracy

from powernorm.data.corpus import SPLITS, Split
from powernorm.data.images.encoded_images import EncodedImages, encode_images, encode_images_by
from powernorm.data.images.image_batches import EvaluationImages, TrainingImages
from powernorm.data.images.image_set import NUM_CLASSES
from powernorm.data.images.image_sets import load_images
from powernorm.errors import InputError
from powernorm.models.choices import Architecture
from powernorm.models.convnet import CHANNELS as CONVNET_CHANNELS
from powernorm.models.convnet import HIDDEN_FEATURES, ConvNet, pooled_side
from powernorm.models.image_input import SIDES
from powernorm.models.layers import NormFactory
from powernorm.models.resnet import RESNET18, RESNET20, ResNet
from powernorm.norms import build_norm
from powernorm.runs import Baseline
from powernorm.training.batches import EvaluationBatches, RunData
from powernorm.training.config import ComparisonConfig, DataConfig, options_of
from powernorm.training.task import DataSummary, Sizes, Task, TaskModel

CONVNET: Final = "convnet"
_STAGES: Final = {"resnet20": RESNET20, "resnet18": RESNET18}
ARCHITECTURES: Final[tuple[Architecture, ...]] = ("convnet", "resnet20", "resnet18")
"""The first is the task's own."""
_SCORED: Final[tuple[Split, ...]] = ("valid", "test")


class ImageData(RunData):
    """Images, each with its class.

    Args:
        encoded: the images.
        config: size of batches, number of steps.
        seed: of the order and of the changes.

    Raises:
        InputError: there are fewer training images than a batch has.
    """

    selection = "accuracy"

    def __init__(self, encoded: EncodedImages, config: ComparisonConfig, seed: int) -> None:
        images = TrainingImages(
            encoded,
            batch_size=config.data.batch_size,
            seed=seed,
            augmentation=config.data.augmentation,
        )
        super().__init__(config, images)
        self._encoded = encoded

    def evaluation(self, split: Split, max_tokens: int | None = None) -> EvaluationBatches:
        """Return the batches of a split, whole or `max_tokens` images of it."""
        return EvaluationImages(
            self._encoded,
            split,
            batch_size=self._config.data.evaluation_batch_size,
            max_images=max_tokens,
        )

    def scores(self, split: Split, model: nn.Module, device: torch.device) -> Mapping[str, float]:
        """Return the accuracy in percent."""
        answers, labels = [], []
        for batch in self.evaluation(split):
            logits: Tensor = model(**batch.to(device).inputs())
            answers.append(logits.argmax(-1).cpu())
            labels.append(batch.targets)
        return {"accuracy": accuracy(torch.cat(answers), torch.cat(labels))}


class ImageTask(Task[EncodedImages]):
    """Say what an image shows."""

    units = "classes"
    metrics = ("valid_accuracy", "test_accuracy")
    examples = "images"
    has_positions = False
    uses = frozenset({"data.max_examples", "data.augmentation", "model.architecture"})
    unused = (
        "data.vocabulary_size",
        "data.sequence_length",
        "model.num_features",
        "model.num_layers",
        "model.num_heads",
        "model.feedforward_features",
        "model.dropout",
        "model.activation",
        "model.placement",
    )

    def encode(self, data: DataConfig) -> EncodedImages:
        """Read the images and take the statistics of their pixels."""
        return encode_images(load_images(data.path), data.max_examples)

    def encode_by(self, source: str, data: DataConfig) -> EncodedImages:
        """Read `source`, normalised by the statistics of `data.path`."""
        return encode_images_by(load_images(source), self.encode(data))

    def data(self, encoded: EncodedImages, config: ComparisonConfig, seed: int) -> RunData:
        """Return batches of images."""
        return ImageData(encoded, config, seed)

    def baselines(self, encoded: EncodedImages, config: ComparisonConfig) -> list[Baseline]:
        """Return what is known without a look at an image: how frequent the classes are.

        Its accuracy is that of always naming the most frequent one.
        """
        del config
        counts = torch.bincount(encoded.splits["train"].labels, minlength=NUM_CLASSES).double()
        # One more of each, so that a class that the train split lacks is not impossible.
        shares = (counts + 1) / (counts + 1).sum()
        metrics: dict[str, float | None] = {}
        for split in _SCORED:
            labels = encoded.splits[split].labels
            loss = -float(shares.log()[labels].mean())
            metrics[f"{split}_loss"] = loss
            metrics[f"{split}_perplexity"] = math.exp(loss)
            metrics[f"{split}_accuracy"] = accuracy(shares.argmax().expand(len(labels)), labels)
        return [Baseline(name="unigram", metrics=metrics)]

    def facts(self, encoded: EncodedImages) -> dict[str, Any]:
        """Return name, source, licence and sizes of the images."""
        images = encoded.images
        return {
            "name": images.name,
            "source": images.source,
            "licence": images.licence,
            "image_shape": list(images.shape),
            "classes": list(images.class_names),
            "splits": {split: {"images": len(encoded.splits[split].labels)} for split in SPLITS},
        }

    def summary(self, encoded: EncodedImages) -> DataSummary:
        """Return the same in short."""
        num_train = len(encoded.splits["train"].labels)
        return DataSummary(encoded.images.name, num_train, "images", NUM_CLASSES)

    def sizes(self, encoded: EncodedImages) -> Sizes:
        """Return the channels and the side of the images, and the number of classes."""
        channels, side, _ = encoded.images.shape
        return (channels, side, NUM_CLASSES)

    def sizes_of_weights(self, weights: Mapping[str, Tensor]) -> Sizes:
        """Return the same of a model; a ResNet takes every side, and the first one stands here."""
        channels, num_classes = weights["first.weight"].shape[1], len(weights["head.bias"])
        side = SIDES[0]
        if "hidden.weight" in weights:
            num_pixels = weights["hidden.weight"].shape[1] // CONVNET_CHANNELS[-1]
            side = next(one for one in SIDES if pooled_side(one) ** 2 == num_pixels)
        return (channels, side, num_classes)

    def build(self, config: ComparisonConfig, norm: str, sizes: Sizes, seed: int) -> TaskModel:
        """Return the model of a run; equal seeds give equal weights to all norms."""
        return build_image_model(config, norm, sizes, seed)

    def example_inputs(self, config: ComparisonConfig, sizes: Sizes) -> tuple[Tensor, ...]:
        """Return two images, (2, channels, side, side)."""
        del config
        channels, side, _ = sizes
        generator = torch.Generator().manual_seed(0)
        return (torch.randn(2, channels, side, side, generator=generator),)

    def norm_widths(self, config: ComparisonConfig) -> tuple[int, ...]:
        """Return the channels of the stages, or the one width of the convolutional network."""
        stages = _STAGES.get(architecture_of(config), ((HIDDEN_FEATURES, 1),))
        return tuple(channels for channels, _ in stages)


def architecture_of(config: ComparisonConfig) -> Architecture:
    """Return which network a configuration asks for.

    Raises:
        InputError: one that is not for images.
    """
    chosen = config.model.architecture or ARCHITECTURES[0]
    if chosen not in ARCHITECTURES:
        raise InputError(
            f"model.architecture={chosen} is not for images: choose one of "
            f"{', '.join(ARCHITECTURES)}."
        )
    return chosen


def build_image_model(
    config: ComparisonConfig, norm: str, sizes: Sizes, seed: int
) -> ConvNet | ResNet:
    """Build the network of one run; equal seeds give equal weights to all norms.

    Args:
        config: has the architecture.
        norm: short name.
        sizes: channels and side of the images, number of classes.
        seed: of the initial weights.

    Raises:
        InputError: unknown norm, or options that do not fit it or the network.
    """
    channels, side, num_classes = sizes
    architecture = architecture_of(config)
    make = image_norm_factory(config, norm)
    if architecture == CONVNET:
        return ConvNet(make, num_classes=num_classes, num_channels=channels, side=side, seed=seed)
    return ResNet(
        make,
        stages=_STAGES[architecture],
        projects=architecture == "resnet18",
        num_classes=num_classes,
        num_channels=channels,
        seed=seed,
    )


def image_norm_factory(config: ComparisonConfig, norm: str) -> NormFactory:
    """Return what makes the norm over the channels of images, (N, C) or (N, C, H, W)."""
    options = options_of(config, norm)
    return lambda num_features: build_norm(norm, num_features, **{**options, "feature_dim": 1})


def accuracy(answers: Tensor, labels: Tensor) -> float:
    """Return the share of right answers in percent.

    Args:
        answers: classes, int64, (images,).
        labels: int64, (images,).

    >>> accuracy(torch.tensor([1, 2, 3, 3]), torch.tensor([1, 2, 3, 4]))
    75.0
    """
    share = multiclass_accuracy(answers, labels, num_classes=NUM_CLASSES, average="micro")
    return 100 * float(share)
