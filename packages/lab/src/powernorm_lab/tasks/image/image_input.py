"""Checks of the input of image models."""

from typing import Final

from torch import Tensor

from powernorm.errors import InputError

CHANNELS: Final = (1, 3)
SIDES: Final = (28, 32)


def check_channels(num_channels: int) -> int:
    """Check and return the number of channels.

    Raises:
        InputError: the number is neither 1 nor 3.
    """
    if num_channels not in CHANNELS:
        raise InputError(f"num_channels={num_channels}: give 1 for gray images or 3 for colors")
    return num_channels


def check_side(side: int) -> int:
    """Check and return the height and width of the images.

    Raises:
        InputError: the side is neither 28 nor 32.
    """
    if side not in SIDES:
        raise InputError(f"side={side}: give 28 (MNIST) or 32 (CIFAR-10)")
    return side


def check_pixels(pixels: Tensor, num_channels: int, side: int | None = None) -> None:
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
