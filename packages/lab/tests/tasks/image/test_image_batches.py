from pathlib import Path

import pytest
import torch
from lab.tests.data.official_images import write_cifar, write_mnist
from torch import Tensor

from powernorm_lab.tasks.image.data import (
    EncodedImages,
    ImageRows,
    augmented,
    encode_images,
    normalized,
)
from powernorm_lab.tasks.image.sources import load_images

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def digits(tmp_path: Path) -> EncodedImages:
    return encode_images(load_images(str(write_mnist(tmp_path / "mnist"))))


@pytest.fixture
def colors(tmp_path: Path) -> EncodedImages:
    return encode_images(load_images(str(write_cifar(tmp_path / "cifar"))))


def test_pixels_have_mean_0_and_variance_1_over_the_training_images(colors: EncodedImages) -> None:
    pixels = normalized(colors.splits["train"].pixels, colors)
    assert pixels.dtype == torch.float32
    assert pixels.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(pixels.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(pixels.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5)


@pytest.mark.parametrize("mirror", [False, True])
def test_augmented_images_are_windows_of_padded_ones(mirror: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    height, width = 5, 6
    pixels = 1 + torch.rand(400, 2, height, width, generator=generator)
    changed = augmented(pixels, generator, mirror=mirror)
    assert changed.is_contiguous(memory_format=torch.channels_last)
    padded = torch.nn.functional.pad(pixels, (4, 4, 4, 4))
    seen = set()
    for before, after in zip(padded, changed, strict=True):
        matches = [
            (top, left, flipped)
            for top in range(9)
            for left in range(9)
            for flipped in (False, True)
            if torch.equal(_window(before, top, left, height, width, flipped), after)
        ]
        assert matches
        # Crops of an empty corner equal their mirror images.
        seen.add(matches[0] if len(matches) == 1 else None)
    found = [match for match in seen if match is not None]
    assert {top for top, _, _ in found} == {left for _, left, _ in found} == set(range(9))
    assert {flipped for _, _, flipped in found} == ({False, True} if mirror else {False})


def _window(padded: Tensor, top: int, left: int, height: int, width: int, flipped: bool) -> Tensor:
    window = padded[:, top : top + height, left : left + width]
    return window.flip(2) if flipped else window


def test_digits_are_never_mirrored(digits: EncodedImages, colors: EncodedImages) -> None:
    """A mirrored 2 is no 2: idx images are only shifted, CIFAR's images also mirrored."""
    for encoded, mirrored in ((digits, False), (colors, True)):
        changed = ImageRows(encoded, "train", augmentation=True).training(batch_size=8, seed=0)
        plain = ImageRows(encoded, "train").training(batch_size=8, seed=0)
        height, width = encoded.images.shape[1:]
        flips = []
        for position in range(3):
            before = torch.nn.functional.pad(plain.batch(position).inputs()["pixels"], (4,) * 4)
            after = changed.batch(position).inputs()["pixels"]
            for image, window in zip(before, after, strict=True):
                flips.append(
                    not any(
                        torch.equal(_window(image, top, left, height, width, False), window)
                        for top in range(9)
                        for left in range(9)
                    )
                )
        assert any(flips) == mirrored
