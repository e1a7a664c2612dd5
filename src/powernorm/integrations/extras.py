"""Packages of the extras of powernorm, and the error where one is missing."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "train": (
        *(
            "filelock",
            "jinja2",
            "markupsafe",
            "matplotlib",
            "pandas",
            "pydantic",
            "rich",
            "sacrebleu",
            "sacremoses",
            "safetensors",
            "scipy",
        ),
        *("seqeval", "tensorboard", "tokenizers", "torchcrf", "torchmetrics", "typer"),
    ),
    "hf": ("accelerate", "datasets", "transformers"),
    "lightning": ("lightning",),
    "sentencepiece": ("sentencepiece",),
    "ray": ("ray",),
    "slurm": ("submitit",),
    "tune": ("optuna",),
    "export": ("onnx", "onnxruntime", "onnxscript"),
}
"""Packages of each extra, by their import names."""


def extra_of(package: str) -> str | None:
    """Return the extra that installs a package, or None if no extra does."""
    return next((extra for extra, packages in EXTRAS.items() if package in packages), None)


@contextmanager
def needed_for(what: str) -> Iterator[None]:
    """In the block, raise an error that names the extra if an imported package is missing.

    Args:
        what: subject of the error message: what needs the package.

    Raises:
        ModuleNotFoundError: a package of an extra is missing.
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
