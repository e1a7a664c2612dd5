from pathlib import Path

import pytest
import torch
from lab.tests.data.official_images import write_archive, write_cifar, write_mnist

from powernorm.errors import InputError
from powernorm_lab.data.corpus import SPLITS
from powernorm_lab.tasks.image.data import (
    Images,
    ImageSet,
    divided,
    encode_images,
    encode_images_by,
    pixel_statistics,
)
from powernorm_lab.tasks.image.sources import drawn_digits, load_images

pytestmark = pytest.mark.usefixtures("own_cache")


def _blank(num_images: int) -> Images:
    return Images(torch.zeros(num_images, 1, 1, 1, dtype=torch.uint8), torch.arange(num_images))


@pytest.mark.parametrize(
    ("num_images", "period", "sizes"), [(60_000, 12, (55_000, 5000)), (50_000, 10, (45_000, 5000))]
)
def test_official_sizes(num_images: int, period: int, sizes: tuple[int, int]) -> None:
    test = _blank(10_000)
    parts = divided(_blank(num_images), test, period)
    assert tuple(len(parts[split].labels) for split in ("train", "valid")) == sizes
    assert int(parts["valid"].labels[0]) == sizes[0]  # the last of the official training images
    assert parts["test"] is test


def test_a_single_image_cannot_be_divided() -> None:
    with pytest.raises(InputError, match="only 1 training image"):
        divided(_blank(1), _blank(1), 12)


def test_a_folder_of_idx_files(tmp_path: Path) -> None:
    images = load_images(str(write_mnist(tmp_path / "digits")))
    assert (images.name, images.shape) == ("digits", (1, 28, 28))
    assert [len(images.splits[split].labels) for split in SPLITS] == [22, 2, 6]
    assert images.class_names == tuple("0123456789")
    assert not images.can_be_mirrored


@pytest.mark.parametrize("packed", [False, True])
def test_cifar(tmp_path: Path, packed: bool) -> None:
    path = write_archive(tmp_path / "a.tgz") if packed else write_cifar(tmp_path / "folder")
    images = load_images(str(path))
    assert (images.name, images.shape) == ("cifar10", (3, 32, 32))
    assert [len(images.splits[split].labels) for split in SPLITS] == [9, 1, 2]
    assert images.class_names[3] == "cat"
    assert images.can_be_mirrored


@pytest.mark.parametrize("unpacked", ["nothing", "an empty folder"])
def test_a_folder_with_the_archive_of_cifar(tmp_path: Path, unpacked: str) -> None:
    write_archive(tmp_path / "cifar-10-binary.tar.gz")
    if unpacked == "an empty folder":
        (tmp_path / "cifar-10-batches-bin").mkdir()
    images = load_images(str(tmp_path))
    assert images.name == "cifar10"
    assert [len(images.splits[split].labels) for split in SPLITS] == [9, 1, 2]


def test_unpacked_batches_are_read_before_their_archive(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"damaged")
    write_cifar(tmp_path / "cifar-10-batches-bin")
    assert load_images(str(tmp_path)).name == "cifar10"
    (tmp_path / "cifar-10-batches-bin").rename(tmp_path / "away")
    with pytest.raises(InputError, match=r"cifar-10-binary\.tar\.gz .*(damaged|cannot be read)"):
        load_images(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [("nowhere", "does not exist"), ("empty", "holds no images"), ("text.txt", "holds no images")],
)
def test_what_is_no_set_of_images(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("x")
    with pytest.raises(InputError, match=f"{message}: expected a folder with MNIST's"):
        load_images(str(tmp_path / name))


@pytest.mark.parametrize("source", [None, "mnist"])
def test_mnist_is_fetched_only_by_the_user(source: str | None) -> None:
    with pytest.raises(InputError, match="powernorm data get mnist"):
        load_images(source)


def test_drawn_digits_are_always_the_same_and_show_all_classes() -> None:
    first, second = drawn_digits(), drawn_digits()
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.pixels, other.pixels)
        assert torch.equal(one.labels, other.labels)
        assert one.pixels.shape[1:] == (1, 28, 28)
        assert sorted(set(one.labels.tolist())) == list(range(10))
    images = load_images("drawn-digits")
    assert [len(images.splits[split].labels) for split in SPLITS] == [3209, 291, 500]


def test_a_set_without_images_is_refused() -> None:
    splits = {"train": _blank(2), "valid": _blank(0), "test": _blank(1)}
    with pytest.raises(InputError, match="the valid split of here has no images"):
        ImageSet("x", "here", "", splits, (), False)  # type: ignore[arg-type]


def test_statistics_are_those_of_the_pixels() -> None:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (7, 3, 5, 4), generator=generator).to(torch.uint8)
    mean, std = pixel_statistics(pixels)
    floats = pixels.double() / 255
    assert torch.allclose(mean.double(), floats.mean((0, 2, 3)), rtol=1e-6)
    assert torch.allclose(std.double(), floats.std((0, 2, 3), correction=0), rtol=1e-6)


def test_fewer_examples_are_evenly_spaced_and_alone_count(tmp_path: Path) -> None:
    images = load_images(str(write_mnist(tmp_path)))
    some = encode_images(images, 11)
    assert torch.equal(some.splits["train"].pixels, images.splits["train"].pixels[::2])
    assert torch.equal(some.mean, pixel_statistics(images.splits["train"].pixels[::2])[0])
    assert some.fingerprint != encode_images(images).fingerprint
    assert encode_images(images, 100).fingerprint == encode_images(images).fingerprint


def test_images_of_one_color_cannot_be_normalized() -> None:
    splits = {split: _blank(2) for split in SPLITS}
    with pytest.raises(InputError, match="all have the same pixels"):
        encode_images(ImageSet("x", "here", "", splits, (), False))


def test_another_set_is_normalized_as_the_first(tmp_path: Path) -> None:
    own = encode_images(load_images("drawn-digits"))
    other = load_images(str(write_mnist(tmp_path / "mnist")))
    encoded = encode_images_by(other, own)
    assert encoded.mean is own.mean
    assert encoded.splits["test"] is other.splits["test"]
    with pytest.raises(InputError, match=r"sizes \(3, 32, 32\), but the model was trained with"):
        encode_images_by(load_images(str(write_cifar(tmp_path / "cifar"))), own)
