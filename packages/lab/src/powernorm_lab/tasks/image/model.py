"""Networks for small images with norms from a factory: Xu et al. 2019, He et al. 2016."""

import math
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm_lab.models.initialization import initialize, outside_norms
from powernorm_lab.models.normed import NormFactory

_NUM_CHANNELS: Final = (1, 3)
SIDES: Final = (28, 32)


def _check_channels(num_channels: int) -> int:
    """Check and return the number of channels.

    Raises:
        InputError: the number is neither 1 nor 3.
    """
    if num_channels not in _NUM_CHANNELS:
        raise InputError(f"num_channels={num_channels}: give 1 for gray images or 3 for colors")
    return num_channels


def _check_side(side: int) -> int:
    """Check and return the height and width of the images.

    Raises:
        InputError: the side is neither 28 nor 32.
    """
    if side not in SIDES:
        raise InputError(f"side={side}: give 28 (MNIST) or 32 (CIFAR-10)")
    return side


def _check_pixels(pixels: Tensor, num_channels: int, side: int | None = None) -> None:
    """Check the input of a model.

    Args:
        pixels: (images, channels, height, width).
        num_channels: number of channels of the model.
        side: height and width of the model's images; None allows 28 and 32.

    Raises:
        InputError: the pixels have another shape.
    """
    sides = SIDES if side is None else (side,)
    fits = pixels.ndim == 4 and pixels.shape[1] == num_channels
    if not fits or pixels.shape[2] != pixels.shape[3] or pixels.shape[2] not in sides:
        expected = " or ".join(f"(images, {num_channels}, {one}, {one})" for one in sides)
        raise InputError(
            f"the pixels have the shape {tuple(pixels.shape)}: the model takes {expected}"
        )


# The convolutional network of Xu et al. 2019, with a norm in a linear layer.


KERNEL: Final = 5
POOLING: Final = 2
HIDDEN_FEATURES: Final = 500
CHANNELS: Final = (20, 50)


class ConvNet(nn.Module):
    """Classifies small images: two convolutions, a linear layer with a norm, a classifier.

    Xu et al. 2019, 2.2, describe 3 layers, convolutions from 1 to 20 and from 20 to 50 channels,
    then "a linear layer", with the norm "before the activation in every linear layer". Other
    details are as in the MNIST example that was common at the time (LeNet): kernels of 5 x 5
    without padding, each followed by ReLU and 2 x 2 max pooling, a linear layer to 500 features
    with norm and ReLU, and the classifier, which has no activation and therefore no norm. The
    convolutions have no norm. All weights have torch's initialization.

    Args:
        norm: builds the only norm, over the features of an image, (images, 500).
        num_classes: number of classes.
        num_channels: 1 (gray) or 3.
        side: height and width of an image, 28 or 32.
        seed: seed of the initial weights, which are the same for every norm.

    Shape:
        - pixels: (images, num_channels, side, side)
        - output: logits, (images, num_classes)

    Raises:
        InputError: `num_channels` or `side` is invalid, or the pixels have another shape.
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
        self.num_channels = _check_channels(num_channels)
        self.side = _check_side(side)
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
        """Return the features before the output layer, (images, 500)."""
        _check_pixels(pixels, self.num_channels, self.side)
        x = F.max_pool2d(F.relu(self.first(pixels)), POOLING)
        x = F.max_pool2d(F.relu(self.second(x)), POOLING)
        normalized: Tensor = self.norm(self.hidden(x.flatten(1)), None)
        return F.relu(normalized)


def pooled_side(side: int) -> int:
    """Return the height and width of the convolutions' output.

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


RESNET20: Final = ((16, 3), (32, 3), (64, 3))
"""Channels and blocks of each stage: He et al. 2016, 4.2, with n = 3."""
RESNET18: Final = ((64, 2), (128, 2), (256, 2), (512, 2))
"""Channels and blocks of each stage in their Table 1."""


class ResNet(nn.Module):
    """Classifies small images by residual blocks of two 3 x 3 convolutions.

    The network has a first 3 x 3 convolution, the stages, the mean over all pixels, and a linear
    classifier. A norm follows every convolution except those of shortcuts, and ReLU follows the
    norms and the sums (post-activation). The first block of every stage after the first one halves
    height and width.

    - `RESNET20`: the network of He et al. for CIFAR-10. Its shortcuts have no weights (their option
      A): they take every other pixel, and zeros for new channels.
    - `RESNET18`: their ImageNet network in the form that is common for CIFAR-10, with this first
      convolution in place of 7 x 7 and pooling. Shortcuts that change the shape have a 1 x 1
      convolution and a norm (option B).

    Convolutions have no bias and are initialized after He et al. 2015 (normal, variance 2 /
    fan-out). For a norm over channels only (`ln`, `rms` and so on) every pixel of an image is a
    token; with batch statistics the tokens are all pixels of all images.

    Args:
        norm: builds every norm, over the dimension 1 of (images, channels, height, width).
        stages: channels and number of blocks of each stage.
        projects: whether shortcuts that change the shape have a convolution with a norm.
        num_classes: number of classes.
        num_channels: 1 (gray) or 3.
        seed: seed of the initial weights, which are the same for every norm.

    Shape:
        - pixels: (images, num_channels, side, side), side 28 or 32
        - output: logits, (images, num_classes)

    Raises:
        InputError: `num_channels` is invalid, or the pixels have another shape.
    """

    def __init__(
        self,
        norm: NormFactory,
        *,
        stages: tuple[tuple[int, int], ...] = RESNET20,
        projects: bool = False,
        num_classes: int = 10,
        num_channels: int = 3,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.num_channels = _check_channels(num_channels)
        width = stages[0][0]
        self.first = _convolution(num_channels, width)
        self.first_norm = norm(width)
        blocks = []
        for stage, (channels, num_blocks) in enumerate(stages):
            for block in range(num_blocks):
                stride = 2 if stage and not block else 1
                blocks.append(
                    ResidualBlock(width, channels, norm, stride=stride, projects=projects)
                )
                width = channels
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, num_classes)
        generator = initialize(self, seed, "kaiming")
        for module in outside_norms(self):
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(
                    module.weight, mode="fan_out", nonlinearity="relu", generator=generator
                )
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the logits of the classes."""
        logits: Tensor = self.head(self.features(pixels))
        return logits

    def features(self, pixels: Tensor) -> Tensor:
        """Return the features before the output layer, (images, channels of the last stage)."""
        _check_pixels(pixels, self.num_channels)
        x = F.relu(self.first_norm(self.first(pixels), None))
        for block in self.blocks:
            x = block(x)
        return x.mean((2, 3))


class ResidualBlock(nn.Module):
    """Two convolutions with norms and a shortcut: `relu(shortcut(x) + f(x))`.

    Args:
        num_inputs: channels of x.
        num_outputs: channels of the output.
        norm: builds the norms.
        stride: 2 halves height and width.
        projects: whether a shortcut that changes the shape has a 1 x 1 convolution with a norm;
            otherwise it takes every other pixel and zeros for new channels.
    """

    def __init__(
        self, num_inputs: int, num_outputs: int, norm: NormFactory, *, stride: int, projects: bool
    ) -> None:
        super().__init__()
        self.first = _convolution(num_inputs, num_outputs, stride=stride)
        self.first_norm = norm(num_outputs)
        self.second = _convolution(num_outputs, num_outputs)
        self.second_norm = norm(num_outputs)
        self.stride = stride
        self.num_new = num_outputs - num_inputs
        self.projection: nn.Conv2d | None = None
        self.projection_norm: nn.Module | None = None
        if projects and (stride > 1 or self.num_new):
            self.projection = nn.Conv2d(num_inputs, num_outputs, 1, stride=stride, bias=False)
            self.projection_norm = norm(num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, (images, num_outputs, height, width)."""
        inner = F.relu(self.first_norm(self.first(x), None))
        branch: Tensor = self.second_norm(self.second(inner), None)
        return F.relu(self._shortcut(x) + branch)

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.projection is not None and self.projection_norm is not None:
            projected: Tensor = self.projection_norm(self.projection(x), None)
            return projected
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, 0, self.num_new)) if self.num_new else x


def _convolution(num_inputs: int, num_outputs: int, *, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(num_inputs, num_outputs, 3, stride=stride, padding=1, bias=False)
