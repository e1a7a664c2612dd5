"""The folders of fetched data sets in the user's cache.

A folder holds the files of its data set and a text on where they come from. The catalog knows
size and sum of every file, so nothing in the folder has to be believed. It appears whole under its
name; where it is there already, single files are replaced by whole ones. As the files of all
processes are the same, two that fetch at once do no harm.
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
from powernorm.lab.data.cache import cache_folder
from powernorm.lab.data.sets.entries import DataSet, Member, Wheel

State = Literal["absent", "whole", "damaged"]

PROVENANCE: Final = "README.txt"
_BLOCK: Final = 1 << 20
_ABANDONED: Final = 24 * 3600
"""Seconds after which a half-made folder belongs to a process that was killed."""


def sets_folder() -> Path:
    """Return the folder of all fetched data sets."""
    return cache_folder() / "data"


def folder_of(name: str) -> Path:
    """Return the folder of a fetched data set, whether it is there or not."""
    return sets_folder() / name


def damage(entry: DataSet) -> str | None:
    """Say what is wrong with the files of a data set, which are read for that.

    Returns:
        None where all are whole; else what is wrong with the first that is not.
    """
    folder = folder_of(entry.name)
    for member in wheel_of(entry).members:
        try:
            found = _fault(folder / member.name, member)
        except OSError as error:
            found = f"cannot be read ({error.strerror})"
        if found:
            return f"{folder / member.name} {found}"
    return None


def state_of(entry: DataSet, *, thorough: bool = True) -> State:
    """Return whether a fetched data set is absent, whole or damaged.

    Args:
        entry: which.
        thorough: read the files; else look at their sizes alone.
    """
    state = state_in(folder_of(entry.name), wheel_of(entry).members)
    return "damaged" if state == "whole" and thorough and damage(entry) else state


def state_in(folder: Path, members: Sequence[Member]) -> State:
    """Return whether a folder holds these files, by their sizes; no files are always there."""
    sizes = [_size(folder / member.name) for member in members]
    if members and all(size is None for size in sizes):
        return "absent"
    return "whole" if sizes == [member.size for member in members] else "damaged"


def wheel_of(entry: DataSet) -> Wheel:
    """Return the wheel of a data set that can be fetched."""
    assert entry.wheel is not None, entry.name
    return entry.wheel


@contextmanager
def half_made(name: str) -> Iterator[Path]:
    """Give an empty folder beside the finished ones, which is gone afterwards whatever happens.

    Raises:
        InputError: the cache cannot be written, or the disk is full.
    """
    parent = sets_folder()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent)
        with tempfile.TemporaryDirectory(
            dir=parent, prefix=f".{name}.", ignore_cleanup_errors=True
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
    """Delete what killed processes have left."""
    for path in parent.glob(".*.*"):
        with suppress(OSError):
            if path.is_dir() and time.time() - path.stat().st_mtime > _ABANDONED:
                shutil.rmtree(path)


def install(made: Path, entry: DataSet, origin: str) -> Path:
    """Put the finished files of a folder into their place, the whole folder at once if it is new.

    Args:
        made: the folder.
        entry: the data set.
        origin: where the files were read from, for the text beside them.

    Raises:
        OSError: the cache cannot be written.
    """
    (made / PROVENANCE).write_text(_provenance(entry, origin), encoding="utf-8")
    target = folder_of(entry.name)
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        # Another process was faster, or it is fetched anew: the same files again.
        for path in sorted(made.iterdir()):
            path.replace(target / path.name)
    return target


def delete(entry: DataSet) -> bool:
    """Delete the files of a fetched data set, and its folder unless the user has put more into it.

    Returns:
        Whether there was one.

    Raises:
        InputError: it cannot be deleted.
    """
    folder = folder_of(entry.name)
    names = [member.name for member in wheel_of(entry).members]
    there = [folder / name for name in (*names, PROVENANCE) if (folder / name).exists()]
    try:
        for path in there:
            path.unlink(missing_ok=True)
        with suppress(OSError):  # of the user's own files in it
            folder.rmdir()
    except OSError as error:
        raise InputError(f"{folder} cannot be deleted ({error.strerror})") from error
    return bool(there)


def _provenance(entry: DataSet, origin: str) -> str:
    """Return the text that lies beside the files."""
    wheel = wheel_of(entry)
    lines = [
        f"{entry.name}: {entry.summary}; {entry.amount}.",
        f"Source: {origin}.",
        f"License: {entry.license}.",
        *([entry.rights] if entry.rights else []),
        "",
        "sha256, bytes and name of each file:",
        *(f"{member.sha256} {member.size} {member.name}" for member in wheel.members),
        "",
        f"Put here by `powernorm data get {entry.name}`; `powernorm data remove {entry.name}` "
        "deletes it.",
    ]
    return "\n".join(lines) + "\n"


def _fault(path: Path, member: Member) -> str | None:
    size = _size(path)
    if size is None:
        return "is missing"
    if size != member.size:
        return f"has {size} bytes, expected {member.size}"
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    if digest.hexdigest() != member.sha256:
        return f"has the sha256 {digest.hexdigest()}, expected {member.sha256}"
    return None


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
