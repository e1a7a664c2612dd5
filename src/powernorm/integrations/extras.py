"""Which extra of powernorm brings which package, and the error where one is missing."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "train": (
        *("lightning", "matplotlib", "rich", "sacrebleu", "sacremoses", "safetensors", "scipy"),
        *("seqeval", "tensorboard", "tokenizers", "torchcrf", "torchmetrics", "typer"),
    ),
    "hf": ("accelerate", "datasets", "transformers"),
    "export": ("onnx", "onnxruntime", "onnxscript"),
}
"""Packages by extra, as they are imported."""


def extra_of(package: str) -> str | None:
    """Return the extra that brings a package, None for a package of none."""
    return next((extra for extra, packages in EXTRAS.items() if package in packages), None)


@contextmanager
def needed_for(what: str) -> Iterator[None]:
    """Name the extra where a package that is imported inside is missing.

    Args:
        what: needs the package; the subject of the sentence.

    Raises:
        ModuleNotFoundError: with that sentence.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = extra_of(package)
        if extra is None:
            raise
        raise ModuleNotFoundError(
            f"{what} needs the package {package}: pip install 'powernorm[{extra}]'",
            name=error.name,
        ) from error
