"""Files and folders of our own: put in place in one step, and deleted; nothing behind links."""

import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from powernorm.errors import InputError


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Give a new file in the same folder, which in the end takes the place of `path` in one step.

    Where the block raises, what was there stays.

    Raises:
        InputError: a link or something else that is no file is in its place.
        OSError: the folder cannot be written.
    """
    check_own(path)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with draft.open("x+b") as file:  # which follows no link
            yield file
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write(path: Path, *parts: bytes | str) -> None:
    """Write a file of these parts, texts in UTF-8, in one step.

    Raises:
        InputError: a link or something else that is no file is in its place.
        OSError: the folder cannot be written.
    """
    with replacing(path) as file:
        file.writelines(part.encode() if isinstance(part, str) else part for part in parts)


def remove(*paths: Path) -> None:
    """Delete files, and folders with what they hold, where they are there.

    Raises:
        InputError: one is a link or a device; none is deleted.
        OSError: it cannot be deleted.
    """
    check_own(*paths)
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def check_own(*paths: Path) -> None:
    """Check that paths are regular files or folders, or nothing.

    Raises:
        InputError: one is a link or a device.
    """
    for path in paths:
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            continue
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            what = "a link" if stat.S_ISLNK(mode) else "no regular file"
            raise InputError(
                f"{path} is {what}, and powernorm writes and deletes nothing there: remove it"
            )
