"""What the table of data sets, data_sets.toml, says about each of them."""

from dataclasses import dataclass
from typing import Literal

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
