"""Data sets that are downloaded once into the user's cache."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from powernorm.errors import InputError
from powernorm_lab.data.sets import folders
from powernorm_lab.data.sets.catalog import DataSet, data_set
from powernorm_lab.data.sets.embedded_files import corpora_folder, embedded_paths

if TYPE_CHECKING:
    import pooch

OnProgress = Callable[[int], None]
"""Receives the number of bytes since its last call; their sum is `DataSet.download_size`."""
_BLOCK: Final = 1 << 16


def fetched(name: str) -> Path:
    """Return the folder of a data set in the user's cache, after a check of its checksums.

    Args:
        name: `mnist`, `conll2003`, `imdb` or `msra`.

    Raises:
        InputError: it is missing or damaged; the message names the command that fetches it.
    """
    entry = fetchable(name)
    state = folders.state_of(entry)
    folder = folders.folder_of(entry)
    if state == "absent":
        raise InputError(
            f"the data set {name} is not here: run `powernorm data get {name}`, or give your own "
            "files with --data"
        )
    if state == "damaged":
        raise InputError(
            f"the data set {name} is damaged: {folders.damage(folder, entry.files)}; `powernorm "
            f"data get {name}` fetches it again"
        )
    return folder


def fetch(
    name: str,
    *,
    accept: bool = False,
    force: bool = False,
    on_progress: OnProgress | None = None,
) -> bool:
    """Fetch a data set into the user's cache, unless it is there already.

    Downloads the files, or an archive from which only these files are extracted, and compares them
    with the known checksums. A failure does not change the cache.

    Args:
        name: `mnist`, `conll2003`, `imdb` or `msra`.
        accept: the user has accepted the `rights` of the data set.
        force: fetch the data set even if it is there.
        on_progress: receives the numbers of downloaded bytes.

    Returns:
        Whether it was fetched; False if it was there.

    Raises:
        InputError: the data set is of a kind that is not fetched, its rights are not accepted, the
            network or the disk failed, or a checksum is wrong.
    """
    entry = fetchable(name)
    if not force and folders.state_of(entry) == "whole":
        return False
    if entry.rights and not accept:
        raise InputError(
            f"the data set {name} needs your consent: {entry.rights} To accept: powernorm data get "
            f"{name} --accept"
        )
    with folders.half_made(entry) as scratch:
        _download(entry, scratch, on_progress or (lambda _: None))
        folders.install(scratch, entry)
    return True


def fetchable(name: str) -> DataSet:
    """Return the entry of a data set that can be fetched.

    Raises:
        InputError: the data set is unknown or not of this kind.
    """
    entry = data_set(name)
    if entry.home == "embedded":
        raise InputError(
            f"the data set {name} comes with powernorm or powernorm-data: nothing is fetched or "
            f"removed; use it as {entry.usage}"
        )
    if entry.home == "own":
        raise InputError(
            f"the data set {name} cannot be fetched; get its files yourself ({entry.source}) and "
            f"give them as {entry.usage}"
        )
    return entry


def cached_state(name: str, *, thorough: bool = False) -> folders.State | None:
    """Return the state of a data set's files.

    Args:
        name: name of the data set.
        thorough: verify checksums of a fetched data set; otherwise only file sizes.

    Returns:
        The state; `whole` for a generated data set, None for one that users provide.

    Raises:
        InputError: there is no such data set.
    """
    entry = data_set(name)
    if entry.home == "own":
        return None
    if entry.home == "fetched":
        return folders.state_of(entry, thorough=thorough)
    folder = corpora_folder()
    if folder is None and entry.files:
        return "absent"
    return folders.state_in(folder or Path(), entry.files)


def places(name: str) -> list[Path]:
    """Return the paths of a data set, present or not: a folder of the cache, or embedded files.

    Raises:
        InputError: the data set is unknown, users provide it, or it is in `powernorm-data`, which
            is not installed.
    """
    entry = data_set(name)
    if entry.home != "embedded":
        return [folders.folder_of(fetchable(name))]
    return embedded_paths(entry)


def check_here(name: str) -> None:
    """Check that a data set has files that are embedded, or fetched and whole.

    Raises:
        InputError: it has no such files; the message says how to get or use it.
    """
    entry = data_set(name)
    if entry.home != "embedded":
        fetched(name)
    elif not entry.files:
        raise InputError(
            f"the data set {name} is generated on use and has no files: use it as {entry.usage}"
        )


def remove(name: str) -> bool:
    """Delete a fetched data set from the cache; return False if it was not there.

    Raises:
        InputError: the data set is not of the fetched kind, or cannot be deleted.
    """
    return folders.delete(fetchable(name))


def _download(entry: DataSet, scratch: Path, advance: OnProgress) -> None:
    """Download the files of a data set into a folder, each to its path in the archive."""
    import pooch

    source = entry.archive
    with _advice(entry), _quiet(pooch.get_logger()):
        if source is None:
            for file in entry.files:
                urls = [f"{mirror}/{file.name}" for mirror in entry.mirrors]
                _retrieve(urls, file.sha256, file.size, scratch / file.path, advance)
        else:
            target = scratch / source.url.rpartition("/")[2]
            out_of = pooch.Unzip([file.path for file in entry.files], extract_dir=".")
            _retrieve([source.url], source.sha256, source.size, target, advance, out_of)


def _retrieve(
    urls: Sequence[str],
    sha256: str,
    size: int,
    target: Path,
    advance: OnProgress,
    processor: "pooch.Unzip | None" = None,
) -> None:
    """Download a file from the first address that works.

    Raises:
        InputError: all addresses failed; the message gives the reasons.
        OSError: the folder cannot be written.
    """
    import pooch
    from requests import RequestException

    reasons = []
    for url in urls:
        downloader = pooch.HTTPDownloader(_Progress(size, advance), chunk_size=_BLOCK)
        try:
            pooch.retrieve(
                url, f"sha256:{sha256}", target.name, target.parent, processor, downloader
            )
        except (RequestException, ValueError) as error:  # no such file, or a wrong checksum
            reasons.append(f"{url}: {' '.join(str(error).split())}")
        else:
            return
    raise InputError(f"{target.name} could not be downloaded ({'; '.join(reasons)})")


class _Progress:
    """A progress bar for pooch, which also ends downloads that are larger than the known file."""

    def __init__(self, size: int, advance: OnProgress) -> None:
        self.total = size
        self._size, self._advance = size, advance
        self._num_read = self._num_told = 0

    def update(self, size: int) -> None:
        """Report a block; its size is rounded up."""
        if self._num_read > self._size:
            raise ValueError(f"more than the known {self._size} bytes")
        self._num_read += size
        told = min(self._num_read, self._size)
        self._advance(told - self._num_told)
        self._num_told = told

    def reset(self) -> None:
        """Reset the count; pooch then calls `update` with the total size."""
        self._num_read = 0

    def close(self) -> None:
        """Do nothing."""


@contextmanager
def _advice(entry: DataSet) -> Iterator[None]:
    """Add advice on a manual download to errors."""
    try:
        yield
    except InputError as error:
        names = ", ".join(file.name for file in entry.files)
        whence = (
            f"out of the zip archive {entry.archive.url}"
            if entry.archive
            else f"from {entry.mirrors[0]}"
        )
        raise InputError(
            f"{error}: check the network and its proxy (HTTPS_PROXY), or put {names} {whence} "
            f"into {folders.folder_of(entry)} by hand"
        ) from error


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)
