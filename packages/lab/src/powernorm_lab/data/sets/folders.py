"""The folders of fetched data sets in the user's cache.

A folder holds the files of its data set and a README.txt on their origin. The table of data sets
has size and checksum of every file, so that nothing in the folder needs to be trusted. A new folder
is renamed into place as a whole; in an existing one, single files are replaced. Two processes may
fetch at the same time, since their files are the same.
"""

import errno
import hashlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal

from powernorm.errors import InputError
from powernorm_lab.data.cache import cache_folder
from powernorm_lab.data.sets.catalog import DataFile, DataSet

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
