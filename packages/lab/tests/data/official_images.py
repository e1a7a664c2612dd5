"""Small files in the official formats of MNIST and CIFAR-10, made by hand."""

import gzip
import io
import struct
import tarfile
from pathlib import Path

import torch
from torch import Tensor

CLASS_NAMES = [
    b"plane",
    b"car",
    b"bird",
    b"cat",
    b"deer",
    b"dog",
    b"frog",
    b"horse",
    b"ship",
    b"truck",
]
CIFAR_FILES = [
    *(f"data_batch_{number}.bin" for number in range(1, 6)),
    "test_batch.bin",
    "batches.meta.txt",
]


def idx(values: Tensor) -> bytes:
    """Return uint8 values as an idx file."""
    head = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return head + values.numpy().tobytes()


def digits(num_images: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (num_images, 28, 28), generator=generator).to(torch.uint8)
    return pixels, (torch.arange(num_images) % 10).to(torch.uint8)


def write_mnist(
    folder: Path, num_train: int = 24, num_test: int = 6, *, packed: bool = False, mark: str = "-"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (part, number) in enumerate((("train", num_train), ("t10k", num_test))):
        pixels, labels = digits(number, seed)
        for kind, values in (("images", pixels), ("labels", labels)):
            name = f"{part}-{kind}{mark}idx{values.ndim}-ubyte"
            content = idx(values)
            path = folder / (f"{name}.gz" if packed else name)
            path.write_bytes(gzip.compress(content, mtime=0) if packed else content)
    return folder


def cifar_contents(num_images: int = 2) -> dict[str, bytes]:
    """Return the seven files; every batch has `num_images` images."""
    contents = {}
    for seed, name in enumerate(CIFAR_FILES[:-1]):
        generator = torch.Generator().manual_seed(seed)
        pixels = torch.randint(256, (num_images, 3072), generator=generator).to(torch.uint8)
        labels = [bytes([(seed + number) % 10]) for number in range(num_images)]
        rows = (bytes(row.tolist()) for row in pixels)
        contents[name] = b"".join(a + b for a, b in zip(labels, rows, strict=True))
    return contents | {"batches.meta.txt": b"\n".join(CLASS_NAMES) + b"\n\n"}


def write_cifar(folder: Path, contents: dict[str, bytes] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (contents or cifar_contents()).items():
        (folder / name).write_bytes(content)
    return folder


def write_archive(
    path: Path,
    contents: dict[str, bytes] | None = None,
    mode: str = "w:gz",
    folder: str = "cifar-10-batches-bin",
) -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in (contents or cifar_contents()).items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path
