"""The table of data sets, data_sets.toml, and the files of the distribution `powernorm-data`."""

import difflib
import hashlib
import lzma
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from pydantic import ConfigDict, TypeAdapter

from powernorm.errors import InputError
from powernorm.integrations.extras import install_command

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
    table = files("powernorm_lab.data") / "data_sets.toml"
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
    raise InputError(f"there is no data set {name!r}: {hint}known are {', '.join(SETS)}")


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


# Files of `powernorm-data`, with a check of their checksums.


PACKAGE: Final = "powernorm_data"
"""A package of files only; it is not imported."""


def corpora_folder() -> Path | None:
    """Return the folder of the files; None if the distribution is not installed."""
    found = find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0])


def embedded_paths(entry: DataSet) -> list[Path]:
    """Return the paths of the files of an embedded data set.

    Raises:
        InputError: their package is not installed; the message gives the command to install it.
    """
    folder = corpora_folder()
    if folder is None and entry.files:
        raise InputError(
            f"the data set {entry.name} is in the package powernorm-data, which is not installed: "
            f"{install_command('powernorm-data')}; or give your own files with --data"
        )
    return [] if folder is None else [folder / file.name for file in entry.files]


def embedded_texts(entry: DataSet) -> list[str]:
    """Return the text of each file of an embedded data set, after a check of its checksum.

    Raises:
        InputError: the package is not installed, or a file has another checksum.
    """
    pairs = zip(embedded_paths(entry), entry.files, strict=True)
    return [lzma.decompress(_content(path, file)).decode() for path, file in pairs]


def _content(path: Path, file: DataFile) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): {_again()}") from error
    found = hashlib.sha256(content).hexdigest()
    if found != file.sha256:
        raise InputError(f"{path} has the sha256 {found}, expected {file.sha256}: {_again()}")
    return content


def _again() -> str:
    return f"install powernorm-data again: {install_command('powernorm-data')}"
