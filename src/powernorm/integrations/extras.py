"""Packages of the extras of powernorm, and what to install where one is missing."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
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
            "scipy",
        ),
        *("tensorboard", "tokenizers", "torchmetrics"),
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
CORPORA: Final = "packages/data"
"""In a checkout, the folder of the distribution `powernorm-data`."""
_NAMED: Final = 3
"""So many missing packages are named; the extra brings them all."""


def checkout() -> Path | None:
    """Return the folder of the sources if powernorm runs out of a checkout; None if installed."""
    root = Path(__file__).resolve().parents[3]
    is_checkout = (root / "pyproject.toml").is_file() and (root / "src" / "powernorm").is_dir()
    return root if is_checkout else None


def install_extra(extra: str) -> str:
    """Return the command that installs an extra, for a checkout or for an installed package."""
    root = checkout()
    if root is None:
        # No index has the package, and what has its name there is another one.
        return f"`pip install '.[{extra}]'` in powernorm's source tree"
    return f"pip install -e {shlex.quote(f'{root}[{extra}]')}"


def install_corpora() -> str:
    """Return what to do where `powernorm-data` is missing."""
    root = checkout()
    if root is not None and (root / CORPORA).is_dir():
        return f"pip install {shlex.quote(str(root / CORPORA))}"
    return f"`pip install ./{CORPORA}` in powernorm's source tree, or the wheel of powernorm-data"


def _extra_of(package: str) -> str | None:
    """Return the extra that installs a package, or None if no extra does."""
    return next((extra for extra, packages in EXTRAS.items() if package in packages), None)


class MissingPackageError(ModuleNotFoundError):
    """A package of an extra is missing; the message says what to install."""


def check_extra(extra: str, what: str) -> None:
    """Raise unless all packages of an extra can be found; none is imported.

    Args:
        extra: its name.
        what: subject of the error message: what needs it.

    Raises:
        MissingPackageError: one is missing.
    """
    missing = [package for package in EXTRAS[extra] if find_spec(package) is None]
    if missing:
        raise _missing(what, missing, extra)


def explained(error: ModuleNotFoundError, what: str) -> MissingPackageError | None:
    """Return the error that names the extra of a missing package; None if no extra brings it.

    Args:
        error: as Python raised it.
        what: subject of the error message: what needs the package.
    """
    if isinstance(error, MissingPackageError):
        return error
    package = (error.name or "").partition(".")[0]
    extra = _extra_of(package)
    return None if extra is None else _missing(what, [package], extra)


def _missing(what: str, packages: Sequence[str], extra: str) -> MissingPackageError:
    several = "s" if len(packages) > 1 else ""
    more = f" and {len(packages) - _NAMED} more" if len(packages) > _NAMED else ""
    named = ", ".join(packages[:_NAMED]) + more
    return MissingPackageError(
        f"{what} needs the package{several} {named}: {install_extra(extra)}",
        name=packages[0],
    )


@contextmanager
def needed_for(what: str) -> Iterator[None]:
    """In the block, raise an error that names the extra if an imported package is missing.

    Args:
        what: subject of the error message: what needs the package.

    Raises:
        MissingPackageError: a package of an extra is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        named = explained(error, what)
        if named is None:
            raise
        raise named from error
