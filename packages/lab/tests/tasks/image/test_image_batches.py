from pathlib import Path

import pytest
import torch
from lab.tests.data.official_images import write_cifar, write_mnist
from torch import Tensor

from powernorm.errors import InputError
from powernorm_lab.data.batch import TrainingBatches
from powernorm_lab.tasks.image.batches import (
    ImageRows,
    augmented,
    normalized,
)
from powernorm_lab.tasks.image.encoded_images import EncodedImages, encode_images
from powernorm_lab.tasks.image.sources import load_images

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def digits(tmp_path: Path) -> EncodedImages:
    return encode_images(load_images(str(write_mnist(tmp_path / "mnist"))))


@pytest.fixture
def colors(tmp_path: Path) -> EncodedImages:
    return encode_images(load_images(str(write_cifar(tmp_path / "cifar"))))


def _row_numbers(pixels: Tensor, encoded: EncodedImages, split: str = "train") -> list[int]:
    every = normalized(encoded.splits[split].pixels, encoded)  # type: ignore[index]
    return [int((every == image).flatten(1).all(1).nonzero()) for image in pixels]


def test_pixels_have_mean_0_and_variance_1_over_the_training_images(colors: EncodedImages) -> None:
    pixels = normalized(colors.splits["train"].pixels, colors)
    assert pixels.dtype == torch.float32
    assert pixels.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(pixels.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(pixels.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5)


def test_every_epoch_has_every_image_once_in_another_order(digits: EncodedImages) -> None:
    training = ImageRows(digits, "train").training(batch_size=11, seed=0)
    assert training.batches_per_epoch == 2
    assert training.tokens_per_batch == 11
    epochs = []
    for epoch in range(2):
        batches = [training.batch(2 * epoch + index) for index in range(2)]
        rows = [row for batch in batches for row in _row_numbers(batch.inputs()["pixels"], digits)]
        assert sorted(rows) == list(range(22))
        labels = torch.cat([batch.targets for batch in batches])
        assert torch.equal(labels, digits.splits["train"].labels[rows])
        epochs.append(rows)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("augmentation", [False, True])
def test_a_batch_depends_on_seed_and_position_alone(
    colors: EncodedImages, augmentation: bool
) -> None:
    def make(seed: int) -> TrainingBatches:
        return ImageRows(colors, "train", augmentation=augmentation).training(
            batch_size=4, seed=seed
        )

    one, other = make(3), make(3)
    in_order = [one.batch(position).inputs()["pixels"] for position in range(7)]
    torch.manual_seed(1)
    for position in (6, 0, 3, 5, 1, 4, 2):
        assert torch.equal(other.batch(position).inputs()["pixels"], in_order[position])
    assert not torch.equal(make(4).batch(0).inputs()["pixels"], in_order[0])
    for first in range(7):
        for second in range(first):
            assert not torch.equal(in_order[first], in_order[second])


def test_batches_count_images(digits: EncodedImages) -> None:
    batch = ImageRows(digits, "train").training(batch_size=5, seed=0).batch(0)
    assert (batch.num_tokens, batch.num_targets, batch.loss_targets) == (5, 5, None)
    assert batch.targets.dtype == torch.int64


def test_too_few_images_for_a_batch(digits: EncodedImages) -> None:
    with pytest.raises(InputError, match="22 images, fewer than a batch of 23: lower data"):
        ImageRows(digits, "train").training(batch_size=23, seed=0)


def test_evaluation_has_the_images_in_order(digits: EncodedImages) -> None:
    batches = ImageRows(digits, "test").evaluation(batch_size=4)
    assert len(batches) == 2
    found = list(batches)
    pixels = torch.cat([batch.inputs()["pixels"] for batch in found])
    assert _row_numbers(pixels, digits, "test") == list(range(6))
    assert torch.cat([batch.targets for batch in found]).tolist() == list(range(6))
    some = ImageRows(digits, "test").evaluation(batch_size=4, max_tokens=3)
    assert torch.cat([batch.targets for batch in some]).tolist() == [0, 2, 4]
    assert len(ImageRows(digits, "test").evaluation(batch_size=4, max_tokens=99)) == 2


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
