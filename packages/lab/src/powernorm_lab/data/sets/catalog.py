"""The table of data sets, data_sets.toml, and its entries by name."""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from pydantic import ConfigDict, TypeAdapter

from powernorm.errors import InputError

Home = Literal["embedded", "fetched", "own"]
"""Place of a data set: in the package `powernorm-data` (or generated), in the user's cache after it
was fetched, or provided by the user."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of a data set."""

    path: str
    """Path in its archive; the name alone without an archive."""
    size: int
    """Size in bytes."""
    sha256: str

    @property
    def name(self) -> str:
        """The file's name in the folder of its data set."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Archive:
    """A zip archive on the web with the files of a data set, and possibly others."""

    url: str
    size: int
    """Size in bytes."""
    sha256: str


@dataclass(frozen=True, slots=True)
class DataSet:
    """A data set that the tasks of `powernorm compare` can train on."""

    name: str
    home: Home
    tasks: tuple[str, ...]
    summary: str
    amount: str
    """Amount of data, with units."""
    license: str
    source: str
    """Origin of the data."""
    usage: str
    """Value of `--data`, or the options that use the data set."""
    files: tuple[DataFile, ...] = ()
    """Files of `powernorm-data`, or of the folder in the cache; empty for generated data sets and
    those that users provide."""
    mirrors: tuple[str, ...] = ()
    """Addresses of folders with the files of a fetched data set, the most reliable first."""
    archive: Archive | None = None
    """Archive with the files of a fetched data set without mirrors."""
    rights: str | None = None
    """Terms that the user must accept before the data set is fetched; None if there are none."""

    @property
    def origin(self) -> str:
        """Summary and source of the data set, for results."""
        return f"{self.summary}, {self.source}"

    @property
    def size(self) -> int:
        """Total size of the files in bytes."""
        return sum(file.size for file in self.files)

    @property
    def download_size(self) -> int:
        """Number of bytes to download."""
        return self.archive.size if self.archive else self.size


def _read() -> dict[str, DataSet]:
    # importlib.resources instead of __file__: the package may be in a zip file.
    table = files("powernorm_lab.data.sets") / "data_sets.toml"
    facts = tomllib.loads(table.read_text(encoding="utf-8"))
    strict = TypeAdapter(dict[str, DataSet], config=ConfigDict(extra="forbid"))
    return strict.validate_python({name: {"name": name, **keys} for name, keys in facts.items()})


SETS: Final[Mapping[str, DataSet]] = MappingProxyType(_read())
"""Data sets by name: first embedded ones, then those to fetch, then those that users provide."""


def data_set(name: str) -> DataSet:
    """Return the entry of a data set.

    Raises:
        InputError: the name is unknown; the message lists the nearest and all names.
    """
    if name in SETS:
        return SETS[name]
    near = difflib.get_close_matches(name.lower(), SETS, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise InputError(f"there is no data set {name!r}: {hint}The known ones are {', '.join(SETS)}")


def check_known_set(name: str, task: str) -> None:
    """Check data that are given by the name of a known data set.

    Raises:
        InputError: no file has this name, and the data set is for another task or must be provided
            by the user.
    """
    entry = SETS.get(name)
    if entry is None or Path(name).exists():
        return
    if task not in entry.tasks:
        names = [other.name for other in SETS.values() if task in other.tasks]
        raise InputError(
            f"{name} is a data set of {', '.join(entry.tasks)}, not of {task}: use one of "
            f"{', '.join(names)}, or your own files (see `powernorm data`)"
        )
    if entry.home == "own":
        raise InputError(
            f"{name} does not exist: powernorm neither has nor fetches this data set; get it from "
            f"{entry.source} and give it as {entry.usage}"
        )
