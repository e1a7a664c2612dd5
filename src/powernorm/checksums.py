"""Checksums inside their own files, so that one rename puts both in place.

A checksum in a separate file gets out of step when a process is killed between the two renames.
Here it is a part of the file: the comment at the end of torch's zip archives, or an entry of the
metadata of safetensors. Other programs read such files as before. A file without a checksum, from
earlier versions, is `unsealed`; anything in between, such as a truncated checksum, is `damaged`.
"""

import errno
import hashlib
import io
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal

from powernorm.errors import InputError
from powernorm.files import replacing

if TYPE_CHECKING:
    from torch import Tensor

Seal = Literal["whole", "unsealed", "damaged"]
"""Whether a file has the checksum that it was written with; `unsealed`: it has none."""

SAFETENSORS_KEY: Final = "powernorm_sha256"
_ZEROS: Final = "0" * 64
SAFETENSORS_SEAL: Final = {SAFETENSORS_KEY: _ZEROS}
"""Metadata to write a safetensors file with, as the place for the sum of `_seal_safetensors`."""

_COMMENT: Final = b"powernorm sha256 "
_ARCHIVE_BEGIN: Final = b"PK\x03\x04"
_ARCHIVE_END: Final = b"PK\x05\x06"
_ARCHIVE_END_SIZE: Final = 22
"""Size of the archive's end record; its last two bytes are the size of the following comment."""
_SAFETENSORS_HEADER_LIMIT: Final = 100_000_000
"""Limit of safetensors itself."""
_LENGTH_SIZE: Final = 8
"""Bytes of the number at the start of a safetensors file, the length of its header."""
_CHUNK: Final = 1 << 20


def save_sealed(value: Any, file: BinaryIO) -> None:
    """Write the file of `torch.save`, with its checksum.

    Raises:
        OSError: the file cannot be written.
    """
    import torch  # late, because commands that need no torch read the cache

    # When torch writes to the file itself, it hides the reason of a failure.
    content = io.BytesIO()
    torch.save(value, content)
    seal_archive(content)
    file.write(content.getbuffer())
    file.flush()


def save_sealed_tensors(
    tensors: Mapping[str, "Tensor"], path: Path, metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file with its checksum, in one step.

    Args:
        tensors: tensors that share no memory.
        path: path of the file.
        metadata: strings to store with them.

    Raises:
        OSError: the folder cannot be written.
        ModuleNotFoundError: safetensors is missing.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with replacing(path) as draft:
            save_file(dict(tensors), draft.name, {**metadata, **SAFETENSORS_SEAL})
            written = Path(draft.name)
            # safetensors makes a file readable by its owner only; give it the usual permissions.
            written.chmod(os.fstat(draft.fileno()).st_mode)
            with written.open("r+b") as file:
                _sort_metadata(file)
                _seal_safetensors(file)
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        code = int(found[1]) if found else errno.EIO
        raise OSError(code, os.strerror(code)) from error


def load_sealed(path: Path, fix: str) -> Any:
    """Return the contents of a file of `save_sealed` or, without a checksum, of `torch.save`.

    Args:
        path: path of the file.
        fix: advice about a damaged file, appended to the error.

    Raises:
        InputError: the file is damaged.
    """
    import torch

    check_seal(path, fix)
    return torch.load(path, map_location="cpu", weights_only=True)


def check_seal(path: Path, fix: str) -> Seal:
    """Check a file against its checksum, and return whether it has one.

    Args:
        path: path of the file.
        fix: advice about a damaged file, appended to the error.

    Raises:
        InputError: the file is damaged.
        OSError: the file cannot be read.
    """
    seal = seal_of(path)
    if seal == "damaged":
        raise InputError(f"{path} is damaged, its contents do not match its checksum: {fix}")
    return seal


def seal_of(path: Path) -> Seal:
    """Return whether a file has the checksum that it was written with.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        if path.suffix.lower() == ".safetensors":
            return _seal_of_safetensors(file)
        return _seal_of_archive(file)


def seal_archive(file: BinaryIO) -> None:
    """Store the checksum of a zip archive without a comment as its comment."""
    size = file.seek(0, io.SEEK_END)
    length = len(_COMMENT) + len(_ZEROS)
    file.seek(size - 2)
    file.write(length.to_bytes(2, "little") + _COMMENT)
    digest = _digest(file, ((0, size + len(_COMMENT)),))
    file.seek(0, io.SEEK_END)
    file.write(digest.encode())


def _seal_safetensors(file: BinaryIO) -> None:
    """Write the checksum into a safetensors file with the metadata `SAFETENSORS_SEAL`."""
    place = _place_in_safetensors(file)
    assert isinstance(place, int)
    digest = _digest(file, _around(file, place))
    file.seek(place)
    file.write(digest.encode())


def _sort_metadata(file: BinaryIO) -> None:
    """Sort the metadata, which safetensors writes in a different order each time."""
    size = int.from_bytes(file.read(_LENGTH_SIZE), "little")
    header = json.loads(file.read(size))
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    if len(text) <= size:  # unusual characters may take more bytes than before
        file.seek(_LENGTH_SIZE)
        file.write(text.ljust(size))


def _seal_of_archive(file: BinaryIO) -> Seal:
    """Compare an archive with its checksum; without one, check that the archive is complete."""
    size = file.seek(0, io.SEEK_END)
    length = len(_COMMENT) + len(_ZEROS)
    tail = _bytes_at(file, max(0, size - _ARCHIVE_END_SIZE - length), size)
    written = _COMMENT + tail[-len(_ZEROS) :]
    if tail.startswith(_ARCHIVE_END) and tail.endswith(length.to_bytes(2, "little") + written):
        digest = _digest(file, ((0, size - len(_ZEROS)),))
        return "whole" if digest.encode() == tail[-len(_ZEROS) :] else "damaged"
    is_archive = _bytes_at(file, 0, len(_ARCHIVE_BEGIN)) == _ARCHIVE_BEGIN
    end = tail[-_ARCHIVE_END_SIZE:]
    is_ended = end.startswith(_ARCHIVE_END) and end.endswith(b"\0\0")
    return "damaged" if is_archive and not is_ended else "unsealed"


def _seal_of_safetensors(file: BinaryIO) -> Seal:
    place = _place_in_safetensors(file)
    if not isinstance(place, int):
        return place
    digest = _digest(file, _around(file, place))
    return "whole" if _bytes_at(file, place, place + len(_ZEROS)) == digest.encode() else "damaged"


def _place_in_safetensors(file: BinaryIO) -> int | Literal["unsealed", "damaged"]:
    """Return the position of the checksum of a safetensors file."""
    size = file.seek(0, io.SEEK_END)
    begin = 8
    length = int.from_bytes(_bytes_at(file, 0, begin), "little")
    if size < begin or length > min(size - begin, _SAFETENSORS_HEADER_LIMIT):
        return "damaged"
    header = _bytes_at(file, begin, begin + length)
    # Unescaped quotes around a key occur only outside of strings.
    found = re.search(rf'"{SAFETENSORS_KEY}":"([^"]{{{len(_ZEROS)}}})"'.encode(), header)
    if found:
        return begin + found.start(1)
    return "damaged" if SAFETENSORS_KEY.encode() in header else "unsealed"


def _around(file: BinaryIO, place: int) -> tuple[tuple[int, int], ...]:
    """Return the parts of a file that a checksum at a position covers: all but the checksum."""
    return (0, place), (place + len(_ZEROS), file.seek(0, io.SEEK_END))


def _digest(file: BinaryIO, parts: tuple[tuple[int, int], ...]) -> str:
    """Return the SHA-256 of parts of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    chunk = memoryview(bytearray(_CHUNK))
    for begin, end in parts:
        file.seek(begin)
        while begin < end:
            count = file.readinto(chunk[: min(_CHUNK, end - begin)])  # type: ignore[attr-defined]
            if not count:
                break  # the file was truncated meanwhile
            digest.update(chunk[:count])
            begin += count
    return digest.hexdigest()


def _bytes_at(file: BinaryIO, begin: int, end: int) -> bytes:
    file.seek(begin)
    return file.read(end - begin)
