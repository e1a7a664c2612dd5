"""Optional packages, and the command that installs a missing one."""

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoints, PackageNotFoundError, entry_points, requires
from pathlib import Path
from typing import Final, NamedTuple

COMMANDS: Final = "powernorm.commands"
"""Entry points of functions that add commands to the app of `powernorm`."""
MODELS: Final = "powernorm.models"
"""Entry points of functions that open a trained model by its folder, as a `ModelSource`."""

LABORATORY: Final = "powernorm-lab"
FOLDERS: Final = {"powernorm": ".", LABORATORY: "packages/lab", "powernorm-data": "packages/data"}
"""The distributions of this project, and their folders in its source tree."""
_REQUIRED: Final = re.compile(r"([\w.-]+)[^;]*(?:;.*\bextra == [\"'](\w+)[\"'])?")


class Requirement(NamedTuple):
    """A package that a distribution requires, with an extra or without."""

    distribution: str
    extra: str | None


@cache
def plugins(group: str) -> EntryPoints:
    """Return the entry points of installed distributions: `COMMANDS` or `MODELS`."""
    return entry_points(group=group)


def checkout() -> Path | None:
    """Return the folder of the sources if powernorm runs from a checkout; None if installed."""
    root = Path(__file__).resolve().parents[3]
    is_checkout = (root / "pyproject.toml").is_file() and (root / "src" / "powernorm").is_dir()
    return root if is_checkout else None


def install_command(distribution: str = "powernorm", extra: str | None = None) -> str:
    """Return the command that installs one of this project's distributions, or an extra of it."""
    end = "" if extra is None else f"[{extra}]"
    if distribution not in FOLDERS:
        return f"pip install {shlex.quote(distribution + end)}"
    root = checkout()
    if root is not None and (root / FOLDERS[distribution]).is_dir():
        return f"pip install -e {shlex.quote(str(root / FOLDERS[distribution]) + end)}"
    # The distributions are in no index, where their names belong to other projects.
    folder = FOLDERS[distribution] if distribution == "powernorm" else f"./{FOLDERS[distribution]}"
    return f"`pip install {shlex.quote(folder + end)}` in powernorm's source tree"


def requirement_of(package: str) -> Requirement | None:
    """Return the distribution that requires a package, ours or one with commands; None if none.

    Packages are identified by their import names, which are those of their distributions here.
    """
    names = {"powernorm": None}
    names |= dict.fromkeys(one.dist.name for one in plugins(COMMANDS) if one.dist is not None)
    for name in names:
        try:
            lines = requires(name) or []
        except PackageNotFoundError:  # only its sources are on the path
            continue
        for line in lines:
            found = _REQUIRED.match(line)
            if found and found[1] == package and found[2] not in ("dev", "docs"):
                return Requirement(name, found[2])
    return None


class MissingPackageError(ModuleNotFoundError):
    """A package that powernorm can use is missing; the message says what to install."""


def explained(error: ModuleNotFoundError, what: str) -> MissingPackageError | None:
    """Return the error with the command that installs a missing package; None if there is none.

    Args:
        error: error as Python raised it.
        what: subject of the error message: the feature that needs the package.
    """
    if isinstance(error, MissingPackageError):
        return error
    package = (error.name or "").partition(".")[0]
    required = requirement_of(package)
    if required is None:
        return None
    message = f"{what} needs the package {package}: {install_command(*required)}"
    return MissingPackageError(message, name=package)


@contextmanager
def needed_for(what: str) -> Iterator[None]:
    """Raise an error with the install command if an import in the block needs a missing package.

    Args:
        what: subject of the error message: the feature that needs the package.

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
