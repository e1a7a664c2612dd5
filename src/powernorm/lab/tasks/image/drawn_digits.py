"""Digits that the program draws itself: what works offline, and means nothing but that.

Each image is a digit of seven segments in 28 x 28 gray pixels, moved, thickened, faded and with
noise on it. It is for trying things out; a network reads nearly all of them after a minute, so no
score on them says anything about a norm on real images.
"""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from powernorm.lab.tasks.image.image_set import Images

SIDE: Final = 28
NUM_TRAIN: Final = 3000
NUM_OTHER: Final = 500
_SEGMENTS: Final = (
    "abcdef",
    "bc",
    "abdeg",
    "abcdg",
    "bcfg",
    "acdfg",
    "acdefg",
    "abc",
    "abcdefg",
    "abcdfg",
)
"""Lit in each digit: a is the top, b to f go round clockwise, g is the middle."""
_PLACES: Final = {
    # rows and columns in a box of 17 x 9
    "a": (slice(0, 1), slice(0, 9)),
    "b": (slice(0, 9), slice(8, 9)),
    "c": (slice(8, 17), slice(8, 9)),
    "d": (slice(16, 17), slice(0, 9)),
    "e": (slice(8, 17), slice(0, 1)),
    "f": (slice(0, 9), slice(0, 1)),
    "g": (slice(8, 9), slice(0, 9)),
}
_HEIGHT: Final = 17
_WIDTH: Final = 9
_SEED: Final = 20191116


def drawn_digits() -> tuple[Images, Images]:
    """Return training and test images, the same at every call."""
    generator = torch.Generator().manual_seed(_SEED)
    train = _draw(NUM_TRAIN + NUM_OTHER, generator)
    return train, _draw(NUM_OTHER, generator)


def _draw(num_images: int, generator: torch.Generator) -> Images:
    def draw(high: int) -> Tensor:
        return torch.randint(high, (num_images,), generator=generator)

    labels = draw(10)
    top, left = draw(SIDE - _HEIGHT + 1), (SIDE - _WIDTH) // 4 + draw((SIDE - _WIDTH) // 2 + 1)
    rows = torch.arange(SIDE) - top[:, None]
    columns = torch.arange(SIDE) - left[:, None]
    inside = ((rows >= 0) & (rows < _HEIGHT))[:, :, None] & ((columns >= 0) & (columns < _WIDTH))[
        :, None, :
    ]
    ink = _glyphs()[
        labels[:, None, None],
        rows.clamp(0, _HEIGHT - 1)[:, :, None],
        columns.clamp(0, _WIDTH - 1)[:, None, :],
    ]
    image = (ink * inside)[:, None]
    thick = F.max_pool2d(image, 3, stride=1, padding=1)
    image = torch.where(draw(2).bool()[:, None, None, None], thick, image)
    strength = 0.4 + 0.6 * torch.rand(num_images, 1, 1, 1, generator=generator)
    noise = 0.15 * torch.randn(image.shape, generator=generator)
    pixels = (255 * (image * strength + noise)).round().clamp(0, 255).to(torch.uint8)
    return Images(pixels, labels)


def _glyphs() -> Tensor:
    glyphs = torch.zeros(10, _HEIGHT, _WIDTH)
    for digit, segments in enumerate(_SEGMENTS):
        for segment in segments:
            rows, columns = _PLACES[segment]
            glyphs[digit, rows, columns] = 1
    return glyphs
