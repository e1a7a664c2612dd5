"""The small convolutional network of Xu et al. 2019, whose norm stands in a linear layer."""

import math
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powernorm.lab.models.initialization import initialize
from powernorm.lab.models.normed import NormFactory
from powernorm.lab.tasks.image.image_input import check_channels, check_pixels, check_side

KERNEL: Final = 5
POOLING: Final = 2
HIDDEN_FEATURES: Final = 500
CHANNELS: Final = (20, 50)


class ConvNet(nn.Module):
    """Classifies small images: two convolutions, a linear layer with a norm, a classifier.

    Xu et al. 2019, 2.2, say that there are 3 layers, convolutions from 1 to 20 and from 20 to 50
    channels, then "a linear layer", with the norm "before the activation in every linear layer".
    What they leave open is as in the example for MNIST that was usual then (LeNet's): kernels of
    5 x 5 without padding, each followed by ReLU and the largest of every 2 x 2 pixels, a linear
    layer to 500 features with norm and ReLU, and the classifier, which has no activation and
    therefore no norm. The convolutions have no norm. All weights begin as torch's layers do.

    Args:
        norm: makes the only norm, over the features of an image, (images, 500).
        num_classes: of the images.
        num_channels: 1 (gray) or 3.
        side: height and width of an image, 28 or 32.
        seed: of the initial weights, which are the same for every norm.

    Shape:
        - pixels: (images, num_channels, side, side)
        - output: logits, (images, num_classes)

    Raises:
        InputError: another number of channels or another side, here or of the pixels.
    """

    def __init__(
        self,
        norm: NormFactory,
        *,
        num_classes: int = 10,
        num_channels: int = 1,
        side: int = 28,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.num_channels = check_channels(num_channels)
        self.side = check_side(side)
        first, second = CHANNELS
        self.first = nn.Conv2d(num_channels, first, KERNEL)
        self.second = nn.Conv2d(first, second, KERNEL)
        self.hidden = nn.Linear(second * pooled_side(side) ** 2, HIDDEN_FEATURES)
        self.norm = norm(HIDDEN_FEATURES)
        self.head = nn.Linear(HIDDEN_FEATURES, num_classes)
        generator = initialize(self, seed, "kaiming")
        for convolution in (self.first, self.second):
            _initialize_as_torch(convolution, generator)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the logits of the classes."""
        logits: Tensor = self.head(self.features(pixels))
        return logits

    def features(self, pixels: Tensor) -> Tensor:
        """Return what the logits are made from, (images, 500)."""
        check_pixels(pixels, self.num_channels, self.side)
        x = F.max_pool2d(F.relu(self.first(pixels)), POOLING)
        x = F.max_pool2d(F.relu(self.second(x)), POOLING)
        normalized: Tensor = self.norm(self.hidden(x.flatten(1)), None)
        return F.relu(normalized)


def pooled_side(side: int) -> int:
    """Return the height and width of what the convolutions make of an image.

    >>> pooled_side(28), pooled_side(32)
    (4, 5)
    """
    for _ in CHANNELS:
        side = (side - KERNEL + 1) // POOLING
    return side


def _initialize_as_torch(convolution: nn.Conv2d, generator: torch.Generator) -> None:
    nn.init.kaiming_uniform_(convolution.weight, a=math.sqrt(5), generator=generator)
    if convolution.bias is not None:
        bound = 1 / math.sqrt(convolution.weight[0].numel())
        nn.init.uniform_(convolution.bias, -bound, bound, generator=generator)
