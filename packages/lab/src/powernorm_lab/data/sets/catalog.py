"""The table of data sets, data_sets.toml: what it says about each of them, by name."""

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
"""Where a data set is: in the package `powernorm-data` (or drawn), in the user's cache once it is
asked for, or with the user alone."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of a data set."""

    path: str
    """In its archive; the name alone where it is not in one."""
    size: int
    """In bytes."""
    sha256: str

    @property
    def name(self) -> str:
        """The file's name in the folder of its data set."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Archive:
    """A zip archive on the web that holds the files of a data set, beside others."""

    url: str
    size: int
    """In bytes."""
    sha256: str


@dataclass(frozen=True, slots=True)
class DataSet:
    """A data set that the tasks of `powernorm compare` can train on."""

    name: str
    home: Home
    tasks: tuple[str, ...]
    summary: str
    amount: str
    """How much it is, in its own units."""
    license: str
    source: str
    """Where it comes from."""
    usage: str
    """What `--data` takes."""
    files: tuple[DataFile, ...] = ()
    """Files of `powernorm-data`, or of the folder in the cache. One that is drawn and one that the
    user brings have none."""
    mirrors: tuple[str, ...] = ()
    """Addresses of folders that have the files of a fetched one, the likeliest first."""
    archive: Archive | None = None
    """Has the files of a fetched one that has no mirrors."""
    rights: str | None = None
    """What the user must accept before it is fetched; None where nothing is unclear."""

    @property
    def origin(self) -> str:
        """What it is and where it comes from, as results say it."""
        return f"{self.summary}, {self.source}"

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(file.size for file in self.files)

    @property
    def download_size(self) -> int:
        """Bytes that fetching it downloads."""
        return self.archive.size if self.archive else self.size


def _read() -> dict[str, DataSet]:
    # Not by __file__: the package may lie in a zip.
    table = files("powernorm_lab.data.sets") / "data_sets.toml"
    facts = tomllib.loads(table.read_text(encoding="utf-8"))
    strict = TypeAdapter(dict[str, DataSet], config=ConfigDict(extra="forbid"))
    return strict.validate_python({name: {"name": name, **keys} for name, keys in facts.items()})


SETS: Final[Mapping[str, DataSet]] = MappingProxyType(_read())
"""Embedded ones first, then those that can be fetched, then those that the user brings."""


def data_set(name: str) -> DataSet:
    """Return the entry of a data set.

    Raises:
        InputError: there is none of that name; names the nearest and all.
    """
    if name in SETS:
        return SETS[name]
    near = difflib.get_close_matches(name.lower(), SETS, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise InputError(f"there is no data set {name!r}: {hint}The known ones are {', '.join(SETS)}")


def check_known_set(name: str, task: str) -> None:
    """Check that a task's reader can find the data where they bear the name of a known set.

    Raises:
        InputError: no file is there, and the set is of another task or one that the user must
            bring.
    """
    entry = SETS.get(name)
    if entry is None or Path(name).exists():
        return
    if task not in entry.tasks:
        names = [other.name for other in SETS.values() if task in other.tasks]
        raise InputError(
            f"{name} is a data set of {', '.join(entry.tasks)}, not of {task}: take one of "
            f"{', '.join(names)}, or files of your own (see `powernorm data`)"
        )
    if entry.home == "own":
        raise InputError(
            f"{name} does not exist: a data set that powernorm neither holds nor fetches; it "
            f"comes from {entry.source} and is then given as {entry.usage}"
        )
