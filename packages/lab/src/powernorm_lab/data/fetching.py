"""Data sets that are not in the package: fetched once into the user's cache, then found there."""

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
"""Receives how many more bytes have come; in all they are `DataSet.download_size`."""
_BLOCK: Final = 1 << 16


def fetched(name: str) -> Path:
    """Return the folder of a data set in the user's cache.

    Its files, which keep the names that they have at their source, are compared with the known
    sums first.

    Args:
        name: `mnist`, `conll2003`, `imdb` or `msra`.

    Raises:
        InputError: it is not there or damaged; says which command fixes that.
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
    """Fetch a data set into the user's cache, unless it is there.

    Its files are downloaded, or an archive out of which they alone are read. Everything is
    compared with the known sums. A failure leaves the cache as it was.

    Args:
        name: `mnist`, `conll2003`, `imdb` or `msra`.
        accept: the user has accepted what the `rights` of the data set say.
        force: fetch it even if it is there.
        on_progress: is told how far it is.

    Returns:
        Whether it was fetched; False where it was there.

    Raises:
        InputError: it cannot be fetched, by its kind, its rights, the network, the disk, or a sum
            that is not the known one.
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
        InputError: it cannot be.
    """
    entry = data_set(name)
    if entry.home == "embedded":
        raise InputError(
            f"the data set {name} comes with powernorm or powernorm-data: nothing is fetched or "
            f"removed; use it as {entry.usage}"
        )
    if entry.home == "own":
        raise InputError(
            f"the data set {name} cannot be fetched, its files are yours to bring "
            f"({entry.source}): give them as {entry.usage}"
        )
    return entry


def cached_state(name: str, *, thorough: bool = False) -> folders.State | None:
    """Return whether a data set is there.

    Args:
        name: which.
        thorough: read the files of a fetched one; else look at sizes alone.

    Returns:
        `whole` for one that is drawn, None for one that the user brings.

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
    """Return where a data set is or would be: a folder of the cache, or packed files.

    Raises:
        InputError: it is the user's own, there is none of that name, or it is in `powernorm-data`,
            which is not installed.
    """
    entry = data_set(name)
    if entry.home != "embedded":
        return [folders.folder_of(fetchable(name))]
    return embedded_paths(entry)


def check_here(name: str) -> None:
    """Check that a data set has files that are embedded, or fetched and whole.

    Raises:
        InputError: it has not; says what can be done.
    """
    entry = data_set(name)
    if entry.home != "embedded":
        fetched(name)
    elif not entry.files:
        raise InputError(
            f"the data set {name} is made when it is used and has no files: use it as {entry.usage}"
        )


def remove(name: str) -> bool:
    """Delete a fetched data set from the cache; False where there was none.

    Raises:
        InputError: it is none that is fetched, or cannot be deleted.
    """
    return folders.delete(fetchable(name))


def _download(entry: DataSet, scratch: Path, advance: OnProgress) -> None:
    """Put the files of a data set into a folder, each under its path in the archive."""
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
    """Download a file from the first of its addresses that has it.

    Raises:
        InputError: no address gives that file; says why.
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
        except (RequestException, ValueError) as error:  # no such file, or another sum
            reasons.append(f"{url}: {' '.join(str(error).split())}")
        else:
            return
    raise InputError(f"{target.name} could not be downloaded ({'; '.join(reasons)})")


class _Progress:
    """What pooch tells of a download; ends one that is larger than the known file."""

    def __init__(self, size: int, advance: OnProgress) -> None:
        self.total = size
        self._size, self._advance = size, advance
        self._num_read = self._num_told = 0

    def update(self, size: int) -> None:
        """Told after each block, whose size is rounded up."""
        if self._num_read > self._size:
            raise ValueError(f"more than the known {self._size} bytes")
        self._num_read += size
        told = min(self._num_read, self._size)
        self._advance(told - self._num_told)
        self._num_told = told

    def reset(self) -> None:
        """Told at the end, before the size is told once more."""
        self._num_read = 0

    def close(self) -> None:
        """Told when all is done."""


@contextmanager
def _advice(entry: DataSet) -> Iterator[None]:
    """Say what the user can do by hand where a download fails."""
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
