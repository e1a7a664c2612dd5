"""Reading zip archives that may be damaged, whatever a changed byte turns them into."""

import struct
import zipfile
import zlib
from typing import BinaryIO, Final

DAMAGES: Final = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,  # an encryption that Python does not know
    RuntimeError,  # an encrypted member
    ValueError,  # offsets, names and dates that make no sense
    OverflowError,  # offsets beyond what a file can have
)
"""What reading a damaged archive of `open_zip` can raise, beside an `OSError` of the disk."""
_COMPRESSIONS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def open_zip(file: BinaryIO) -> zipfile.ZipFile:
    """Open an archive whose members are stored or deflated, as in wheels and torch's files.

    A damaged byte can ask for another compression. Its decompressor would allocate what the damaged
    data says, or end in an `OSError` that looks like one of the disk.

    Raises:
        Exception: one of `DAMAGES`, also where a member has another compression.
    """
    archive = zipfile.ZipFile(file)
    for member in archive.infolist():
        if member.compress_type not in _COMPRESSIONS:
            raise zipfile.BadZipFile(
                f"{member.filename} has the compression type {member.compress_type}, expected 0 "
                "(stored) or 8 (deflated)"
            )
    return archive
