"""Packages of the extras of powernorm, and what to install where one is missing."""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "train": (
        *(
            "filelock",
            "jinja2",
            "markupsafe",
            "matplotlib",
            "pandas",
            "pooch",
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
    "export": ("onnx", "onnxruntime", "onnxscript"),
}
"""Packages of each extra, by their import names."""
CORPORA: Final = "packages/data"
"""In a checkout, the folder of the distribution `powernorm-data`."""


def checkout() -> Path | None:
    """Return the folder of the sources if powernorm runs out of a checkout; None if installed."""
    root = Path(__file__).resolve().parents[3]
    is_checkout = (root / "pyproject.toml").is_file() and (root / "src" / "powernorm").is_dir()
    return root if is_checkout else None


def install_extra(extra: str) -> str:
    """Return the command that installs an extra, for a checkout or for an installed package."""
    root = checkout()
    if root is None:
        # Of what is installed already, pip takes the extras without asking an index for it again.
        return f"pip install 'powernorm[{extra}]'"
    return f"pip install -e {shlex.quote(f'{root}[{extra}]')}"


def install_corpora() -> str:
    """Return what to do where `powernorm-data` is missing."""
    root = checkout()
    if root is not None and (root / CORPORA).is_dir():
        return f"pip install {shlex.quote(str(root / CORPORA))}"
    return f"`pip install ./{CORPORA}` in powernorm's source tree, or the wheel of powernorm-data"


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
            f"{what} needs the package {package}: {install_extra(extra)}", name=error.name
        ) from error
