"""Safe access to powernorm's files: written in one step, never through links."""

import atexit
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import BinaryIO, Final

from powernorm.errors import InputError

MAX_BYTES: Final = 256 * 2**20
MAX_LINES: Final = 2_000_000
MAX_LINE_BYTES: Final = 4 * 2**20
"""Limits of a log or a table; powernorm's largest have a tenth of that."""
_DRAFT: Final = re.compile(r"\..+\.[0-9a-f]{16}")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file in the same folder, which replaces `path` in one step at the end.

    If the block raises an exception, the old file stays.

    Raises:
        InputError: `path` is a link, a folder or another kind of special file.
        OSError: the folder cannot be written.
    """
    check_own(path)
    if path.is_dir():
        raise InputError(f"{path} is a folder, expected a file: remove it")
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # see _DRAFT
    try:
        with draft.open("x+b") as file:  # follows no link
            yield file
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write(path: Path, *parts: bytes | str) -> None:
    """Write a file of these parts, texts in UTF-8, in one step.

    Raises:
        InputError: the path is a link or another kind of special file.
        OSError: the folder cannot be written.
    """
    with replacing(path) as file:
        file.writelines(part.encode() if isinstance(part, str) else part for part in parts)


def remove(*paths: Path) -> None:
    """Delete files, and folders with their contents, if they exist.

    Raises:
        InputError: one is a link or a device; none is deleted.
        OSError: one cannot be deleted.
    """
    check_own(*paths)
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def is_draft(name: str) -> bool:
    """Return whether a file has the name of a draft, which a killed process may leave behind."""
    return _DRAFT.fullmatch(name) is not None


def remove_drafts(folder: Path) -> None:
    """Delete drafts of killed processes in a folder that no other process writes to."""
    remove(*(path for path in folder.glob(".*") if is_draft(path.name)))


def check_own(*paths: Path) -> None:
    """Check that paths are regular files or folders, or do not exist.

    Raises:
        InputError: one is a link or a device.
    """
    for path in paths:
        try:
            mode = path.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            what = "a link" if stat.S_ISLNK(mode) else "no regular file"
            raise InputError(
                f"{path} is {what}, and powernorm does not write or delete there: remove it"
            )


def check_regular(path: Path) -> None:
    """Check that a path leads to a regular file, whose reading ends.

    Raises:
        InputError: the path is a pipe or a device.
        OSError: the path does not exist.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise InputError(f"{path} is not a regular file: remove it")


def read_text(path: Path) -> str:
    """Return the text of a log or a table of a run.

    Raises:
        InputError: the file cannot be read, is not regular or not UTF-8, or is larger than the
            limits.
    """
    check_own(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    fix = "restore it, or delete it and repeat the comparison with --resume"
    if len(content) > MAX_BYTES or content.count(b"\n") > MAX_LINES:
        raise InputError(f"{path}: has more than {MAX_BYTES} bytes or {MAX_LINES} lines; {fix}")
    if max(map(len, content.split(b"\n"))) > MAX_LINE_BYTES:
        raise InputError(f"{path}: has a line of more than {MAX_LINE_BYTES} bytes; {fix}")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: byte {error.start} is not UTF-8, so this is not a file of powernorm; {fix}"
        ) from error


@cache
def package_folder(package: str) -> Path:
    """Return the folder of a package's files, copied out of a zip for this process if necessary."""
    found = resources.files(package)
    if isinstance(found, Path):
        return found
    folder = Path(tempfile.mkdtemp(prefix="powernorm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _copy(found, folder)
    return folder


def _copy(source: Traversable, folder: Path) -> None:
    for item in source.iterdir():
        target = folder / item.name
        if item.is_dir():
            target.mkdir()
            _copy(item, target)
        elif target.suffix != ".py":
            target.write_bytes(item.read_bytes())
