"""Data sets that are downloaded once into the user's cache, and their folders there.

A folder holds the files of its data set and a README.txt on their origin. The table of data sets
has size and checksum of every file, so that nothing in the folder needs to be trusted. A new folder
is renamed into place as a whole; in an existing one, single files are replaced. Two processes may
fetch at the same time, since their files are the same.
"""

import errno
import hashlib
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from powernorm.errors import InputError
from powernorm_lab.data.cache import cache_folder
from powernorm_lab.data.catalog import DataFile, DataSet, corpora_folder, data_set, embedded_paths

if TYPE_CHECKING:
    import pooch


State = Literal["absent", "whole", "damaged"]

_PROVENANCE: Final = "README.txt"
_ABANDONED: Final = 24 * 3600
"""Seconds after which an unfinished folder counts as left by a killed process."""


def sets_folder() -> Path:
    """Return the folder of all fetched data sets."""
    return cache_folder() / "data"


def folder_of(entry: DataSet) -> Path:
    """Return the folder of a fetched data set, which may not exist."""
    return sets_folder() / entry.name


def damage(folder: Path, files: Sequence[DataFile]) -> str | None:
    """Read the files of a data set, and describe the first damaged one.

    Returns:
        None if no file is damaged.
    """
    for file in files:
        try:
            found = _fault(folder / file.name, file)
        except OSError as error:
            found = f"cannot be read ({error.strerror})"
        if found:
            return f"{folder / file.name} {found}"
    return None


def state_of(entry: DataSet, *, thorough: bool = True) -> State:
    """Return whether a fetched data set is absent, whole or damaged.

    Args:
        entry: the data set.
        thorough: verify checksums; otherwise only file sizes.
    """
    folder = folder_of(entry)
    state = state_in(folder, entry.files)
    return "damaged" if state == "whole" and thorough and damage(folder, entry.files) else state


def state_in(folder: Path, files: Sequence[DataFile]) -> State:
    """Return whether a folder holds these files, by their sizes; `whole` without files."""
    sizes = [_size(folder / file.name) for file in files]
    if files and all(size is None for size in sizes):
        return "absent"
    return "whole" if sizes == [file.size for file in files] else "damaged"


@contextmanager
def half_made(entry: DataSet) -> Iterator[Path]:
    """Yield a temporary folder next to the finished ones.

    Raises:
        InputError: the cache is not writable, or the disk is full.
    """
    parent = sets_folder()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent)
        with tempfile.TemporaryDirectory(
            dir=parent, prefix=f".{entry.name}.", ignore_cleanup_errors=True
        ) as folder:
            yield Path(folder)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "free some space" if full else "make it writable"
        raise InputError(
            f"{parent} cannot be written ({error.strerror or error}): {fix}, or set "
            "POWERNORM_CACHE to another folder; nothing was kept"
        ) from error


def _sweep(parent: Path) -> None:
    """Delete folders of killed processes."""
    for path in parent.glob(".*.*"):
        with suppress(OSError):
            if path.is_dir() and time.time() - path.stat().st_mtime > _ABANDONED:
                shutil.rmtree(path)


def install(scratch: Path, entry: DataSet) -> None:
    """Move the files of a data set into place, atomically if the folder is new.

    Args:
        scratch: folder with each file at its path in the archive.
        entry: the data set.

    Raises:
        InputError: a file has another checksum.
        OSError: the cache is not writable.
    """
    made, target = scratch / "made", folder_of(entry)
    made.mkdir()
    for file in entry.files:
        # A copy: pooch's files are readable by their owner only.
        shutil.copyfile(scratch / file.path, made / file.name)
    fault = damage(made, entry.files)
    if fault:
        raise InputError(f"{entry.name} is not the known data set: {fault}; nothing was kept")
    (made / _PROVENANCE).write_text(_provenance(entry), encoding="utf-8")
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        # Another process was faster, or it is fetched again: the same files.
        for path in sorted(made.iterdir()):
            path.replace(target / path.name)


def delete(entry: DataSet) -> bool:
    """Delete the files of a fetched data set, and its folder unless it holds other files.

    Returns:
        Whether there were any files.

    Raises:
        InputError: a file cannot be deleted.
    """
    folder = folder_of(entry)
    names = [*(file.name for file in entry.files), _PROVENANCE]
    there = [folder / name for name in names if (folder / name).exists()]
    try:
        for path in there:
            path.unlink(missing_ok=True)
        with suppress(OSError):  # the folder holds other files
            folder.rmdir()
    except OSError as error:
        raise InputError(f"{folder} cannot be deleted ({error.strerror})") from error
    return bool(there)


def _provenance(entry: DataSet) -> str:
    """Return the contents of README.txt."""
    lines = [
        f"{entry.name}: {entry.summary}; {entry.amount}.",
        f"Source: {entry.source}, {entry.archive.url if entry.archive else entry.mirrors[0]}",
        f"License: {entry.license}.",
        *([entry.rights] if entry.rights else []),
        "",
        "sha256, bytes and name of each file:",
        *(f"{file.sha256} {file.size} {file.name}" for file in entry.files),
        "",
        f"`powernorm data remove {entry.name}` deletes it.",
    ]
    return "\n".join(lines) + "\n"


def _fault(path: Path, file: DataFile) -> str | None:
    size = _size(path)
    if size is None:
        return "is missing"
    if size != file.size:
        return f"has {size} bytes, expected {file.size}"
    with path.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    return None if found == file.sha256 else f"has the sha256 {found}, expected {file.sha256}"


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


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
    state = state_of(entry)
    folder = folder_of(entry)
    if state == "absent":
        raise InputError(
            f"the data set {name} is not here: run `powernorm data get {name}`, or give your own "
            "files with --data"
        )
    if state == "damaged":
        raise InputError(
            f"the data set {name} is damaged: {damage(folder, entry.files)}; `powernorm "
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
    if not force and state_of(entry) == "whole":
        return False
    if entry.rights and not accept:
        raise InputError(
            f"the data set {name} needs your consent: {entry.rights} To accept: powernorm data get "
            f"{name} --accept"
        )
    with half_made(entry) as scratch:
        _download(entry, scratch, on_progress or (lambda _: None))
        install(scratch, entry)
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


def cached_state(name: str, *, thorough: bool = False) -> State | None:
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
        return state_of(entry, thorough=thorough)
    folder = corpora_folder()
    if folder is None and entry.files:
        return "absent"
    return state_in(folder or Path(), entry.files)


def places(name: str) -> list[Path]:
    """Return the paths of a data set, present or not: a folder of the cache, or embedded files.

    Raises:
        InputError: the data set is unknown, users provide it, or it is in `powernorm-data`, which
            is not installed.
    """
    entry = data_set(name)
    if entry.home != "embedded":
        return [folder_of(fetchable(name))]
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
    return delete(fetchable(name))


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
            f"into {folder_of(entry)} by hand"
        ) from error


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)
